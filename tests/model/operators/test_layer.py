"""A layer as a list of operations: tensors that are read twice, and stacks whose layers differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpctl.model.families.gpt.ops import HIDDEN
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes
from mpctl.model.operators.blocks import decoder_layer
from mpctl.model.operators.layer import Activation, AttentionOp, OperatorGroup
from mpctl.model.operators.table import OperatorTable
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.activations import layer_bytes, stage_chunks
from mpctl.plan.estimate.flops import block_flops, step_flops
from mpctl.plan.estimate.saved import layer_activations
from tests.jobs import GPT, job_of, shape_of

CAUSAL = AttentionOp("attention", is_causal=True)


def kept(block: OperatorGroup, shapes: ActivationShapes) -> list[str]:
    return [tensor.name for tensor in layer_activations(shapes, block).saved]


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({}, {"attention_norm input", "attention.qkv input", "mlp_norm input", "mlp.up input"}),
        (
            {"model.parallel_residual": True},  # both norms read the layer's input
            {"attention_norm input", "attention.qkv input", "mlp.up input"},
        ),
        ({"model.parallel_residual": True, "model.shared_norm": True}, {"attention_norm input", "attention.qkv input"}),
        (
            {"model.norm_order": "output"},
            {"attention.qkv input", "attention_output_norm input", "mlp.up input", "mlp_output_norm input"},
        ),
        (
            {"model.norm_order": "sandwich"},
            {
                "attention_norm input",
                "attention.qkv input",
                "attention_output_norm input",
                "mlp_norm input",
                "mlp.up input",
                "mlp_output_norm input",
            },
        ),
    ],
)
def test_a_tensor_that_two_operations_read_is_saved_once(settings: dict[str, Any], inputs: set[str]) -> None:
    layout = JobLayout.of(job_of({**GPT, **settings}))
    names = kept(layout.table.stacks[0].block_of(0), activation_shapes(layout))
    hidden = [n for n in names if n.endswith(" input") and n != "mlp.down input"]
    assert sorted(hidden) == sorted(inputs)


@pytest.fixture(scope="module")
def mixed() -> JobLayout:
    """12 layers on 2 stages of 2 chunks; every third has norms of queries and keys besides."""
    job = job_of(
        {
            **GPT,
            "parallel.pp": 2,
            "parallel.vpp": 2,
            "parallel.tp": 2,
            "parallel.dp": 2,
            "parallel.zero": 1,
            "training.global_batch_size": 8,
        }
    )
    plain = JobLayout.of(job)
    (stack,) = plain.table.stacks
    normed_model = shape_of(job).model_copy(update={"qk_norm": True})
    normed = decoder_layer(normed_model, HIDDEN, CAUSAL._replace(has_norms=True))
    blocks = tuple(normed if layer % 3 == 2 else stack.block_of(layer) for layer in range(12))
    table = OperatorTable((replace(stack, blocks=blocks),))
    return JobLayout.assemble(job, plain.model, table, plain.stages)


def test_layers_of_a_stack_may_differ_in_kind(mixed: JobLayout) -> None:
    """Parameters, buckets, FLOP and memory of a stage are the sums of those of its own layers."""
    (stack,) = mixed.table.stacks
    plain, normed = stack.kinds
    more = {w.name for w in normed.weights} - {w.name for w in plain.weights}
    assert more == {f"attention.{x}_norm.{y}" for x in ("query", "key") for y in ("weight", "bias")}
    for stage in range(2):
        layers = [n for span in mixed.stages[stage] for n in range(*span)]
        expected = {f"layers.{n}.{w.name}": w.numel for n in layers for w in stack.block_of(n).weights}
        names = {
            name: size
            for bucket in mixed.buckets(stage)
            for name, size in zip(bucket.names, bucket.sizes, strict=True)
            if name.startswith("layers.")
        }
        assert set(names) == set(expected)
        assert sum(mixed.bucket_shapes(stage).values()) == len(mixed.buckets(stage))
        flow = dict(
            zip((plain, normed), (mixed.table.flows[0].runs[0][1], mixed.table.flows[0].runs[1][1]), strict=True)
        )
        alone = sum(block_flops(mixed, flow[stack.block_of(n)]) for n in layers)
        ends = step_flops(mixed, stage) / mixed.num_microbatches - alone
        assert ends >= 0 and (stage == 1) == (ends > 0)  # the head is on the last stage
    shapes = activation_shapes(mixed)
    saved = {b: shapes.bytes_of(layer_activations(shapes, b).saved) for b in (plain, normed)}
    assert saved[normed] > saved[plain]
    by_chunk = [sum(saved[stack.block_of(n)] for n in range(*span)) for span in mixed.stages[0][1:]]
    batch = stage_chunks(mixed, 0, shapes)[1].saved - by_chunk[0]
    assert 0 <= batch < saved[plain] / 10  # the chunk's part of the batch's arrays alone


def test_a_peak_is_that_of_the_listed_operations() -> None:
    """By hand, in units of r h for r = b s rows of fp32 elements and ffn 4 h, no dropout; m: bytes of
    the largest matrix, 4 h^2. The peak is in the second product of the MLP: the gradients of the
    hidden states, 1, and of the activation, 4, and m. Attention behind the MLP needs 3 h^2 + 5
    (gradients of hidden states, of q k v and of the norm) at most, less than an MLP before whose
    backward attention has freed all it saved: norm, its result, q k v and context, 6, statistics."""
    layout = JobLayout.of(job_of({**GPT, "training.dropout": 0.0, "training.attention_dropout": 0.0}))
    shapes, block = activation_shapes(layout), layout.table.stacks[0].block_of(0)
    stream, matrix = shapes.stream_bytes(), 4 * shapes.dims["hidden"] ** 2 * shapes.value
    saved = {id(one): shapes.bytes_of(one.saved(shapes, {"context"})) for one in block.operations}
    first, second = (
        tuple(one for one in block.operations if (one.part == "mlp") == is_mlp) for is_mlp in (False, True)
    )
    assert layer_bytes(shapes, block).temporary == 5 * stream + matrix
    turned = layer_bytes(shapes, OperatorGroup((*second, *first)))
    assert turned.saved == layer_bytes(shapes, block).saved
    assert turned.temporary == max(
        5 * stream + matrix - sum(saved[id(one)] for one in first), 5 * stream + matrix * 3 // 4
    )
    for kind in (AttentionOp, Activation):
        rest = OperatorGroup(tuple(one for one in block.operations if not isinstance(one, kind)))
        assert layer_bytes(shapes, rest).saved < layer_bytes(shapes, block).saved
