"""The parameters of a compiled kernel as it reads them, with numbers of tensors in place of their addresses.

They are the arguments that are no constants, in their order, a descriptor as its tensor map, its shape (i32) and its
strides (i64); then two addresses of scratch memory, which our kernels do not use.
"""

import ctypes
import importlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MAP_BYTES = 128
"""The bytes of a tensor map, and their alignment. Triton's object has it behind its head, at the first such place."""
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A tensor of a pass by its number, and bytes from its start."""

    tensor: int
    offset: int = 0


@dataclass(frozen=True)
class Described:
    """A descriptor of a tensor of a pass: its class, and the fields that do not change."""

    tensor: int
    kind: type[Any]
    same: dict[str, Any]


def launch_of(compiled: Any, grid: tuple[int, ...], arguments: Sequence[object]) -> dict[str, Any] | None:
    """A launch as native.cpp reads it; None where its parameters are of a kind that is not known.

    arguments: as the kernel was called with them by place, with a Place for each tensor and a Described for each
    descriptor. What was given by name is a constant.
    """
    run, (warps, ctas, shared) = compiled.run, compiled.packed_metadata[:3]
    scratch = run.global_scratch_size or run.profile_scratch_size
    if ctas != 1 or scratch or run.launch_cooperative_grid or run.launch_pdl:
        return None
    parameters = _Parameters()
    of_descriptors = iter(compiled.metadata.tensordesc_meta or ())
    kinds = list(compiled.src.signature.values())
    if any(kind != "constexpr" for kind in kinds[len(arguments) :]):
        return None
    for kind, argument in zip(kinds, arguments, strict=False):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            metadata = next(of_descriptors, None)
            if metadata is None or not isinstance(argument, Described):
                return None
            parameters.descriptor(argument, metadata)
        elif kind.startswith("*"):
            if argument is not None and not isinstance(argument, Place):
                return None
            parameters.address(argument)
        elif kind in _FORMATS:
            parameters.number(_FORMATS[kind], argument)
        else:
            return None
    for _ in range(2):
        parameters.address(None)
    return {
        "function": compiled.function, "grid": (*grid, 1, 1)[:3], "threads": 32 * warps, "shared": shared,
        "bytes": bytes(parameters.bytes), "places": parameters.places, "addresses": parameters.addresses,
        "descriptors": parameters.descriptors,
    }  # fmt: skip


class _Parameters:
    """The parameters of a kernel side by side, each at a multiple of its size."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.places: list[int] = []
        self.addresses: list[tuple[int, int, int]] = []
        self.descriptors: list[tuple[int, int, int]] = []

    def _add(self, value: bytes) -> int:
        self.bytes += bytes(-len(self.bytes) % len(value))
        self.places.append(len(self.bytes))
        self.bytes += value
        return self.places[-1]

    def number(self, form: str, value: Any) -> None:
        """A number in the form of `struct`."""
        self._add(struct.pack(form, value))

    def address(self, place: Place | None) -> None:
        """The address of a tensor; None for no tensor."""
        at = self._add(bytes(8))
        if place is not None:
            self.addresses.append((at, place.tensor, place.offset))

    def descriptor(self, of: Described, metadata: object) -> None:
        """A tensor map, and the shape and the strides that follow it."""
        # Its address is replaced at each call, so any that is aligned will do.
        base = torch.empty(32, dtype=torch.uint8)
        described = object.__new__(of.kind)
        described.__dict__.update(of.same, base=base[-base.data_ptr() % 16 :])
        made = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg(described, metadata)[0]
        self.descriptors.append((self._add(ctypes.string_at(id(made) + _MAP_BYTES, _MAP_BYTES)), of.tensor, 0))
        for size in of.same["shape"]:
            self.number("i", size)
        for stride in of.same["strides"]:
            self.number("q", stride)
