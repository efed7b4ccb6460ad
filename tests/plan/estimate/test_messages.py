"""One list of messages: every byte that is counted has seconds, every second has bytes.

Over families, layouts and runtimes: the messages that the step's time asks a network to price are
those that the plan lists, as often; and on links without latency, with nothing hidden, the seconds
of an axis are its listed bytes over the link's bandwidth.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.kernels import device_speed
from mpctl.plan.estimate.messages import StepMessages, step_messages
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.operator_times import OperatorTimer
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.time import StepTimeModel, find_step_time
from mpctl.spec.runtime import OverlapShares, RuntimeProfile, get_profile
from tests.jobs import job_of

SMALL: dict[str, Any] = {
    "cluster.preset": "selene",
    "cluster.step_factor": 1.0,
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 8,
    "model.vocab": 256,
    "model.seq_length": 64,
    "training.micro_batch_size": 1,
    "training.dtype": "fp32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "model.norm": "rmsnorm",
        "model.position": "rotary",
        "model.bias": False,
        "model.tied_embeddings": False,
        "model.kv_heads": 2,
    },
    "bert": {"model.family": "bert"},
    "t5": {
        "model.family": "t5",
        "model.position": "relative",
        "model.norm": "rmsnorm",
        "model.bias": False,
        "model.layers": 2,
        "model.decoder_layers": 2,
        "model.decoder_seq_length": 32,
    },
    "glm": {"model.family": "glm"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel.tp": 4},
    "tp-sp": {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.dp": 2},
    "cp": {"parallel.cp": 2, "parallel.dp": 2},
    "pp": {"parallel.pp": 2, "parallel.tp": 2, "parallel.dp": 2},
    "vpp": {
        "parallel.pp": 2,
        "parallel.vpp": 2,
        "parallel.cp": 2,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
    },
    "zero-bubble": {"parallel.pp": 2, "parallel.schedule": "zero-bubble", "parallel.dp": 2},
    "zero-size": {"parallel.cp": 2, "parallel.dp": 4, "parallel.zero_size": 4},
}
TRAINING: dict[str, dict[str, Any]] = {
    "plain": {"training.dropout": 0.1},
    "full": {"training.recompute": "full"},
    "selective": {"training.recompute": "selective"},
    "frozen": {"training.freeze": ["embedding.*", "layers.0.*", "*.bias"], "training.recompute": "full"},
}
RUNTIMES = ("mpctl", "megatron-2021", "megatron-core", "fsdp", "torchtitan")
# Every stage under one runtime, every runtime with one stage.
STAGES = [*((zero, "mpctl") for zero in range(4)), *((1, runtime) for runtime in RUNTIMES[1:])]


class RecordingNetwork(Network):
    """A network that notes every message whose seconds it is asked for."""

    def __init__(self, layout: JobLayout) -> None:
        super().__init__(layout.job.cluster, layout.topology)
        self.asked: set[Message] = set()

    def seconds(self, message: Message) -> float:
        self.asked.add(message._replace(count=1))
        return super().seconds(message)


def layout_of(*settings: dict[str, Any]) -> JobLayout:
    merged = {key: value for some in (SMALL, *settings) for key, value in some.items()}
    ranks = prod(merged.get(f"parallel.{axis}", 1) for axis in ("tp", "cp", "dp", "pp"))
    merged |= {"cluster.nodes": 1, "cluster.gpus_per_node": ranks}
    return JobLayout.of(job_of({**merged, "training.global_batch_size": 8}))


def priced(layout: JobLayout) -> set[Message]:
    """Messages, each as if sent once, that a step's time is made of."""
    job, profile = layout.job, get_profile(layout.job.training.runtime)
    network = RecordingNetwork(layout)
    speed = device_speed(job.cluster, job.training.dtype)
    StepTimeModel(layout, OperatorTimer(layout, speed, network, profile)).step()
    return network.asked


def key(message: Any) -> tuple[str, str, str, int]:
    return message.axis, message.kind, message.what, message.bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.quick(20)
def test_what_is_counted_is_priced(family: str, layout: str, training: str) -> None:
    for zero, runtime in STAGES:
        own = {"parallel.zero": zero, "training.runtime": runtime, "parallel.bucket_bytes": 20_000}
        made = layout_of(FAMILIES[family], LAYOUTS[layout], TRAINING[training], own)
        counted = {key(m) for stage in step_messages(made) for m in stage}
        assert {key(m) for m in priced(made) if m.bytes} == counted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_message_is_priced_as_often_as_it_is_counted(family: str, layout: str) -> None:
    """By pass: a layer's messages times its layers, a chunk's times its micro batches."""
    for zero, training in product(range(4), TRAINING.values()):
        made = layout_of(FAMILIES[family], LAYOUTS[layout], training, {"parallel.zero": zero})
        messages, m = StepMessages.of(made), made.num_microbatches
        for stage, counted in enumerate(step_messages(made)):
            counts: Counter[tuple[str, str, str, int]] = Counter()
            for part in made.stage_slices(stage):
                for own, layers in messages.slice_messages(part):
                    counts.update(_sum(own, m * layers))
            for chunk in range(len(made.stages[stage])):
                counts.update(_sum(messages.gradients.chunk(stage, chunk), m))
            counts.update(_sum(messages.once_a_step(stage), 1))
            found = _sum((one for one in counted if one.kind != "send"), 1)
            assert counts == found


def _sum(messages: Any, times: int) -> Counter[tuple[str, str, str, int]]:
    counts: Counter[tuple[str, str, str, int]] = Counter()
    for message in messages:
        counts[key(message)] += times * message.count
    return counts


NOTHING_HIDDEN = OverlapShares(tp=0, pp=0, dp=0)
LINK = {"bandwidth": 1e9, "latency": 0.0, "start": 0.0, "efficiency": 1.0}


def unhidden(runtime: str) -> RuntimeProfile:
    """A runtime that hides no message behind a computation."""
    profile = get_profile(runtime)
    kept = {name: getattr(profile.overlap, name) for name in ("buckets", "keeps", "scatters")}
    return profile.model_copy(update={"overlap": NOTHING_HIDDEN.model_copy(update=kept)})


def listed_seconds(layout: JobLayout, profile: RuntimeProfile, stage: int, axis: str) -> float:
    """Bytes of a ring that each rank sends at 1 GB/s."""
    ranks, seconds = layout.group_sizes[axis], 0.0
    for message in StepMessages(layout, profile).counted()[stage]:
        if message.axis == axis and message.what != "stages":
            phases = 2 if message.kind == "all_reduce" else 1
            seconds += phases * (ranks - 1) / ranks * message.bytes * message.count / 1e9
    return seconds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.quick(20)
def test_without_latency_seconds_are_bytes_over_bandwidth(family: str, training: str, runtime: str) -> None:
    profile = unhidden(runtime)
    for zero, own in product(range(4), (LAYOUTS["tp"], LAYOUTS["tp-sp"], LAYOUTS["cp"])):
        links = {"cluster.intra_node": LINK, "cluster.inter_node": LINK}
        settings = {"parallel.zero": zero, "training.runtime": runtime, **links}
        made = layout_of(FAMILIES[family], own, TRAINING[training], settings)
        time = find_step_time(made, profile)
        assert isinstance(time, StepTime), time
        for axis in ("tp", "cp", "dp_cp"):
            expected = listed_seconds(made, profile, 0, axis)
            assert getattr(time, axis) == pytest.approx(expected, rel=1e-9, abs=1e-12), axis


def test_kv_heads_that_several_ranks_share_take_time() -> None:
    """Llama's 2 kv heads over tp 4: keys and values gathered over tp, 2 x 64 x 16 x 4 bytes."""
    shared = layout_of(FAMILIES["llama"], LAYOUTS["tp"])
    (messages,) = step_messages(shared)
    heads = [m for m in messages if m.what == "kv heads"]
    assert [(m.kind, m.bytes, m.count) for m in heads] == [
        ("all_gather", 2 * 64 * 16 * 4, 4 * 8),
        ("reduce_scatter", 2 * 64 * 16 * 4, 4 * 8),
    ]
    every = layout_of(FAMILIES["llama"], LAYOUTS["tp"], {"model.kv_heads": 8})
    more, less = find_step_time(shared), find_step_time(every)
    assert isinstance(more, StepTime) and isinstance(less, StepTime)
    assert more.tp > less.tp


def test_a_partitioned_input_takes_time_to_gather() -> None:
    full = layout_of(LAYOUTS["tp"], TRAINING["full"])
    parted = layout_of(LAYOUTS["tp"], TRAINING["full"], {"training.partition_activations": True})
    times = [find_step_time(full), find_step_time(parted)]
    assert all(isinstance(time, StepTime) for time in times)
    network = Network(full.job.cluster, full.topology)
    gather = network.seconds(Message("tp", "all_gather", "blocks", 64 * 64 * 4, 4 * 8))
    assert times[1].tp - times[0].tp == pytest.approx(gather)  # type: ignore[union-attr]


def test_a_table_that_two_ends_share_is_gathered_once() -> None:
    """ZeRO 3 on one stage: a tied word table is one bucket, whoever uses it."""
    tied, untied = (
        layout_of({"parallel.dp": 4, "parallel.zero": 3, "model.tied_embeddings": is_tied}) for is_tied in (True, False)
    )
    gathers = [
        sum(m.bytes * m.count for m in step_messages(own)[0] if m.what == "parameters") for own in (tied, untied)
    ]
    assert gathers[1] - gathers[0] == 2 * 2 * 256 * 64 * 4  # forward and backward, 2 micro batches
