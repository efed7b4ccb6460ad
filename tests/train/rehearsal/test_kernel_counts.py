"""What operations cost on a GPU, by hand."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mpctl
from mpctl.train.rehearsal.fake_backend import fake_tensors
from mpctl.train.rehearsal.kernel_counts import COMPOSITES, OpCost, cost_of, is_known, region, seen_pairs, tensor_bytes

META = torch.device("meta")
aten = torch.ops.aten


class Costs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.costs: list[OpCost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cost = cost_of(func, args, kwargs or {}, result)
        self.costs += [] if cost is None else [cost]
        return result


def costs(work: Any, *shapes: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """(name, kernels, bytes) of what `work` does with tensors of these shapes in bf16."""
    with fake_tensors():
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in shapes]
        with Costs() as seen:
            work(*tensors)
    return [(cost.name, cost.launches, cost.moved) for cost in seen.costs]


@pytest.mark.parametrize(
    ("work", "shapes", "found"),
    [
        (lambda x, y: x + y, [(4, 8), (4, 8)], [("add", 1, 3 * 64)]),
        (lambda x: x + x, [(4, 8)], [("add", 1, 2 * 64)]),  # one tensor, read once
        (lambda x: x.add_(1), [(4, 8)], [("add_", 1, 2 * 64)]),  # there and back
        (lambda x: x.zero_(), [(4, 8)], [("zero_", 1, 64)]),  # written only
        (lambda x: x[4:].zero_(), [(4, 8)], []),  # no elements
        (lambda x, y: x.copy_(y), [(4, 8), (4, 8)], [("copy_", 1, 2 * 64)]),
        (lambda x: x.t().contiguous(), [(4, 8)], [("clone", 1, 2 * 64)]),
        (lambda x: x.view(8, 4).transpose(0, 1)[1:], [(4, 8)], []),  # views
        (lambda x: x.expand(100, 4, 8).sum(0), [(4, 8)], [("sum", 1, 2 * 64)]),
        (lambda x: x.float(), [(4, 8)], [("_to_copy", 1, 64 + 128)]),
        (lambda x, y: x @ y, [(4, 8), (8, 16)], [("mm", 1, 64 + 256 + 128)]),
        (lambda x: x.masked_fill(x > 0, 0.0), [(4, 8)], [("gt", 1, 96), ("masked_fill", 2, 224)]),
    ],
)
def test_kernels_and_bytes_by_hand(work: Any, shapes: Any, found: Any) -> None:
    assert costs(work, *shapes) == found


def test_a_table_is_read_as_far_as_rows_are_looked_up() -> None:
    def look_up(table: Tensor) -> None:
        torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64, device=META), table)

    rows, indices = 3 * 8 * 2, 3 * 8
    assert costs(look_up, (1000, 8))[1:] == [("embedding", 1, rows + rows + indices)]


def test_many_tensors_take_a_launch_for_as_many_as_fit() -> None:
    def add(x: Tensor) -> None:
        torch._foreach_add_([x] * 129, [x] * 129)

    assert costs(add, (4, 8))[0][:2] == ("_foreach_add_", 3)  # 64 pairs a launch


def test_products_and_attention_have_their_flop() -> None:
    with fake_tensors(), Costs() as seen:
        x = torch.empty((4, 8), dtype=torch.bfloat16, device=META)
        aten.addmm(x[0], x, x.t()[:, :1].expand(8, 8))
        q = torch.empty((2, 4, 16, 8), dtype=torch.bfloat16, device=META)
        aten._scaled_dot_product_flash_attention(q, q[:, :2], q[:, :2], 0.0, True)
    works = [cost.work for cost in seen.costs if cost.work is not None]
    # 2 m n k; half of 16 x 16 pairs, 4 heads of 8 columns, two products
    assert [work.flops for work in works] == [2 * 4 * 8 * 8, 4 * (2 * 16 * 16 / 2) * 32]


def test_a_block_of_rows_sees_the_keys_before_its_end() -> None:
    """Rows 2 and 3 of 4 keys: 2.5 + 3.5 pairs; with a window of 2: 2 + 2. Row 0 alone: a half."""
    assert seen_pairs(range(2, 4), 4, 0) == 6 and seen_pairs(range(2, 4), 4, 2) == 4
    assert seen_pairs(range(1), 4, 0) == 0.5


def test_a_region_is_the_same_however_it_is_looked_at() -> None:
    x = torch.zeros(4, 6, 8)
    assert region(x) == region(x.view(24, 8).t()) == region(x.permute(2, 0, 1)) == (0, ((192, 1),))
    assert region(x[:, 2:4]) == (16, ((4, 48), (16, 1)))
    assert tensor_bytes(x[:, 2:4]) == 4 * 16 * 4 and tensor_bytes(x[:0]) == 0


def test_an_operation_that_torch_splits_by_a_rule_has_to_be_in_a_table() -> None:
    assert is_known(aten.add.Tensor) and is_known(aten.masked_fill.Scalar)
    assert not is_known(aten.block_diag.default)


def test_a_copy_of_many_does_not_read_what_it_overwrites() -> None:
    def copy(x: Tensor, y: Tensor) -> None:
        torch._foreach_copy_([x], [y])
        torch._foreach_zero_([x])

    found = [("_foreach_copy_", 1, 128), ("_foreach_zero_", 1, 64)]
    assert costs(copy, (4, 8), (4, 8)) == found


@pytest.mark.parametrize(("rows", "kernels"), [(3072, 2), (3073, 10)])
def test_few_rows_of_a_tables_gradient_are_not_sorted(rows: int, kernels: int) -> None:
    def backward(grad: Tensor) -> None:
        indices = torch.zeros(rows, dtype=torch.int64, device=META)
        aten.embedding_dense_backward(grad, indices, 10, -1, False)

    assert costs(backward, (rows, 8))[-1][:2] == ("embedding_dense_backward", kernels)


def launches_of(function: ast.AST, functions: dict[str, ast.AST], launchers: set[str]) -> int:
    """Calls of launchers in a function or lambda, and in functions of its module that it calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [func.id for func in calls if isinstance(func, ast.Name)]
    own = sum(name in launchers for name in names)
    return own + sum(launches_of(functions[name], functions, launchers) for name in names if name in functions)


def launches_by_operation(source: str) -> dict[str, int]:
    """Kernels that each operation of a module in mpctl/train/kernels/triton launches, as its source has
    them: `define_operation("name(..)", run, fake)`, and the calls of each `X = Launcher(..)` in
    `run`."""
    tree = ast.parse(source)
    launchers = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Launcher(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions: dict[str, ast.AST] = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, int] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "define_operation":
            schema, run = call.args[0], call.args[1]
            name = next(n.value for n in ast.walk(schema) if isinstance(n, ast.Constant))
            body = functions[run.id] if isinstance(run, ast.Name) else run
            found[str(name).partition("(")[0]] = launches_of(body, functions, launchers)
    return found


def test_our_own_operations_launch_as_many_kernels_as_are_counted() -> None:
    folder = Path(mpctl.__file__).parent / "train" / "kernels" / "triton"
    found = [launches_by_operation(path.read_text("utf-8")) for path in folder.glob("*.py")]
    launches = {name: count for each in found for name, count in each.items()}
    assert {"dropout", "attention", "attention_backward"} <= set(launches)
    assert launches == {name: COMPOSITES.get(name, 1) for name in launches}
