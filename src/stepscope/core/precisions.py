"""One record for each precision of a step (`--dtype`): what is kept in how many bytes, and what is multiplied.

To add a precision, write its record, and how a model is brought to it (`training/training_step.py`).
"""

from typing import Literal

import msgspec
from msgspec.structs import replace

from stepscope.core.errors import InputError

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure", "bf16-master", "fp8", "fp8-row"]
"""fp32: true fp32 everywhere. tf32: fp32 storage, products on TF32 Tensor Cores. bf16, fp16: autocast over fp32
parameters (fp16 with gradient scaling). bf16-pure: parameters, gradients and optimizer state in bf16. bf16-master:
weights and their gradients in bf16, written by the optimizer from master weights in fp32; norms, optimizer state and
loss in fp32. fp8, fp8-row: as bf16-master, and the products of the blocks' linear layers take operands of 8 bits,
scaled by tensor or by row."""


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an element, by the kind of tensor, and what products take."""

    weights: int
    """Of a parameter of two dimensions or more, and of its gradient."""
    vectors: int
    """Of any other parameter, as a norm's, and of its gradient."""
    buffers: int
    """Of a buffer of the model, as the angles of RoPE."""
    moments: int
    """Of each of AdamW's two moments, where the optimizer does not say another."""
    masters: int = 0
    """Of the master copy of a weight; 0 where there is none."""
    residual: int
    """Of the residual stream."""
    products: int
    """Of the inputs and outputs of matrix products."""
    tensors: Literal["fp32", "bf16", "fp16"]
    """The dtype of the tensors that matrix products and attention take."""
    multiplies: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    """The rate of matrix products: a column of a device's datasheet."""
    scaled: Literal["", "tensor", "row"] = ""
    """By what operands of 8 bits are scaled; empty where products take none."""
    autocast: bool = False
    """Whether torch.autocast casts the inputs of products."""


_FULL = Precision(weights=4, vectors=4, buffers=4, moments=4, residual=4, products=4, tensors="fp32", multiplies="fp32")
_MASTERS = Precision(
    weights=2, vectors=4, buffers=4, moments=4, masters=4, residual=2, products=2, tensors="bf16", multiplies="bf16",
    autocast=True,
)  # fmt: skip

PRECISIONS: dict[Dtype, Precision] = {
    "fp32": _FULL,
    "tf32": replace(_FULL, multiplies="tf32"),
    "bf16": replace(_FULL, products=2, tensors="bf16", multiplies="bf16", autocast=True),
    "fp16": replace(_FULL, products=2, tensors="fp16", multiplies="fp16", autocast=True),
    "bf16-pure": Precision(
        weights=2, vectors=2, buffers=2, moments=2, residual=2, products=2, tensors="bf16", multiplies="bf16"
    ),
    "bf16-master": _MASTERS,
    "fp8": replace(_MASTERS, multiplies="fp8", scaled="tensor"),
    "fp8-row": replace(_MASTERS, multiplies="fp8", scaled="row"),
}

SCALED_MULTIPLE = 16
"""Sizes that products of 8 bits take, and their number of rows, are multiples of this."""


def takes_scaled(in_features: int, out_features: int) -> bool:
    """Whether the products of a linear layer of these sizes take operands of 8 bits."""
    return in_features % SCALED_MULTIPLE == 0 and out_features % SCALED_MULTIPLE == 0


def check_scaled_layers(layers: int, dtype: str) -> None:
    """Raise InputError where no linear layer of a model `takes_scaled`."""
    if not layers:
        raise InputError(
            f"dtype {dtype} needs linear layers whose sizes are multiples of {SCALED_MULTIPLE}, and this model has "
            "none: choose bf16"
        )


def check_scaled_rows(rows: int) -> None:
    """Raise InputError for a number of rows, as of tokens, that products of 8 bits do not take."""
    if rows % SCALED_MULTIPLE:
        raise InputError(
            f"products of 8 bits take rows in multiples of {SCALED_MULTIPLE}, and a layer was given {rows}: "
            "change the batch or the sequence, or choose --dtype bf16"
        )
