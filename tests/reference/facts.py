"""What stands in no model: exit codes, environment variables and JSON documents.

The variables and documents that the code names are read from its syntax trees, so that none can be
left out here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mpctl

EXIT_CODES = {
    "0": "done",
    "1": "the run failed (a rank died, a measurement or rehearsal did not finish), or `doctor` "
    "found what would break a launch",
    "2": "bad input: an unknown option, a bad job, an illegal layout, a file that cannot be used",
    "3": "legal, but a rank leaves less than the headroom of its device's memory "
    "(`cluster.headroom`, allocator and context counted): `plan` (not with `--rank`), `emit`, `search`, "
    "`launch --rehearse`",
    "4": "a gate of `--fail-if` failed",
    "128 + n": "ended by signal n: 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1",
}
READ = {
    "COLUMNS": "width of tables and pages of text; when absent the terminal's, 100 in a pipe",
    "CUDA_VISIBLE_DEVICES": "GPUs that a launch may use",
    "COMP_WORDS": "set by bash where it asks for completions: the words that are typed",
    "COMP_CWORD": "the same: the number of the word that is to be completed",
    "_MPCTL_COMPLETE": "set by a shell's script that asks for completions: which shell asks",
    "LOCAL_RANK": "by workers: set by torchrun",
    "MASTER_ADDR": "by workers: set by torchrun, where they meet",
    "MASTER_PORT": "the same: the port",
    "TORCHELASTIC_USE_AGENT_STORE": "by workers: set by torchrun, which hosts their store",
    "SUDO_UID": "set by sudo: whose run directories root may act on",
    "MPCTL_PARENT": "by processes of `doctor`: set by what starts them, with which they end",
    "MPCTL_BREADCRUMBS": "by workers: set by what starts the ranks of a host",
    "MPCTL_FORK": "by torchrun: set by the launcher where ranks may be forked from it",
    "MPCTL_LAUNCHER": "by torchrun: set by the launcher, the process that it ends with",
    "GLOO_SOCKET_IFNAME": "by `doctor`: the interface that gloo would use",
    "NCCL_SOCKET_IFNAME": "by `doctor`: the interfaces that NCCL would use",
    "SSH_CONNECTION": "by node agents: set by sshd, the address of the launcher",
    "HF_HUB_CACHE": "Hugging Face's cache, in which a model's config.json is looked for",
    "HF_ENDPOINT": "by --fetch: the hub that is asked, by default https://huggingface.co",
    "HF_HOME": "the same: the folder whose `hub` it is, where HF_HUB_CACHE is not set",
    "XDG_CACHE_HOME": "the user's cache, by default ~/.cache: huggingface/hub there is the same, "
    "and mpctl/models keeps what --fetch fetched",
    "XDG_CONFIG_HOME": "the user's settings, by default ~/.config: mpctl/presets there is searched",
    "HOME": "the user's folder, where XDG_CONFIG_HOME is not set",
    "NO_COLOR": "any value turns colours off",
    "PYTHONPATH": "searched for modules by workers too; what hides Python's own modules is refused",
    "RANK": "by workers: set by torchrun",
    "SLURM_STEP_NUM_NODES, SLURM_NNODES, SLURM_JOB_NUM_NODES, PET_NNODES, GROUP_WORLD_SIZE": ""
    "hosts that a scheduler gave the job; the first that is set counts",
    "SLURMD_NODENAME": "by node agents: set by Slurm, the name of the node in its list",
    "WORLD_SIZE": "by workers: set by torchrun",
}
SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "for workers on GPUs in a pipeline, unless set: 32, so that its "
    "streams have queues of their own",
    "CUDA_VISIBLE_DEVICES": "for workers on CPU: empty",
    "GLOO_SOCKET_IFNAME": "for workers on CPU: the loopback interface",
    "MPCTL_BREADCRUMBS": "for workers: the first rank of the host, and the file in memory in which "
    "its ranks say what they do",
    "MPCTL_JOB_SHA256": "for workers: the job.json that the launcher wrote",
    "MPCTL_RESUME_SAVE": "for workers: which save of that step, where it has a name",
    "MPCTL_RESUME_STEP": "for workers: the step of the checkpoint to resume, 0 for none",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "for workers, as torchrun does: the signals that end it",
    "OMP_NUM_THREADS": "for workers: launch.threads_per_rank",
    "PYTORCH_ALLOC_CONF": "for workers on GPUs, unless set under any name that torch reads: expandable_segments:True",
    "PYDANTIC_DISABLE_PLUGINS": "for the command itself, unless set: a faster start",
    "PYTHONSAFEPATH": "for workers: 1, the working directory is not searched for modules",
    "PYTHONUNBUFFERED": "for workers: 1, logs are written at once",
    "TORCH_FR_BUFFER_SIZE": "for workers, unless set: entries of torch's flight recorder of collectives",
    "TORCH_FR_DUMP_TEMP_FILE": "for workers, unless set: the beginning of the files that it writes "
    "when a collective times out, RUN/logs/nccl_trace_rank_",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "for workers, unless set: 1, it writes them",
}
SCHEMAS = {
    "mpctl.attempt/1": "nodes/status.json of a run of older versions, which is read",
    "mpctl.attempt/2": "the same, with the phase of its attempt",
    "mpctl.attempt/3": "nodes/status.json of a run: the phase of its attempt, all hosts and ranks, "
    "as the launcher last knew them",
    "mpctl.blamed/1": "nodes/blamed.json of a run: the failures that each host is blamed for",
    "mpctl.bench/2": "`mpctl bench ... --json` and OUT/report.json: rows and findings of any bench",
    "mpctl.bench-compare/1": "`mpctl bench compare --json`: two reports, row by row",
    "mpctl.calibrate/1": "`mpctl calibrate --json`: what own runs told, errors, bands, presets",
    "mpctl.checkpoint-inspect/1": "`mpctl checkpoint inspect --json`: shards and parameters of one",
    "mpctl.checkpoint/1": "manifest.json of a checkpoint of 0.1.0, which is read: parameters are "
    "split along one dimension at most",
    "mpctl.checkpoint/2": "an older one, which is read: the number of shards and tp",
    "mpctl.checkpoint/3": "manifest.json of a checkpoint: its step, and its shards by name",
    "mpctl.checkpoints/1": "`mpctl checkpoint list`, `verify` and `reshard --json`: what there is",
    "mpctl.compare/2": "`mpctl compare --json`: settings that differ, figures of each job",
    "mpctl.data/1": "`mpctl data prepare --json` and manifest.json of prepared data",
    "mpctl.doctor/1": "`mpctl doctor --json`: a report a host, pairs, all-reduces and findings",
    "mpctl.error/1": "any command with `--json` that refuses its input: `issues`, each with "
    "`rule`, `where`, `message` and `hint`",
    "mpctl.eval/1": "`mpctl eval --json`: loss and perplexity, a row a corpus",
    "mpctl.explain/2": "`mpctl explain --json`: figures with formula and numbers",
    "mpctl.emit/1": "`mpctl emit JOB LAUNCHER --json`: the text for another launcher, its notes",
    "mpctl.extension/1": "extension.json beside an extended tokenizer: its new pieces",
    "mpctl.hook/1": "what `launch.hook` reads on its standard input: a failure, a restart, the end",
    "mpctl.hosts/1": "nodes/hosts.json of a run on several hosts: the ranks of each host",
    "mpctl.launcher/1": "launcher.json of a run: which process launched it, where and how",
    "mpctl.launch/1": "`mpctl launch --dry-run --json`: command, environment and job",
    "mpctl.meeting/1": "nodes/meeting.json: where processes of a joined world find the launcher",
    "mpctl.plan/2": "`mpctl plan --json` and plan.json of a run: the whole plan",
    "mpctl.preset/1": "`mpctl presets NAME --json`: one preset",
    "mpctl.presets/1": "`mpctl presets --json`: names of presets by kind, files of your own",
    "mpctl.rank/1": "`mpctl plan --rank N --json`: one rank, its coordinates and groups",
    "mpctl.rehearsal/2": "`mpctl launch --rehearse --json`: memory and messages of rehearsed ranks",
    "mpctl.run-trace/2": "`mpctl bench trace RUN`: profiled steps beside the planned, for Perfetto",
    "mpctl.run/2": "`mpctl launch --json` and summary.json of a run",
    "mpctl.runs/1": "`mpctl runs --json`: a row a run",
    "mpctl.run-dir/1": ".mpctl-run of a run directory: a launch wrote what is here",
    "mpctl.sample/1": "`mpctl sample --json`: what was written for each prompt",
    "mpctl.search/3": "`mpctl search --json`: the fastest layout, the suggested one, the best as rows",
    "mpctl.series/1": "`mpctl show --plot METRIC --json`: a curve a run and metric",
    "mpctl.show/1": "`mpctl show --json`: each run's job, progress, checkpoints and failure",
    "mpctl.status/1": "`mpctl status --json`: progress, time left, launcher, newest checkpoint and "
    "what every rank is doing",
    "mpctl.stopped/1": "`mpctl stop --json`: how the run ended and what it saved",
    "mpctl.lock/1": ".lock of a run directory, or of data in preparation: which process has it",
    "mpctl.stop/1": "stop-request of a run: `mpctl stop` asks its launcher to stop it",
    "mpctl.submission/1": "`mpctl launch --submit --json`: scheduler, job and run directory; with "
    "`--dry-run` no job, and the script or manifest as `document`",
    "mpctl.tensor-modes/1": "`mpctl tensor-modes --json`: costs in symbols and this job's numbers, an entry a mode",
    "mpctl.trace/2": "`mpctl plan --trace FILE`: the planned step for Perfetto",
    "mpctl.trial/1": "TUNE/trials/NNN.json: a trial of `mpctl tune`, how it was planned and ended",
    "mpctl.tune/1": "`mpctl tune --json` and TUNE/report.json: trials, plans and step times, the "
    "best layout and its lead",
    "mpctl.tuned-job/1": "TUNE/tuned.json: the job that a folder of `mpctl tune` is of",
    "mpctl.weights/1": "`mpctl checkpoint import` and `export --json`: what was written",
}
SCHEMA = re.compile(r"mpctl(\.[a-z-]+)+/\d+")


def facts_text(table: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {meaning}" for name, meaning in table.items())


def trees() -> Iterator[ast.Module]:
    for path in sorted(Path(mpctl.__file__).parent.rglob("*.py")):
        yield ast.parse(path.read_text("utf-8"))


def named_schemas() -> set[str]:
    """Every `mpctl.NAME/N` that stands in the code by itself."""
    return {text for tree in trees() for text in _strings(tree) if SCHEMA.fullmatch(text)}


def named_variables() -> set[str]:
    """Keys of `os.environ` and of any table called `env`."""
    return {name for tree in trees() for node in ast.walk(tree) for name in _variables(node)}


def _strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _variables(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
        if any(_is_environment(target) for target in node.targets):
            yield from (text for key in node.value.keys if key for text in _strings(key))
    elif isinstance(node, ast.Subscript) and _is_environment(node.value):
        yield from _strings(node.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        yield from _strings(node.args[0]) if _is_environment(node.func.value) else ()


def _is_environment(node: ast.AST) -> bool:
    return ast.unparse(node) in ("env", "environ", "os.environ")
