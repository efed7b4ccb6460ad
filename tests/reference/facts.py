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
from mpctl.cli.documents import DOCUMENTS

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
SCHEMAS = {name: document.meaning for name, document in DOCUMENTS.items()}
SCHEMA = re.compile(r"mpctl(\.[a-z-]+)+/\d+")


def facts_text(table: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {meaning}" for name, meaning in table.items())


def trees(apart: str = "") -> Iterator[ast.Module]:
    root = Path(mpctl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path != root / "cli" / apart:
            yield ast.parse(path.read_text("utf-8"))


def named_schemas() -> set[str]:
    """Every `mpctl.NAME/N` that stands in the code by itself, the list of documents apart."""
    return {text for tree in trees("documents.py") for text in _strings(tree) if SCHEMA.fullmatch(text)}


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
