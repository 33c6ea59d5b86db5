"""Calls of attention: judged by the gate, then one pass for their memory, then timed, those of one shape in turns.

All happens in this process, cell after cell: memory that runs out is one cell's row, and what was measured is told as
it comes, so that a process that dies leaves the rows before. The only loop that times is `measure()`.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

import msgspec
import torch
from torch import Tensor

from stepscope.core.attention_call import (
    AttentionCell,
    AttentionShape,
    AttentionTiming,
    AttentionTimings,
    AttentionVerdict,
    CallCompile,
    CallMemory,
    CallOutcome,
    Launches,
    Numbers,
)
from stepscope.core.attention_support import find_fault
from stepscope.core.errors import named_line, one_line
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.run import Settings
from stepscope.kernels.operators import compile_for_each_shape
from stepscope.recording.device import is_out_of_memory, let_go, timing_device
from stepscope.recording.environment import read_environment
from stepscope.recording.leads import Leads, launches_hidden, overwrite_cache, with_lead
from stepscope.recording.precision import matmul_precision
from stepscope.recording.saved_tensors import saved_tensors
from stepscope.recording.step import Phase
from stepscope.recording.timer import Measurement, StepFailed, measure
from stepscope.training.attention import AttentionFunction, fault_of_device, implementation
from stepscope.training.attention.gate import LONG, check_attention_matrix
from stepscope.training.attention.inputs import TORCH_DTYPES

# One pass of attention, forward and backward: its inputs, its phases, what it saves, and compiling it.


class AttentionPass:
    """Forward and backward of one call as a subject of `measure`."""

    def __init__(self, function: AttentionFunction, shape: AttentionShape, inputs: "CallInputs") -> None:
        self._function, self._shape, self._inputs = function, shape, inputs
        self.out: Tensor | None = None
        self._gradients: tuple[Tensor, ...] = ()
        self.lead: Callable[[], object] | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self._inputs.leaves

    @property
    def phases(self) -> Sequence[Phase]:
        forward, backward = Phase(name=FORWARD, run=self.forward), Phase(name=BACKWARD, run=self.backward)
        return with_lead(self.lead, forward, backward)

    def prepare(self) -> None:
        self.out, self._gradients = None, ()

    def forward(self) -> None:
        self.out = self._function(*self._inputs.leaves, causal=self._shape.causal, window=self._shape.window)

    def backward(self) -> None:
        assert self.out is not None
        # Not `.backward()`, which would add to what a pass before left, or copy.
        self._gradients = torch.autograd.grad(self.out, self._inputs.leaves, self._inputs.gradient)


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """Random numbers of one shape: q, k and v, and the output's gradient."""

    leaves: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor

    @classmethod
    def draw(cls, shape: AttentionShape, dtype: TensorDtype, device: torch.device) -> "CallInputs":
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            size = (shape.batch, heads, length, shape.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=TORCH_DTYPES[dtype])

        q = normal(shape.heads, shape.queries).requires_grad_()
        k, v = (normal(shape.key_heads, shape.keys).requires_grad_() for _ in range(2))
        return cls(leaves=(q, k, v), gradient=normal(shape.heads, shape.queries))


def saved_storages(out: Tensor, inputs: Sequence[Tensor]) -> dict[int, int]:
    """Bytes of every storage, by its address, that autograd keeps for the backward of `out`, but those of `inputs`.

    Numbers that autograd wraps as tensors without a dimension (the scale, say) are left out: they lie on the host.
    """
    if out.grad_fn is None:
        return {}
    of_inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    storages = [saved.tensor.untyped_storage() for saved in saved_tensors(out.grad_fn) if saved.tensor.ndim]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in of_inputs}


def call_once(
    name: Attention, compile: CallCompile, shape: AttentionShape, dtype: TensorDtype, device: torch.device
) -> None:
    """Run one pass, so that the kernels that it compiles are in the caches on disk."""
    with matmul_precision("fp32"):
        function = implementation(name) if compile == "none" else compile_for_each_shape(implementation(name))
        call_pass = AttentionPass(function, shape, CallInputs.draw(shape, dtype, device))
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
        self.broken = ""
        """The device's error when it failed for good; empty while it works."""
        self._timing = timing_device(device)
        self._launches: Launches = launches if device.type == "cuda" else "shown"
        self._deadline_s, self._now = deadline_s, clock
        self._functions = functions or {}
        self._compiled: Functions = {}
        self._judged: dict[_Key, AttentionVerdict] = {}
        self._settings = settings_for(seconds, steps)
        self._leads: Leads | None = None

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
            self._clean_up()
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
            inputs = CallInputs.draw(shape, dtype, self.device)
        except Exception as error:  # each backend has an error of its own for memory that ran out
            if not is_out_of_memory(error):
                raise
            rows.update({cell: _fallen(cell, error, "the inputs") for cell in right})
            let_go(error)
            return
        passes: dict[AttentionCell, AttentionPass] = {}
        memories: dict[AttentionCell, CallMemory] = {}
        for cell in right:
            if self.over:
                break
            call_pass = AttentionPass(self._function(cell), shape, inputs)
            try:
                memories[cell] = self._try(call_pass, cell)
            except Exception as error:  # whatever it raises is its own row
                rows[cell] = _fallen(cell, error, "a first pass")
                call_pass.prepare()
                let_go(error)
                self._clean_up()
                continue
            passes[cell] = call_pass
        for cell, (measurement, launches) in self._time(passes, rows).items():
            samples = measurement.samples
            whole = bool(samples[FORWARD].count)
            if measurement.interrupted:
                self.interrupted = True
            rows[cell] = AttentionTiming(
                cell=cell, outcome="measured" if whole else "interrupted", checked=right[cell],
                forward=samples[FORWARD] if whole else None, backward=samples[BACKWARD] if whole else None,
                host=samples["host"] if whole else None, launches=launches, memory=memories[cell],
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
                if self._key(cell, shape) not in self._judged:
                    together.setdefault((cell.compile, cell.dtype, shape), []).append(cell)
        for (_, dtype, shape), group in together.items():
            if self.over:
                return
            self._judge_on(shape, dtype, group)

    def _judge_on(
        self, shape: AttentionShape, dtype: TensorDtype, cells: Sequence[AttentionCell]
    ) -> torch.OutOfMemoryError | None:
        """Keep what the gate says of the cells on this shape. Returns the error where memory ran out."""
        try:
            reports = check_attention_matrix(
                [cell.implementation for cell in cells],
                device=self.device,
                dtypes=(dtype,),
                shapes=(shape,),
                functions=self._to_be_judged(cells),
            )
        except torch.OutOfMemoryError as error:
            let_go(error)
            self._clean_up()
            return error
        for cell, report in zip(cells, reports, strict=True):
            self._judged[self._key(cell, shape)] = report.verdicts[0]
        return None

    def _key(self, cell: AttentionCell, shape: AttentionShape) -> "_Key":
        return cell.implementation, cell.compile, cell.dtype, shape

    def _to_be_judged(self, cells: Sequence[AttentionCell]) -> Functions:
        """The functions that the gate judges, by the name of the implementation that each replaces."""
        return {
            cell.implementation: self._function(cell)
            for cell in cells
            if cell.compile != "none" or cell.implementation in self._functions
        }

    def _gate(self, cell: AttentionCell, shapes: Sequence[AttentionShape]) -> AttentionTiming:
        """`measured` where it may be; otherwise the row that says why not."""
        judged: list[AttentionVerdict] = []
        for shape in shapes:
            key = self._key(cell, shape)
            if key not in self._judged and (error := self._judge_on(shape, cell.dtype, [cell])):
                return _fallen(cell, error, f"the gate's call ({shape})")
            judged.append(self._judged[key])
        wrong = [verdict for verdict in judged if verdict.outcome == "failed"]
        if wrong:
            self._clean_up()
            return AttentionTiming(cell=cell, outcome="wrong", reason=f"the gate: {wrong[0].sentence}")
        passed = sum(verdict.outcome == "passed" and len(verdict.errors) > 1 for verdict in judged)
        if not passed:
            why = judged[0].sentence if judged else "it was asked for nothing"
            return AttentionTiming(cell=cell, outcome="wrong", reason=f"the gate did not see it right: {why}")
        return AttentionTiming(cell=cell, outcome="measured", checked=passed)

    def _function(self, cell: AttentionCell) -> AttentionFunction:
        function = self._functions.get(cell.implementation) or implementation(cell.implementation)
        if cell.compile == "none":
            return function
        if cell.implementation not in self._compiled:
            self._compiled[cell.implementation] = compile_for_each_shape(function)
        return self._compiled[cell.implementation]

    # ---- memory

    def _try(self, call_pass: AttentionPass, cell: AttentionCell) -> CallMemory:
        """A pass that compiles and chooses kernels, then one whose memory is looked at."""
        call_pass.prepare()
        call_pass.forward()
        call_pass.backward()
        call_pass.prepare()
        gc.collect()
        self._timing.synchronize()
        before = 0
        if self._on_gpu:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        call_pass.forward()
        assert call_pass.out is not None
        saved = saved_storages(call_pass.out, call_pass.leaves)
        if self._on_gpu:
            alive = torch.cuda.memory_allocated(self.device) - before
        else:
            out = call_pass.out.untyped_storage()
            alive = sum({**saved, out.data_ptr(): out.nbytes()}.values())
        call_pass.backward()
        self._timing.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before if self._on_gpu else None
        call_pass.prepare()
        return CallMemory(
            saved_bytes=sum(saved.values()),
            before_backward_bytes=cell.input_bytes + alive,
            peak_bytes=None if peak is None else cell.input_bytes + peak,
        )

    # ---- time

    def _time(
        self, passes: dict[AttentionCell, AttentionPass], rows: dict[AttentionCell, AttentionTiming]
    ) -> dict[AttentionCell, tuple[Measurement, Launches]]:
        """Times of the passes, taken in turns. A pass that fails gets its row; the others start again without it."""
        while passes:
            names = {str(cell): cell for cell in passes}
            try:
                if self._launches == "hidden":
                    self._leads = self._leads or Leads(self._timing, overwrite_cache(self.device))
                    for name, cell in names.items():
                        self._leads.give(name, passes[cell])
                measured = measure(
                    {name: passes[cell] for name, cell in names.items()}, device=self._timing, settings=self._settings
                )
            except StepFailed as failure:
                cell, cause = names[failure.subject], failure.__cause__ or failure
                rows[cell] = _fallen(cell, cause, f"{failure.stage}, {failure.phase or 'step'}")
                let_go(failure)
                passes.pop(cell).prepare()
                self._clean_up()
                continue
            return {
                cell: (measured[name], "hidden" if launches_hidden(measured[name]) else "shown")
                for name, cell in names.items()
            }
        return {}

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _clean_up(self) -> None:
        gc.collect()
        if self._on_gpu and not self.broken:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError as error:  # an illegal access, say: nothing runs any more in this process
                self.broken = one_line(error)


def settings_for(seconds: float, steps: int | None = None) -> Settings:
    """How a cell is timed: for about so long, or exactly so many passes."""
    return Settings(
        warmup_floor=2,
        warmup_cap=20,
        warmup_seconds=min(0.5, seconds),
        steps_floor=5 if steps is None else steps,
        steps_cap=10_000 if steps is None else steps,
        seconds=seconds,
    )


def start_timings(device: torch.device, *, seconds: float, launches: Launches, preset: str = "") -> AttentionTimings:
    """A measurement before its first cell."""
    return AttentionTimings(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=read_environment(device),
        seconds=seconds,
        launches=launches if device.type == "cuda" else "shown",
        preset=preset,
    )


def with_timing(timings: AttentionTimings, rows: Sequence[AttentionTiming]) -> AttentionTimings:
    """The timings with these rows appended."""
    return msgspec.structs.replace(timings, timings=(*timings.timings, *rows))


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
