"""Rehearsals: a rank without its machine sends what the plan says, byte by byte, and holds what the
same rank holds with real tensors.

The jobs are those of test_axes.py and test_pipeline.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.core.topology import Topology
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.model.pipeline.schedule.program import Step
from mpctl.plan.estimate.memory import StageMemory
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.families.gpt.module import GPT
from mpctl.train.rehearsal import worker as module
from mpctl.train.rehearsal.fake_backend import PlannedRows, SimulatedGpuKernels, fake_tensors
from mpctl.train.rehearsal.worker import MicroBatchTraffic, num_microbatches_run, rehearse_rank
from mpctl.train.runtime.memory import MemoryTracker
from mpctl.train.transport.timing import Collective
from tests.train.runtime.test_axes import MODES, SHAPES
from tests.train.runtime.test_pipeline import MODELS, SEQUENCE, layout
from tests.train.runtime.tiny import make_trainer, settings, tiny_job, tiny_plan, train

NO_DROPOUT = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
CUDA = {"launch__device": "cuda", "training__dtype": "bf16"}
HOW: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {**NO_DROPOUT, **CUDA}}
QUICK = {"cpu": {("bert", "tp4-sp")}, "cuda": {("gpt", "tp2-full-parts")}}


def rehearsed(job: JobSpec, rank: int) -> dict[str, Any]:
    account = rehearse_rank(job, job_topology(job), rank)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    return account


def is_as_planned(job: JobSpec, account: dict[str, Any]) -> bool:
    estimate, stage = tiny_plan(job).estimate, account["coords"]["pp"]
    assert account["step_traffic"] == planned_traffic(estimate.messages[stage])
    memory: StageMemory = estimate.memory[stage]
    assert account["parameters"] == memory.parameters
    assert account["state_bytes"] == {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
    }
    assert sum(account["at_peak"].values()) == account["peak_bytes"]
    return True


EXPERTS = {
    "model__experts": 8,
    "model__experts_per_token": 2,
    "model__expert_ffn": 32,
    "model__shared_expert_ffn": 32,
    "model__dense_layers": 1,
    "model__activation": "swiglu",
}


@pytest.mark.parametrize("how", [HOW["cpu"], HOW["cuda"]], ids=["cpu", "cuda"])
def test_experts_get_the_rows_of_the_plan(data: Path, how: dict[str, Any]) -> None:
    """Tokens of a rehearsal have no values to be routed by: this rank's experts get twice the mean,
    and what it sends does not depend on that."""
    load = {"training__moe_load": 2.0}
    job = tiny_job(data, dp=4, parallel__ep=4, **EXPERTS, **load, **how)
    account = rehearsed(job, 1)
    assert is_as_planned(job, account)
    planned = tiny_plan(job).estimate.memory[0].tensor_bytes
    assert account["peak_bytes"] == pytest.approx(planned, rel=0.1)
    rows = PlannedRows.of(JobLayout.of(job), 1)
    assert (rows.parts, rows.index, rows.load) == (4, 1, 2.0)
    assert [sum(own) for own in rows.counts(4, 8, 30)] == [30] * 4
    assert sum(own[2] + own[3] for own in rows.counts(4, 8, 30)) == 60


@pytest.mark.parametrize(
    ("shape", "mode", "how"),
    [
        pytest.param(
            shape,
            mode,
            HOW[how],
            id=f"{shape}-{mode}-{how}",
            marks=[pytest.mark.slow] * ((shape, mode) not in QUICK[how]),
        )
        for shape in SHAPES
        for mode in MODES
        for how in HOW
    ],
)
def test_every_family_and_axis_is_as_planned(
    shape: str, mode: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the working directory is not taken for the rehearsal's run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-run" / "checkpoints" / "step-1").mkdir(parents=True)
    tp, cp, dp, changes = MODES[mode]
    world = {"parallel__cp": cp, "cluster__gpus_per_node": tp * cp * dp}
    job = load_job(None, settings(tp, dp, **{**world, **SHAPES[shape], **changes, **how}))
    assert is_as_planned(job, rehearsed(job, job.world_size - 1))


@pytest.mark.parametrize(
    ("model", "how", "changes"),
    [
        ("gpt", layout(2, 2, "interleaved", dp=2), {"training__micro_batch_size": 1}),
        pytest.param("llama", layout(4, schedule="gpipe"), CUDA, marks=pytest.mark.slow),
        pytest.param("t5", layout(2, 2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(
            "glm", layout(2, tp=2), {**SEQUENCE, "training__recompute": "full", **CUDA}, marks=pytest.mark.slow
        ),
        pytest.param("bert", layout(2, cp=2), {"training__freeze": ["[!pn]*"]}, marks=pytest.mark.slow),
    ],
)
def test_every_stage_is_as_planned(model: str, how: dict[str, Any], changes: dict[str, Any]) -> None:
    job = load_job(None, settings(**{**MODELS[model], **how, **changes}))
    for stage in range(job.parallel.pp):
        rank = Topology.of(job.sizes).rank(tp=0, cp=0, dp=0, pp=stage)
        assert is_as_planned(job, rehearsed(job, rank))


@pytest.mark.slow
def test_it_sends_what_the_real_ranks_send(data: Path, tmp_path: Path) -> None:
    """Of 8 micro batches stage 1 is rehearsed with 3."""
    changes = {**SEQUENCE, "model__layers": 4, "training__global_batch_size": 16}
    job = tiny_job(
        data,
        training__steps=1,
        training__eval_samples=0,
        checkpoint__interval=0,
        checkpoint__at_end=False,
        **{**layout(2, tp=2), **changes},
    )
    for rank, real in enumerate(train(job, tmp_path)):
        account = rehearsed(job, rank)
        assert account["step_traffic"] == real["traffic"]
        assert account["parameters"] == real["count"]
        assert account["micro_batches_run"] < account["micro_batches"] == 8


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("gpt", {"training__recompute": "full"}),
        pytest.param("llama", NO_DROPOUT, marks=pytest.mark.slow),
        pytest.param("bert", {"training__dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("t5", {}, marks=pytest.mark.slow),
        pytest.param("glm", {"training__recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_real_tensors_take_the_same_bytes(data: Path, tmp_path: Path, shape: str, changes: dict[str, Any]) -> None:
    """The second step of 3 micro batches, with a tracker over real tensors."""
    job = tiny_job(
        data,
        training__global_batch_size=6,
        training__steps=2,
        training__eval_samples=0,
        checkpoint__interval=0,
        checkpoint__at_end=False,
        launch__track_memory=False,
        **{**SHAPES[shape], **changes},
    )
    tracker = MemoryTracker(torch.device("cpu"))
    with tracker:
        trainer = make_trainer(job, tmp_path)
        steps = trainer.run()
        next(steps)
        for kind, tensors in trainer.state_tensors().items():
            tracker.name(kind, tensors)
        tracker.activity = trainer.environment.activity
        tracker.activity.on_move = tracker.close_action
        tracker.restart()
        next(steps)
    account = rehearsed(job, 0)
    assert account["peak_bytes"] == tracker.peak
    assert {k: v for k, v in account["at_peak"].items() if v} == tracker.at_peak
    assert account["activation_bytes"] == tracker.peak_activations > 0


@pytest.mark.parametrize(
    ("how", "stage", "run"),
    [
        pytest.param(layout(4), 1, 5, marks=pytest.mark.slow),
        pytest.param(layout(2, 2), 0, 8, marks=pytest.mark.slow),
        pytest.param(layout(2, 2), 1, 6, marks=pytest.mark.slow),
        pytest.param(layout(2, tp=2), 1, 3, marks=pytest.mark.slow),
        pytest.param(layout(2, 2, "dualpipev"), 0, 8, marks=pytest.mark.slow),
        pytest.param(layout(2, 2, "zbv"), 1, 6, marks=pytest.mark.slow),
    ],
)
def test_more_micro_batches_than_are_run_would_add_their_token_ids_alone(
    monkeypatch, how: dict[str, Any], stage: int, run: int
) -> None:
    job = load_job(None, settings(**how, model__layers=4, training__global_batch_size=24))
    rank = Topology.of(job.sizes).rank(tp=0, cp=0, dp=0, pp=stage)
    short = rehearsed(job, rank)
    monkeypatch.setattr(module, "num_microbatches_run", lambda job, stage: job.num_microbatches)
    whole = rehearsed(job, rank)
    assert (short["micro_batches_run"], whole["micro_batches_run"]) == (run, 12)
    ids = (12 - run) * 2 * (2 * 32 + 1) * 8  # tokens, targets and numbers of 2 samples
    assert 0 <= whole["peak_bytes"] - short["peak_bytes"] <= ids
    assert 0 <= whole["activation_bytes"] - short["activation_bytes"] <= ids
    assert whole["step_traffic"] == short["step_traffic"]


@pytest.mark.parametrize(
    ("how", "found"),
    [
        (layout(4), [6, 5, 4, 3]),
        (layout(4, schedule="gpipe"), [16] * 4),
        (layout(1), [3]),
        (layout(2, 2), [8, 6]),
        (layout(2, 2, "dualpipev"), [8, 8]),
    ],
)
def test_num_microbatches_run(how: dict[str, Any], found: list[int]) -> None:
    sizes = {"model__layers": 4, "training__global_batch_size": 32}
    job = load_job(None, settings(**how, **sizes))
    assert [num_microbatches_run(job, stage) for stage in range(job.parallel.pp)] == found


@pytest.mark.slow
def test_what_lies_on_the_host_is_not_the_devices() -> None:
    kept = []
    for offload in (False, True):
        changes = {"training__recompute": "full", "training__offload_activations": offload, "model__layers": 4}
        job = load_job(None, settings(**CUDA, **changes))
        kept.append(rehearsed(job, 0)["activation_bytes"])
    layers, b, s, h, width = 4, 2, 32, 32, 2
    # a layer's input is dropout's result, kept for nothing else; the last ones are being copied
    assert kept[0] - kept[1] == (layers - COPIES_IN_FLIGHT) * b * s * h * width


def test_a_tracker_by_hand() -> None:
    tracker = MemoryTracker(torch.device("cpu"))
    with tracker:
        tracker.activity.move(Step("compute", Action("forward", 0)))
        x = torch.ones(4, requires_grad=True)
        y = x.exp().exp()
        tracker.activity.move(None)
        assert tracker.bytes_by_kind["activations"] == tracker.peak_activations == tracker.total == 48
        tracker.name("parameters", [x])
        assert (tracker.bytes_by_kind["parameters"], tracker.bytes_by_kind["activations"]) == (16, 32)
        del y
        assert tracker.total == 16 and tracker.peak == 48


def test_what_is_passing_is_temporary() -> None:
    """A message that a forward leaves alive is no activation while it is sent; if it is saved as
    well, it is one from then on."""
    messages: list[torch.Tensor] = []
    tracker = MemoryTracker(torch.device("cpu"), passing=lambda: messages)
    with tracker:
        tracker.activity.move(Step("compute", Action("forward", 0)))
        saved, message = torch.ones(4), torch.ones(2)
        messages[:] = [message, saved]
        tracker.activity.move(None)
        assert tracker.bytes_by_kind["activations"] == 0 and tracker.total == 24
        messages[:] = [message]
        tracker.activity.move(Step("compute", Action("backward", 0)))
        assert tracker.bytes_by_kind["activations"] == tracker.peak_activations == 16
        messages.clear()
        del message
        tracker.activity.move(None)
        assert tracker.bytes_by_kind == {"activations": 16, "temporaries": 0}
        del saved
        assert tracker.total == tracker.bytes_by_kind["activations"] == 0


def test_a_gradient_that_a_backward_has_taken_is_temporary_until_it_ends() -> None:
    """It is received before its backward, which defers products of weights that read it."""
    messages: list[torch.Tensor] = []
    tracker = MemoryTracker(torch.device("cpu"), passing=lambda: messages)
    move, action = tracker.activity.move, Action("backward_input", 0)
    with tracker:
        move(Step("receive", action))
        gradient = torch.ones(4)
        messages.append(gradient)
        move(Step("compute", action))
        messages.clear()
        torch.ones(2)
        assert tracker.peak_activations == 0
        move(None)
        assert tracker.peak_activations == gradient.nbytes


def test_fused_attention_keeps_no_scores() -> None:
    """The example of fake_backend.py; in 32 bit with a mask, the mask as numbers besides."""
    device = torch.device("meta")
    for dtype, causal, most in ((torch.bfloat16, True, 5 << 20), (torch.float32, False, 26 << 20)):
        with fake_tensors(), MemoryTracker(device) as tracker:
            q = torch.empty(1, 8, 2048, 128, dtype=dtype, device=device, requires_grad=True)
            mask = None if causal else torch.ones(1, 1, 2048, 2048, dtype=bool, device=device)
            before = tracker.total
            result = SimulatedGpuKernels().scaled_dot_product(q, q, q, mask, is_causal=causal)
            assert result.shape == q.shape and result.dtype == dtype
            assert result.nbytes + 8 * 2048 * 4 <= tracker.total - before <= most


def test_values_of_another_head_size_keep_no_scores() -> None:
    """Latent attention of 16 bits, which FlashAttention does not take: scores were 64 MiB."""
    device = torch.device("meta")
    with fake_tensors(), MemoryTracker(device) as tracker:
        q = torch.empty(1, 8, 2048, 192, dtype=torch.bfloat16, device=device, requires_grad=True)
        v = torch.empty(1, 8, 2048, 128, dtype=torch.bfloat16, device=device)
        before = tracker.total
        result = SimulatedGpuKernels().scaled_dot_product(q, q, v, is_causal=True)
        assert result.shape == v.shape
        assert tracker.total - before <= 5 << 20
        result.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


def test_a_bias_of_other_strides_has_no_fused_kernel_on_cuda() -> None:
    """fp32, a bias of 8 heads over 512 keys: fused keeps no scores of 8 MiB, products do."""
    device, kept = torch.device("meta"), []
    for is_permuted in (False, True):
        with fake_tensors(), MemoryTracker(device) as tracker:
            q = torch.empty(1, 8, 512, 64, device=device, requires_grad=True)
            shape = (1, 512, 512, 8) if is_permuted else (1, 8, 512, 512)
            bias = torch.empty(shape, device=device)
            bias = bias.permute(0, 3, 1, 2) if is_permuted else bias
            before = tracker.total
            result = SimulatedGpuKernels().scaled_dot_product(q, q, q, bias)
            assert result.shape == q.shape
            kept.append(tracker.total - before)
    scores = 8 * 512 * 512 * 4
    assert kept[0] < scores <= kept[1]


# ---------------------------------------------------------------- what goes wrong


def test_a_failure_says_where(monkeypatch) -> None:
    calls = Counter[str]()

    def burning(self: GPT, *args: Any) -> Any:
        calls["stage_forward"] += 1
        if calls["stage_forward"] == 2:
            raise RuntimeError("layers on fire\nand more")
        return stage_forward(self, *args)

    stage_forward = GPT.stage_forward
    monkeypatch.setattr(GPT, "stage_forward", burning)
    job = load_job(None, settings(**layout(2)))
    account = rehearse_rank(job, Topology.of(job.sizes), 0)
    assert account["failure"]["error"] == "RuntimeError: layers on fire"
    assert account["failure"]["doing"] == "step 1, stage 0, forward of micro batch 1"
    assert not torch.distributed.is_initialized()


def test_micro_batches_that_differ_are_not_multiplied() -> None:
    step = {("tp", "all_reduce", 8): 2}
    traffic = MicroBatchTraffic(by_microbatch={0: Counter(step), 1: Counter(step), None: Counter(step)})
    assert traffic.extrapolate(5, 2) == {"tp all_reduce": {"count": 12, "bytes": 96}}
    traffic.record(Collective("all_reduce", "tp", 8, "float32"))  # outside of micro batches
    assert traffic.extrapolate(5, 2) == {"tp all_reduce": {"count": 13, "bytes": 104}}
    traffic.by_microbatch[1]["tp", "all_reduce", 8] += 1
    with pytest.raises(AssertionError, match="micro batch 1 sends other"):
        traffic.extrapolate(5, 2)
