"""Muon: updates of matrices that are orthogonalised by Newton-Schulz steps (Jordan et al., 2024; at scale
arXiv 2502.16982). Names and defaults are Megatron-Core's."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from mpctl.spec.base import PositiveHyper, Probability, StrictModel


class MuonSpec(StrictModel):
    """Settings of optimizer muon. Matrices of the layers are updated by it; embeddings, head, norms and biases by
    AdamW, with the keys of [training]."""

    momentum: Probability = Field(0.95, description="decay of the momentum")
    nesterov: bool = Field(True, description="orthogonalise the gradient plus the momentum of the next step")
    steps: Annotated[int, Ge(1), Le(20)] = Field(5, description="Newton-Schulz steps of an update")
    coefficients: Literal["quintic", "polar_express"] = Field(
        "quintic", description="polynomials of the Newton-Schulz steps"
    )
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = Field(
        "spectral", description="factor of an update by its shape"
    )
    extra_scale: PositiveHyper = Field(
        0.2, description="further factor; 0.2 with scale_mode spectral has AdamW's root mean square"
    )
    split_qkv: bool = Field(True, description="orthogonalise Q, K and V of a fused product apart")
    tp_mode: Literal["duplicated", "distributed", "blockwise"] = Field(
        "duplicated",
        description="of a matrix that tp cuts: gathered and computed by each rank, by sums over ranks, or each part "
        "as a matrix of its own (depends on tp)",
    )
