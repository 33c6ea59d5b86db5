"""The highest rates of a device, measured where they were measured and by the datasheet otherwise; each says which."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stepscope.core.device_spec import Ceilings, DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.work.operators.calls import ELEMENT_BYTES
from stepscope.traces.kernels.names.decoding import decode

Arithmetic = Literal["fp64", "fp32", "tf32", "3xtf32", "bf16", "fp16", "fp8", "int8", "int32"]
"""What multiplies. fp32: CUDA cores. tf32, bf16, fp16, fp8: Tensor Cores. 3xtf32: fp32 products as three in TF32."""

_OF_OPERANDS: dict[str, Arithmetic] = {
    "double": "fp64", "c10::BFloat16": "bf16", "at::BFloat16": "bf16", "c10::Half": "fp16", "at::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A rate in FLOP/s or bytes/s, and where it comes from."""

    rate: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The rates that bound an operator. A rate that is neither measured nor documented is missing, never guessed."""

    flops_per_s: Mapping[str, Peak] = field(default_factory=dict)
    """Peak FLOP/s by `Arithmetic`."""
    bytes_per_s: Peak | None = None
    """Peak bandwidth of device memory: bytes read plus bytes written per second."""


def peaks_for(spec: DeviceSpec | None, ceilings: Ceilings | None, device_names: Collection[str] = ()) -> Peaks:
    """Measured ceilings first, then the datasheet. `device_names`: the devices that a trace names, if it does.

    Raises InputError where ceilings were measured on another device than the trace's.
    """
    if ceilings is not None and device_names and set(device_names) != {ceilings.device_name}:
        traced = ", ".join(sorted(device_names))
        raise InputError(f"the ceilings were measured on {ceilings.device_name}, but the trace is of {traced}")
    rates: dict[str, Peak] = {}
    memory = None
    if spec is not None:
        rates = {dtype: Peak(rate=rate, source=spec.source) for dtype, rate in spec.peak_flops_per_s.items()}
        memory = Peak(rate=spec.peak_bytes_per_s, source=spec.source) if spec.peak_bytes_per_s else None
    if ceilings is not None:
        measured = {
            dtype: Peak(rate=found.rate, source=f"measured: {found.operation}")
            for dtype, found in ceilings.matmul.items()
        }
        rates |= measured
        if ceilings.copy is not None:
            memory = Peak(rate=ceilings.copy.rate, source=f"measured: {ceilings.copy.operation}")
    if "tf32" in rates:
        rates["3xtf32"] = Peak(rate=rates["tf32"].rate / 3, source=f"a third of TF32's, {rates['tf32'].source}")
    return Peaks(flops_per_s=rates, bytes_per_s=memory)


def product_arithmetic(kernel: str) -> Arithmetic | None:
    """The arithmetic of a kernel of matrix products or attention, as far as its name says; else None."""
    decoded = decode(kernel)
    if decoded.second_pass:
        return None
    if decoded.input_dtype == "fp32" and decoded.unit == "tensor core":
        return "3xtf32"
    if decoded.input_dtype is None and decoded.unit == "cuda core":
        return "fp32"
    return decoded.input_dtype


def operand_arithmetic(dtype: str | None, *, on_cpu: bool) -> Arithmetic | None:
    """The arithmetic of a product by its operands' dtype. None for fp32 on a GPU: CUDA cores, TF32, or emulation."""
    if dtype == "float":
        return "fp32" if on_cpu else None
    return _OF_OPERANDS.get(dtype or "")


_OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?l?>")
_FUNCTOR = re.compile(r"Functor<(double|float|c10::BFloat16|c10::Half),")
"""The functor that a kernel over lists applies: its first type is the elements', hyperparameters have their own."""
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def element_bytes(kernel: str) -> int | None:
    """Bytes of the elements that a kernel reads and writes, where its name says one size and no other."""
    if opaque := _OPAQUE.search(kernel):
        return int(opaque[1])
    if "multi_tensor_apply_kernel<" in kernel:
        functor = _FUNCTOR.search(kernel)
        return ELEMENT_BYTES[functor[1]] if functor else None
    decoded = decode(kernel)
    same = decoded.input_dtype == decoded.output_dtype
    return _DTYPE_BYTES.get(decoded.input_dtype or "") if same else None
