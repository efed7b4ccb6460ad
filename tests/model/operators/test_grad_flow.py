"""What frozen parameters take out of a step: gradients product by product, and then messages,
FLOP and bytes, against counts by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.families import get_table
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.grad_flow import GradFlow, StackGradFlow, find_flows, frozen_by
from mpctl.model.operators.matmul import GradNeeds
from mpctl.plan.estimate.communication import local_parameters
from mpctl.plan.estimate.flops import step_flops
from mpctl.plan.planning.plan import make_plan
from tests.jobs import job_of, shape_of

ALL, NONE = GradNeeds(), GradNeeds(False, False, False)
LAYERS = 4
SMALL: dict[str, Any] = {
    "model.layers": LAYERS,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
}
BERT = {"model.family": "bert"}
T5 = {
    "model.family": "t5",
    "model.position": "relative",
    "model.decoder_layers": 2,
    "model.decoder_seq_length": 8,
    "model.norm": "rmsnorm",
    "model.bias": False,
}
LLAMA = {
    "model.norm": "rmsnorm",
    "model.position": "rotary",
    "model.bias": False,
    "model.tied_embeddings": False,
    "model.kv_heads": 2,
}
SEQUENCE = {"parallel.tp": 2, "parallel.sequence_parallel": True}
BOTTOM = ["embedding.*", "layers.[01].*"]  # half of SMALL's layers
DROPOUT, FULL = {"training.dropout": 0.1}, {"training.recompute": "full"}


def flows(freeze: list[str], settings: dict[str, Any] | None = None) -> tuple[StackGradFlow, ...]:
    table = get_table(shape_of(job_of({**SMALL, **(settings or {})})), tp=1)
    return find_flows(table.stacks, frozen_by(freeze) if freeze else None)


def layer(stack: StackGradFlow, number: int) -> GradFlow:
    return next(flow for run, flow in stack.runs if number in run)


def sent(freeze: list[str], settings: dict[str, Any], *, stage: int = 0) -> dict[str, int]:
    """Collectives of one step and micro batch: `tp all_reduce blocks` -> how many."""
    plan = make_plan(job_of({**SMALL, **settings, "training.freeze": freeze}))
    assert plan.estimate is not None, plan.errors
    found: dict[str, int] = {}
    for m in plan.estimate.messages[stage]:
        name = f"{m.axis} {m.kind} {m.what}"
        found[name] = found.get(name, 0) + m.count
    return found


# ---------------------------------------------------------------- which gradients


def test_nothing_frozen_is_one_run_of_everything() -> None:
    for settings in ({}, BERT, {**BERT, "model.norm_order": "post"}, LLAMA, T5):
        for stack in flows([], settings):
            ((run, flow),) = stack.runs
            assert len(run) in (LAYERS, T5["model.decoder_layers"])
            assert set(flow.needs.values()) == {ALL}
            assert flow.trained == flow.part.weights
            assert stack.entry.needs["embedding.word"] == GradNeeds(False, True, True)
            assert set(stack.exit.needs.values()) <= {ALL}


def test_below_the_first_trained_parameter_there_is_nothing() -> None:
    (stack,) = flows(BOTTOM)
    assert [run for run, _ in stack.runs] == [range(2), range(2, 3), range(3, 4)]
    assert set(layer(stack, 1).needs.values()) == {NONE}
    assert set(layer(stack, 2).needs.values()) == {ALL}  # its own norm stands before its qkv
    assert stack.entry.needs["embedding.word"] == NONE
    assert stack.exit.needs["head"] == GradNeeds(True, False, True)  # the tied table


def test_without_its_norm_the_first_trained_product_needs_no_input_gradient() -> None:
    (stack,) = flows([*BOTTOM, "*norm*"])
    assert layer(stack, 2).needs["attention.qkv"] == GradNeeds(False, True, True)
    assert layer(stack, 2).needs["attention.output"] == ALL
    assert layer(stack, 3).needs["attention.qkv"] == ALL


def test_a_norm_is_before_its_branch_or_after_its_sum() -> None:
    """All but layer 0's first norm frozen: of a post-norm layer its attention needs nothing."""
    only = ["embedding.*", "layers.[1-9].*", "layers.0.[!a]*", "layers.0.attention.*", "[!l]*"]
    for order, first in (("pre", GradNeeds(True, False, True)), ("post", NONE)):
        (stack,) = flows(only, {**BERT, "model.norm_order": order})
        assert [w.name for w in layer(stack, 0).trained] == ["attention_norm.weight", "attention_norm.bias"]
        assert layer(stack, 0).needs["attention.qkv"] == first
        assert layer(stack, 0).needs["mlp.up"] == GradNeeds(True, False, True)


def test_a_decoder_starts_at_its_own_words_and_reads_the_encoder() -> None:
    encoder, decoder = flows(["embedding.*", "encoder.*"], T5)
    assert set(layer(encoder, 0).needs.values()) == {NONE} and not encoder.exit.after
    assert layer(decoder, 0).needs["attention.qkv"] == ALL  # by its norm
    assert layer(decoder, 1).needs["cross.query"] == ALL
    assert layer(decoder, 1).needs["cross.key_value"] == GradNeeds(False, True, True)
    _, keys = flows(["embedding.*", "encoder.*", "*.key_value.*"], T5)
    assert layer(keys, 1).needs["cross.key_value"] == NONE
    _, other = flows(["embedding.*", "decoder.*"], T5)  # the encoder alone is trained
    assert layer(other, 0).needs["attention.qkv"] == NONE
    assert layer(other, 0).needs["cross.query"] == NONE
    assert layer(other, 0).needs["cross.key_value"] == GradNeeds(True, False, True)
    assert layer(other, 1).needs["attention.qkv"] == GradNeeds(True, False, True)


def test_a_relative_bias_joins_the_scores() -> None:
    """Trained alone: past layer 0's first product of queries and keys all inputs need gradients."""
    encoder, decoder = flows(["embedding.*", "encoder.*", "decoder.[!p]*"], T5)
    assert encoder.shared == () and [w.name for w in decoder.shared] == ["decoder.position.weight"]
    assert layer(decoder, 0).needs["attention.qkv"] == NONE
    passed_on = GradNeeds(True, False, True)
    assert layer(decoder, 0).needs["attention.output"] == passed_on
    assert layer(decoder, 1).needs["attention.qkv"] == passed_on
    assert layer(decoder, 1).needs["cross.key_value"] == NONE


def test_a_bias_alone_passes_on_from_its_product() -> None:
    (stack,) = flows(["embedding.*", "*.weight", "*norm*", "layers.*.output.bias", "*.mlp.*"])
    assert {w.name for w in layer(stack, 0).trained} == {"attention.qkv.bias"}
    assert layer(stack, 0).needs["attention.qkv"] == GradNeeds(False, False, True)
    assert layer(stack, 0).needs["attention.output"] == GradNeeds(True, False, True)


def test_layers_alike_are_one_run() -> None:
    (stack,) = flows(["embedding.*", "layers.[02].*"])
    kinds = [(run, bool(flow.trained), flow.after) for run, flow in stack.runs]
    assert kinds == [
        (range(1), False, False),
        (range(1, 2), True, True),
        (range(2, 3), False, True),
        (range(3, 4), True, True),
    ]
    assert [count for count, _ in stack.blocks(range(1, 3))] == [1, 1]
    (other,) = flows(["layers.[13].*"])
    assert len(other.runs) == LAYERS
    assert [count for count, _ in other.blocks(range(LAYERS))] == [2, 2]


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("layers.[0-5].*", "layers.5.mlp.up.weight", True),
        ("layers.[0-5].*", "layers.15.mlp.up.weight", False),
        ("*norm*", "layers.15.mlp_norm.bias", True),
        ("*Norm*", "layers.15.mlp_norm.bias", False),
        ("layers.1", "layers.1.mlp_norm.bias", False),
        ("word", "embedding.word.weight", False),
    ],
)
def test_patterns_match_full_names(pattern: str, name: str, is_match: bool) -> None:
    assert frozen_by([pattern])(name) is is_match
    assert frozen_by(["nothing", pattern])(name) is is_match


# ---------------------------------------------------------------- messages


def test_all_reduces_by_hand() -> None:
    tp2 = {"parallel.tp": 2}
    assert sent([], tp2)["tp all_reduce blocks"] == 4 * LAYERS
    assert sent(BOTTOM, tp2)["tp all_reduce blocks"] == 2 * 2 + 2 * 4
    assert sent([*BOTTOM, "*norm*"], tp2)["tp all_reduce blocks"] == 2 * 2 + (2 + 1) + 4
    ends = ["embedding.*", "layers.*"]  # the final norm is left
    assert sent(ends, tp2)["tp all_reduce blocks"] == 2 * LAYERS
    assert sent(ends, tp2)["tp all_reduce head"] == 1
    untied = ["embedding.*", "layers.*", "final_norm.*"]
    alone = sent(untied, {**tp2, "model.tied_embeddings": False})
    assert "tp all_reduce head" not in alone
    assert alone["tp all_reduce loss"] == 3


def test_phases_of_sequence_parallelism_by_hand() -> None:
    """A trained block gathers 2 + 4 times and scatters 2 + 2 times."""

    def of(freeze: list[str]) -> tuple[int, int]:
        found = sent(freeze, SEQUENCE)
        return found["tp all_gather blocks"], found["tp reduce_scatter blocks"]

    assert of([]) == (6 * LAYERS, 4 * LAYERS)
    assert of(BOTTOM) == (2 * 2 + 6 * 2, 2 * 2 + 4 * 2)
    assert of([*BOTTOM, "*norm*"]) == (2 * 2 + 6 * 2, 2 * 2 + 3 + 4)  # one dX less
    assert of(["*.mlp.up.weight"]) == (5 * LAYERS, 4 * LAYERS)  # its input is gathered for dW
    assert of(["*.mlp.down.weight"]) == (6 * LAYERS, 4 * LAYERS)  # a row's gather is for dX too


def test_the_lookup_gathers_backward_for_its_table_alone() -> None:
    untied = {**SEQUENCE, "model.tied_embeddings": False}
    words = {"tp reduce_scatter embedding.word": 1, "tp all_gather embedding.word": 1}
    assert words.items() <= sent([], untied).items()
    found = sent(["embedding.word.*"], untied)  # positions are trained: layers still give dX
    assert found["tp reduce_scatter embedding.word"] == 1
    assert "tp all_gather embedding.word" not in found
    assert found["tp reduce_scatter blocks"] == 4 * LAYERS


def test_keys_and_values_go_back_where_they_need_gradients() -> None:
    shape = {**LLAMA, "model.heads": 8, "parallel.tp": 4, "parallel.cp": 2}
    for what in ("tp {} kv heads", "cp {} keys and values"):
        found = sent(BOTTOM, shape)
        assert found[what.format("all_gather")] == LAYERS
        assert found[what.format("reduce_scatter")] == LAYERS - 2


def test_keys_of_a_frozen_encoder_stay_where_they_are() -> None:
    encoder = ["embedding.*", "encoder.*"]
    cp2 = {**T5, "parallel.cp": 2}
    assert sent(encoder, cp2)["cp reduce_scatter keys and values"] == 2 + 2
    frozen_keys = sent([*encoder, "*.key_value.*"], cp2)
    assert frozen_keys["cp reduce_scatter keys and values"] == 2
    assert frozen_keys["cp all_gather keys and values"] == LAYERS + 2 + 2


def test_a_layer_without_gradients_is_not_run_again() -> None:
    """2 all-reduces forward, 2 for dX, 2 again with dropout and 1 without."""
    full = {"parallel.tp": 2, **FULL, "training.partition_activations": True}
    for dropout, again in ((DROPOUT, 2), ({}, 1)):
        found = sent(BOTTOM, {**full, **dropout})
        assert found["tp all_reduce blocks"] == 2 * 2 + 2 * (4 + again)
        assert found["tp all_gather blocks"] == 2  # of the kept inputs


def test_the_last_bias_alone_asks_for_no_second_forward_without_a_mask() -> None:
    only = ["[!l]*", "*norm*", "*.attention.*", "*.up.*", "*.weight", "layers.[!3].*"]
    full = {"parallel.tp": 2, **FULL}
    assert sent(only, full)["tp all_reduce blocks"] == 2 * LAYERS
    assert sent(only, {**full, **DROPOUT})["tp all_reduce blocks"] == 2 * LAYERS + 2
    post = {**BERT, "model.norm_order": "post"}
    assert sent(only, {**full, **post})["tp all_reduce blocks"] == 2 * LAYERS + 2


def test_gradients_are_those_of_the_trained() -> None:
    """A layer of hidden 64: 12 h^2 over tp, and biases of 3 h and 4 h; 6 h are not split."""
    h, dp = 64, {**SEQUENCE, "parallel.dp": 2, "cluster.gpus_per_node": 4}
    plan = make_plan(job_of({**SMALL, **dp, "training.freeze": [*BOTTOM, "final_norm.*"]}))
    assert plan.estimate is not None
    bytes_of = Counter[str]()
    for message in plan.estimate.messages[0]:
        bytes_of[message.what] += message.bytes * message.count
    local = 2 * ((12 * h * h + 7 * h) // 2 + 6 * h)
    assert bytes_of["gradients"] == 4 * local
    assert bytes_of["partial gradients"] == 4 * 2 * 6 * h
    (stage,) = plan.estimate.memory
    assert (stage.gradient_bytes, stage.optimizer_bytes) == (4 * local, 8 * local)
    (whole,) = make_plan(job_of({**SMALL, **dp})).estimate.memory  # type: ignore[union-attr]
    assert (stage.parameters, stage.parameter_bytes) == (whole.parameters, whole.parameter_bytes)
    share = stage.activation_bytes / whole.activation_bytes
    assert 0.5 < share < 0.6  # half of the layers, and of what the ends keep all that is not frozen


def test_a_message_of_no_bytes_is_not_sent() -> None:
    whole = ["*norm*", "embedding.position.*", "*.output.bias", "*.down.bias"]
    assert "tp all_reduce partial gradients" in sent(whole[1:], SEQUENCE)
    assert "tp all_reduce partial gradients" not in sent(whole, SEQUENCE)


def test_a_frozen_stage_only_passes_forward() -> None:
    pipeline = {"parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 2, "cluster.gpus_per_node": 8}
    first, last = (sent(BOTTOM, pipeline, stage=stage) for stage in (0, 1))
    assert first["tp all_reduce blocks"] == 2 * 2 and last["tp all_reduce blocks"] == 2 * 4
    assert "dp_cp all_reduce gradients" not in first and "dp_cp all_reduce gradients" in last


PIECES = [
    "embedding.word.*",
    "embedding.position.*",
    "*norm*",
    "*.qkv.*",
    "*.output.*",
    "*.up.*",
    "*.down.weight",
    "layers.0.*",
    "layers.[12].*",
    "*.bias",
]


@given(
    freeze=st.sets(st.sampled_from(PIECES), max_size=5),
    more=st.sampled_from(PIECES),
    split=st.booleans(),
    full=st.booleans(),
)
def test_freezing_more_never_sends_more(freeze: set[str], more: str, split: bool, full: bool) -> None:
    settings = {**(SEQUENCE if split else {"parallel.tp": 2}), **(FULL if full else {})}
    before, after = (sent(sorted(some), settings) for some in (freeze, freeze | {more}))
    assert all(count <= before[name] for name, count in after.items())


# ---------------------------------------------------------------- FLOP and parameters


def flops(freeze: list[str], settings: dict[str, Any]) -> float:
    job = job_of({**SMALL, **settings, "training.freeze": freeze})
    return step_flops(JobLayout.of(job), 0)


def test_flops_by_passes() -> None:
    """Forward 2 x 16 x 12 h^2 and 4 x 16^2 h a layer, 2 x 16 x 256 h of the head."""
    h, s = 64, 16
    matrices, scores, head = 2 * s * 12 * h * h, 4 * s * s * h, 2 * s * 256 * h
    block = matrices + scores
    assert flops([], {}) == 3 * (LAYERS * block + head)
    # layers 0 and 1 forward alone, 2 and 3 whole; the tied head needs dX and no dW
    assert flops(BOTTOM, {}) == 2 * block + 2 * 3 * block + 2 * head
    assert flops(BOTTOM, FULL) == 2 * block + 2 * 4 * block + 2 * head
    # biases alone: no dW; layer 0's qkv needs no dX
    qkv = 2 * s * 3 * h * h
    everywhere = 2 * LAYERS * matrices - qkv + 3 * LAYERS * scores + 2 * head
    assert flops(["*.weight", "embedding.*", "*norm*"], {}) == everywhere
    head_alone = ["embedding.*", "layers.*", "final_norm.*"]
    assert flops(head_alone, {"model.tied_embeddings": False}) == LAYERS * block + 2 * head


@given(freeze=st.sets(st.sampled_from(PIECES)), tp=st.sampled_from([1, 2, 4]))
def test_trained_parameters_are_those_that_no_pattern_names(freeze: set[str], tp: int) -> None:
    layout = JobLayout.of(job_of({**SMALL, "parallel.tp": tp, "training.freeze": sorted(freeze)}))
    is_frozen = frozen_by(sorted(freeze))
    expected = sum(w.local_numel(layout.views) for w in layout.table.weights() if not is_frozen(w.name))
    assert local_parameters(layout, 0, trained_only=True) == expected


SPARSE = {
    **LLAMA,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.shared_expert_ffn": 32,
    "model.shared_expert_gate": True,
    "parallel.dp": 2,
    "parallel.ep": 2,
}
DENSE_PARTS = ["embedding.*", "*norm*", "*attention*", "head*"]


@pytest.mark.parametrize(
    ("trained", "with_dx"), [("router", ()), ("experts", ("experts.down",)), ("shared.", ("shared.down",))]
)
def test_experts_router_and_shared_experts_are_beside_each_other(trained: str, with_dx: tuple[str, ...]) -> None:
    """Of the first layer: what is trained in one of them asks for no dX of another, and above it
    all have one. Of 4 exchanges of rows the first layer sends those that end at a gradient."""
    parts = ("router", "experts", "shared.", "shared_gate")
    freeze = [*DENSE_PARTS, *(f"*mlp.{part}*" for part in parts if part != trained)]
    (stack,) = flows(freeze, SPARSE)
    first, second = (
        {n.removeprefix("mlp."): need for n, need in layer(stack, at).needs.items() if n.startswith("mlp.")}
        for at in (0, 1)
    )
    assert {name for name, need in first.items() if need.x} == set(with_dx)
    assert {name for name, need in first.items() if need.w} == {name for name in first if name.startswith(trained)}
    assert all(need.x for need in second.values()) and layer(stack, 0).after
    rows = sent(freeze, SPARSE)["ep all_to_all experts' rows"]
    back = 1 if trained == "experts" else 0
    assert rows == (2 + back) + 4 * (LAYERS - 1)


def test_latents_of_queries_and_keys_are_beside_each_other() -> None:
    """Where the queries' latent alone is trained, keys and values have no gradient in the first
    layer, and the product behind attention has one."""
    latent = {
        **LLAMA,
        "model.kv_heads": 4,
        "model.attention_kind": "mla",
        "model.q_lora_rank": 16,
        "model.kv_lora_rank": 16,
        "model.qk_nope_head_dim": 16,
        "model.qk_rope_head_dim": 8,
        "model.v_head_dim": 16,
    }
    frozen = ["embedding.*", "*norm*", "*mlp*", "head*", "*key_value*", "*output*", "*query_up*"]
    (stack,) = flows(frozen, latent)
    needs = layer(stack, 0).needs
    assert needs["attention.query_down"] == GradNeeds(False, True, True)
    assert needs["attention.query_up"].x and needs["attention.output"].x
    assert needs["attention.key_value_down"] == needs["attention.key_value_up"] == NONE
    assert layer(stack, 1).needs["attention.key_value_up"].x
