"""Builds, loads and teaches the launcher of FlashAttention in C++ (native.cpp), which eager calls take where it is.

It is built once for a version of PyTorch, of Triton and of the source, by PyTorch's own tools and the system's C++
compiler, into the directory of caches. It needs no CUDA compiler. Without it calls go through Python.

What it learns are the launches of a call that Python ran, of forward first, then of both passes: the compiled kernel,
its grid, and its parameters as the kernel reads them. Those are the arguments that are no constants, in their order, a
descriptor as its tensor map, its shape (i32) and its strides (i64); then two addresses of scratch memory, which our
kernels do not use.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import struct
import sys
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepscope.core.cache_directory import cache_directory
from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError, one_line
from stepscope.core.shown_text import printable
from stepscope.kernels.flash import replay

SOURCE = Path(__file__).with_name("native.cpp")
NAME = "stepscope_attention"
_KNOWN = ("3.6.", "3.7.")
"""The releases of Triton whose kernels take parameters as the module says."""
_MAP_BYTES = 128
"""The bytes of a tensor map, and their alignment. Triton's object has it behind its head, at the first such place."""
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip

_tried: set[Hashable] = set()


def wanted() -> bool:
    """Whether this process is to take the launcher."""
    return os.environ.get(NATIVE_LAUNCHER) == "1"


def library() -> Path | None:
    """Where the launcher is or would be built; None without a directory of caches."""
    caches = cache_directory()
    said = f"{torch.__version__} {triton.__version__} {sys.implementation.cache_tag}".encode() + SOURCE.read_bytes()
    made = hashlib.sha256(said).hexdigest()[:12]
    return caches / f"flash-attention-{made}" / f"{NAME}.so" if caches else None


def build() -> Path:
    """Build the launcher, where it is not there yet: some twenty seconds. Raises InputError, one line, where that
    fails."""
    path = library()
    if path is None:
        raise InputError("there is no place for the launcher of flash attention: name one in STEPSCOPE_CACHE")
    if path.exists():
        return path
    from torch.utils import cpp_extension  # noqa: PLC0415  (slow, and seldom needed)

    print("stepscope: building the launcher of flash attention, once", file=sys.stderr, flush=True)
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(
            NAME, [str(SOURCE)], extra_cflags=["-O1", "-std=c++20"], extra_include_paths=[str(headers)],
            build_directory=str(path.parent), with_cuda=False,
        )  # fmt: skip
    except (RuntimeError, OSError, ImportError) as error:
        wrong = next((line for line in str(error).splitlines() if "error:" in line or "not found" in line), str(error))
        raise InputError(
            f"the launcher of flash attention cannot be built ({printable(wrong.strip())[:300]}): install g++ and ninja"
        ) from error
    return path


@functools.cache
def extension() -> ModuleType | None:
    """The launcher with the driver's functions, built now if it must be; None where it is not wanted or cannot be
    had, which a warning says."""
    if not wanted() or not triton.__version__.startswith(_KNOWN):
        return None
    try:
        path = build()
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None and spec.loader is not None  # a file that ends in .so is a module
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        driver = ctypes.CDLL("libcuda.so.1")
        functions = [driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress]
    except (InputError, ImportError, OSError, AttributeError) as error:
        warnings.warn(f"flash attention is launched from Python: {one_line(error)}", stacklevel=2)
        return None
    module.set_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return module


class Backward(NamedTuple):
    """What backward takes beside forward: the key of its recording, the gradient, and its buffers."""

    key: Hashable
    gradient: Tensor
    statistics: Tensor
    sums: Tensor | None


def learn(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, causal: bool, scale: float, configuration: int, key: Hashable,
    backward: Backward | None = None,
) -> None:  # fmt: skip
    """Teach the launcher a call whose launches are recorded under the keys: forward alone, or both passes."""
    found, keys = extension(), (key, backward.key if backward else None)
    if found is None or keys in _tried:
        return
    recordings = [replay.recorded(each) for each in keys if each is not None]
    if None in recordings:
        return
    _tried.add(keys)
    passes = [[launch_of(*each) for each in recording.launches] for recording in recordings if recording is not None]
    if any(each is None for launches in passes for each in launches):
        return
    of_backward: list[list[int]] = [[], [], []]
    if backward is not None:
        buffers = list(backward.statistics.shape), [] if backward.sums is None else list(backward.sums.shape)
        of_backward = [list(backward.gradient.stride()), *buffers]
    found.learn(q, k, v, out, causal, scale, configuration, *of_backward, *passes, *([] if backward else [[]]))


def forget() -> None:
    """Forget all that was learnt, as when other configurations are chosen."""
    _tried.clear()
    found = extension()
    if found is not None:
        found.forget()


def launch_of(
    compiled: Any, grid: tuple[int, ...], template: Sequence[object], operands: Sequence[replay.Operand]
) -> dict[str, Any] | None:
    """A recorded launch as native.cpp reads it; None where its parameters are of a kind that is not known."""
    run, (warps, ctas, shared) = compiled.run, compiled.packed_metadata[:3]
    if ctas != 1 or any(
        (run.global_scratch_size, run.profile_scratch_size, run.launch_cooperative_grid, run.launch_pdl)
    ):
        return None
    parameters = _Parameters()
    of_descriptors = iter(compiled.metadata.tensordesc_meta or ())
    by_index = {at: (place, descriptor) for at, place, descriptor in operands}
    for at, (kind, argument) in enumerate(zip(compiled.src.signature.values(), template, strict=True)):
        place, descriptor = by_index.get(at, (None, None))
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            metadata = next(of_descriptors, None)
            if metadata is None or descriptor is None or place is None:
                return None
            parameters.descriptor(place, *descriptor, metadata)
        elif kind.startswith("*"):
            if place is None and argument is not None:
                return None
            parameters.address(place)
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
        self.addresses: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int]] = []

    def _add(self, value: bytes) -> int:
        self.bytes += bytes(-len(self.bytes) % len(value))
        self.places.append(len(self.bytes))
        self.bytes += value
        return self.places[-1]

    def number(self, form: str, value: Any) -> None:
        """A number in the form of `struct`."""
        self._add(struct.pack(form, value))

    def address(self, tensor: int | None) -> None:
        """The address of the tensor at this place of a call; None for no tensor."""
        at = self._add(bytes(8))
        if tensor is not None:
            self.addresses.append((at, tensor))

    def descriptor(self, tensor: int, kind: type[Any], same: dict[str, Any], metadata: object) -> None:
        """A tensor map, and the shape and the strides that follow it."""
        # Its address is replaced at each call, so any that is aligned will do.
        base = torch.empty(32, dtype=torch.uint8)
        described = replay.descriptor(kind, same, base[-base.data_ptr() % 16 :])
        made = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg(described, metadata)[0]
        self.descriptors.append((self._add(ctypes.string_at(id(made) + _MAP_BYTES, _MAP_BYTES)), tensor))
        for size in same["shape"]:
            self.number("i", size)
        for stride in same["strides"]:
            self.number("q", stride)
