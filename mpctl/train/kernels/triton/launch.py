"""Launches of kernels, prepared once for each form of their arguments.

Triton's own launch finds the compiled kernel anew each time: it classifies every argument, reads
settings and builds a key of text, some 15 us of the host beside what a caller spends on blocks and
grids. Here the first launch of a form is Triton's, and what it compiled is kept: later ones cost a
key, and what hands the arguments to the device (`mpctl bench kernels` measures it).

A form is finer than what Triton compiles by: each tensor's type, shape, strides and address modulo
256 (Triton asks whether 16 divides it), the device, and every number's value (Triton asks whether
it is 1, 16 divides it or 32 bits hold it), so that equal forms always run the same compiled kernel.
A number that differs from launch to launch would never be met again: such are given apart, as
`varying`, and the kernel declares them in `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor


def blocks(places: int, block: int) -> int:
    """Return the number of blocks that cover `places`."""
    return -(-places // block)


def power_of_2(number: int) -> int:
    """Round `number`, 1 or more, up to a power of 2."""
    return int(1 << (number - 1).bit_length())


FORMS = 1024  # of a kernel, before they are forgotten: one that decodes meets a new one each step
ALIGNMENT = 255


class KernelLaunch(NamedTuple):
    """Settings of a kernel's launch. grid: programs by axis. sizes: its arguments after tensors and
    varying numbers. constants: its constexprs. options: of the compiler, such as num_warps."""

    grid: tuple[int, ...]
    sizes: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class Launcher:
    """Launches a kernel. module: imports the module of mpctl.train.kernels.triton.jit that defines it,
    which imports triton, for the first launch."""

    def __init__(self, module: Callable[[], ModuleType], name: str) -> None:
        self._module, self._name = module, name
        self._ready: dict[Hashable, Callable[..., Any]] = {}

    def __call__(
        self,
        tensors: tuple[Tensor | None, ...],
        facts: Hashable,
        prepare: Callable[..., KernelLaunch],
        *given: Any,
        varying: tuple[float, ...] = (),
    ) -> None:
        """KernelLaunch on the device of the first tensor. facts and the tensors' forms determine
        `prepare(*given)`, which is called where they are met for the first time."""
        forms = [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & ALIGNMENT) for x in tensors]
        form = (facts, tensors[0].get_device(), *forms)  # type: ignore[union-attr]
        run = self._ready.get(form)
        if run is None:
            self._first(form, (*tensors, *varying), prepare(*given))
        else:
            run(*tensors, *varying)

    def _first(self, form: Hashable, arguments: tuple[Any, ...], launch: KernelLaunch) -> None:
        kernel = getattr(self._module(), self._name)
        grid, sizes, constants, options = launch
        compiled = kernel[grid](*arguments, *sizes, **constants, **options)
        if compiled is None:  # interpreted
            return
        start = compiled[(*grid, 1, 1)[:3]]
        first = len(arguments) + len(sizes)
        rest = (*sizes, *(constants[name] for name in kernel.arg_names[first:]))
        if len(self._ready) >= FORMS:
            self._ready.clear()
        self._ready[form] = lambda *arguments: start(*arguments, *rest)
