#!/usr/bin/env bash
# Plan job files, and compare each with its version at a git ref: gate.sh REF JOB...
# GATES: what fails, between blanks. The exit code is the largest of mpctl's: 2 not legal, 3 does not fit, 4 a gate
# failed. Both versions of a job read the presets of the working tree.
set -uo pipefail
ref=${1:?usage: gate.sh REF JOB...}
shift
gates=()
for gate in ${GATES:-memory>+2% step>+5%}; do gates+=(--fail-if "$gate"); done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/base"
git archive "$ref" | tar -x -C "$folder/base" || exit 2

judge() {
  local worst=0 job said code gate
  for job in "$@"; do
    said=$(mpctl plan "$job")
    code=$?
    head -n 4 <<<"$said"
    if [ "$code" -ne 2 ] && [ -f "$folder/base/$job" ]; then
      mpctl compare "$folder/base/$job" "$job" "${gates[@]}"
      gate=$?
      [ "$gate" -gt "$code" ] && code=$gate
    fi
    [ "$code" -gt "$worst" ] && worst=$code
  done
  return "$worst"
}

judge "$@" 2>&1 | tee "$folder/said"
worst=${PIPESTATUS[0]}
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
  { echo '```' && cat "$folder/said" && echo '```'; } >>"$GITHUB_STEP_SUMMARY"
fi
exit "$worst"
