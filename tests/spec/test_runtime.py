"""What a runtime's operations read and write may differ on accelerators."""

from __future__ import annotations

from mpctl.spec.runtime import get_profile


def test_mpctl_drops_in_one_kernel_on_an_accelerator_and_step_by_step_on_a_cpu() -> None:
    operators = get_profile("mpctl").operators
    on_gpu, on_cpu = operators.on(True), operators.on(False)
    # x, mask and gradient: an extra byte of mask forward, 2 + 1 + 2 bytes backward, in passes of 2
    assert (on_gpu.dropout.forward, on_gpu.dropout.backward) == (1 / 2, 5 / 2)
    assert on_cpu == operators and on_cpu.dropout.forward > on_gpu.dropout.forward
    assert on_gpu.logits.forward == 2 * 2 and on_gpu.scores == operators.scores


def test_a_runtime_without_figures_for_accelerators_has_the_same_everywhere() -> None:
    operators = get_profile("megatron-core").operators
    assert operators.on(True) == operators.on(False) == operators
