"""Head and loss chunk by chunk under every layout: the curve of one process over whole logits, in float64; each
rank sends what its plan says, and holds it, beside its states too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.model.layout.topology import job_topology
from mpctl.run.launch.summary import planned_traffic
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.train.runtime.chat import chat_job, make_chat_data
from tests.train.runtime.test_axes import SHAPES, same_gradients
from tests.train.runtime.test_memory import CUDA, DRY, FULL, SEQUENCE, job_of
from tests.train.runtime.tiny import VOCAB, column, make_data, tiny_job, tiny_plan, train

LINEAR: dict[str, Any] = {"training__cross_entropy": "linear", "training__cross_entropy_chunks": 3}
FIXED: dict[str, Any] = {
    "training__dtype": "fp64",
    "training__steps": 3,
    "checkpoint__at_end": False,
    "checkpoint__interval": 0,
}
SP, MTP = {"parallel__sequence_parallel": True}, {"model__mtp_layers": 2, "model__position": "rotary"}
PP2: dict[str, Any] = {"parallel__pp": 2}
Case = tuple[str, int, int, int, dict[str, Any]]  # shape, tp, cp, dp, settings
CASES: dict[str, Case] = {
    "tied-tp2-sp-cp2": ("gpt", 2, 2, 1, SP),
    "llama-pp2-zero1": ("llama", 1, 1, 2, {**PP2, "parallel__zero": 1}),
    "mtp-tp2-zero3": ("gpt", 2, 1, 2, {**MTP, "parallel__zero": 3}),
    "tied-pp2-tp2-full": ("gpt", 2, 1, 1, {**PP2, "training__recompute": "full"}),
    "llama-zero3-cp2": ("llama", 1, 2, 2, {"parallel__zero": 3}),
    "llama-zero2-sp": ("llama", 2, 1, 2, {**SP, "parallel__zero": 2}),
    "mtp-sp-zero-bubble": ("llama", 2, 1, 1, {**MTP, **SP, **PP2, "parallel__schedule": "zero-bubble"}),
    "t5-tp2": ("t5", 2, 1, 1, {}),
    "glm-tp2-sp": ("glm", 2, 1, 1, SP),
    "default-chunks": ("gpt", 1, 1, 1, {"training__cross_entropy_chunks": None}),
}
QUICK = ("tied-tp2-sp-cp2", "llama-pp2-zero1", "mtp-tp2-zero3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("linear"))


def same_curves(ranks, alone) -> None:
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10)
    last = [found[0]["records"][-1]["validation_loss"] for found in (ranks, alone)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_chunks_of_the_loss_do_not_show(data: Path, tmp_path: Path, name: str) -> None:
    shape, tp, cp, dp, changes = CASES[name]
    world = tp * cp * dp * changes.get("parallel__pp", 1)
    fixed = {**FIXED, **SHAPES[shape], "cluster__gpus_per_node": world, "parallel__cp": cp}
    job = tiny_job(data, tp, dp, **{**fixed, **LINEAR, **changes})
    of_model = {key: value for key, value in changes.items() if key.startswith("model__")}
    alone = train(tiny_job(data, **{**FIXED, **SHAPES[shape], **of_model}), tmp_path / "one")
    ranks = train(job, tmp_path / "all")
    same_curves(ranks, alone)
    same_gradients(ranks, alone, vocab=job.model.vocab)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        assert rank["traffic"] == planned_traffic(estimate.messages[rank["coords"]["pp"]])


@pytest.mark.slow
def test_masked_tokens_of_chats_do_not_show(tmp_path: Path) -> None:
    chats = make_chat_data(tmp_path, packing="best-fit")
    one = {**FIXED, **SHAPES["llama"], "cluster__gpus_per_node": 1}
    alone = train(chat_job(chats, **one), tmp_path / "one")
    split = {"tp": 2, "parallel__cp": 2, **SP, **LINEAR, "cluster__gpus_per_node": 4}
    ranks = train(chat_job(chats, **{**one, **split}), tmp_path / "all")
    same_curves(ranks, alone)
    same_gradients(ranks, alone, vocab=VOCAB)


WORDS = {"model__vocab": 20_000, "model__layers": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt", DRY),
    "llama-sp": ("llama", {**SEQUENCE, **DRY}),
    "cuda-full": ("llama", {**CUDA, **FULL}),
    "cuda-sp-tied": ("gpt", {**CUDA, **SEQUENCE, **FULL}),
    "pp2": ("llama", {**PP2, **DRY}),
    "cp2-default": ("gpt", {"parallel__cp": 2, **DRY, "training__cross_entropy_chunks": None}),
    "mtp": ("llama", {**DRY, "model__mtp_layers": 1, "model__position": "rotary"}),
    "zero3": ("llama", {"dp": 2, **DRY, "parallel__zero": 3}),
    "bf16-full": ("llama", {**DRY, **FULL, "training__dtype": "bf16"}),
}
QUICK_LAYOUTS = ("tied", "cuda-full")
WITHOUT_STATES = (
    "tied",
    "llama-sp",
    "pp2",
    "cp2-default",
    "bf16-full",
    "cuda-full",
    "mtp",
)  # where the rest is within 5 % too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK_LAYOUTS)) for n in LAYOUTS]
)
def test_a_peak_without_logits_is_as_planned(name: str) -> None:
    """A vocabulary 80 times the hidden states' width: whole logits would be most of the peak."""
    shape, changes = LAYOUTS[name]
    job = job_of(shape, {**LINEAR, "training__cross_entropy_chunks": 8, **changes, **WORDS})
    whole = tiny_plan(job_of(shape, {**changes, **WORDS, "training__cross_entropy_chunks": None})).estimate.memory
    topology = job_topology(job)
    for stage, memory in enumerate(tiny_plan(job).estimate.memory):
        account = rehearse_rank(job, topology, topology.rank(pp=stage))
        assert account["failure"] is None, "".join(account["failure"]["traceback"])
        rest = account["peak_bytes"] - sum(account["state_bytes"].values())
        if name in WITHOUT_STATES:
            assert memory.tensor_bytes - memory.state_bytes == pytest.approx(rest, rel=0.05)
        assert memory.tensor_bytes == pytest.approx(account["peak_bytes"], rel=0.05)
        assert memory.activation_bytes == pytest.approx(account["activation_bytes"], rel=0.02)
    saved = 25e6 * job.training.value_bytes / 4  # most of the logits
    assert memory.tensor_bytes < whole[-1].tensor_bytes - saved
