"""Adapters of parameter-efficient fine-tuning: which products have one, of what rank, over which base.

LoRA (arXiv 2106.09685): Y = X W + s (X A^T) B^T with A [rank, in] and B [out, rank], s = alpha / rank;
W is frozen. DoRA (arXiv 2402.09353): the rows of W + s B A keep a trained length. QLoRA (arXiv
2305.14314): W is stored in 4 bits.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import BeforeValidator, Field

from mpctl.spec.base import DType, Probability, StrictModel

AdapterKind = Literal["lora", "qlora", "dora"]
BasePrecision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4-gptq", "nf4"]
QUANTIZED: tuple[BasePrecision, ...] = ("fp8", "int8", "int4-gptq", "nf4")


def _as_list(value: Any) -> Any:
    """A single name as a list of it."""
    return [value] if isinstance(value, str) else value


Names = Annotated[list[Annotated[str, MinLen(1)]], BeforeValidator(_as_list)]


class AdapterSpec(StrictModel):
    """Adapters of linear layers: all other parameters are frozen."""

    kind: AdapterKind = Field(
        "lora",
        description="lora; qlora: lora over a base in 4 bits (nf4, unless base_precision names another); "
        "dora: lora with trained lengths of the rows of W + BA",
    )
    rank: Annotated[int, Ge(1), Le(2**16)] = Field(16, description="rank of A and B")
    alpha: Annotated[float, Ge(1e-6), Le(1e6)] | None = Field(
        None, description="BA is multiplied by alpha / rank; 2 x rank when absent"
    )
    rslora: bool = Field(False, description="multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)")
    dropout: Probability = Field(0.0, description="dropout probability of the adapter's input, in its branch alone")
    targets: Annotated[Names, MinLen(1)] = Field(
        ["all-linear"],
        description="products with an adapter: all-linear, attention, mlp, or names as in Hugging Face's modules, "
        "such as q_proj; all-linear is every product of the layers, each expert's too, without router and head",
    )
    modules_to_save: Names = Field(
        [], description="modules trained in full next to the adapters, such as lm_head or embed_tokens"
    )
    base_precision: BasePrecision | None = Field(
        None, description="data type in which the frozen products' weights are stored; training.dtype when absent"
    )
    double_quantization: bool = Field(True, description="nf4: the scale of each block is stored in 8 bits")
    dtype: DType | None = Field(None, description="data type of A and B; training.dtype when absent")

    @property
    def scale(self) -> float:
        """The factor of BA.

        >>> AdapterSpec(rank=16, alpha=32.0).scale, AdapterSpec(rank=16, alpha=32.0, rslora=True).scale
        (2.0, 8.0)
        """
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def stored_as(self) -> BasePrecision | None:
        """`base_precision`, with that of kind qlora; None: training.dtype."""
        return self.base_precision or ("nf4" if self.kind == "qlora" else None)

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen products' weights are stored in 8 or 4 bits."""
        return self.stored_as in QUANTIZED
