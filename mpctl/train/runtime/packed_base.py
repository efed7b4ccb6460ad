"""The frozen base of adapters in nf4: packed once its values are there (train/layers/nf4.py).

Values are read into host memory, so that a device holds one weight at a time in the training dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from mpctl.model.operators.table import OperatorTable
from mpctl.train.layers.grouped_linear import GroupedLinear
from mpctl.train.layers.linear import ParallelLinear
from mpctl.train.layers.nf4 import Nf4Packer
from mpctl.train.layers.parameters import set_stored
from mpctl.train.runtime.zero.param_store import release


@torch.no_grad()
def pack_base(module: nn.Module, table: OperatorTable, device: torch.device) -> None:
    """Pack the frozen products of a stage's layers, where the job stores them in nf4, and free their
    memory. Raises ValueError for one whose module does not multiply by stored bits."""
    adapter = table.adapter
    if adapter is None or adapter.stored_as != "nf4":
        return
    packer = Nf4Packer(double=adapter.double_quantization)
    for name, parameter in stored_parameters(dict(module.named_parameters()), table):
        owner = module.get_submodule(name.removesuffix(".weight"))
        if not isinstance(owner, (ParallelLinear, GroupedLinear)):
            raise ValueError(f"{name}: {type(owner).__name__} has no product by stored bits")
        packed = packer.pack(parameter.detach().to(device))
        parameter.data = torch.empty_like(parameter, device=device)
        release(parameter)
        set_stored(parameter, packed)


def stored_parameters(
    parameters: Mapping[str, nn.Parameter], table: OperatorTable
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of these, by global name, that the job stores in fewer bits."""
    prefixes = tuple(f"{stack.prefix}." for stack in table.stacks)
    for name, parameter in parameters.items():
        # layers.3.attention.qkv.weight, of a stack in the module `layers`
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None and name.removeprefix(prefix).partition(".")[2] in table.quantized_names:
            yield name, parameter
