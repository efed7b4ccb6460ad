"""What a runtime's operations read and write may differ on accelerators."""

from __future__ import annotations

from mpctl.spec.runtime import get_profile


def test_mpctl_drops_in_one_kernel_on_an_accelerator_and_step_by_step_on_a_cpu() -> None:
    operators = get_profile("mpctl").operators
    on_gpu, on_cpu = (operators.on(is_gpu, "dropout") for is_gpu in (True, False))
    # x, mask and gradient: an extra byte of mask forward, 2 + 1 + 2 bytes backward, in passes of 2
    assert (on_gpu.forward, on_gpu.backward) == (1 / 2, 5 / 2)
    assert on_cpu == operators.dropout and on_cpu.forward > on_gpu.forward
    assert operators.on(True, "logits").forward == 2 * 2
    assert operators.on(False, "logits") == operators.logits


def test_a_runtime_without_figures_for_accelerators_has_the_same_everywhere() -> None:
    operators = get_profile("megatron-core").operators
    assert operators.on(True, "dropout") == operators.on(False, "dropout")
    assert operators.on(True, "logits") == operators.on(False, "logits")
