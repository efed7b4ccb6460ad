"""One layer of a model under several tensor modes, timed in turns by the same ranks.

Each case is a grid of all ranks (tensor_grid.py) with its own groups and layer, which are made
once. A pass is a forward and a backward of one micro batch without dropout; gradients of weights
add up over the passes, and their partial sums, which a training step reduces once, are not sent.
During the first pass of a case its messages and the bytes saved for backward are measured
(train/runtime/memory.py). Then the cases are timed in rounds, A B C A B C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.core.sharding import DENSE
from mpctl.model.layout.topology import dense_view, job_topology
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.model.pipeline.schedule.program import Step
from mpctl.records.rundir.rank_files import Traffic
from mpctl.records.rundir.requests import LayerAnswer, LayerCase, LayerRequest
from mpctl.spec.job import JobSpec
from mpctl.train.families.parts import layer_config
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.layers.grid.tensor_parallel import tensor_parallel_of
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.runtime.memory import MemoryTracker
from mpctl.train.runtime.mesh import Mesh, build_mesh
from mpctl.train.runtime.optimizer import TORCH_DTYPES
from mpctl.train.runtime.probes.measure import agreed_rounds, time_runs, values_of_all
from mpctl.train.runtime.step_record import TrafficCounter

SITE = "layers.0"  # the layer's name, on which its initial weights depend


@dataclass(frozen=True)
class ProbedLayer:
    """A rank's part of the layer in one case, with its input [b, s, h] and the gradient of its
    result; traffic: counts what its groups send."""

    module: ParallelTransformerLayer
    hidden: Tensor
    gradient: Tensor
    traffic: TrafficCounter

    @classmethod
    def of(cls, job: JobSpec, context: ShardContext, traffic: TrafficCounter, *, causal: bool = True) -> ProbedLayer:
        """The layer of the job's model under a shard context."""
        model, training = job.model, job.training
        assert model is not None, "a layer is of a model"
        config = layer_config(model, training, causal=causal)
        module = ParallelTransformerLayer(config, context, SITE)
        initialise(module, training.seed, prefix=SITE)
        samples = training.micro_batch_size // context.grid.sample_parts
        shape = samples, model.seq_length, model.hidden // context.grid.hidden_parts
        generator = torch.Generator().manual_seed(training.seed)
        values = torch.randn(shape, generator=generator).to(context.device, context.dtype)
        return cls(module, values.requires_grad_(), torch.ones_like(values), traffic)

    def run(self) -> None:
        """One pass."""
        self.hidden.grad = None
        self.module(self.hidden).backward(self.gradient)

    def watched(self) -> tuple[int, Traffic]:
        """One pass: returns the bytes saved for backward, and the traffic."""
        activity = Activity()
        tracker = MemoryTracker(self.hidden.device, activity=activity, own_only=True)
        tracker.add("parameters", self.module.parameters())
        tracker.add("temporaries", [self.hidden])  # the result is counted instead
        self.traffic.clear()
        with tracker:
            activity.move(Step("compute", Action("forward", 0)))
            result = self.module(self.hidden)
            activity.move(None)
            saved = tracker.bytes_by_kind["activations"]
        result.backward(self.gradient)
        return saved, self.traffic.snapshot()


def probe_layers(request: LayerRequest, job: JobSpec, mesh: Mesh) -> Iterator[LayerAnswer]:
    """The answers to a request, the same on every rank of `mesh`, which all call it.

    job: its model and training are used, not its layout. The answers are the sizes of every case
    and of the unsharded layer, then a timing for each round and case.
    """
    dtype, kernels = TORCH_DTYPES[job.training.dtype], machine_kernels(mesh.device, mesh.world)
    layers = []
    for number, case in enumerate(request["cases"]):
        layers.append(_layer(job, case, mesh, dtype, kernels))
        yield _sizes(number, layers[-1], mesh)
    alone = ShardContext(dtype=dtype, device=mesh.device, backend=kernels)
    whole = ProbedLayer.of(job, alone, TrafficCounter())
    yield _sizes(None, whole, mesh)
    del whole
    for number in agreed_rounds(mesh, request["rounds"], request["seconds"]):
        for place, layer in enumerate(layers):
            seconds, cpu = time_runs(mesh, [layer.run] * request["steps"])
            yield {"event": "timing", "case": place, "round": number, "seconds": seconds, "cpu_seconds": cpu}


def _layer(job: JobSpec, case: LayerCase, mesh: Mesh, dtype: torch.dtype, kernels: KernelBackend) -> ProbedLayer:
    own = {"tensor_mode": case["mode"], "tensor_depth": case["depth"], "tp": mesh.world.size}
    parallel = job.parallel.model_copy(update={**own, "dp": 1})
    laid = job.model_copy(update={"parallel": parallel})
    traffic = TrafficCounter()
    own_mesh = build_mesh(
        job_topology(laid),
        mesh.rank,
        mesh.device,
        launch=job.launch,
        views={DENSE: dense_view(laid)},
        record=traffic.record,
    )
    grid = own_mesh.grid
    context = ShardContext(
        own_mesh.tp,
        dtype=dtype,
        device=mesh.device,
        backend=kernels,
        grid=grid,
        groups=own_mesh.groups,
        tensor_parallel=tensor_parallel_of(grid.mode),
    )
    return ProbedLayer.of(job, context, traffic)


def _sizes(number: int | None, layer: ProbedLayer, mesh: Mesh) -> LayerAnswer:
    """Sizes: the maximum bytes of all ranks, and the traffic of this rank."""
    saved, traffic = layer.watched()
    held = sum(p.nbytes for p in layer.module.parameters())
    largest = values_of_all(mesh, held, saved).amax(0)
    parameters, saved = (int(size) for size in largest)
    return {"event": "sizes", "case": number, "parameter_bytes": parameters, "saved_bytes": saved, "traffic": traffic}
