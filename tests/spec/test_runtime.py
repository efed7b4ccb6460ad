"""What a runtime's operations move may differ on accelerators; a runtime is known by its fields alone."""

from __future__ import annotations

import ast
from pathlib import Path

import mpctl
from mpctl.model.operators.kernel_sets import KERNEL_SETS
from mpctl.spec.presets import preset_names
from mpctl.spec.runtime import get_profile


def test_mpctl_drops_in_one_kernel_on_an_accelerator_and_step_by_step_on_a_cpu() -> None:
    operators = get_profile("mpctl").operators
    on_gpu, on_cpu = operators.on(True), operators.on(False)
    assert on_cpu == operators
    assert on_cpu.dropout.forward > on_gpu.dropout.forward
    assert on_cpu.dropout.backward > on_gpu.dropout.backward
    assert on_gpu.logits.forward == 2 * 2 and on_gpu.scores == operators.scores
    # cuBLAS adds a matrix's gradient to the step's itself
    assert on_gpu.gradient_bytes == 0 < on_cpu.gradient_bytes


def test_a_runtime_without_figures_for_accelerators_has_the_same_everywhere() -> None:
    operators = get_profile("megatron-core").operators
    assert operators.on(True) == operators.on(False) == operators


def test_no_code_compares_the_name_of_a_runtime() -> None:
    """What a runtime does is asked of its profile's fields. Comparing two jobs' runtimes is fine."""
    package = Path(mpctl.__file__).parent
    names, found = {*preset_names("runtimes"), *KERNEL_SETS}, []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            texts = {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}
            said = ast.unparse(node)
            if "DEFAULT_RUNTIME" in said or (texts & names and ("runtime" in said or "memory.kernels" in said)):
                found.append(f"{path.relative_to(package)}:{node.lineno}: {said}")
    assert not found
