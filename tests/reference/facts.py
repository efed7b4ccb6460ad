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
    "NO_COLOR": "any value turns colours off",
    "CUDA_VISIBLE_DEVICES": "GPUs that a launch may use",
    "PYTHONPATH": "searched by workers too; what hides Python's own modules is refused",
    "HF_HUB_CACHE": "Hugging Face's cache, in which a model's config.json is looked for",
    "HF_HOME": "without HF_HUB_CACHE: the folder whose `hub` is that cache",
    "XDG_CACHE_HOME": "without both: huggingface/hub here; mpctl/models keeps what --fetch got; by default ~/.cache",
    "HF_ENDPOINT": "the hub that --fetch asks, by default https://huggingface.co",
    "XDG_CONFIG_HOME, HOME": "mpctl/presets here is searched; by default ~/.config",
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME": "network interfaces, which `doctor` checks",
    "SLURM_STEP_NUM_NODES, SLURM_NNODES, SLURM_JOB_NUM_NODES, PET_NNODES, GROUP_WORLD_SIZE": "hosts "
    "that a scheduler gave the job; the first that is set counts",
    "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE": "by workers, from torchrun",
    "SLURMD_NODENAME": "by node agents, from Slurm: the node's name",
    "SSH_CONNECTION": "by node agents, from sshd: the launcher's address",
    "SUDO_UID": "from sudo: whose run directories root may act on",
    "COMP_WORDS, COMP_CWORD, _MPCTL_COMPLETE": "from a shell that completes a line",
    "MPCTL_PARENT, MPCTL_BREADCRUMBS, MPCTL_FORK, MPCTL_LAUNCHER": "from mpctl's own processes to each other",
}
SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "on GPUs in a pipeline, unless set: 32, queues for its streams",
    "CUDA_VISIBLE_DEVICES": "on CPU: empty",
    "GLOO_SOCKET_IFNAME": "on CPU: the loopback interface",
    "OMP_NUM_THREADS": "launch.threads_per_rank",
    "PYTORCH_ALLOC_CONF": "on GPUs, unless set under any name that torch reads: expandable_segments:True",
    "PYTHONSAFEPATH": "1, the working directory is not searched for modules",
    "PYTHONUNBUFFERED": "1, logs are written at once",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "signals that end torchrun",
    "TORCH_FR_BUFFER_SIZE, TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DUMP_ON_TIMEOUT": "unless set: torch's flight "
    "recorder of collectives, written to RUN/logs/nccl_trace_rank_N at a timeout",
    "MPCTL_JOB_SHA256, MPCTL_RESUME_STEP, MPCTL_RESUME_SAVE, MPCTL_BREADCRUMBS": "the job, the checkpoint to resume "
    "(step 0: none), the file in memory in which ranks say what they do",
    "PYDANTIC_DISABLE_PLUGINS": "for the command itself, unless set: a faster start",
}
SCHEMAS = {name: document.meaning for name, document in DOCUMENTS.items()}
SCHEMA = re.compile(r"mpctl(\.[a-z-]+)+/\d+")


def described(*tables: dict[str, str]) -> set[str]:
    """Every name in the tables, whose keys may hold several."""
    return {name for table in tables for key in table for name in key.split(", ")}


def facts_text(table: dict[str, str]) -> str:
    return "\n".join(f"- `{name.replace(', ', '`, `')}`: {meaning}" for name, meaning in table.items())


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
