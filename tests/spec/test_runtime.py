"""What a runtime's operations read and write may differ on accelerators."""

from __future__ import annotations

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
