"""What cuDNN's convolutions take for themselves: bytes that a call allocates beyond its results, over many shapes.

    python benchmarks/convolutions.py results/h200/convolutions/workspaces.json
    python benchmarks/convolutions.py results/h200/convolutions/workspaces.json --show

`fit` leaves so much memory free where a model of the user's own has convolutions (allocations/prediction/fit.py).
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch

from stepscope.core.environment import Environment
from stepscope.core.units import format_bytes
from stepscope.recording.environment import read_environment

BATCH, IN, OUT, SIDE, KERNEL, STRIDE = (2, 8, 32), (3, 32, 128), (32, 128, 512), (16, 48, 112), (1, 3), (1, 2)
_MOST_ELEMENTS = 3e8

Pass = Literal["forward", "gradient of the input", "gradient of the weight"]
PASSES: tuple[Pass, ...] = ("forward", "gradient of the input", "gradient of the weight")


class Convolution(msgspec.Struct, frozen=True, kw_only=True):
    """One shape: an image (batch, inputs, side, side) and a square kernel, and what each pass takes."""

    dtype: str
    batch: int
    inputs: int
    outputs: int
    side: int
    kernel: int
    stride: int
    transposed: bool
    operand_bytes: int
    """Bytes of image, weight and output together."""
    workspace_bytes: dict[Pass, int]
    """The most that a pass allocates, less what it returns."""


class Workspaces(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    convolutions: list[Convolution]


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", action="store_true", help="print a table of a file written before")
    asked = parser.parse_args()
    if not asked.show:
        device = torch.device("cuda")
        found = Workspaces(environment=read_environment(device), convolutions=list(_measured(device)))
        asked.file.parent.mkdir(parents=True, exist_ok=True)
        asked.file.write_bytes(msgspec.json.encode(found))
    print("\n".join(table(msgspec.json.decode(asked.file.read_bytes(), type=Workspaces))))


def table(found: Workspaces) -> list[str]:
    """The largest workspaces by the size of the operands, as lines."""
    lines = [f"{'operands from':>14}{'calls':>7}{'most, of the operands':>24}{'most beyond the operands':>27}"]
    for least in (0, 2**20, 2**22, 2**24, 2**26, 2**28):
        pairs = [
            (taken, each.operand_bytes)
            for each in found.convolutions
            for taken in each.workspace_bytes.values()
            if each.operand_bytes >= least
        ]
        most = max(taken / operands for taken, operands in pairs)
        beyond = max(taken - operands for taken, operands in pairs)
        said = format_bytes(beyond) if beyond > 0 else "none"
        lines.append(f"{format_bytes(least):>14}{len(pairs):>7}{most:>24.2f}{said:>27}")
    made = found.environment
    return [*lines, f"{made.device_name}, torch {made.versions['torch']}"]


def _measured(device: torch.device) -> Iterator[Convolution]:
    for dtype, batch, inputs, outputs, side, kernel, stride, transposed in itertools.product(
        (torch.float32, torch.bfloat16), BATCH, IN, OUT, SIDE, KERNEL, STRIDE, (False, True)
    ):
        if batch * max(inputs, outputs) * side * side > _MOST_ELEMENTS:
            continue
        x = torch.randn(batch, inputs, side, side, device=device, dtype=dtype)
        across = (inputs, outputs) if transposed else (outputs, inputs)
        weight = torch.randn(*across, kernel, kernel, device=device, dtype=dtype)
        how = ([stride] * 2, [kernel // 2] * 2, [1, 1], transposed, [0, 0], 1)

        def forward(x: torch.Tensor = x, weight: torch.Tensor = weight, how: tuple = how) -> torch.Tensor:
            return torch.ops.aten.convolution(x, weight, None, *how)

        out = forward()
        gradient = torch.randn_like(out)

        def backward(
            *mask: bool,
            g: torch.Tensor = gradient, x: torch.Tensor = x, weight: torch.Tensor = weight, how: tuple = how,
        ) -> torch.Tensor:  # fmt: skip
            found = torch.ops.aten.convolution_backward(g, x, weight, None, *how, mask)
            return next(tensor for tensor in found if tensor is not None)

        yield Convolution(
            dtype=str(dtype).removeprefix("torch."), batch=batch, inputs=inputs, outputs=outputs, side=side,
            kernel=kernel, stride=stride, transposed=transposed,
            operand_bytes=x.nbytes + weight.nbytes + out.nbytes,
            workspace_bytes={
                "forward": _beyond(forward, device),
                "gradient of the input": _beyond(lambda back=backward: back(True, False, False), device),
                "gradient of the weight": _beyond(lambda back=backward: back(False, True, False), device),
            },
        )  # fmt: skip


def _beyond(call: Callable[[], torch.Tensor], device: torch.device) -> int:
    """The most that a call allocates while it runs, less its result; the second call's, since the first sets up."""
    call()
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    return torch.cuda.max_memory_allocated(device) - held - result.nbytes


if __name__ == "__main__":
    main()
