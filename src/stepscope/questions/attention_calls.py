"""Calls of attention: judged by the gate, then one pass for their memory, then timed, those of one shape in turns.

All happens in this process, cell after cell: memory that runs out is one cell's row, and what was measured is told as
it comes, so that a process that dies leaves the rows before. What measures is `function_calls.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import torch
from torch import Tensor

from stepscope.core.attention_call import (
    AttentionCell,
    AttentionShape,
    AttentionTiming,
    AttentionVerdict,
    CallCompile,
    CallMemory,
    CallOutcome,
    Launches,
    Numbers,
)
from stepscope.core.attention_support import find_fault
from stepscope.core.errors import named_line, one_line
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype, is_users
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.kernels.operators import compile_for_each_shape
from stepscope.questions.function_calls import CallPass, FunctionCalls, settings_for
from stepscope.recording.device import is_out_of_memory, let_go, timing_device
from stepscope.recording.leads import launches_hidden
from stepscope.recording.precision import matmul_precision
from stepscope.training.attention import AttentionFunction, fault_of_device, implementation
from stepscope.training.attention.gate import LONG, check_attention_matrix, check_users_gradients
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.judging import Call


def draw_call(shape: AttentionShape, dtype: TensorDtype, device: torch.device) -> tuple[Call, Tensor]:
    """Random numbers of one shape: a call, and its output's gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=TORCH_DTYPES[dtype])

    q = normal(shape.heads, shape.queries).requires_grad_()
    k, v = (normal(shape.key_heads, shape.keys).requires_grad_() for _ in range(2))
    gradient = normal(shape.heads, shape.queries)
    return Call((q, k, v), {"causal": shape.causal, "window": shape.window}), gradient


def call_once(
    name: Attention, compile: CallCompile, shape: AttentionShape, dtype: TensorDtype, device: torch.device
) -> None:
    """Run one pass, so that the kernels that it compiles are in the caches on disk."""
    with matmul_precision("fp32"):
        function = implementation(name) if compile == "none" else compile_for_each_shape(implementation(name))
        call, gradient = draw_call(shape, dtype, device)
        call_pass = CallPass(function, call, [gradient])
        call_pass.forward()
        call_pass.backward()
        call_pass.prepare()
    timing_device(device).synchronize()


_MOST_JUDGED_SCORES = {"cuda": 1 << 33, "cpu": 1 << 22}
"""The most scores of a timed shape, by device, for which the gate computes attention in float64."""
_FEWEST_JUDGED = 1024
"""The fewest output numbers of a judged shape: with fewer, sdpa's error may be zero by chance, and so the allowance."""

Functions = dict[Attention, AttentionFunction]
_Key = tuple[Attention, CallCompile, TensorDtype, AttentionShape]
GateShapes = Callable[[AttentionCell], Sequence[AttentionShape]]
"""A function from a cell to the shapes on which the gate judges it."""


def _key(cell: AttentionCell, shape: AttentionShape) -> _Key:
    return cell.implementation, cell.compile, cell.dtype, shape


class AttentionCalls:
    """Measures groups of cells. A study uses one object, which keeps the gate's verdicts and judges no call twice.

    functions: measured in place of the implementations of these names. deadline_s: a time of `clock`, in seconds.
    """

    def __init__(
        self, device: torch.device, *, seconds: float, steps: int | None = None, launches: Launches = "hidden",
        deadline_s: float = math.inf, clock: Callable[[], float] = time.monotonic, functions: Functions | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.interrupted = False
        self._calls = FunctionCalls(device, settings_for(seconds, steps), hidden=launches == "hidden")
        self._deadline_s, self._now = deadline_s, clock
        self._functions = functions or {}
        self._compiled: Functions = {}
        self._judged: dict[_Key, AttentionVerdict] = {}
        self._gradients: dict[tuple[Attention, int], AttentionVerdict] = {}

    @property
    def broken(self) -> str:
        """The device's error when it failed for good; empty while it works."""
        return self._calls.broken

    @property
    def over(self) -> bool:
        """Whether nothing more is measured."""
        return self.interrupted or bool(self.broken) or self._now() >= self._deadline_s

    # ---- one group

    def measure_group(self, cells: Sequence[AttentionCell], gate_shapes: GateShapes) -> list[AttentionTiming]:
        """The cells, all of one shape and dtype, in their order: judged on `gate_shapes` of it, then measured in turns.

        Ctrl-C leaves what is measured, and sets `interrupted`.
        """
        rows: dict[AttentionCell, AttentionTiming] = {}
        try:
            with matmul_precision("fp32"):
                self._measure_group(cells, gate_shapes, rows)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._calls.clean_up()
        word: CallOutcome = "interrupted" if self.interrupted else "not reached"
        reason = f"the device failed before: {self.broken}" if self.broken else ""
        reason = reason or ("" if self.interrupted else "the time was over")
        return [rows.get(cell) or AttentionTiming(cell=cell, outcome=word, reason=reason) for cell in cells]

    def _measure_group(
        self,
        cells: Sequence[AttentionCell],
        gate_shapes: GateShapes,
        rows: dict[AttentionCell, AttentionTiming],
    ) -> None:
        right: dict[AttentionCell, int] = {}
        faults = {cell: self._fault(cell) for cell in cells}
        self._judge_together([cell for cell in cells if not faults[cell]], gate_shapes)
        for cell, fault in faults.items():
            if self.over:
                return
            row = AttentionTiming(cell=cell, outcome="not supported", reason=fault) if fault else None
            row = row or self._gate(cell, gate_shapes(cell))
            if row.outcome == "measured":
                right[cell] = row.checked
            else:
                rows[cell] = row
        if not right:
            return
        shape, dtype = cells[0].shape, cells[0].dtype
        try:
            call, gradient = draw_call(shape, dtype, self.device)
        except Exception as error:  # each backend has an error of its own for memory that ran out
            if not is_out_of_memory(error):
                raise
            rows.update({cell: _fallen(cell, error, "the inputs") for cell in right})
            let_go(error)
            return
        by_name = {str(cell): cell for cell in right}
        passes = {name: CallPass(self._function(cell), call, [gradient]) for name, cell in by_name.items()}

        def failed(name: str, error: BaseException, during: str) -> None:
            rows[by_name[name]] = _fallen(by_name[name], error, during)

        memories = self._calls.memories(passes, failed, lambda: self.over)
        for name, measured in self._calls.in_turns(passes, failed).items():
            cell, samples, memory = by_name[name], measured.samples, memories[name]
            whole = bool(samples[FORWARD].count)
            self.interrupted |= measured.interrupted
            rows[cell] = AttentionTiming(
                cell=cell, outcome="measured" if whole else "interrupted", checked=right[cell],
                forward=samples[FORWARD] if whole else None, backward=samples[BACKWARD] if whole else None,
                host=samples["host"] if whole else None, launches="hidden" if launches_hidden(measured) else "shown",
                memory=CallMemory(
                    saved_bytes=sum(memory.saved.values()),
                    before_backward_bytes=cell.input_bytes + memory.alive_bytes,
                    peak_bytes=None if memory.peak_bytes is None else cell.input_bytes + memory.peak_bytes,
                ),
            )  # fmt: skip

    # ---- the gate

    def _fault(self, cell: AttentionCell) -> str | None:
        if cell.implementation in self._functions:
            return None
        if cell.compile != "none" and ATTENTIONS[cell.implementation].compiler == "inductor":
            return "is compiled as it is: measure it with --compile none"
        return find_fault(cell.implementation, cell.shape.call(self.device.type, cell.dtype), here=fault_of_device)

    def _judge_together(self, cells: Sequence[AttentionCell], gate_shapes: GateShapes) -> None:
        """Several on the same numbers: those in float64 are made once. What does not fit is left to `_gate`."""
        together: dict[tuple[CallCompile, TensorDtype, AttentionShape], list[AttentionCell]] = {}
        for cell in cells:
            for shape in gate_shapes(cell):
                if _key(cell, shape) not in self._judged:
                    together.setdefault((cell.compile, cell.dtype, shape), []).append(cell)
        for (_, dtype, shape), group in together.items():
            if self.over:
                return
            self._judge_on(shape, dtype, group)

    def _judge_on(self, shape: AttentionShape, dtype: TensorDtype, cells: Sequence[AttentionCell]) -> Exception | None:
        """Keep what the gate says of the cells on this shape. Returns the error where memory ran out."""
        try:
            reports = check_attention_matrix(
                [cell.implementation for cell in cells],
                device=self.device,
                dtypes=(dtype,),
                shapes=(shape,),
                functions={
                    cell.implementation: self._function(cell)
                    for cell in cells
                    if cell.compile != "none" or cell.implementation in self._functions
                },
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
            self._calls.clean_up()
            return error
        for cell, report in zip(cells, reports, strict=True):
            self._judged[_key(cell, shape)] = report.verdicts[0]
        return None

    def _gate(self, cell: AttentionCell, shapes: Sequence[AttentionShape]) -> AttentionTiming:
        """`measured` where it may be; otherwise the row that says why not."""
        judged: list[AttentionVerdict] = []
        for shape in shapes:
            key = _key(cell, shape)
            if key not in self._judged and (error := self._judge_on(shape, cell.dtype, [cell])):
                return _fallen(cell, error, f"the gate's call ({shape})")
            judged.append(self._judged[key])
        if is_users(cell.implementation):
            judged.append(self._gradients_of(cell))
        wrong = [verdict for verdict in judged if verdict.outcome == "failed"]
        if wrong:
            self._calls.clean_up()
            return AttentionTiming(cell=cell, outcome="wrong", reason=f"the gate: {wrong[0].sentence}")
        passed = sum(verdict.outcome == "passed" and len(verdict.errors) > 1 for verdict in judged)
        if not passed:
            why = judged[0].sentence if judged else "it was asked for nothing"
            return AttentionTiming(cell=cell, outcome="wrong", reason=f"the gate did not see it right: {why}")
        return AttentionTiming(cell=cell, outcome="measured", checked=passed)

    def _gradients_of(self, cell: AttentionCell) -> AttentionVerdict:
        """What PyTorch's own check says of a user's function, once for each head_dim."""
        of = cell.implementation, cell.shape.head_dim
        if of not in self._gradients:
            self._gradients[of] = check_users_gradients(*of, self.device)
        return self._gradients[of]

    def _function(self, cell: AttentionCell) -> AttentionFunction:
        function = self._functions.get(cell.implementation) or implementation(cell.implementation)
        if cell.compile == "none":
            return function
        if cell.implementation not in self._compiled:
            self._compiled[cell.implementation] = compile_for_each_shape(function)
        return self._compiled[cell.implementation]


def judged_shape(shape: AttentionShape, device: torch.device) -> tuple[AttentionShape, ...]:
    """The shape for the gate, or nothing if float64 would take too long or the output is too small to judge."""
    rows = shape.batch * shape.heads * shape.queries
    few = rows * shape.head_dim < _FEWEST_JUDGED
    return (shape,) if not few and rows * shape.keys <= _MOST_JUDGED_SCORES[device.type] else ()


def odd_shapes(cell: AttentionCell) -> tuple[AttentionShape, ...]:
    """Small shapes for the gate, one for each kind of scores; what is compiled for one of them serves for all.

    Implementations that switch kernels by sequence length also get a longer shape if the cell is long, so that the
    kernel that will be timed is judged.
    """
    # Head_dim, mask and grouping are the cell's; no tile divides the lengths.
    group = cell.shape.heads // cell.shape.key_heads
    odd = msgspec.structs.replace(cell.shape, batch=2, heads=2 * group, key_heads=2, queries=203, keys=203)
    shapes = tuple(msgspec.structs.replace(odd, numbers=numbers) for numbers in get_args(Numbers))
    if not ATTENTIONS[cell.implementation].kernel_by_length or cell.shape.queries <= LONG:
        return shapes
    return (*shapes, msgspec.structs.replace(odd, batch=1, queries=LONG + 85, keys=LONG + 85))


def _fallen(cell: AttentionCell, error: BaseException, during: str) -> AttentionTiming:
    """The timing row of a cell that raised an error."""
    if is_out_of_memory(error):
        return AttentionTiming(cell=cell, outcome="out of memory", reason=f"in {during}: {one_line(error)}")
    reason = f"in {during}: {named_line(error)}"
    return AttentionTiming(cell=cell, outcome="failed", reason=reason)
