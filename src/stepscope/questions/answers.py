"""What the questions on precision have in common: where they ran, how far a result is from float64, tables, curves.

PyTorch comes with what computes.
"""

import contextlib
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import stepscope
from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table
from stepscope.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stepscope.core.workloads import TextbookWorkload

# Where an experiment runs: the name of its machine, its versions, its threads, and whether a step can fit at all.


_SMALL_WORK = 2**28
"""Parameters times tokens of a step: below it one thread of a CPU is as fast as several."""


def processor_name(device: "torch.device") -> str:
    """The name of the GPU, or of the CPU."""
    import torch

    from stepscope.recording.environment import cpu_name

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While open, PyTorch computes on one thread of the CPU: for operators too small to be worth sharing out.

    Threads wait for each other by spinning. Where another process wants one of two cores, training a model of 0.2M
    parameters took 1.5 s on two threads and 0.24 s on one; on a quiet machine 0.20 s and 0.23 s.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(parameters: int, tokens: int) -> contextlib.AbstractContextManager[None]:
    """While open, PyTorch computes on one thread if steps are too small for more."""
    return one_thread() if parameters * tokens < _SMALL_WORK else contextlib.nullcontext()


def check_room(workload: "TextbookWorkload", device: "torch.device", *, bytes_per_parameter: int) -> None:
    """Raise InputError where parameters and what is kept for backward alone are more than the device has.

    Linux ends a process that takes more memory than there is; this line comes before. Of what is kept only the largest
    is counted, in fp32: the logits and their gradient, and in each layer the weights of attention and the inner
    activations of the feed-forward. So what passes may still not fit.
    """
    import torch

    from stepscope.core.formulas.transformer import parameter_count

    model, tokens = workload.model, workload.tokens
    parameters = parameter_count(model) * bytes_per_parameter
    by_layer = tokens * (model.heads * workload.seq_len + model.d_ff) * 4
    activations = model.layers * by_layer + 2 * tokens * model.vocabulary * 4
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if parameters + activations > room:
        raise InputError(
            f"model {model.name} needs {parameters / 1e9:.1f} GB for parameters, gradients and copies and "
            f"{activations / 1e9:.1f} GB for activations of {tokens:,} tokens, and there are {room / 1e9:.1f} GB: "
            "choose a smaller preset, which has the same modules, or fewer tokens"
        )


def computed_answer(
    on: "torch.device",
    *,
    study: str,
    question: str,
    device: str = "",
    settings: Mapping[str, Cell] | None = None,
    tables: Iterable[Table],
    panels: Iterable[Panel] = (),
    findings: Iterable[Finding],
) -> Answer:
    """The answer of a study that computed on a device. `device` says where in other words than its name."""
    import torch

    versions = {
        "stepscope": stepscope.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    where = {"device": device or processor_name(on), "date": datetime.now(UTC).date().isoformat()}
    facts = {"versions": versions, "settings": dict(settings or {})}
    parts = {"tables": tuple(tables), "panels": tuple(panels), "findings": tuple(findings)}
    return Answer(study=study, question=question, **where, **facts, **parts)


def quoted(record: object, *fields: str) -> dict[str, Any]:
    """The figures of a record that a finding's sentence quotes, by the names of their fields."""
    return {field: getattr(record, field) for field in fields}


_Row = TypeVar("_Row")


def table_by(title: str, rows: Iterable[_Row], columns: Mapping[str, Callable[[_Row], Cell]]) -> Table:
    """A table from a map of heads to what takes the column's cell from a row."""
    cells = tuple(tuple(take(row) for take in columns.values()) for row in rows)
    return Table(title=title, columns=tuple(columns), rows=cells)


def pivot(title: str, names: tuple[str, ...], cells: Iterable[tuple[tuple[Cell, ...], str | float, Cell]]) -> Table:
    """A table: a row for each tuple of names, a column for each key, both in the order in which they first come."""
    rows: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns: dict[str, None] = {}
    for row, key, cell in cells:
        column = key if isinstance(key, str) else f"{key:g}"
        columns[column] = None
        rows.setdefault(row, {})[column] = cell
    return Table(
        title=title,
        columns=(*names, *columns),
        rows=tuple((*row, *(by_column.get(column) for column in columns)) for row, by_column in rows.items()),
    )


def curves(
    points: Iterable[tuple[str, float, float | str]],
    *,
    x_title: str,
    y_title: str,
    x_log: bool = False,
    y_log: bool = False,
) -> Panel:
    """A panel of curves from points (line, x, y). A line whose last values are not finite is marked where they begin.

    y may be a word for a value that is not finite. On a logarithmic scale values of zero are left out.
    """
    shown: list[Point] = []
    lost: dict[str, Point] = {}
    for line, x, y in points:
        if isinstance(y, str) or not math.isfinite(y):
            lost.setdefault(line, Point(line=line, x=x, y=0.0, missing=str(y)))
            continue
        lost.pop(line, None)
        if y > 0 or not y_log:
            shown.append(Point(line=line, x=x, y=y))
    return Panel(x_title=x_title, y_title=y_title, points=(*shown, *lost.values()), x_log=x_log, y_log=y_log)


# How far a result in few bits is from float64, and at which numbers a format ends.


FEW_BITS = ("fp32", "fp16", "bf16")
"""The formats that PyTorch computes in."""


def dtype_of(name: str) -> "torch.dtype":
    """The dtype of one of FEW_BITS."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a result is from the one of float64."""

    error: float
    """|found - reference| / |reference| of the worst row, by the Euclidean norm; NaN where a row is not finite."""
    word: str
    """What the result became: `nan`, `inf`; `zero` where a whole row is zero and should not be; `input overflows` where
    the format cannot hold what goes in. Empty for any other result."""

    @property
    def broken(self) -> bool:
        return bool(self.word)

    @property
    def cell(self) -> Cell:
        """The word, or the error to three digits."""
        return self.word or float(f"{self.error:.3g}")

    @property
    def plotted(self) -> float | str:
        """The error, or the word where that is not finite."""
        return self.error if math.isfinite(self.error) else self.word or str(self.error)


INPUT_OVERFLOWS = Deviation(error=math.nan, word="input overflows")


def deviation(measured: "Tensor", reference: "Tensor", *inputs: "Tensor") -> Deviation:
    """The largest relative error of a row of `measured` (..., W) against a float64 reference of that shape, or a word.

    inputs: what went in, in its format.
    """
    import torch

    if not all(tensor.isfinite().all() for tensor in inputs):
        return INPUT_OVERFLOWS
    wide = measured.double()
    if wide.isnan().any():
        return Deviation(error=math.nan, word="nan")
    if wide.isinf().any():
        return Deviation(error=math.nan, word="inf")
    off, size = (wide - reference).norm(dim=-1), reference.norm(dim=-1)
    # Where the reference is zero itself, nothing found is no error, and anything else an infinite one.
    error = torch.where(off == 0, off, off / size).max().item()
    lost = (wide == 0).all(dim=-1) & (size > 0)
    return Deviation(error=error, word="zero" if lost.any() else "")


def last_number_where(holds: "Callable[[Tensor], Tensor]", dtype: "torch.dtype", device: "torch.device") -> float:
    """The largest number of the format, zero or above, for which `holds` is true.

    `holds` takes a tensor of one number, and is true from zero up to somewhere, and false from there on. Positive
    numbers are ordered as their bits are (IEEE 754), so that this is a binary search over the bits.
    """
    import torch

    bits = _as_wide(dtype)
    low, high = 0, int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(bits).item())
    while low < high:
        middle = (low + high + 1) // 2
        number = torch.tensor(middle, dtype=bits, device=device).view(dtype)
        low, high = (middle, high) if bool(holds(number)) else (low, middle - 1)
    return torch.tensor(low, dtype=bits).view(dtype).item()


def next_number(value: float, dtype: "torch.dtype") -> float:
    """The next larger number of the format, for a number of it that is zero or above."""
    import torch

    bits = torch.tensor(value, dtype=dtype).view(_as_wide(dtype))
    return (bits + 1).view(dtype).item()


def _as_wide(dtype: "torch.dtype") -> "torch.dtype":
    """The integer dtype as wide as a number of this one, of 2 or 4 bytes."""
    import torch

    return torch.int16 if dtype.itemsize == 2 else torch.int32
