"""Puts the fake driver under Triton in this process, whose tensors lie on the CPU, and reads what it kept."""

import ctypes
import os
import subprocess
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

HERE = Path(__file__).parent
STREAM = 0
"""The stream of tensors of the CPU."""
NUMBERS = ("function", "grid x", "grid y", "grid z", "threads", "threads y", "threads z", "shared", "stream", "others")


def built(folder: Path) -> Path:
    """The driver as a library in the folder."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    made = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", f"-I{headers}", "-o", made, HERE / "driver.c"], check=True)
    return made


@dataclass(frozen=True)
class Kept:
    """One launch: its numbers, and its parameters, each as its bytes."""

    numbers: dict[str, int]
    parameters: list[bytes]


class Fake:
    """The driver of this process. It is a Hopper's, as far as Triton and our kernels ask."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"))
        self._sizes: dict[int, list[int]] = {}
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.set_device = lambda *_: None
        torch._C._cuda_getCurrentRawStream = lambda _: STREAM  # pyright: ignore[reportAttributeAccessIssue]
        from triton.backends.nvidia.driver import CudaDriver

        triton.runtime.driver.set_active(CudaDriver())
        from stepscope.kernels import native
        from stepscope.kernels.flash import attention, launch, recorded_launches, tuning_cache
        from stepscope.kernels.hopper import launch as hopper
        from stepscope.kernels.parts import mlp, norm, rope

        # Tensors of the CPU count as a GPU's here.
        hopper.takes = lambda *tensors: hopper.hopper_columns(tensors[0].shape[-1]) is not None
        tuning_cache._capability = lambda _: (9, 0)
        recorded_launches.run = recorded_launches._run_here
        there = types.SimpleNamespace(**vars(launch))
        there.interpreted = lambda: True
        attention._launching = lambda: (there, recorded_launches, tuning_cache)  # pyright: ignore[reportAttributeAccessIssue]
        for part in (norm, mlp, rope):
            vars(part)["check_place"] = lambda *_, **__: None
        learn = native.launch_of

        def noted(compiled: Any, *rest: Any) -> dict[str, Any] | None:
            self._know(compiled)
            return learn(compiled, *rest)

        native.launch_of = noted

    def _know(self, compiled: Any) -> None:
        """Tell the driver the sizes of a kernel's parameters, without which it keeps none."""
        sizes: list[int] = []
        for kind in compiled.src.signature.values():
            if kind.startswith("tensordesc"):
                dimensions = kind.partition("[")[2].partition("]")[0].count(",") + 1
                sizes += [128, *[4] * dimensions, *[8] * dimensions]
            elif kind != "constexpr":
                sizes.append(8 if kind.startswith("*") else int(kind[-2:]) // 8)
        sizes += [8, 8]  # addresses of scratch memory
        self._sizes[compiled.function] = sizes
        self._library.fake_sizes(ctypes.c_long(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def fail(self, status: int) -> None:
        """Let launches fail with this status of the driver; 0 lets them be."""
        self._library.fake_fail(status)

    def forget(self) -> None:
        """Forget the launches."""
        self._library.fake_forget()

    def launches(self) -> list[Kept]:
        """The launches since they were forgotten."""
        found: list[Kept] = []
        for at in range(self._library.fake_launches()):
            numbers, parameters = (ctypes.c_long * len(NUMBERS))(), ctypes.create_string_buffer(8192)
            length = self._library.fake_launch(at, numbers, parameters)
            said: dict[str, int] = dict(zip(NUMBERS, numbers, strict=True))
            rest, each = parameters.raw[:length], list[bytes]()
            for size in self._sizes.get(said["function"], ()):
                each.append(rest[:size])
                rest = rest[size:]
            found.append(Kept(said, each))
        return found


def in_cpp(out: Tensor) -> bool:
    """Whether the call that made it ran in C++."""
    return type(out.grad_fn).__name__ == "RecordedBackward"


def said(run: Callable[[], object]) -> str:
    """What it raises, in words; empty where it raises nothing."""
    try:
        run()
    except RuntimeError as error:  # NotImplementedError is one
        return str(error)
    return ""
