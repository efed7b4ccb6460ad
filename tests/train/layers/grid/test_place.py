"""What a rank of a grid holds of fused and whole parameters, and what it refuses to be given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mpctl.train.layers.attention import AttentionConfig, ParallelSelfAttention
from mpctl.train.layers.grid.tensor_parallel import GridTensorParallel
from mpctl.train.layers.linear import WEIGHTS
from mpctl.train.layers.parameters import partial_kind, shard_of
from mpctl.train.layers.shard_context import ShardContext, TensorParallel
from tests.train.layers.grid.echo import echo_context
from tests.train.layers.grid.grids import GRIDS


def test_a_fused_matrix_is_cut_part_by_part() -> None:
    """2d on 4 ranks, rank 1 in row 0 and column 1: the second half of q, of k and of v, and the
    first half of the inputs."""
    context, _ = echo_context(("2d", 4, None), 1)
    fused = shard_of(context.parameter((16, 8), ("heads", "hidden"), WEIGHTS, (8, 4, 4)))
    assert fused.cuts == {0: (range(4, 8), range(10, 12), range(14, 16)), 1: (range(4),)}
    assert fused.local_shape == (8, 4)
    whole = shard_of(context.parameter((16, 8), ("heads", "hidden"), WEIGHTS))
    assert whole.cuts == {0: (range(8, 16),), 1: (range(4),)}


def test_a_position_table_is_cut_over_hidden_states_alone() -> None:
    context, samples = echo_context(("3d", 8, None), 4)[0], torch.arange(8)
    assert context.coords == {"weight": 0, "input": 0, "output": 1}
    table = context.parameter((5, 8), ("positions", "hidden"), WEIGHTS)
    assert shard_of(table).cuts == {1: (range(4, 8),)}
    assert context.own_samples(samples).tolist() == [0, 1]
    assert context.own_samples(samples, inside=True).tolist() == [4, 5]


def test_a_grid_has_every_method_of_a_mode() -> None:
    wanted = {name for name in vars(TensorParallel) if not name.startswith("_")}
    assert wanted <= set(dir(GridTensorParallel))


@pytest.mark.parametrize("name", GRIDS)
def test_partial_gradients_are_marked_with_their_group(name: str) -> None:
    context, _ = echo_context(GRIDS[name], 0)
    grid, layers = context.grid, context.layers
    column = layers.column_linear(48, 96, bias=True, init=WEIGHTS)
    norm = context.norm("layernorm", 48, eps=1e-5)
    table = context.replicated_table(7, 48, init=WEIGHTS)
    words = context.word_bias(48)
    told = [*map(partial_kind, (column.weight, column.bias, norm.weight, table.weight, words))]
    assert told == [
        grid.partial_kind(dims)
        for dims in (("ffn", "hidden"), ("ffn",), ("hidden",), ("positions", "hidden"), ("vocab",))
    ]
    assert all(kind in context.groups for kind in told if kind)
    assert shard_of(words).local_shape == (48 // grid.feature_parts,)


def _context(mode: str, tp: int) -> ShardContext:
    return echo_context((mode, tp, None), 0)[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda c: c.layers.column_linear(8, 7, bias=False, init=WEIGHTS), "7 is not .* by 2"),
        (lambda c: c.layers.column_linear(6, 8, bias=False, init=WEIGHTS), "6 is not .* by 4"),
        (lambda c: c.layers.row_linear(6, 8, bias=False, init=WEIGHTS), "6 is not .* by 4"),
        (lambda c: c.layers.column_linear(8, 8, bias=True, init=WEIGHTS, parts=(5, 3)), "5 is not"),
        (lambda c: c.norm("rmsnorm", 7, eps=1e-5), "7 is not divisible by 2"),
        (lambda c: c.local_heads(3), "3 is not divisible by 2"),
        (lambda c: c.own_samples(torch.ones(6)), "6 is not divisible by 4"),
        (
            lambda c: c.layers.word_embedding(9, 8, padded_vocab=8, init=WEIGHTS),
            "padded_vocab 8 is below the vocabulary of 9",
        ),
        (lambda c: c.layers.output_head(9, 8, padded_vocab=10, init=WEIGHTS), "10 is not divisible by 4"),
    ],
)
def test_what_a_cube_does_not_divide_is_refused(make: Callable[[ShardContext], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make(_context("3d", 8))


def test_ranks_of_a_grid_do_not_share_the_columns_of_a_head() -> None:
    """As those of 1d do; the rules refuse it, too."""
    config = AttentionConfig(16, 4, kv_heads=1)
    for mode, tp in (("2d", 4), ("3d", 8)):
        with pytest.raises(ValueError, match="1 is not divisible by 2"):
            ParallelSelfAttention(config, _context(mode, tp), "layers.0")


def test_print_says_which_part_a_rank_has() -> None:
    layers = _context("2d", 4).layers
    texts = [
        repr(layers.column_linear(8, 16, bias=True, init=WEIGHTS)),
        repr(_context("2d", 4).norm("layernorm", 8, eps=1e-5)),
        repr(layers.word_embedding(13, 8, padded_vocab=16, init=WEIGHTS)),
    ]
    assert texts == [
        "GridLinear(4 -> 8 (part), bias=True)",
        "LayerNorm(4 of 8, eps=1e-05)",
        "GridEmbedding(8 rows (part) of 13 words, 4 (part))",
    ]


def test_words_of_a_rank_by_hand() -> None:
    """2d on 4 ranks, 13 words in 16 rows: a rank looks up the rows of its row of the grid, and
    makes logits for those of its column."""
    tables = [
        echo_context(("2d", 4, None), rank)[0].layers.word_embedding(13, 8, padded_vocab=16, init=WEIGHTS)
        for rank in range(4)
    ]
    assert [(t.rows, t.words) for t in tables] == [
        (range(8), range(8)),
        (range(8), range(8, 13)),
        (range(8, 16), range(8)),
        (range(8, 16), range(8, 13)),
    ]


def test_a_product_of_frozen_weights_keeps_no_input() -> None:
    """dX needs the weight alone, dW the input alone."""
    for mode, tp in (("2d", 4), ("3d", 8)):
        layers = _context(mode, tp).layers
        layer = layers.column_linear(8, 8, bias=False, init=WEIGHTS)
        x = torch.ones(4, 1, 4, requires_grad=True)
        layer.weight.requires_grad_(False)
        y = layer(x)  # its graph lives as long as it does
        saved = y.grad_fn.saved_tensors
        assert saved[0] is None and saved[1] is layer.weight
        layer.weight.requires_grad_()
        y = layer(x.detach())
        saved = y.grad_fn.saved_tensors
        assert saved[0].data_ptr() == x.data_ptr() and saved[1] is None
