"""What the ranks of a bench measure: a generator for each task of a request.

A bench is a launch whose workers find RUN/bench.json and answer it instead of training
(bench/probe.py, runtime/worker.py). Every rank of the mesh runs the same generator over the same
request; each rank yields the same number of answers, and rank 0's are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpctl.errors import RunFailed

if TYPE_CHECKING:
    from mpctl.rundir.requests import BenchRequest
    from mpctl.runtime.mesh import Mesh
    from mpctl.spec.job import JobSpec

Probe = Callable[[Any, "JobSpec", "Mesh"], Iterator[Mapping[str, object]]]
"""probe(request, job, mesh): the answers of one rank."""


def _probe_layers() -> Probe:
    from mpctl.runtime.probes.layers import probe_layers

    return probe_layers


def _probe_kernels() -> Probe:
    from mpctl.runtime.probes.kernels import probe_kernels

    return probe_kernels


def _probe_collectives() -> Probe:
    from mpctl.runtime.probes.collectives import probe_collectives

    return probe_collectives


PROBES: Mapping[str, Callable[[], Probe]] = {
    "layers": _probe_layers,
    "kernels": _probe_kernels,
    "collectives": _probe_collectives,
}
"""What imports the generator of each task, by the request's key "task"."""


def find_probe(request: BenchRequest) -> Probe:
    """The generator that answers a request. Raises RunFailed for a task that there is none for."""
    load = PROBES.get(request["task"])
    if load is None:
        raise RunFailed(f"no probe answers {request['task']!r}: this mpctl is another version")
    return load()
