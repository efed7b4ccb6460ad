"""The flags of Megatron-LM that have no setting of a job: which are refused, which change something
other than the layout, and which do not change a plan.

megatron_parser.txt lists all flags of its parser (megatron-core 0.19.2), a line each: name, number
of values (+ for one or more), default. A flag with its default value is ignored. Flags that change
the layout or the model's shape are refused by name, or by a word in their name; so is a name that
the parser does not have, as it may be a misspelt flag of the layout. Of the rest those that are
known to concern data, checkpoints, logs and the like do not change a plan (`is_apart`); any other
is assumed to change it.

By hand, `--moe-latent-size 64` and `--sequence-parralel` are refused, `--optimizer-cpu-offload`
changes memory, `--log-interval 10` nothing.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from mpctl.core.errors import Issue

SOFTWARE = "Megatron-LM (megatron-core 0.19.2)"
NEUTRAL = {
    "--tensor-parallel-num-weight-shards": ("1",),
    "--expert-tensor-parallel-num-weight-shards": ("1",),
    "--cp-comm-type": ("p2p",),
}
"""Values that mean the same as leaving the flag out, where the parser's default is another or
none."""
GONE = {
    "--checkpoint-activations": "--recompute-activations, or --recompute-granularity full",
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}
"""Flags that the parser accepts and Megatron-LM then rejects, and their replacements."""
_LAYOUT = re.compile(r"parallel|pipeline|virtual|fsdp|sharding|sharded|expert|moe|shard-")
_NO_LAYOUT = {
    "--no-overlap-p2p-communication",
    "--overlap-p2p-communication-warmup-flush",
    "--pipeline-model-parallel-comm-backend",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--dist-ckpt-format",
    "--ckpt-fully-parallel-save",
    "--ckpt-fully-parallel-load",
    "--no-ckpt-fully-parallel-save",
    "--ckpt-assume-constant-structure",
    "--fsdp-double-buffer",
    "--fsdp-manual-registration",
    "--dist-ckpt-save-pre-mcore-014",
    "--no-data-sharding",
    "--moe-shared-expert-overlap",
    "--overlap-moe-expert-parallel-comm",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--use-grouped-gemm-for-shared-expert",
    "--moe-router-fusion",
    "--moe-router-padding-for-fp8",
    "--moe-router-padding-for-quantization",
    "--moe-router-force-load-balancing",
    "--moe-router-force-biased",
    "--moe-per-layer-logging",
    "--moe-flex-dispatcher-num-sms",
    "--moe-deepep-num-sms",
    "--moe-hybridep-num-sms",
    "--moe-hybridep-num-sms-preprocessing",
    "--moe-hybridep-num-blocks-permute",
    "--moe-hybridep-num-blocks-unpermute",
    "--moe-permute-fusion-into-hybridep",
    "--moe-hybridep-pad-uneven-dispatch-inputs",
    "--moe-paged-stash",
    "--moe-paged-stash-page-size",
    "--moe-paged-stash-buffer-size-factor-cpu",
    "--moe-paged-stash-buffer-size-factor-cuda",
    "--save-tokens-per-expert-interval",
    "--moe-mlp-glu-interleave-size",
    "--moe-shared-expert-glu-interleave-size",
    "--moe-token-drop-policy",
}
"""Flags with a word of the layout in their name that do not change it."""
_SHAPE = {
    "--quick-geglu",
    "--openai-gelu",
    "--qk-l2-norm",
    "--apply-residual-connection-post-layernorm",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--is-hybrid-model",
    "--spec",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--experimental-attention-variant",
    "--linear-attention-freq",
    "--yaml-cfg",
    "--encoder-num-layers",
    "--decoder-num-layers",
    "--encoder-seq-length",
    "--decoder-seq-length",
    "--no-pad-vocab-size",
    "--attention-output-gate",
    "--use-mup",
    "--optimizer",
    "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading",
    "--freeze-all-layers",
    "--fp32-residual-connection",
    "--cp-comm-type",
    "--vocab-extra-ids",
    "--disable-pad-vocab-size",
    "--no-rope-freq",
    "--mrope-section",
}
ALL_NAMED = frozenset(_SHAPE | _NO_LAYOUT | NEUTRAL.keys() | GONE.keys())
_APART = re.compile(
    r"--(no-|disable-|enable-|use-|allow-)?("
    # data and tokenizers
    r"data-|dataloader-(defer|fast|type)|block-data|evidence-data|titles-data|train-data|"
    r"valid-data|test-data|per-split-data|per-dataset|split$|mock-data|vocab-file|merge-file|"
    r"tokenizer-|tiktoken-|null-tokenizer|num-workers|num-dataset-builder|mmap-bin|fim-|"
    r"mid-level-dataset|chat-template|trust-remote|create-attention-mask|object-storage|"
    r"full-validation|multiple-validation|validation-set|msc$|ambiguous-pad|"
    # checkpoints
    r"save$|save-(interval|retain|optim|rng)|load$|load-(optim|rng|main)|ckpt|dist-ckpt|"
    r"async-(ckpt|save|strategy)|auto-detect-ckpt|non-persistent|persistent-(save|ckpt)|"
    r"pretrained-checkpoint|override-ckpt|replication|finetune$|stream-ckpt|exit-|"
    # logs, profiles, evaluation and faults
    r"log-|logging-|tensorboard-|wandb-|one-logger|timing-|profile|pytorch-profiler|record-|"
    r"memory-snapshot|nvtx-|app-tag|config-logger|run-workload|barrier-with|straggler|"
    r"result-rejected|flight-recorder|gpu-sniff|dump-param|eval-i|start-eval|adlr-|test-mode|"
    r"check-for-|check-weight|rerun-|error-injection|fault-|ft-|calc-ft|inprocess-|manual-gc|"
    r"verify-integrity|"
    # processes, and inference
    r"distributed-(backend|timeout)|local-rank|gloo-|te-rng-tracker|inference-"
    r")"
)


class ParserFlag(NamedTuple):
    """A flag of Megatron-LM's parser. values: how many it takes, -1 for any number; default: as a
    word of the command line, empty where it has none."""

    values: int
    default: str


@cache
def parser_flags() -> dict[str, ParserFlag]:
    """All flags of Megatron-LM's parser by name, in the order of their names."""
    text = files("mpctl.interop").joinpath("megatron_parser.txt").read_text("utf-8")
    rows = (line.split() for line in text.splitlines())
    return {name: ParserFlag(-1 if count == "+" else int(count), " ".join(default)) for name, count, *default in rows}


def is_neutral(flag: str, values: tuple[str, ...]) -> bool:
    """Whether a flag with these values says what is so without it."""
    if values == NEUTRAL.get(flag):
        return True
    known = parser_flags().get(flag)
    return known is not None and len(values) == 1 and _is_same(values[0], known.default)


def _is_same(text: str, other: str) -> bool:
    """As words, or as numbers: 1 and 1.0."""
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


def is_apart(flag: str) -> bool:
    """Whether a flag is of data, checkpoints, logs and the like: a plan is the same without it."""
    return _APART.match(flag) is not None


def misspelt(flag: str) -> Issue | None:
    """The issue of a flag that Megatron-LM does not have, with the nearest that it has."""
    if flag in parser_flags():
        return None
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(flag, parser_flags(), n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "leave it out to plan without it"
    return Issue("megatron-flag", flag, f"is no flag of {SOFTWARE}", hint)


def refusal_of(flag: str, values: tuple[str, ...]) -> Issue | None:
    """The issue of a flag that is not read, if it is none of Megatron-LM's, if Megatron-LM ends on
    it, or if it changes the layout or the model's shape; None of others."""
    if wrong := misspelt(flag):
        return wrong
    if flag in GONE:
        return Issue("megatron-flag", flag, f"{SOFTWARE} ends on it", f"use {GONE[flag]}")
    if is_neutral(flag, values) or flag in _NO_LAYOUT:
        return None
    if flag not in _SHAPE and not _LAYOUT.search(flag):
        return None
    what = "the layout" if _LAYOUT.search(flag) else "the model or its training"
    message = f"{' '.join(values)}: changes {what}, and no setting of a job says it".lstrip(": ")
    return Issue("megatron-flag", flag, message, "leave it out to plan without it")
