"""What a software holds in memory besides what every training does: a runtime profile's [memory].

Which tensors its kernels keep, what it keeps gradients in, what its allocator and its libraries
take beyond what it asked for. From the software's sources where not said otherwise; nothing here
knows a model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpctl.spec.base import DType, NonNegative, Positive, Table


class Memory(Table):
    kernels: Literal["mpctl", "megatron", "half"] = Field(
        "mpctl", description="whose tensors backward keeps (families/kept.py)"
    )
    parameter_dtype: DType | None = Field(
        None, description="parameters are kept in it and it is stepped, without masters"
    )
    gradient_bytes: dict[DType, NonNegative] = Field(
        default_factory=dict, description="of a gradient by the training's dtype; else reduced"
    )
    assumes_dropout: bool = Field(
        False, description="where scores are held, dropout was on: the software's default"
    )
    logit_bytes: NonNegative = Field(0.0, description="of a logit at the loss, beside itself")
    weight_gradients: Literal["one", "layer"] = Field(
        "one", description="the largest dW for a moment, or stand-ins of a layer's for good"
    )
    slack: Positive = Field(1.0, description="reserved by the allocator for an allocated byte")
    context_bytes: NonNegative = Field(
        0.0, description="of the device's libraries, outside of the allocator"
    )
    source: str = ""
