"""The pruned search against the exhaustive one, its bounds against estimates, its layouts against
`mpctl plan`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpctl.core.units import seconds_text
from mpctl.plan.estimate.memory import peak_bytes
from mpctl.plan.planning.difference import WIDE_BAND, ranking_error
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, layout_of, layout_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.sizes import views_agree
from mpctl.plan.rules.validate import check_job
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import (
    ALIKE,
    BUDGETS,
    EvaluatedLayout,
    FoundLayouts,
    LayoutClass,
    LayoutGroup,
    class_of,
    find_layouts,
    non_dominated,
)
from mpctl.plan.search.nearest import SETTINGS, nearest_that_fit, with_nearest
from mpctl.plan.search.plain import complexity, least_complexity, savings
from mpctl.plan.search.request import varied
from mpctl.plan.search.result import LayoutReport, difference_text, layout_reports
from mpctl.plan.search.space import MemberSetting, SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.presets import preset_names
from mpctl.spec.runtime import PlainLayout, get_profile
from mpctl.spec.schedules import SCHEDULES
from tests.cli.calls import Mpctl, caller

V_SHAPED = ("zbv", "v-half", "v-min", "dualpipev")
SMALL = {
    "cluster": "selene",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 4,
    "cluster.device.memory_bytes": 24 * 2**30,
    "model.layers": 8,
    "model.hidden": 2048,
    "model.heads": 16,
    "model.vocab": 50257,
    "model.seq_length": 1024,
    "training.global_batch_size": 16,
    "training.dtype": "bf16",
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"model": "llama-3-8b", "model.layers": 6, "model.seq_length": 1024},
    "t5": {"model": "t5-base", "model.layers": 4, "model.decoder_layers": 4},
    "filled": {"training.runtime": "nanotron", "training.dtype": "bf16"},
    "frozen": {"training.freeze": ["embedding.*", "layers.[0-3].*"]},
    "lora": {"training.adapter": {"rank": 8}},
    "qlora": {  # whose gathers of ZeRO 2 and 3 move the stored bits
        "training.adapter": {"kind": "qlora", "rank": 8, "targets": "attention"},
        "training.runtime": "torchtitan",
        "training.dtype": "bf16",
        "cluster": "dgx-h100",
    },
    "experts": {
        "model.experts": 8,
        "model.experts_per_token": 2,
        "model.expert_ffn": 1024,
        "model.dense_layers": 1,
        "model.shared_expert_ffn": 512,
    },
    "every-other": {
        "model.experts": 6,
        "model.moe_layer_every": 2,
        "model.expert_ffn": 2048,
        "training.runtime": "megatron-core",
        "cluster": "dgx-h100",
    },
}
# Weights are cast once a step, so that a layer's seconds follow from the number of micro batches.
FP8 = {"cluster": "dgx-h100", "training.runtime": "torchtitan", "training.dtype": "fp8"}


def job_of(**settings: Any) -> JobSpec:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return load_job(None, {**SMALL, **named})


def model_job(name: str, **settings: Any) -> JobSpec:
    base = {k: v for k, v in SMALL.items() if not (name in ("llama", "t5") and k[:5] == "model")}
    return load_job(None, {**base, **{**MODELS, "fp8": FP8}[name], **settings})


def samples(space: SearchSpace, count: int, seed: int = 5) -> list[LayoutSettings]:
    layouts = list(space.layouts())
    return random.Random(seed).sample(layouts, min(count, len(layouts)))


# ---------------------------------------------------------------- the space


def test_states_are_shared_by_all_replicas_or_those_of_a_node() -> None:
    """tp 2 on nodes of 4: two of the replicas are on one; without ZeRO there is nothing to share.
    A fixed size stays, and layouts with and without ZeRO have networks of their own."""
    space = SearchSpace(job_of(parallel__zero_size=8))
    alike = [one for one in space.layouts() if one.tp == 2 and one.pp == 1 and one.cp == 1]
    found = {(one.zero > 0, one.zero_size) for one in alike}
    assert found == {(False, None), (True, None), (True, 2)}
    fixed = SearchSpace(space.job, {"zero_size": 4, "tp": 2, "pp": 1, "cp": 1})
    evaluator = LayoutEvaluator(fixed)
    for layout in sorted(fixed.layouts(), key=lambda one: one.zero)[::7]:
        time = evaluator.step_time(layout)
        plan = make_plan(fixed.job_of(layout))
        assert plan.estimate is not None and time == plan.estimate.time


def test_the_space_by_hand() -> None:
    """24 layers, 16 heads, 4 GPUs in a node, a batch of 8."""
    job = job_of(cluster__nodes=1, model__layers=24, training__global_batch_size=8)
    space = SearchSpace(job, {"cp": 1})
    assert {axes.tp for axes in space.axes()} == {1, 2, 4}
    assert {axes.pp for axes in space.axes() if axes.tp == 2} == {1, 2}
    assert list(space.micro_batch_sizes(2)) == [1, 2, 4]
    cuts = [cut for cut in space.pipelines(2, 4) if cut[0] > 1]
    assert [vpp for vpp, schedule, _ in cuts if not SCHEDULES[schedule].is_v] == [2, 3, 4, 6, 12]
    assert {(vpp, schedule) for vpp, schedule, _ in cuts if SCHEDULES[schedule].is_v} == {
        (2, name) for name in V_SHAPED
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_a_space_is_legal_and_none_comes_twice(name: str) -> None:
    space = SearchSpace(model_job(name))
    layouts = list(space.layouts())
    assert len(set(layouts)) == len(layouts) > 150
    for layout in samples(space, 60):
        job = space.job_of(layout)
        assert [c for c in check_job(job) if c.status == "error"] == []
        assert layout_of(job) == layout


@pytest.mark.parametrize("name", ["experts", "every-other"])
def test_experts_are_placed_in_every_legal_way(name: str) -> None:
    """By hand of 8 ranks: 8 experts have ep 1, 2 and 4 with pp 2, and etp 1, in whose place ep is;
    6 experts ep 1 and 2, with tp 4 etp 4 too; tp splits the sequence; both views have the same
    stages."""
    job = model_job(name)
    assert job.model is not None and job.model.experts is not None
    found = {(n.tp, n.pp, n.etp, n.ep) for n in SearchSpace(job).layouts()}
    heads = (1, 2, 4)  # of tp, within nodes of 4
    wanted = {
        (tp, pp, etp, ep)
        for tp in heads
        for pp in (1, 2, 4, 8)
        for etp in {1, tp}
        for ep in range(1, 9)
        if 8 % (tp * pp) == 0
        and 8 // pp % (etp * ep) == 0
        and job.model.experts % ep == 0
        and (etp == 1 or job.model.experts % (etp * ep))
    }
    assert found == wanted
    for layout in SearchSpace(job).layouts():
        assert layout.sequence_parallel == (layout.tp > 1)
        assert views_agree(layout.sizes, layout.expert_sizes, layout.order)
        assert layout.expert_sizes == SearchSpace(job).job_of(layout).expert_sizes


A_GROUP = 2 * 24 * 9.7e6  # bytes of a communicator more, at most


@pytest.mark.parametrize("name", ["experts", "every-other"])
@pytest.mark.slow
def test_what_is_left_out_for_experts_is_beaten_by_what_is_tried(name: str) -> None:
    """etp where ep can take its place, and cp of several whole samples."""
    space = SearchSpace(model_job(name, **{"training.global_batch_size": 32}))
    evaluator = LayoutEvaluator(space)
    seen = 0
    for one in samples(space, 400):
        worse: list[tuple[LayoutSettings, float]] = []
        if one.dp % 2 == 0 and one.order == "tp-cp-dp-pp":
            twice = {"cp": 2 * one.cp, "dp": one.dp // 2}
            two = one._replace(**twice, micro_batch_size=2 * one.micro_batch_size)
            worse.append((two, 0.0005))
        if one.tp > 1 and one.ep % one.tp == 0:
            worse.append((one._replace(etp=one.tp, ep=one.ep // one.tp), 0.02))
        for layout, error in worse:
            if evaluator.is_legal(layout):
                seconds, others = map(evaluator.step_seconds, (one, layout))
                assert seconds is not None and others is not None
                assert seconds <= others * (1 + error)
                less, more = map(evaluator.device_bytes, (one, layout))
                assert less <= more * 1.02 + A_GROUP
                seen += 1
    assert seen > 30


def test_a_dense_model_is_not_asked_for_experts() -> None:
    layouts = SearchSpace(job_of()).layouts()
    assert {(layout.ep, layout.etp) for layout in layouts} == {(1, 1)}


def test_a_fixed_ep_stays_and_one_that_does_not_divide_leaves_nothing() -> None:
    job = model_job("experts")
    layouts = list(SearchSpace(job, {"ep": 4, "etp": 1}).layouts())
    assert {(layout.ep, layout.etp) for layout in layouts} == {(4, 1)}
    assert not list(SearchSpace(job, {"ep": 3}).layouts())
    assert not list(SearchSpace(job, {"tp": 2, "sequence_parallel": False, "ep": 16}).layouts())


@pytest.mark.parametrize("runtime", preset_names("runtimes"))
def test_each_runtime_is_asked_for_what_it_runs(runtime: str) -> None:
    profile = get_profile(runtime)
    runs = profile.searched or profile.runs
    layouts = list(SearchSpace(job_of(training__runtime=runtime)).layouts())
    assert layouts
    assert {layout.zero for layout in layouts if layout.replicas > 1} <= {*runs.zero}
    assert {layout.zero for layout in layouts if layout.replicas == 1} <= {0}
    recompute = {layout.recompute for layout in layouts}
    assert {*runs.recompute} - {"selective"} <= recompute <= {*runs.recompute}
    assert runs.tensor or {layout.tp for layout in layouts} == {1}
    assert runs.pipeline or {layout.pp for layout in layouts} == {1}
    assert runs.context or {layout.cp for layout in layouts} == {1}
    assert runs.sequence == any(layout.sequence_parallel for layout in layouts)
    assert (runs.chunks and runs.pipeline) == any(layout.vpp > 1 for layout in layouts)
    assert runs.by_cost == any(layout.stage_balance == "cost" for layout in layouts)


@pytest.mark.parametrize("runtime", ["mpctl", "megatron-core", "torchtitan"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_selective_recomputation_is_tried_where_it_spares_memory(runtime: str, attention: str) -> None:
    if attention == "unfused" and runtime == "torchtitan":
        pytest.skip("torchtitan has fused attention alone")
    space = SearchSpace(job_of(training__runtime=runtime, model__attention=attention))
    is_tried = any(layout.recompute == "selective" for layout in space.layouts())
    evaluator, spares = LayoutEvaluator(space), []
    for layout in samples(space, 20):
        if layout.recompute != "none":
            continue
        none, selective = layout, layout._replace(recompute="selective")
        spares.append(evaluator.device_bytes(selective) < evaluator.device_bytes(none))
        times = [evaluator.step_time(one) for one in (none, selective)]
        assert is_tried or times[0].total <= times[1].total
    assert spares and set(spares) == {is_tried}


def test_chunks_keep_the_name_that_the_job_gives_their_schedule() -> None:
    interleaved = job_of(parallel__pp=2, parallel__vpp=2, parallel__schedule="interleaved")
    names = {(layout.vpp > 1, layout.schedule) for layout in SearchSpace(interleaved).layouts()}
    plain = {(False, "1f1b"), (False, "zero-bubble"), (True, "interleaved")}
    assert names == plain | {(True, name) for name in V_SHAPED}


def test_what_is_fixed_stays_and_bounds_hold() -> None:
    layouts = list(SearchSpace(job_of(), {"pp": 2, "recompute": "full"}, {"tp": 2}).layouts())
    assert {(layout.pp, layout.recompute) for layout in layouts} == {(2, "full")}
    assert {layout.tp for layout in layouts} == {1, 2}


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("name", [*MODELS, "fp8"])
def test_the_evaluator_gives_what_plan_gives(name: str) -> None:
    space = SearchSpace(model_job(name))
    evaluator = LayoutEvaluator(space)
    for layout in samples(space, 12):
        plan = make_plan(space.job_of(layout))
        time = evaluator.step_time(layout)
        assert plan.estimate is not None and time is not None
        assert time == plan.estimate.time
        assert evaluator.step_seconds(layout) == pytest.approx(time.total, rel=1e-12)
        assert evaluator.device_bytes(layout) == peak_bytes(plan.estimate.memory)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_layouts_that_differ_in_one_setting_share_no_wrong_bytes(zero: int) -> None:
    """Stages that were worked out for one layout serve another only where they hold as much."""
    base = LayoutSettings(tp=2, dp=2, pp=2, zero=zero)
    changes: list[dict[str, Any]] = [
        {},
        {"schedule": "zero-bubble"},
        {"cp": 2, "dp": 1},
        {"zero": 0},
        {"recompute": "full"},
        {"micro_batch_size": 2},
        {"sequence_parallel": True},
        {"tp": 1, "dp": 4},
        {"pp": 4, "dp": 1},
    ]
    assert_nothing_wrong_is_shared(SearchSpace(job_of()), base, changes)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_layouts_that_differ_in_ep_or_etp_share_nothing_wrong(zero: int) -> None:
    base = LayoutSettings(tp=2, dp=2, pp=2, zero=zero, sequence_parallel=True)
    changes: list[dict[str, Any]] = [
        {},
        {"ep": 2},
        {"ep": 4},
        {"etp": 2},
        {"etp": 2, "ep": 2},
        {"ep": 2, "cp": 2, "dp": 1},
        {"ep": 2, "micro_batch_size": 2},
        {"ep": 2, "recompute": "full"},
        {"zero": 0, "ep": 2},
        {"ep": 2, "tp": 1, "dp": 4, "sequence_parallel": False},
        {"ep": 2, "order": "tp-cp-pp-dp"},
    ]
    assert_nothing_wrong_is_shared(SearchSpace(model_job("experts")), base, changes)


def test_latent_attention_shares_no_times_between_layouts_of_other_cp() -> None:
    """Under cp a rank computes the keys and values of all its group's positions."""
    latent = {
        "model.attention_kind": "mla",
        "model.kv_lora_rank": 128,
        "model.position": "rotary",
        "model.qk_nope_head_dim": 64,
        "model.qk_rope_head_dim": 32,
        "model.v_head_dim": 64,
        "model.bias": False,
    }
    base = LayoutSettings(dp=4, pp=2)
    changes = [{}, {"cp": 2, "dp": 2, "micro_batch_size": 2}, {"ep": 2}]
    changes += [{"ep": 2, "cp": 2, "dp": 2, "micro_batch_size": 2}]
    assert_nothing_wrong_is_shared(SearchSpace(model_job("experts", **latent)), base, changes)


def assert_nothing_wrong_is_shared(space: SearchSpace, base: LayoutSettings, changes: list[dict[str, Any]]) -> None:
    """An evaluator that has seen other layouts finds what a new one does."""
    evaluator = LayoutEvaluator(space)
    for change in changes:
        layout, alone = base._replace(**change), LayoutEvaluator(space)
        assert evaluator.device_bytes(layout) == alone.device_bytes(layout), change
        assert evaluator.step_seconds(layout) == alone.step_seconds(layout), change


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(3)
def test_a_bound_is_below_the_estimate(name: str) -> None:
    space = SearchSpace(model_job(name, **{"training.global_batch_size": 64}))
    evaluator = LayoutEvaluator(space)
    bounds, seen = StepTimeBound(evaluator), 0
    for layout in samples(space, 80):
        family = layout._replace(zero=0, order="")
        bound = bounds.of_family(family)
        (own,) = [b for b, found in bounds.of_members(family, bound, [layout]) if found == layout]
        time = evaluator.step_time(layout)
        assert time is not None
        assert 0 < bounds.of_axes_quickly(layout) <= bounds.of_axes(layout) <= bound
        assert bound <= own <= time.total
        assert evaluator.min_state_bytes <= evaluator.device_bytes(layout)
        assert evaluator.least_bytes(family) <= min(evaluator.min_bytes(family, zero) for zero in range(4))
        assert evaluator.min_bytes(layout, layout.zero) <= evaluator.device_bytes(layout)
        seen += own > 0.5 * time.total
    assert seen > 30, "a bound that is far below prunes nothing"


def test_a_bound_holds_where_kernels_pace_dense_layers_and_the_host_those_with_experts() -> None:
    """The stages before one take as long as the sum of their kernels or that of their host, less
    than the sum of what is longer in each layer; and a stage closes its step without waiting for
    the backward passes of those before it."""
    settings = {
        "cluster": "dgx-h100",
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "model.layers": 6,
        "model.hidden": 512,
        "model.heads": 8,
        "model.vocab": 1000,
        "model.seq_length": 512,
        "model.experts": 16,
        "model.experts_per_token": 2,
        "model.expert_ffn": 256,
        "model.dense_layers": 1,
        "model.moe_layer_every": 2,
        "model.shared_expert_ffn": 256,
        "training.global_batch_size": 64,
        "training.runtime": "megatron-core",
    }
    fixed = {"pp": 2, "micro_batch_size": 8, "recompute": "full", "cp": 1, "etp": 1}
    space = SearchSpace(load_job(None, settings), fixed)
    evaluator = LayoutEvaluator(space)
    bounds = StepTimeBound(evaluator)
    for layout in space.layouts():
        family = layout._replace(zero=0, order="")
        bound, seconds = bounds.of_family(family), evaluator.step_seconds(layout)
        (own,) = [b for b, _ in bounds.of_members(family, bound, [layout])]
        assert seconds is not None and bound <= own <= seconds, layout


def test_the_bound_by_hand() -> None:
    """Of one rank that sends nothing it is the step, less host and what happens once."""
    space = SearchSpace(job_of(cluster__nodes=1, cluster__gpus_per_node=1))
    evaluator = LayoutEvaluator(space)
    bounds = StepTimeBound(evaluator)
    for layout in samples(space, 5):
        time = evaluator.step_time(layout)
        assert time is not None
        bound = bounds.of_family(layout)
        assert bound == pytest.approx(time.total - time.optimizer - time.other, rel=0.02)


def assert_equal_answers(space: SearchSpace, pruned: FoundLayouts, every: FoundLayouts, objective: str) -> None:
    """The same rows and suggestion, and the fastest layout within each budget of memory."""
    assert pruned.groups == every.groups and every.groups
    assert (pruned.suggested, pruned.error) == (every.suggested, every.error)
    memory = LayoutEvaluator(space).usable_memory
    for share in range(BUDGETS, 0, -1) if objective == "tokens" else ():
        limit = memory * share / BUDGETS
        fastest = [min((p for p in found.evaluated if p.bytes <= limit), default=None) for found in (pruned, every)]
        assert fastest[0] == fastest[1]
        assert fastest[0] is None or fastest[0] in pruned.front


def answers(job: JobSpec, fixed: dict[str, Any], **asked: Any) -> tuple[FoundLayouts, FoundLayouts]:
    space = SearchSpace(job, fixed)
    return find_layouts(space, **asked), find_layouts(space, exhaustive=True, **asked)


CASES = [
    ("gpt", "memory", {"cp": 1, "zero": 1, "stage_balance": "even"}, {"training.dtype": "fp16"}),
    ("frozen", "tokens", {"cp": 1, "zero": 3, "recompute": "full", "micro_batch_size": 1}, {}),
    # hides messages beside products and gradients of chunks beside several backwards
    (
        "gpt",
        "tokens",
        {"cp": 1, "recompute": "none"},
        {"training.runtime": "megatron-core", "cluster": "dgx-h100", "training.dtype": "fp8"},
    ),
    ("qlora", "tokens", {"cp": 1, "recompute": "none"}, {}),
    ("experts", "tokens", {"cp": 1, "zero": 1, "recompute": "none", "stage_balance": "even"}, {}),
    ("every-other", "memory", {"cp": 1, "zero": 1}, {}),
]
SLOW_CASES = [
    ("every-other", "tokens", {"micro_batch_size": 1, "recompute": "none"}, {}),
    ("experts", "tokens", {"cp": 1, "micro_batch_size": 1, "stage_balance": "even"}, {}),
    ("gpt", "tokens", {"cp": 1, "zero": 1, "sequence_parallel": False}, {}),
    ("llama", "tokens", {"cp": 1, "recompute": "none"}, {"cluster.nodes": 1}),
    ("t5", "tokens", {"cp": 1, "recompute": "full", "stage_balance": "even"}, {}),
    ("gpt", "tokens", {}, {"training.runtime": "torchtitan", "cluster.nodes": 1}),
]


@pytest.mark.parametrize(
    ("name", "objective", "fixed", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
@pytest.mark.quick(2)
def test_the_pruned_search_finds_what_the_exhaustive_one_does(
    name: str, objective: Any, fixed: dict[str, Any], more: dict[str, Any]
) -> None:
    pruned, every = answers(model_job(name, **more), fixed, top=3, objective=objective)
    assert_equal_answers(SearchSpace(model_job(name, **more), fixed), pruned, every, objective)
    assert len(pruned.evaluated) <= len(every.evaluated)
    assert find_layouts(SearchSpace(model_job(name, **more), fixed), top=3, objective=objective) == pruned


@pytest.mark.parametrize(("runtime", "tried"), [("megatron-core", True), ("mpctl", False)])
def test_chunks_that_count_embedding_and_loss_as_layers_are_tried(runtime: str, tried: bool) -> None:
    """6 layers on 2 stages of 4 chunks are cut as 8, as Llama 3 405B's 126 on 8 of 8 are: the first
    block holds the word table alone. The bounds hold for them."""
    job = model_job(
        "gpt", **{"model.layers": 6, "training.runtime": runtime, "cluster": "dgx-h100", "training.dtype": "bf16"}
    )
    fixed = {"cp": 1, "tp": 2, "recompute": "none", "micro_batch_size": 1}
    pruned, every = answers(job, fixed, top=3)
    assert_equal_answers(SearchSpace(job, fixed), pruned, every, "tokens")
    chunks = {(p.layout.pp, p.layout.vpp) for p in every.evaluated}
    assert ((2, 4) in chunks) == tried and (2, 3) in chunks


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["tokens", "memory"])
@pytest.mark.parametrize("name", MODELS)
def test_on_larger_spaces_too(name: str, objective: Any) -> None:
    fixed = {"cp": 1, "recompute": "full"} if name == "t5" else {"cp": 1}
    pruned, every = answers(model_job(name), fixed, top=8, objective=objective)
    assert_equal_answers(SearchSpace(model_job(name), fixed), pruned, every, objective)


@pytest.fixture(scope="module")
def large() -> FoundLayouts:
    """GPT-3 175B on 1,024 A100, as Megatron-Core runs it."""
    job = load_job("gpt3-175b-1024", {"training.runtime": "megatron-core", "parallel.cp": 1})
    return find_layouts(SearchSpace(job, {"cp": 1, "order": "tp-cp-dp-pp"}), top=3)


def test_few_of_many_layouts_are_estimated(large: FoundLayouts) -> None:
    job = load_job("gpt3-175b-1024", {"training.runtime": "megatron-core"})
    space = SearchSpace(job, {"cp": 1, "order": "tp-cp-dp-pp"})
    assert len(large.evaluated) < sum(1 for _ in space.layouts()) / 40


def test_the_front_is_a_front_and_its_memory_was_a_limit(large: FoundLayouts) -> None:
    seconds = [point.seconds for point in large.front]
    sizes = [point.bytes for point in large.front]
    assert seconds == sorted(seconds) and sizes == sorted(sizes, reverse=True)
    assert len(large.front) > 2 and large.front[0] == large.best[0]
    assert sizes[0] <= 80 * 2**30


def test_ctrl_c_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = LayoutEvaluator.step_seconds, 0

    def interrupted(evaluator: LayoutEvaluator, layout: LayoutSettings) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return plain(evaluator, layout)

    monkeypatch.setattr(LayoutEvaluator, "step_seconds", interrupted)
    found = find_layouts(SearchSpace(job_of(), {"cp": 1}), top=3)
    assert not found.is_complete and found.best


# ---------------------------------------------------------------- nearest, reasons


def unfit() -> JobSpec:
    return job_of(
        model__hidden=4096,
        model__layers=16,
        model__heads=32,
        parallel__pp=2,
        parallel__dp=4,
        training__micro_batch_size=2,
    )


def test_nearest_changes_least_and_fits() -> None:
    job = unfit()
    plan = with_nearest(make_plan(job))
    (check,) = [c for c in plan.checks if c.rule == "memory-fits"]
    assert check.status == "warning" and "above" in check.message
    assert len(plan.nearest) == 3 and all(near.text in check.hint for near in plan.nearest)
    for near in plan.nearest:
        there = with_nearest(make_plan(load_job(None, {**named(job), **near.changes, "parallel.dp": None})))
        assert there.nearest == () and there.errors == []
        assert there.estimate is not None and there.estimate.step_seconds == near.step_seconds
    assert [len(near.changes) for near in plan.nearest] == sorted(len(near.changes) for near in plan.nearest)


def named(job: JobSpec) -> dict[str, Any]:
    return {
        **SMALL,
        "model.hidden": 4096,
        "model.layers": 16,
        "model.heads": 32,
        "parallel.pp": 2,
        "training.micro_batch_size": 2,
    }


def test_nearest_is_the_oracle_s() -> None:
    """Of all layouts of the space that differ in one setting, the fastest that fit."""
    job = unfit()
    space = SearchSpace(job)
    evaluator, here = LayoutEvaluator(space), layout_of(job)
    fitting = []
    for layout in space.layouts():
        if len(changed_settings(here, layout)) == 1 and evaluator.device_bytes(layout) <= 0.95 * 24 * 2**30:
            time = evaluator.step_time(layout)
            assert time is not None
            fitting.append(time.total)
    found = [near.step_seconds for near in nearest_that_fit(job) if len(near.changes) == 1]
    assert found == sorted(fitting)[: len(found)] and found


def test_only_a_plan_that_does_not_fit_is_searched_and_not_by_itself() -> None:
    fits, unfitting = make_plan(job_of()), make_plan(unfit())
    assert fits.fits and with_nearest(fits) is fits
    assert unfitting.fits is False and unfitting.nearest == ()


def test_reasons_name_the_parts_that_differ() -> None:
    space = SearchSpace(job_of(), {"cp": 1, "zero": 1, "recompute": "none"})
    evaluator = LayoutEvaluator(space)
    best, *others = layout_reports(evaluator, find_layouts(space, top=4, evaluator=evaluator).best)
    slower = best.time._replace(bubble=best.time.bubble + best.time.total)
    told = difference_text(best, LayoutReport(best.job, best.layout, slower, 2 * best.bytes))
    assert "100.0%) slower (bubble +" in told and "more memory" in told
    assert all(" slower" in difference_text(best, other) for other in others) and len(others) == 3
    assert layout_text(best.layout).count("micro batch") == 1


def test_every_setting_of_a_layout_is_one_of_a_job() -> None:
    here = layout_of(job_of())
    there = here._replace(tp=4, recompute="full", order="tp-pp-cp-dp")
    assert changed_settings(here, there) == {
        "parallel.tp": 4,
        "training.recompute": "full",
        "parallel.order": "tp-pp-cp-dp",
    }
    assert set(SETTINGS) == set(LayoutSettings._fields) - {"dp"}


@pytest.mark.slow
def test_a_searched_setting_is_one_row() -> None:
    """The members of a family take the values of each row of the space's settings."""
    turned = MemberSetting("order", lambda space, family: ["tp-pp-cp-dp", "tp-dp-cp-pp"])
    stages = MemberSetting("zero", lambda space, family: [1] if family.replicas > 1 else [0])
    space = SearchSpace(job_of(), {"cp": 1}, settings=(stages, turned))
    layouts = list(space.layouts())
    assert {layout.order for layout in layouts} == {"tp-pp-cp-dp", "tp-dp-cp-pp"}
    assert all(layout.zero == (layout.dp > 1) for layout in layouts)
    assert {"order", "zero"} <= set(varied(space))
    pruned, every = (find_layouts(space, top=3, exhaustive=way) for way in (False, True))
    assert_equal_answers(space, pruned, every, "tokens")


PLAIN = LayoutSettings(tp=4, dp=8, pp=2, vpp=4, sequence_parallel=True, zero=1)
MEGATRON, FSDP = PlainLayout(), PlainLayout(zero=[2, 2, 1, 0], unusual=["tp", "pp"])


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


@pytest.mark.parametrize(
    "changes",
    [
        {"vpp": 8},
        {"vpp": 5},
        {"cp": 2, "dp": 4},
        {"order": "tp-cp-pp-dp"},
        {"micro_batch_size": 3},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"zero": 2},
        {"etp": 2},
        {"schedule": "zero-bubble", "vpp": 1},
        {"stage_balance": "cost"},
        {"pipeline_layout": "Ett|tL"},
        {"pp": 4, "dp": 4},
        {"tp": 8, "dp": 4},
        {"ep": 2},
    ],
    ids=str,
)
def test_every_change_of_a_plain_layout_makes_it_less_plain(changes: dict[str, Any]) -> None:
    base = PLAIN._replace(vpp=1) if "schedule" in changes else PLAIN
    changed = base._replace(**changes)
    assert complexity(changed, MEGATRON) > complexity(base, MEGATRON)
    assert savings(changed, base, MEGATRON) and not savings(base, changed, MEGATRON)


def test_what_is_plain_depends_on_the_runtime() -> None:
    """FSDP: ZeRO 3, neither tp nor pp. Megatron: ZeRO 0 or 1, any tp."""
    whole = PLAIN._replace(tp=1, pp=1, vpp=1, dp=64, sequence_parallel=False)
    for zero in range(3):
        layout = whole._replace(zero=zero)
        assert complexity(layout, FSDP) > complexity(layout._replace(zero=3), FSDP) == 0
        assert complexity(layout, MEGATRON) < complexity(layout._replace(zero=3), MEGATRON)
    assert complexity(PLAIN._replace(zero=0), MEGATRON) == complexity(PLAIN, MEGATRON)
    fsdp = {name for name in preset_names("runtimes") if get_profile(name).plain == FSDP}
    assert fsdp == {"fsdp", "fsdp2", "fsdp2-automodel", "torchtitan", "maxtext-gpu", "pax-gpu", "trl"}
    assert savings(PLAIN, whole._replace(zero=3), FSDP) == [
        "no tensor parallelism",
        "no pipeline",
        "ZeRO 3 instead of 1",
    ]


@pytest.mark.parametrize("name", MODELS)
def test_no_layout_is_plainer_than_its_sizes(name: str) -> None:
    space = SearchSpace(model_job(name))
    plain = get_profile(space.job.training.runtime).plain
    for layout in samples(space, 200):
        family = layout._replace(zero=0, zero_size=None, order="")
        axes = family._replace(vpp=1, schedule="1f1b", stage_balance="even")
        bounds = [least_complexity(node, plain) for node in (axes, family)]
        assert bounds[0] <= bounds[1] <= complexity(layout, plain)


def test_groups_are_what_a_list_of_all_layouts_gives() -> None:
    """By hand: the fastest of each tp, pp and mode that fits (cp is 1), and what is within 1 % of it."""
    space = SearchSpace(job_of(), {"cp": 1, "recompute": "none", "zero": 1})
    found = find_layouts(space, top=4, exhaustive=True)
    limit = 0.95 * 24 * 2**30
    by_class: dict[LayoutClass, list[EvaluatedLayout]] = {}
    for point in found.evaluated:
        if point.bytes <= limit:
            by_class.setdefault(class_of(point.layout), []).append(point)
    fastest = sorted(by_class.values(), key=lambda points: min(points))[:4]
    assert len(fastest) == len(found.groups) == 4
    assert [class_of(group.first.layout) for group in found.groups] == [
        class_of(points[0].layout) for points in fastest
    ]
    for group in found.groups:
        points = by_class[class_of(group.first.layout)]
        near = [p for p in points if p.seconds <= min(points).seconds * (1 + ALIKE)]
        unordered = {p.layout._replace(order="") for p in near}  # one order of each stays
        assert {p.layout._replace(order="") for p in group.members} == unordered
        assert group.first == min(points)
    steps = [group.first.seconds for group in found.groups]
    assert steps == sorted(steps)


def test_the_plainest_of_a_group_stands_for_it() -> None:
    """By hand: within 0.5 % of one chunk a layer are four chunks and two, and a suggested one goes before."""
    chunks = ((1.0, 41), (1.001, 4), (1.004, 2), (1.006, 1))
    points = tuple(EvaluatedLayout(seconds, 1, LayoutSettings(pp=2, vpp=vpp)) for seconds, vpp in chunks)
    plain = get_profile("megatron-core").plain
    assert LayoutGroup(points).plainest(plain).layout.vpp == 2
    assert LayoutGroup(points).plainest(plain, points[1]).layout.vpp == 4
    assert LayoutGroup(points).plainest(plain, points[3]).layout.vpp == 2


def test_a_search_reports_the_best_so_far() -> None:
    said: list[str] = []
    space = SearchSpace(job_of(), {"cp": 1, "recompute": "none", "zero": 1})
    found = find_layouts(space, top=2, on_note=said.append)
    fastest = min(group.members[0].seconds for group in found.groups)
    assert said[-1].endswith(f"estimated, best {seconds_text(fastest)}") and len(said) > 2


@pytest.mark.parametrize("runtime", ["megatron-core", "torchtitan", "fsdp2"])
def test_the_suggested_layout_is_the_plainest_within_the_error_of_the_fastest(runtime: str) -> None:
    """4 % or, where the band is wide, 10 %; of equally plain ones the fastest."""
    job = job_of(training__runtime=runtime, cluster="dgx-h100", cluster__nodes=1)
    space = SearchSpace(job, {"cp": 1, "recompute": "none"})
    found, every = (find_layouts(space, top=1, exhaustive=way) for way in (False, True))
    plain = get_profile(runtime).plain
    time = LayoutEvaluator(space).step_time(every.best[0].layout)
    assert time is not None and found.error == ranking_error(time.high / time.low)
    assert (found.error == 0.1) == (time.high / time.low >= WIDE_BAND)
    near = [p for p in every.evaluated if p.seconds <= every.best[0].seconds * (1 + found.error)]
    assert found.suggested == min(near, key=lambda p: (complexity(p.layout, plain), p))
    assert found.suggested.layout.zero == 3 if plain == FSDP else found.suggested.layout.zero <= 1


def test_a_front_is_the_points_that_no_other_beats() -> None:
    """By hand: of two as fast the smaller, and none that is slower and not smaller."""
    points = [EvaluatedLayout(s, b, PLAIN) for s, b in ((2.0, 5), (1.0, 9), (1.0, 8), (3.0, 5), (4.0, 1))]
    assert [(p.seconds, p.bytes) for p in non_dominated(points)] == [(1.0, 8), (2.0, 5), (4.0, 1)]
    assert non_dominated([]) == []


SEARCH = (
    "search",
    "--cluster",
    "dgx-h100",
    "--nodes",
    "4",
    "--model",
    "llama-3-8b",
    "--global-batch-size",
    "32",
    "--runtime",
)


@pytest.mark.slow
def test_rows_are_different_layouts_and_say_what_they_stand_for(call: Mpctl) -> None:
    found = call(*SEARCH, "megatron-core", "--json").document
    rows, fastest, suggested = found["rows"], found["fastest"], found["suggested"]
    assert fastest == rows[0] and suggested in rows
    others = [row for row in rows if row != suggested]
    classes = [tuple(e["settings"][k] for k in ("tensor_mode", "tp", "pp")) for e in others]
    assert len(set(classes)) == len(classes) > 2
    seconds = [entry["step_seconds"] for entry in rows]
    assert seconds == sorted(seconds)
    assert suggested["step_seconds"] <= seconds[0] * (1 + found["ranking_error"])
    (first, *_) = [entry for entry in rows if entry["alike"]]
    assert f"{len(first['alike'])} similar one" in first["alike_text"]
    for one in first["alike"]:
        assert 0 <= one["step_seconds"] / first["step_seconds"] - 1 <= ALIKE
        assert one["settings"]["tp"] == first["settings"]["tp"]
    every = call(*SEARCH, "megatron-core", "--all", "--json").document["rows"]
    assert len(every) == len(rows) + sum(len(row["alike"]) for row in rows)
    assert not any(row["alike"] for row in every)


@pytest.mark.slow
def test_a_wide_band_is_said(call: Mpctl) -> None:
    found = call(*SEARCH, "torchtitan", "--json").document
    fastest = found["fastest"]
    assert fastest["step_seconds_high"] / fastest["step_seconds_low"] > WIDE_BAND
    assert found["ranking_error"] == 0.1
    text = " ".join(call(*SEARCH, "torchtitan").out.split())
    assert "differences below 10 % are ranked correctly 7 times out of 10" in text
