"""Audits of steps: figures by hand, of every family, and limits for the layers that matter.

One layer in one micro batch, forward and backward, in bf16: kernels and MiB moved, and the MiB of
the least, before work on them began (docs/design/gpu_speed.md has the figures since):

    layer                      tp   no dropout           dropout 0.1
    GPT, hidden 2048            1    50   1,881 (1,473)   471  13,180
                                8    56     519   (373)   387   2,841
    Llama, hidden 4096, 8 kv    1   111   7,181 (5,063)   654  29,821
                                8   114   1,387 (1,013)   446   6,014
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpctl.core.sharding import padded_vocab
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.model.pipeline.schedule.program import Step
from mpctl.plan.estimate.kernels import Rates, Speed
from mpctl.plan.estimate.time import step_time_model
from mpctl.plan.planning.plan import make_plan
from mpctl.records.rundir.rank_files import AuditRow, StepAudit
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.rehearsal.audit import Dataflow, Part, Scopes, StepAuditor, part_of, pattern
from mpctl.train.rehearsal.fake_backend import fake_tensors
from mpctl.train.rehearsal.kernel_counts import Touched, tensor_bytes
from mpctl.train.rehearsal.worker import rehearse_rank
from mpctl.train.runtime.activity import Activity
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import settings

META = torch.device("meta")
MIB = 2**20
CUDA = {"launch__device": "cuda", "training__dtype": "bf16"}
DROPOUT = {"training__dropout": 0.1, "training__attention_dropout": 0.1}
WHOLE = {
    "cluster__device": "h200",
    **CUDA,
    "training__micro_batch_size": 1,
    "training__dropout": 0.0,
    "training__attention_dropout": 0.0,
    "training__global_batch_size": 1,
    "model__vocab": 50304,
    "model__seq_length": 2048,
}
LAYERS: dict[str, dict[str, Any]] = {
    "gpt": {"model__hidden": 2048, "model__heads": 16, "model__activation": "gelu_tanh"},
    "llama": {
        "model__hidden": 4096,
        "model__heads": 32,
        "model__kv_heads": 8,
        "model__ffn": 14336,
        "model__activation": "swiglu",
        "model__norm": "rmsnorm",
        "model__position": "rotary",
        "model__bias": False,
        "model__tied_embeddings": False,
    },
}


def audited(**changes: Any) -> StepAudit:
    """The audit of a job; that of equal settings is made once, and changed by nobody."""
    return audit_of(load_job(None, settings(**changes)).model_dump_json())


@cache
def audit_of(text: str) -> StepAudit:
    job = JobSpec.model_validate_json(text)
    account = rehearse_rank(job, job_topology(job), 0, audits=True)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    return account["audit"]


def find(audit: StepAudit, module: str, phase: str) -> AuditRow:
    return next(row for row in audit["rows"] if (row["module"], row["phase"]) == (module, phase))


class TwoPasses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) * 2


def test_an_audit_by_hand() -> None:
    """The example of audit.py: 1 GB/s, 1 us a launch, 1 MB."""
    rates = Rates(1e12, 1, 0, 0, 1, 1, 1e9, 1e-6)
    speed = Speed(rates, rates, 1e12, 1e12, 1e9, 1e12, False, 1.0, ())
    activity = Activity(current=Step("compute", Action("forward", 0)))
    auditor = StepAuditor(META, speed, activity)
    model = nn.Sequential(TwoPasses())
    auditor.scopes.watch(model)
    with fake_tensors():
        x = torch.empty(250_000, device=META)
        with auditor:
            result = model(x)
        job = load_job(None, settings(training__global_batch_size=2))
        (row,) = auditor.audit(job, 1)["rows"]
        assert result.shape == x.shape
    assert (row["module"], row["phase"], row["times"]) == ("*", "forward", 1)
    assert (row["launches"], row["bytes"], row["least_bytes"]) == (2, 4e6, 2e6)
    assert row["seconds"] == pytest.approx(4.002e-3)
    assert row["least_seconds"] == pytest.approx(2.001e-3)


@pytest.mark.parametrize("shape", ["gpt", *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES if s != "gpt")])
def test_every_operation_of_every_family_is_known(shape: str) -> None:
    audit = audited(**{**SHAPES[shape], **CUDA, **DROPOUT})
    assert audit["unknown"] == []
    assert all(row["bytes"] >= 0 and row["least_bytes"] >= 0 for row in audit["rows"])


def test_rows_are_of_one_layer_and_micro_batch() -> None:
    """2 layers, 6 of 12 micro batches run; what is done once a step is there once."""
    audit = audited(**CUDA, training__global_batch_size=24)
    row = find(audit, "layers.*.mlp.up", "forward")
    # x, weight, bias and result: [2, 32, 32], [128, 32], [128], [2, 32, 128]
    assert row["bytes"] == row["least_bytes"] == 2 * (2048 + 4096 + 128 + 8192)
    assert (row["times"], row["launches"]) == (24, 1)
    assert row["flops"] == 2 * 64 * 32 * 128
    assert find(audit, "optimizer", "step")["times"] == 1
    assert row["seconds"] is None and "no seconds" in audit["assumption"]


def test_weights_of_a_zero_bubble_are_backward() -> None:
    audit = audited(**CUDA, parallel__pp=2, parallel__schedule="zero-bubble", cluster__gpus_per_node=2)
    row = find(audit, "deferred weights", "backward")
    assert row["operations"]["mm"] == 4  # qkv, output, up and down of the stage's layer
    places = {(row["module"], row["phase"]) for row in audit["rows"]}
    assert ("deferred weights", "forward") not in places


def test_recomputation_is_a_pass_of_its_own() -> None:
    audit = audited(**CUDA, training__recompute="full")
    first = find(audit, "layers.*.mlp.up", "forward")
    again = find(audit, "layers.*.mlp.up", "recompute")
    for key in ("times", "launches", "bytes", "flops"):
        assert first[key] == again[key]  # type: ignore[literal-required]


LIMITS = [
    ("gpt", 1, {}, 31, 1272),
    ("gpt", 8, {}, 35, 437),
    ("gpt", 8, DROPOUT, 37, 478),
    ("llama", 1, {}, 32, 3490),
    ("llama", 8, DROPOUT, 37, 988),
    *(
        pytest.param(*limit, marks=pytest.mark.slow)
        for limit in (("gpt", 1, DROPOUT, 33, 1287), ("llama", 8, {}, 35, 876), ("llama", 1, DROPOUT, 34, 3602))
    ),
]


@pytest.mark.parametrize(("layer", "tp", "dropout", "launches", "mebibytes"), LIMITS)
def test_a_layer_keeps_to_its_limits(
    layer: str, tp: int, dropout: dict[str, float], launches: int, mebibytes: int
) -> None:
    audit = audited(tp=tp, **{**WHOLE, **LAYERS[layer], **dropout})
    totals = [total for total in audit["totals"] if total["part"] == "layers.*"]
    assert sum(total["launches"] for total in totals) <= launches
    assert sum(total["bytes"] for total in totals) <= mebibytes * MIB


@pytest.mark.parametrize(
    ("layer", "launches", "mebibytes"), [("gpt", 42, 1202), pytest.param("llama", 40, 2850, marks=pytest.mark.slow)]
)
def test_samples_are_sent_without_a_copy(layer: str, launches: int, mebibytes: int) -> None:
    """Sequence parallelism over 2 ranks, micro batches of 2: ten messages of each layer, the head's
    three and the word table's two are of tensors as they lie. With a copy each the layers launched
    67 and 59, and moved 1,673 and 3,949 MiB."""
    audit = audited(
        tp=2,
        parallel__sequence_parallel=True,
        **{**WHOLE, **LAYERS[layer], "training__micro_batch_size": 2, "training__global_batch_size": 2},
    )
    rows = [row for row in audit["rows"] if not row["module"].endswith(".grad")]
    sent = [row for row in rows if any("coalesced" in name for name in row["operations"])]
    assert sum(row["times"] * _messages(row) for row in sent) == 2 * 10 + 3 + 2
    assert not any(name in row["operations"] for row in sent for name in ("clone", "copy_"))
    totals = [total for total in audit["totals"] if total["part"] == "layers.*"]
    assert sum(total["launches"] for total in totals) <= launches
    assert sum(total["bytes"] for total in totals) <= mebibytes * MIB


def _messages(row: AuditRow) -> float:
    return sum(count for name, count in row["operations"].items() if "coalesced" in name)


@pytest.mark.parametrize(
    ("shape", "mode", "changes"),
    [
        ("gpt", {"parallel__pp": 2, "parallel__schedule": "zero-bubble"}, {}),
        pytest.param("llama", {"parallel__dp": 2}, {"parallel__zero": 3}, marks=pytest.mark.slow),
        pytest.param(
            "t5", {"parallel__pp": 2, "parallel__tp": 2}, {"model__decoder_layers": 2}, marks=pytest.mark.slow
        ),
        pytest.param("glm", {"parallel__cp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"parallel__tp": 2},
            {"training__recompute": "full", "training__offload_activations": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt", {"parallel__tp": 4}, {"parallel__tensor_mode": "2d"}, marks=pytest.mark.slow),
    ],
)
def test_an_audit_changes_nothing_of_a_rehearsal(shape: str, mode: dict[str, Any], changes: dict[str, Any]) -> None:
    ranks = {"cluster__gpus_per_node": math.prod(v for v in mode.values() if isinstance(v, int))}
    job = load_job(None, settings(**{**SHAPES[shape], **mode, **CUDA, **changes, **ranks}))
    topology = job_topology(job)
    plain: dict[str, Any] = {**rehearse_rank(job, topology, 0)}
    audited: dict[str, Any] = {**rehearse_rank(job, topology, 0, audits=True)}
    assert plain["failure"] is audited["failure"] is None
    assert audited.pop("audit")["unknown"] == []
    assert {**plain, "seconds": 0} == {**audited, "seconds": 0}


@pytest.mark.parametrize(("tp", "launches", "mebibytes"), [(1, 23, 788), (8, 26, 101)])
def test_the_loss_keeps_to_its_limits(tp: int, launches: int, mebibytes: int) -> None:
    """Forward and backward of 50,304 words; before: 149 and 5,699 at tp 1, 44 and 726 at tp 8."""
    audit = audited(tp=tp, **{**WHOLE, **LAYERS["gpt"]})
    rows = [row for row in audit["rows"] if row["module"] == "word_losses"]
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert sum(row["launches"] for row in rows) <= launches
    assert sum(row["bytes"] for row in rows) <= mebibytes * MIB


@pytest.mark.parametrize(("layer", "tp", "module"), [("gpt", 1, "logits"), ("llama", 2, "head")])
def test_a_head_multiplies_the_padded_table_as_planned(layer: str, tp: int, module: str) -> None:
    """GPT-2's 50,257 words, rank 0 and the last: the rows that the plan prices, and two products
    in backward, without a gradient of the whole table or of all logits made of zeros."""
    job = load_job(None, settings(tp=tp, **{**WHOLE, **LAYERS[layer], "model__vocab": 50257}))
    operators = step_time_model(JobLayout.of(job)).operators
    (head,) = operators.layout.table.flows[0].exit.part.products
    m, k, n = operators.shape(head)
    assert n == padded_vocab(50257, tp=tp) // tp
    for rank in {0, tp - 1}:
        audit = rehearse_rank(job, job_topology(job), rank, audits=True)["audit"]
        forward, backward = (find(audit, module, phase) for phase in ("forward", "backward"))
        assert (forward["flops"], backward["flops"]) == (2 * m * k * n, 4 * m * k * n)
        assert forward["operations"] == {"mm": 1}
        sent = {"allreduce_": 1} if tp > 1 else {}
        assert backward["operations"] == {"mm": 2, **sent}


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "dropout"), [("gpt", {}), ("gpt", DROPOUT), ("llama", {}), ("llama", DROPOUT)])
def test_the_plans_kernels_take_what_an_audit_adds_up(layer: str, dropout: dict[str, float]) -> None:
    """The plan sums passes over named tensors, an audit what is launched: within 5 %."""
    changes = {
        **WHOLE,
        **LAYERS[layer],
        **dropout,
        "cluster__step_factor": 1.0,
        "model__layers": 24,
        "training__global_batch_size": 4,
    }
    job = load_job(None, settings(**changes))
    estimate = make_plan(job).estimate
    assert estimate is not None and estimate.time is not None
    planned = estimate.time.compute + estimate.time.optimizer
    counted = sum((row["seconds"] or 0) * row["times"] for row in audited(**changes)["rows"])
    assert planned == pytest.approx(counted, rel=0.05)


def test_fp8_casts_both_operands_in_a_kernel_each_and_leaves_the_head_alone() -> None:
    """Forward X and W are cast, backward dY and W again; 16-bit products are at 16-bit speed."""
    wide, narrow = (audited(**{**WHOLE, **LAYERS["llama"], "training__dtype": dtype}) for dtype in ("bf16", "fp8"))
    for layer in ("attention.qkv", "attention.output", "mlp.up", "mlp.down"):
        for phase, more in (("forward", 2), ("backward", 2)):
            name = f"layers.*.{layer}"
            before, after = (find(audit, name, phase) for audit in (wide, narrow))
            assert after["launches"] == before["launches"] + more, (layer, phase)
            assert after["seconds"] < before["seconds"]
    before, after = (find(audit, "head", "forward") for audit in (wide, narrow))
    assert after["seconds"] == before["seconds"] > 0


class Seen(TorchDispatchMode):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.scopes, self.places = scopes, list[tuple[str, str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.scopes.place("forward")
        name = func._schema.name.split("::")[1]
        self.places += [(name, *place)]
        return func(*args, **(kwargs or {}))

    def where(self, operation: str) -> list[tuple[str, ...]]:
        return [place[1:] for place in self.places if place[0] == operation]


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Layer(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.again = Exponential(), Exponential(), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            result: Tensor = checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=False)
            return result
        return self.second(self.first(x))


@pytest.mark.parametrize("again", [False, True])
def test_backward_is_the_module_that_made_the_node(again: bool) -> None:
    model, scopes = nn.Sequential(Layer(again), Layer(again)), Scopes()
    scopes.watch(model)
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False), Seen(scopes) as seen:
        model(x).sum().backward()
    names = ["0.first", "0.second", "1.first", "1.second"]
    forward = [(name, "forward") for name in names]
    computed = [(f"{layer}.{name}", "recompute") for layer in (1, 0) for name in ("first", "second")]
    assert seen.where("exp") == forward + (computed if again else [])
    assert seen.where("mul") == [(name, "backward") for name in reversed(names)]


def test_a_parameters_sum_has_its_name_and_the_rest_is_named_by_the_work() -> None:
    model, scopes = nn.Sequential(nn.Linear(2, 2)), Scopes()
    scopes.watch(model)
    with torch.autograd.set_multithreading_enabled(False), Seen(scopes) as seen:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with scopes.during("optimizer"):
            torch.ones(2).neg()
    assert ("0.weight.grad", "backward") in seen.where("add_")
    assert seen.where("neg") == [("optimizer", "step")]


def test_names() -> None:
    assert pattern("encoder.layers.11.mlp.up") == "encoder.layers.*.mlp.up"
    assert part_of("encoder.layers.*.mlp.up") == "encoder.layers.*"
    assert part_of("final_norm") == "outside of layers"


def whole(*tensors: Tensor) -> Touched:
    return [(tensor, tensor_bytes(tensor)) for tensor in tensors]


def test_what_a_part_makes_and_uses_up_costs_nothing() -> None:
    flow, part, later = Dataflow(), Part(), Part()
    x, between, y = (torch.zeros(4) for _ in range(3))
    flow.read(part, whole(x))
    flow.write(part, whole(between))
    flow.read(part, whole(between))
    flow.write(part, whole(y))
    del between
    assert part.least_bytes == 16  # y is not needed yet
    flow.read(later, whole(y))
    assert part.least_bytes == 32 and later.least_bytes == 16


def test_views_of_one_product_are_the_product() -> None:
    flow, part = Dataflow(), Part()
    qkv = torch.zeros(2, 12)
    q, k, v = qkv.chunk(3, dim=-1)
    flow.read(part, whole(q, k, v, q.t(), qkv))
    assert part.least_bytes == 96


def test_a_copy_of_values_as_they_are_is_what_it_copies() -> None:
    flow, maker, copier, reader = Dataflow(), Part(), Part(), Part()
    x = torch.zeros(4)
    flow.write(maker, whole(x))
    copy = x.clone()
    flow.copy(x, copy, copier)
    flow.read(reader, whole(copy))
    assert (maker.least_bytes, copier.least_bytes, reader.least_bytes) == (16, 0, 16)


def test_a_change_in_place_of_what_was_there_is_read_and_written() -> None:
    """Also row by row."""
    for x in (torch.zeros(4, 4), torch.zeros(16)):
        flow, part = Dataflow(), Part()
        for each in x if x.ndim == 2 else [x]:
            flow.read(part, whole(each))
            flow.write(part, whole(each))
        assert part.least_bytes == 2 * 64


def test_what_lives_at_the_end_was_needed_and_what_is_freed_is_forgotten() -> None:
    flow, part = Dataflow(), Part()
    kept, dropped = torch.zeros(4), torch.zeros(4)
    flow.write(part, whole(kept, dropped))
    assert len(flow.living) == 2
    del dropped
    assert len(flow.living) == 1
    flow.finish()
    assert part.least_bytes == 16
