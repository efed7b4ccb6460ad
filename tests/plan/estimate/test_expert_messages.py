"""What layers with experts send, by dispatcher, and their seconds, by hand on an ideal device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.expert_messages import copies
from mpctl.plan.estimate.explain import explain_experts, explain_time
from mpctl.plan.estimate.layer_messages import LayerMessages
from mpctl.plan.estimate.messages import StepMessages
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.operator_times import OperatorTimer
from mpctl.plan.estimate.time import find_step_time, step_time_model
from mpctl.spec.runtime import ExpertCosts, MemoryPasses, get_profile
from tests.jobs import job_of
from tests.plan.estimate.test_time import DEVICE, IDEAL
from tests.published import expert_runs, mlperf6_runs

T, H, K, E, WIDTH = 32, 64, 2, 8, 4  # tokens of a micro batch, hidden, a token's experts, experts
MOE: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden": H,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
    "model.activation": "swiglu",
    "model.bias": False,
    "model.position": "rotary",
    "model.experts": E,
    "model.experts_per_token": K,
    "model.expert_ffn": 128,
    "training.micro_batch_size": 2,
    "training.moe_load": 1.0,
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "cluster.step_factor": 1.0,
}
ROW = H * WIDTH


def layout_of(settings: Mapping[str, Any]) -> JobLayout:
    return JobLayout.of(job_of({**MOE, **settings}))


def sent(settings: Mapping[str, Any], dispatcher: str = "rows") -> dict[Any, int]:
    """Bytes by (axis, kind, what, phase) of one layer, of groups of experts or of counts."""
    layout = layout_of(settings)
    profile = layout.profile
    costs = profile.experts.model_copy(update={"dispatcher": dispatcher})
    layers = LayerMessages(layout, profile.model_copy(update={"experts": costs}))
    stack = layout.table.stacks[0]
    found = Counter[Any]()
    for message in layers.block(stack, layout.table.flows[0].runs[-1][1]):
        if message.what.startswith("experts'"):
            key = message.axis, message.kind, message.what.split()[1], message.phase
            found[key] += message.bytes * message.count
    return dict(found)


def test_rows_go_there_and_back_and_so_do_their_gradients() -> None:
    rows = K * T * ROW
    assert sent({"parallel.ep": 4}) == {
        ("ep", "all_gather", "counts", "forward"): 8 * E * 4,
        ("ep", "all_to_all", "rows", "forward"): 2 * rows,
        ("ep", "all_to_all", "rows", "backward"): 2 * rows,
    }
    assert sent({"parallel.ep": 1}) == {}


def test_each_row_goes_to_all_ranks_that_share_its_expert() -> None:
    """etp 2: the tokens of a rank, half of a sequence under tp 2, meet two halves of an expert."""
    split = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.etp": 2}
    rows, group = 2 * K * T // 2 * ROW, "etp_ep"
    assert sent({**split, "parallel.ep": 2}) == {
        (group, "all_gather", "counts", "forward"): 8 * E * 4,
        (group, "all_to_all", "rows", "forward"): 2 * rows,
        (group, "all_to_all", "rows", "backward"): 2 * rows,
        ("tp", "all_reduce", "loads", "forward"): 8 * 2 * E,
    }


@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        ({"parallel.cp": 2}, {"cp"}),
        ({"parallel.cp": 2, "training.moe_aux_loss_coeff": 0}, set()),
        ({"parallel.cp": 2, "training.moe_load_balancing": "global"}, set()),
        ({"parallel.cp": 2, "training.moe_load_balancing": "micro_batch"}, {"cp"}),
        ({"parallel.cp": 2, "parallel.tp": 2, "parallel.sequence_parallel": True}, {"tp", "cp"}),
    ],
)
def test_counts_are_summed_over_ranks_that_share_a_sequence(settings: dict[str, Any], axes: set[str]) -> None:
    found = {key: size for key, size in sent(settings).items() if key[2] == "loads"}
    assert {key[0] for key in found} == axes
    assert all(size == 8 * 2 * E for size in found.values())


def test_full_recomputation_sends_rows_again_and_never_counts() -> None:
    rows, plain = K * T * ROW, sent({"parallel.ep": 4})
    again = sent({"parallel.ep": 4, "training.recompute": "full"})
    assert again == plain | {("ep", "all_to_all", "rows", "recompute"): 2 * rows}


def test_a_validation_has_no_auxiliary_loss() -> None:
    messages = StepMessages.of(layout_of({"parallel.ep": 4, "parallel.cp": 2}))
    what = Counter[str]()
    for message in messages.forward_of(0, 3):
        what[message.what] += message.count
    assert what["experts' rows"] == 3 * 2 * 2 and what["experts' counts"] == 3 * 2
    assert "experts' loads" not in what


def test_other_dispatchers() -> None:
    """etp 2, ep 2: Megatron's goes over ep, then gathers over etp; an all-gather brings every
    token to all four ranks; and one that sends once goes to each rank of a token's experts."""
    split = {
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.etp": 2,
        "parallel.ep": 2,
        "training.moe_aux_loss_coeff": 0,
    }
    own, ranks = T // 2, 4
    assert sent(split, "alltoall") == {
        ("etp_ep", "all_gather", "counts", "forward"): 8 * E * ranks,
        ("ep", "all_to_all", "counts", "forward"): 4 * K * own,
        ("ep", "all_to_all", "rows", "forward"): 2 * K * own * ROW,
        ("etp", "all_gather", "rows", "forward"): 2 * K * own * ROW,
        ("etp", "reduce_scatter", "rows", "forward"): 2 * K * own * ROW,
        ("ep", "all_to_all", "rows", "backward"): 2 * K * own * ROW,
        ("etp", "all_gather", "rows", "backward"): 2 * K * own * ROW,
        ("etp", "reduce_scatter", "rows", "backward"): 2 * K * own * ROW,
    }
    assert sent(split, "allgather") == {
        ("etp_ep", "all_gather", "counts", "forward"): 5 * E * ranks * own,
        ("etp_ep", "all_gather", "rows", "forward"): ranks * own * ROW,
        ("etp_ep", "reduce_scatter", "rows", "forward"): ranks * own * ROW,
        ("etp_ep", "all_gather", "rows", "backward"): ranks * own * ROW,
        ("etp_ep", "reduce_scatter", "rows", "backward"): ranks * own * ROW,
    }
    # of 28 pairs of experts 12 are on one of the two ranks: 1.571 of them have one
    once = int(2 * (2 - 12 / 28) * own * ROW)
    assert sent(split, "deepep") == {
        ("etp_ep", "all_to_all", "rows", "forward"): 2 * once,
        ("etp_ep", "all_to_all", "rows", "backward"): 2 * once,
    }


def test_copies_to_ranks_and_to_nodes() -> None:
    """DeepSeek-V3: 8 of 256 experts are on 7.7 of 64 ranks, 5.3 of 8 nodes; of 4 groups of 8 on 3.6
    nodes."""
    found = [copies(256, 8, 64), copies(256, 8, 8), copies(128, 8, 4)]
    assert found == pytest.approx([7.68, 5.29, 3.63], abs=5e-3)


def test_what_is_sent_once_leaves_a_node_once() -> None:
    """Two nodes of 4 ranks, one expert on each: 8 experts, 2 a token. A rank gets a copy for each
    of them, 2 copies of which half goes to the other node; that node has one of them with
    probability 1 - 6/28."""
    nodes = {"cluster.nodes": 2, "cluster.gpus_per_node": 4, "parallel.ep": 8}
    layout = layout_of(nodes)
    costs = ExpertCosts(dispatcher="deepep")
    layers = LayerMessages(layout, layout.profile.model_copy(update={"experts": costs}))
    (message, *_) = layers.of_experts(layout.table.flows[0].runs[-1][1], is_again=False)
    assert message.bytes == 2 * T * ROW
    assert message.outer == pytest.approx((2 * (1 - 6 / 28) / 2) / (2 / 2))


def test_bytes_inside_and_across_travel_at_once() -> None:
    """8 MB by 8 ranks on two nodes of 4: 3 MB a rank inside at 100 GB/s, and 4 x 4 MB at 40 GB/s
    across; a tenth of these takes 40 us, and what is inside takes as long as before."""
    links = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 4,
        "parallel.ep": 8,
        "cluster.intra_node": {"bandwidth": 100e9, "latency": 0},
        "cluster.inter_node": {"bandwidth": 40e9, "latency": 0},
    }
    layout = layout_of(links)
    network = Network(layout.job.cluster, layout.topology)
    message = Message("ep", "all_to_all", "", 8_000_000)
    seconds = [network.seconds(message._replace(outer=share)) for share in (1.0, 0.1, 0.01)]
    assert seconds == pytest.approx([400e-6, 40e-6, 30e-6])


NONE = MemoryPasses(forward=0, backward=0)


def block_times(settings: Mapping[str, Any], **costs: Any) -> Any:
    job = {**settings, "cluster.device": DEVICE, "cluster.intra_node.bandwidth": 1e9, "cluster.intra_node.latency": 0.0}
    layout = layout_of(job)
    experts = ExpertCosts(**{"permute": NONE, "inner": NONE, "dispatcher": "rows", "wait": 0, **costs})
    profile = IDEAL.model_copy(update={"experts": experts})
    operators = step_time_model(layout, profile).operators
    flow = layout.table.flows[0].runs[-1][1]
    return operators, flow, operators.block(layout.table.stacks[0], flow)


def test_grouped_products_have_the_rows_of_their_rank() -> None:
    """ep 4 of 8 ranks: two experts on each, 64 rows together, filled up to tiles of 64 each; up
    reads 64 columns and writes 2 x 128."""
    operators, flow, _ = block_times({"parallel.ep": 4})
    shapes = {p.name: operators.shape(p) for p in flow.part.products if p.is_grouped}
    assert shapes == {"mlp.experts.up": (64, 64, 256), "mlp.experts.down": (64, 128, 64)}
    up = next(p for p in flow.part.products if p.name == "mlp.experts.up")
    single, both = operators.speed.linear, operators.product_times(up, flow)
    assert both.forward >= 2 * 2 * 64 * 64 * 256 / single.flops


def test_rows_take_as_long_as_their_messages_less_what_is_hidden() -> None:
    """64 rows of 256 B over 4 ranks at 1 GB/s: 3/4 of 16 KiB each way, 12.3 us; counts beside."""
    _, _, plain = block_times({"parallel.ep": 4})
    rows = 2 * 0.75 * K * T * ROW / 1e9
    assert plain.ep_backward == pytest.approx(rows)
    assert plain.ep_forward == pytest.approx(rows + 0.75 * 8 * E * 4 / 1e9)
    _, _, half = block_times({"parallel.ep": 4}, hidden=0.5)
    assert half.ep_backward == pytest.approx(rows / 2)
    _, _, slow = block_times({"parallel.ep": 4}, exchange=0.5)
    assert slow.ep_backward == pytest.approx(2 * rows)


def test_the_fullest_rank_receives_more_rows() -> None:
    rows = 2 * 0.75 * K * T * ROW / 1e9
    _, _, skewed = block_times({"parallel.ep": 4, "training.moe_load": 1.5})
    assert skewed.ep_backward == pytest.approx(1.5 * rows)


def test_shared_experts_hide_rows_on_their_way() -> None:
    """Half of the messages of a direction are on their way to the experts; no more of it is hidden
    than the products take."""
    shared = {"parallel.ep": 4, "model.shared_expert_ffn": 256}
    rows = 2 * 0.75 * K * T * ROW / 1e9
    operators, flow, plain = block_times(shared)
    assert plain.ep_backward == pytest.approx(rows)
    products = [p for p in flow.part.products if p.name.startswith("mlp.shared")]
    times = [operators.product_times(p, flow) for p in products]
    back = sum(t.inputs + t.weights for t in times)
    _, _, beside = block_times(shared, beside=1.0)
    assert 0 < back < rows / 2 and beside.ep_backward == pytest.approx(rows - back)
    _, _, some = block_times(shared, beside=0.01)
    assert some.ep_backward == pytest.approx(rows - min(0.01 * rows / 2, 0.01 * back))


def test_passes_and_waits_are_those_of_the_profile() -> None:
    _, _, plain = block_times({"parallel.ep": 4, "cluster.device.memory_bandwidth": 1e9})
    _, _, more = block_times(
        {"parallel.ep": 4, "cluster.device.memory_bandwidth": 1e9},
        wait=1e-3,
        permute=MemoryPasses(forward=2, backward=3),
        inner=MemoryPasses(forward=1, backward=0),
    )
    row, inner = K * T * ROW / 1e9, K * T * 2 * 128 * WIDTH / 1e9
    assert more.forward - plain.forward == pytest.approx(1e-3 + 2 * row + inner)
    assert more.dgrad - plain.dgrad == pytest.approx(1e-3 + 3 * row)


def test_biases_of_experts_pass_over_their_results() -> None:
    """Nothing without biases; 2 and 3 passes over k T rows with them."""
    slow = {"parallel.ep": 4, "cluster.device.memory_bandwidth": 1e9}
    none, some = MemoryPasses(forward=0, backward=0), MemoryPasses(forward=2, backward=3)
    assert block_times(slow, biased=some)[2] == block_times(slow, biased=none)[2]
    plain, more = (block_times({**slow, "model.expert_bias": True}, biased=one)[2] for one in (none, some))
    row = K * T * ROW / 1e9
    assert more.forward - plain.forward == pytest.approx(2 * row)
    assert more.dgrad - plain.dgrad == pytest.approx(3 * row)


def test_rows_are_planned_with_what_they_say_of_the_software() -> None:
    """A real load is that of a trained router; what a row does not state stays the default."""
    (real,) = {run.job.training.moe_load for run in mlperf6_runs() if run.job.training.moe_overlap}
    assert real == 1.08
    found = {(run.job.training.moe_overlap, run.job.training.moe_dispatcher) for run in expert_runs(software=True)}
    assert {(True, "hybridep"), (True, "alltoall"), (False, "hybridep"), (False, None)} <= found
    biased = [run for run in expert_runs() if run.layout.model.expert_bias]
    assert len(biased) == sum("GPTOSS" in run.id for run in expert_runs()) == 16


def test_the_step_names_what_experts_send() -> None:
    layout = layout_of({"parallel.ep": 4, "cluster.device": DEVICE, "cluster.intra_node.bandwidth": 1e9})
    time = find_step_time(layout)
    assert not isinstance(time, str)
    assert time.ep > 0 and sum(time.parts().values()) == pytest.approx(time.total)
    alone = find_step_time(layout_of({"cluster.device": DEVICE, "cluster.intra_node.bandwidth": 1e9}))
    assert not isinstance(alone, str) and "ep" not in alone.parts()


LATENT: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
    "model.position": "rotary",
    "model.bias": False,
    "model.attention_kind": "mla",
    "model.q_lora_rank": 24,
    "model.kv_lora_rank": 16,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 8,
    "training.micro_batch_size": 2,
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
}


@pytest.mark.parametrize("splits", [False, True])
def test_latent_attention_sends_latents(splits: bool) -> None:
    """Those of train/layers/latent_attention.py: b 2, S 16 / cp 2 = 8, L 20, l_q 24."""
    layout = JobLayout.of(job_of({**LATENT, "parallel.tp": 2, "parallel.cp": 2, "parallel.sequence_parallel": splits}))
    layers = LayerMessages(layout, get_profile("mpctl"))
    flow = layout.table.flows[0].runs[-1][1]
    found = Counter(
        (m.phase, m.axis, m.kind, m.bytes)
        for m in layers.block(layout.table.stacks[0], flow)
        if m.axis == "cp" or m.product.startswith("attention.")
    )
    latent, queries, hidden = (2 * 8 * n * WIDTH for n in (20, 24, 64))
    over_cp = {("forward", "cp", "all_gather", 2 * latent): 1, ("backward", "cp", "reduce_scatter", 2 * latent): 1}
    plain = {
        ("forward", "tp", "all_reduce", hidden): 1,
        ("backward", "tp", "all_reduce", latent): 1,
        ("backward", "tp", "all_reduce", queries): 1,
    }
    split = {
        ("forward", "tp", "all_gather", queries): 1,
        ("forward", "tp", "all_gather", latent): 1,
        ("forward", "tp", "reduce_scatter", hidden): 1,
        ("backward", "tp", "all_gather", hidden): 1,
        ("backward", "tp", "reduce_scatter", latent): 1,
        ("backward", "tp", "all_gather", queries): 1,
        ("backward", "tp", "reduce_scatter", queries): 1,
    }
    assert dict(found) == over_cp | (split if splits else plain)


def test_keys_of_the_full_sequence_are_made_on_each_rank_of_cp() -> None:
    settings = {**LATENT, "cluster.device": DEVICE, "parallel.cp": 2, "cluster.intra_node.bandwidth": 1e9}
    layout = JobLayout.of(job_of(settings))
    operators: OperatorTimer = step_time_model(layout, IDEAL).operators
    rows = {p.name: operators.shape(p)[0] for p in layout.table.flows[0].runs[-1][1].part.products}
    assert rows["attention.key_value_up"] == 2 * 16 and rows["attention.query_up"] == 2 * 8


def test_a_job_s_dispatcher_replaces_the_profile_s() -> None:
    layout = layout_of({"parallel.ep": 4, "training.moe_dispatcher": "allgather"})
    kinds = {m.kind for m in LayerMessages(layout, IDEAL).of_experts(layout.table.flows[0].runs[-1][1], is_again=False)}
    assert kinds == {"all_gather", "reduce_scatter"}


def test_figures_explain_where_rows_go() -> None:
    """ep 8 on nodes of 2 in domains of 4: 7/8 leave the rank, 6/8 the node, 4/8 the domain."""
    links = {
        "cluster.intra_node": {"bandwidth": 100e9, "latency": 0},
        "cluster.inter_node": {"bandwidth": 40e9, "latency": 0},
    }
    layout = layout_of(
        {
            "cluster.nodes": 4,
            "cluster.gpus_per_node": 2,
            "cluster.nvlink_domain": 4,
            "parallel.ep": 8,
            "cluster.device": {**DEVICE, "memory_bandwidth": 1e10},
            **links,
        }
    )
    figures = {figure.name: figure.value for figure in explain_experts(layout)}
    assert figures["routing.message"] == K * T * ROW
    shares = {n: v for n, v in figures.items() if n.startswith("routing.leaves_")}
    assert list(shares.values()) == [87.5, 75.0, 50.0] and len(shares) == 3
    assert figures["routing.rows_an_expert"] == K * T  # one expert on each rank
    assert figures["routing.weight_bound_below"] == pytest.approx(1e12 * WIDTH / 2 / 1e10)
    assert "routing.sent_once" not in figures
    times = {figure.name for figure in explain_time(layout)}
    assert {"time.ep", "time.blocks.ep_forward", "time.blocks.ep_backward"} <= times
    job = layout.job.training.model_copy(update={"moe_dispatcher": "deepep"})
    once = JobLayout.of(layout.job.model_copy(update={"training": job}))
    figures = {figure.name: figure.value for figure in explain_experts(once)}
    # two domains of four experts: a token has one in the other with probability 1 - 6/28
    assert figures["routing.sent_once"] == pytest.approx(100 * (1 - 6 / 28))
