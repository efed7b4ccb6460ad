"""torchrun whose ranks were forked before it began (forking.py): its elastic agent, which hands
each waiting copy the command line and the environment with which it would start a new process.

torchrun has no setting for this. Its `start_method="fork"` forks after its store has started
threads, reports the exit code of one failed rank alone, and has a rank that has ended wait for the
others. So the agent and the processes' context are subclasses: what watches ranks, ends them and
reports their exit codes is torch's own, as for new processes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from subprocess import Popen
from typing import Any, cast

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import config_from_args, parse_args

from mpctl.train.runtime.forking import ForkedRank
from mpctl.train.runtime.store import create_rendezvous

REPLACED: dict[tuple[type, str], list[str]] = {
    (SubprocessHandler, "_popen"): ["self", "args", "env"],
    (SubprocessHandler, "__init__"): [
        "self",
        "entrypoint",
        "args",
        "env",
        "stdout",
        "stderr",
        "local_rank_id",
        "numa_options",
    ],
    (SubprocessContext, "_start"): ["self"],
    (LocalElasticAgent, "_start_workers"): ["self", "worker_group"],
}
"""torch's methods that the subclasses replace or call, with their parameters in torch 2.13."""


def unknown_torch() -> str:
    """Return the reason why the subclasses here do not fit this torch; empty if they do."""
    for (owner, name), known in REPLACED.items():
        method = getattr(owner, name, None)
        now = [] if method is None else list(inspect.signature(method).parameters)
        if now != known:
            return f"torch {torch.__version__} has another {owner.__name__}.{name}"
    return ""


class ForkedHandler(SubprocessHandler):
    """torchrun's handle of one rank's process. Handed to it when it begins: the arguments of its
    base class, which would start a new process with them."""

    def __init__(self, rank: ForkedRank, *given: Any) -> None:
        self.rank = rank
        super().__init__(*given)

    def _popen(self, args: Sequence[str], env: dict[str, str]) -> Popen[bytes]:
        self.rank.begin(args, env)
        return cast("Popen[bytes]", self.rank)  # it has the methods that are called


class ForkedContext(SubprocessContext):
    """The processes of this host's ranks, by local rank."""

    def __init__(self, ranks: Sequence[ForkedRank], **given: Any) -> None:
        super().__init__(**given)
        self.ranks = ranks

    def _start(self) -> None:
        self.subprocess_handlers = {
            local_rank: ForkedHandler(
                rank,
                self.entrypoint,
                self.args[local_rank],
                self.envs[local_rank],
                self.stdouts[local_rank],
                self.stderrs[local_rank],
                local_rank,
                None,
            )
            for local_rank, rank in enumerate(self.ranks)
        }


class ForkedAgent(LocalElasticAgent):
    """torchrun's agent of this host."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, ranks: Sequence[ForkedRank]) -> None:
        super().__init__(spec, logs)
        self.logs, self.ranks = logs, ranks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        spec = worker_group.spec
        count = len(worker_group.workers)
        self._pcontext = ForkedContext(
            self.ranks,
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=dict.fromkeys(range(count), spec.args),
            envs=_environments(worker_group),
            logs_specs=self.logs,
        )
        self._pcontext.start()
        return dict(self._pcontext.pids())


def _environments(group: WorkerGroup) -> dict[int, dict[str, str]]:
    """The variables that torchrun sets for the ranks of this host, by local rank."""
    spec = group.spec
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    common = {
        "GROUP_RANK": group.group_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        handling: os.environ.get(handling, "1"),
    }
    return {
        worker.local_rank: {
            **{name: str(value) for name, value in common.items()},
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "ROLE_RANK": str(worker.role_rank),
            "WORLD_SIZE": str(worker.world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
        }
        for worker in group.workers
    }


@record
def run_forked(arguments: Sequence[str], ranks: Sequence[ForkedRank]) -> None:
    """torchrun with these arguments and processes. Raises as torchrun: ChildFailedError when a rank
    fails, SignalException when it was asked to end."""
    config, program, words = config_from_args(parse_args(arguments))
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        **config.rdzv_configs,
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(words),
        rdzv_handler=create_rendezvous(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
    )
    assert config.logs_specs is not None  # it has a default
    result = ForkedAgent(spec, config.logs_specs, ranks).run()
    if result.is_failed():
        raise ChildFailedError(name=f"forked {words[-2]}", failures=result.failures)
