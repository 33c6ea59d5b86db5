"""The bench itself: each size judged, then one pass for first call and memory, then all that is right timed in turns.

What was measured is told as it comes; Ctrl-C leaves it.
"""

import contextlib
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch
from torch import Tensor

from stepscope.core.errors import InputError, named_line, one_line
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.samples import Samples
from stepscope.core.units import format_seconds
from stepscope.questions.bench_records import (
    Bench,
    Judged,
    ResultError,
    TensorSpec,
    Timed,
    Timing,
    Verdict,
    Work,
    odd,
    shape_words,
    size_words,
    smaller,
)
from stepscope.questions.function_calls import CallPass, FunctionCalls, settings_for
from stepscope.recording.device import is_out_of_memory, let_go
from stepscope.recording.environment import read_environment
from stepscope.recording.flops import FlopCounts
from stepscope.recording.leads import launches_hidden
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import drive
from stepscope.training.judging import (
    Call,
    Function,
    Watched,
    WrongKind,
    attempt,
    compare,
    interpreter_slack,
    nan_around,
    poison,
    run_call,
    settings_kept,
)
from stepscope.training.user_functions import is_interpreted, leave_autotuning_out

# Right or wrong: any function beside the same formula in float64, output and every gradient, before it gets a time.
#
# Its error may be four times what the yardstick makes of the formula in the tensors' dtype, and that of the worst row
# eight times: twice what kernels of stepscope's own may have (`training/judging.py`), since nobody says of a
# stranger's function which intermediate results it rounds to 16 bits, as attention written out rounds its scores.
#
# A function is judged on the numbers that it is timed with, as far as float64 is affordable there, and on small ones
# that show what large random ones hide: odd lengths, views whose neighbours are NaN, large and tiny numbers, rows that
# a mask hides whole, and the same call twice.
#
# An error raised on a shape that need not be supported refuses that case, and says so; wrong numbers refuse the
# function.


DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
AS_TIMED, SMALL, ODD, VIEWS = "as timed", "small", "odd lengths", "views"
LARGE, TINY, MASKED = "large numbers", "tiny numbers", "fully masked rows"
MAY_REFUSE = (ODD, VIEWS)
"""Cases that a function may refuse to take by raising an error."""
SLACK = 2.0
"""How much further off a function may be than a kernel of stepscope's own."""
LARGER, SMALLER = 32.0, 2.0**-7
ILL_CONDITIONED = (LARGE, TINY)
"""Cases in which rounding an intermediate result once may move what follows by more than a unit roundoff: the exponent
of a large score, say. As much as rounding the inputs once more does is then allowed, four times over."""
BLUR = 4.0
_SEED = 20


def draw_call(
    specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device, arguments: Mapping[str, Any]
) -> Call:
    """A call with random numbers: normal ones, integers from 0 on, masks that show three numbers in four."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def one(spec: TensorSpec) -> Tensor:
        shape = [int(size) for size in spec.shape]
        if spec.dtype == "bool":
            return torch.rand(shape, generator=generator, device=device) < 0.75
        if spec.below is not None:
            numbers = torch.randint(int(spec.below), shape, generator=generator, device=device)
            return numbers.to(DTYPES[spec.dtype])
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[spec.dtype] if spec.dtype else dtype)

    tensors = [(spec.name, one(spec)) for spec in specs]
    named = {name: tensor for name, tensor in tensors if name}
    return Call(tuple(tensor for name, tensor in tensors if not name), {**named, **arguments})


def call_of(made: Any, what: str) -> Call:
    """The call of what a factory of inputs returned: a tensor, a tuple of arguments, a dict of keyword arguments, or
    both."""
    if isinstance(made, Tensor):
        return Call((made,))
    if isinstance(made, Mapping):
        return Call((), dict(made))
    if isinstance(made, (tuple, list)):
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping):
            return Call(tuple(made[0]), dict(made[1]))
        return Call(tuple(made))
    raise InputError(
        f"{what} returns {type(made).__name__}: return a tensor, a tuple of arguments, a dict of keyword "
        "arguments, or a tuple of both"
    )


def tensor_names(call: Call, functions: Iterable[Function]) -> list[str]:
    """A name for each tensor: the parameter that it goes to, of the first function that says, or its place."""
    known = (_parameters(function) for function in functions)
    parameters = next((names for names in known if len(names) >= len(call.args)), [])
    named: list[str] = []
    for place, value in enumerate(call.args):
        name = parameters[place] if parameters else f"input {place + 1}"
        count = len(Call((value,)).tensors)
        named += [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]
    for name, value in call.kwargs.items():
        named += [name] * len(Call((value,)).tensors)
    return named


def _parameters(function: Function) -> list[str]:
    """The parameters that a function takes by place; none where it does not say, as one written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def words_of(call: Call) -> str:
    """The call's tensors in the spelling of --shape."""
    short = {dtype: name for name, dtype in DTYPES.items()}
    return shape_words(
        [
            TensorSpec(shape=tuple(t.shape), dtype="" if t.is_floating_point() else short.get(t.dtype, str(t.dtype)))
            for t in call.tensors
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call that functions are judged on: its results in float64, and what the yardstick makes of it."""

    label: str
    dtype: str
    call: Call
    names: Sequence[str]
    backward: bool
    upstream: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    blur: Mapping[str, float]
    """By result, how far one more rounding of the inputs moves it, in float64; empty where that is not looked at."""

    @classmethod
    def make(
        cls, label: str, dtype: str, call: Call, reference: Function, yardstick: Function, *, names: Sequence[str],
        backward: bool,
    ) -> "Case":  # fmt: skip
        """Run the reference in float64 and the yardstick as it is. names: those of the call's tensors. Raises whatever
        they raise."""
        wide = call.widened()
        outs = run_call(reference, wide, names, None, backward=False)
        generator = torch.Generator(next(iter(outs.values())).device).manual_seed(_SEED + 1) if outs else None
        upstream = {
            name: torch.randn(out.shape, generator=generator, device=out.device)
            for name, out in outs.items()
            if out.is_floating_point()
        }
        exact = run_call(reference, wide, names, upstream, backward=backward)
        plain = run_call(yardstick, call, names, upstream, backward=backward)
        blur: dict[str, float] = {}
        if label in ILL_CONDITIONED:
            changed = wide.changed(lambda t: _rounded_once_more(t, DTYPES[dtype]))
            moved = run_call(reference, changed, names, upstream, backward=backward)
            blur = {
                name: float((moved[name] - right).norm()) / (float(right.norm()) or 1.0)
                for name, right in exact.items()
                if right.is_floating_point() and name in moved
            }
        return cls(
            label=label, dtype=dtype, call=call, names=names, backward=backward, upstream=upstream, exact=exact,
            plain=plain, blur=blur,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.call.tensors[0].device

    @property
    def unfit(self) -> str:
        """Why nobody can be judged by this case; empty where they can."""
        for name, tensor in self.exact.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"in float64 the {name} is not finite"
            if name not in self.plain or not bool(self.plain[name].isfinite().all()):
                return f"the yardstick's {name} is not finite in {self.dtype}"
        return ""

    def judge(self, name: str, function: Function) -> Verdict:
        """The verdict on a function. torch.OutOfMemoryError is not caught: a small device is no fault of it."""

        def verdict(judged: Judged, reason: str = "", **fields: Any) -> Verdict:
            return Verdict(function=name, case=self.label, inputs=words_of(self.call), dtype=self.dtype, judged=judged,
                           reason=reason, **fields)  # fmt: skip

        if self.unfit:
            return verdict("not judged", self.unfit)
        outputs = {name: tensor for name, tensor in self.plain.items() if not name.startswith("gradient")}

        def run() -> dict[str, Tensor]:
            return run_call(function, self.call, self.names, self.upstream, backward=self.backward, like=outputs)

        # A view that the gate made has memory of its own around it.
        watch = Watched.around if self.label == VIEWS else Watched.of
        watched = {name: watch(tensor) for name, tensor in zip(self.names, self.call.tensors, strict=True)}
        poison([(t.shape, t.dtype) for t in self.plain.values() if t.is_floating_point()], self.device)
        done = attempt(run, watched, twice=True)
        if isinstance(done.raised, WrongKind):
            return verdict("wrong", str(done.raised))
        if done.raised is not None:
            judged: Judged = "refused" if self.label in MAY_REFUSE else "wrong"
            judged = "not judged" if isinstance(done.raised, TimeoutError) else judged
            return verdict(judged, f"it raises {named_line(done.raised)}")
        if done.written:
            return verdict("wrong", f"it writes to {', '.join(done.written)}, which the caller owns")
        errors, reason = self._errors(done.results)
        if not reason and done.again is not None:
            errors, why = self._errors(done.again)
            reason = f"when it is called again, {why}" if why else ""
        return verdict("wrong" if reason else "right", reason, errors=errors, repeats=done.repeats)

    def _errors(self, found: Mapping[str, Tensor]) -> tuple[tuple[ResultError, ...], str]:
        missing = next((result for result in self.exact if result not in found), None)
        if missing is not None:
            return (), f"the {missing} is missing"
        numbers = {name: tensor for name, tensor in self.exact.items() if tensor.is_floating_point()}
        units = {
            name: max(torch.finfo(self.plain[name].dtype).eps / 2, BLUR * self.blur.get(name, 0.0)) for name in numbers
        }
        slack = SLACK * interpreter_slack(DTYPES[self.dtype], self.device.type)
        errors, reason = compare(numbers, self.plain, found, units, slack)
        rivals = compare(numbers, self.plain, self.plain, units, slack)[0]
        other = next((n for n, t in self.exact.items() if n not in numbers and not torch.equal(t, found[n])), None)
        strange = next((name for name, (error, _) in errors.items() if not math.isfinite(error)), None)
        if strange is not None:
            reason = f"the {strange} is not finite, where it is in float64"
        rows = tuple(
            ResultError(
                result=name, error=error if math.isfinite(error) else None, allowed=allowed, rival=rivals[name][0]
            )
            for name, (error, allowed) in errors.items()
        )
        return rows, reason or (f"the {other} is not the reference's" if other else "")


def variations(small: Call, odd: Call | None) -> list[tuple[str, Call]]:
    """The small calls that a function is judged on. odd: a call at odd lengths, where there is one."""
    cases = [(SMALL, small)]
    if odd is not None:
        cases.append((ODD, odd))
    cases.append((VIEWS, small.changed(as_view)))
    cases.append((LARGE, small.changed(lambda t: _scaled(t, LARGER))))
    cases.append((TINY, small.changed(lambda t: _scaled(t, SMALLER))))
    if any(tensor.dtype == torch.bool and tensor.dim() > 1 for tensor in small.tensors):
        cases.append((MASKED, small.changed(_with_a_hidden_row)))
    return cases


def as_view(tensor: Tensor) -> Tensor:
    """The same numbers as a view of larger memory, which is NaN around them.

    From three dimensions on, the last dimension but one lies outside, as heads of a projection do.
    """
    if tensor.dim() < 1 or not tensor.is_floating_point():
        return tensor
    swapped = tensor.transpose(-3, -2) if tensor.dim() > 2 else tensor
    _, view = nan_around(swapped.shape, tensor.dtype, tensor.device, beside=8)
    view.copy_(swapped.detach())
    view = view.transpose(-3, -2) if tensor.dim() > 2 else view
    return view.requires_grad_(tensor.requires_grad)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return (tensor.detach() * factor).requires_grad_(tensor.requires_grad)


def _rounded_once_more(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 tensor moved by up to one unit roundoff of the dtype, at random."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(_SEED + 2)
    off = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype) * 2 - 1
    changed = tensor.detach() * (1 + off * torch.finfo(dtype).eps / 2)
    return changed.requires_grad_(tensor.requires_grad)


def _with_a_hidden_row(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.bool or tensor.dim() < 2:
        return tensor
    changed = tensor.clone()
    changed[..., changed.shape[-2] // 2, :] = False
    return changed


MOST_JUDGED = {"cuda": 1 << 27, "cpu": 1 << 22}
"""The most numbers of a call's inputs that are judged as they are timed."""
SMALL_SIZE = {"cuda": 512, "cpu": 128}
"""The largest size of the calls on which functions are judged besides."""
MOST_PASSES = 2000
"""Passes of a function on one size: more say nothing more, and fill the document."""
PATIENCE_S = 120.0
"""How long a first call may compile."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a bench."""

    functions: Mapping[str, Function]
    """By name; the first is the one that the others are set beside."""
    spelled: Mapping[str, str]
    reference: Function | None
    reference_name: str
    yardstick: str = ""
    """The name of the function whose error in the same dtype says what is too far; empty for the reference."""
    specs: Sequence[TensorSpec] = ()
    make: Callable[..., Any] | None = None
    """A factory of inputs, in place of `specs`."""
    sizes: Sequence[Mapping[str, int]] = ({},)
    dtype: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By function, the arguments that it has no parameter for."""
    backward: bool = True
    seconds: float = 1.0
    patience_s: float = PATIENCE_S

    def call(self, sizes: Mapping[str, int], device: torch.device) -> Call:
        """The call of this size."""
        if self.make is None:
            specs = tuple(spec.sized(sizes) for spec in self.specs)
            return draw_call(specs, DTYPES[self.dtype], device, self.arguments)
        takes = inspect.signature(self.make).parameters
        given = {"device": device, "dtype": DTYPES[self.dtype]}
        anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        given = {name: value for name, value in given.items() if name in takes or anything}
        torch.manual_seed(0)
        made = call_of(self.make(**sizes, **given), "the factory of inputs")
        placed = made.changed(lambda t: t.detach().to(device).requires_grad_(t.requires_grad))
        return Call(placed.args, {**placed.kwargs, **self.arguments})


Tell = Callable[[str], object]
Grown = Callable[[Bench], object]


def run_bench(
    asked: Asked,
    device: torch.device,
    *,
    tell: Tell = lambda _: None,
    grown: Grown = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Bench:
    """Judge and time every function on every size. tell: is told what is measured. grown: is given what there is, after
    each size. Raises InputError for inputs that cannot be made, and for a reference that cannot be run."""
    bench = Bench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=read_environment(device),
        functions=dict(asked.spelled),
        reference=asked.reference_name,
        yardstick=asked.yardstick,
        dtype=asked.dtype,
        arguments={name: str(value) for name, value in asked.arguments.items()},
        left_out=dict(asked.left_out),
        backward=asked.backward,
        seconds=asked.seconds,
    )
    room = _Room(asked, device, clock)
    try:
        with matmul_precision("fp32"):
            for sizes in asked.sizes:
                label = size_words(sizes) or "the shape"
                tell(f"{label}: right or wrong")
                room.call_first(room.made(sizes))
                call = room.made(sizes)  # afresh: the first call may have written to its inputs
                judged = room.judge(sizes, call)
                bench = msgspec.structs.replace(bench, verdicts=(*bench.verdicts, *judged))
                wrong = {verdict.function for verdict in judged if verdict.judged == "wrong"}
                tell(f"{label}: {''.join(f'{name} is wrong, ' for name in asked.functions if name in wrong)}time")
                timings, work = room.time(sizes, call, bench.verdicts)
                bench = msgspec.structs.replace(
                    bench,
                    timings=(*bench.timings, *timings),
                    works=(*bench.works, *work),
                    interpreted=tuple(room.interpreted),
                    interrupted=room.interrupted,
                )
                times = [f"{row.function} {format_seconds(row.seconds)}" for row in timings if row.seconds]
                tell(f"{label}: {', '.join(times) or 'nothing has a time'}")
                grown(bench)
                if room.interrupted:
                    break
    except KeyboardInterrupt:
        bench = msgspec.structs.replace(bench, interrupted=True)
    return without_times_of_wrong(bench)


def without_times_of_wrong(bench: Bench) -> Bench:
    """The bench without the times of a function that a later size showed to be wrong; ratios are to who is left."""
    refused = {name: wrong[0] for name in bench.functions if (wrong := bench.wrong(name))}
    by_inputs: dict[str, list[Timing]] = {}
    for row in bench.timings:
        kept = msgspec.structs.replace(row, ratio=None, interval=None)
        if row.function in refused:
            verdict = refused[row.function]
            kept = Timing(
                function=row.function,
                sizes=row.sizes,
                inputs=row.inputs,
                dtype=row.dtype,
                outcome="wrong",
                reason=f"{verdict.case} ({verdict.inputs}): {verdict.reason}",
            )
        by_inputs.setdefault(row.inputs, []).append(kept)
    timings = [row for rows in by_inputs.values() for row in with_ratios(rows)]
    return msgspec.structs.replace(bench, timings=tuple(timings))


class _Room:
    """One bench on one device: what stays from size to size."""

    def __init__(self, asked: Asked, device: torch.device, clock: Callable[[], float]) -> None:
        self.asked, self.device, self._clock = asked, device, clock
        self._calls = FunctionCalls(device, settings_for(asked.seconds, most=MOST_PASSES), hidden=True)
        self.interrupted = False
        self._judged: set[tuple[str, str]] = set()
        """Cases, and their inputs, that functions were judged on: several sizes share their small ones."""
        self.given_up: dict[str, str] = {}
        """Functions whose first call did not end, and that in words."""
        self._first_s: dict[str, float] = {}
        self.interpreted = [name for name, function in asked.functions.items() if is_interpreted(function)]
        """Functions that call a kernel which Triton's interpreter runs: themselves, or what they name in their file."""
        leave_autotuning_out()

    def made(self, sizes: Mapping[str, int]) -> Call:
        """The inputs of this size. Raises InputError where they cannot be made."""
        try:
            call = self.asked.call(sizes, self.device)
        except InputError:
            raise
        except Exception as error:  # a user's factory may raise anything; memory runs out in its own way
            raise InputError(
                f"the inputs{' of ' + size_words(sizes) if sizes else ''} fail: {named_line(error)}"
            ) from error
        if not call.tensors:
            raise InputError("the inputs hold no tensor: a bench needs one")
        return call

    # ---- the first call, which compiles

    def call_first(self, call: Call) -> None:
        """Time the first call of every function on this size. One that has not ended in time is given up."""
        self._first_s = {}
        for name, function in self.asked.functions.items():
            if name in self.interpreted or name in self.given_up:
                continue
            one = CallPass(function, call.ready(backward=self.asked.backward))
            self._calls.timing.synchronize()
            began = self._clock()
            try:
                with patience(self.asked.patience_s), settings_kept([]):
                    drive(one)
                    self._calls.timing.synchronize()
                self._first_s[name] = self._clock() - began
            except TimeoutError as error:
                self.given_up[name] = f"its first call {error}"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the gate says what it raises
                let_go(error)
            one.prepare()
        self._calls.clean_up()

    # ---- right or wrong

    def judge(self, sizes: Mapping[str, int], call: Call) -> list[Verdict]:
        """The verdicts of every function on the call and on its variations."""
        asked = self.asked
        if asked.reference is None:
            return []
        verdicts: list[Verdict] = []

        def unjudged(name: str, label: str, call: Call, why: str) -> Verdict:
            return Verdict(
                function=name, case=label, inputs=words_of(call), dtype=asked.dtype, judged="not judged", reason=why
            )

        for label, varied in self._variations(sizes, call):
            alike = (label, AS_TIMED) if label == SMALL else (label,)
            if any((one, words_of(varied)) in self._judged for one in alike):
                continue
            self._judged.add((label, words_of(varied)))
            case = self._case(label, varied)
            if isinstance(case, str):
                verdicts += [unjudged(name, label, varied, case) for name in asked.functions]
                continue
            for name, function in asked.functions.items():
                if name in self.given_up:
                    continue
                try:
                    with patience(asked.patience_s):
                        verdicts.append(case.judge(name, function))
                except Exception as error:
                    if not is_out_of_memory(error) and not isinstance(error, TimeoutError):
                        raise
                    verdicts.append(unjudged(name, label, varied, one_line(error)))
                    let_go(error)
        self._calls.clean_up()
        return verdicts

    def _variations(self, sizes: Mapping[str, int], call: Call) -> Iterator[tuple[str, Call]]:
        asked, most = self.asked, SMALL_SIZE[self.device.type]
        numbers = sum(tensor.numel() for tensor in call.tensors)
        if numbers <= MOST_JUDGED[self.device.type] and not self.interpreted:
            yield AS_TIMED, call
        if asked.make is not None:
            small = call if numbers <= MOST_JUDGED["cpu"] else None
            odd_sizes = {name: value - 1 - value % 2 if value > 2 else value for name, value in sizes.items()}
            other = self.made(odd_sizes) if odd_sizes != dict(sizes) and small is not None else None
            yield from variations(small, other) if small is not None else ()
            return
        specs = tuple(spec.sized(sizes) for spec in asked.specs)
        draw = lambda some: draw_call(some, DTYPES[asked.dtype], self.device, asked.arguments)  # noqa: E731
        small_specs, odd_specs = smaller(specs, most), odd(specs, most)
        yield from variations(draw(small_specs), draw(odd_specs) if odd_specs != small_specs else None)

    def _case(self, label: str, call: Call) -> Case | str:
        """The case, or why nobody can be judged by it. Raises InputError where the reference does not run at all."""
        asked = self.asked
        assert asked.reference is not None
        yardstick = asked.functions.get(asked.yardstick, asked.reference)
        try:
            names = tensor_names(call, (*asked.functions.values(), asked.reference))
            return Case.make(label, asked.dtype, call, asked.reference, yardstick, names=names, backward=asked.backward)
        except Exception as error:
            why = "float64 does not fit into the memory" if is_out_of_memory(error) else named_line(error)
            fits = is_out_of_memory(error)
            let_go(error)
            if label == SMALL and not fits:
                raise InputError(
                    f"the reference, {asked.reference_name}, cannot judge: in float64 it raises {why}; give another "
                    "one with --reference"
                ) from error
            return f"the reference: {why}"

    # ---- time

    def time(
        self, sizes: Mapping[str, int], call: Call, verdicts: Sequence[Verdict]
    ) -> tuple[list[Timing], list[Work]]:
        """The times of what is right, in turns, and the work of this size."""
        asked, words = self.asked, words_of(call)
        rows: dict[str, Timing] = {}

        def row(name: str, outcome: Timed, reason: str = "", **fields: Any) -> Timing:
            return Timing(function=name, sizes=dict(sizes), inputs=words, dtype=asked.dtype, outcome=outcome,
                          reason=reason, **fields)  # fmt: skip

        passes: dict[str, CallPass] = {}
        for name, function in asked.functions.items():
            refused = next((v for v in verdicts if v.function == name and v.judged == "wrong"), None)
            if refused is not None:
                rows[name] = row(name, "wrong", f"{refused.case} ({refused.inputs}): {refused.reason}")
            elif name in self.interpreted:
                why = "its kernels ran in Triton's interpreter, whose times say nothing"
                rows[name] = row(name, "interpreted", why)
            elif name in self.given_up:
                rows[name] = row(name, "failed", self.given_up[name])
            else:
                passes[name] = CallPass(function, call.ready(backward=asked.backward))

        def failed(name: str, error: BaseException, _during: str) -> None:
            rows[name] = row(name, "out of memory" if is_out_of_memory(error) else "failed", named_line(error))

        memories = self._calls.memories(passes, failed)
        work = self._work(sizes, call, passes)
        for name, measured in self._calls.in_turns(passes, failed).items():
            self.interrupted |= measured.interrupted
            samples, memory = measured.samples, memories[name]
            saved = sum(nbytes for pointer, nbytes in memory.saved.items() if pointer not in memory.outs)
            rows[name] = row(
                name, "measured" if samples[FORWARD].count else "interrupted", forward=samples[FORWARD],
                backward=samples.get(BACKWARD), host=samples["host"], hidden=launches_hidden(measured),
                first_s=self._first_s.get(name), saved_bytes=saved if passes[name].leaves else None,
                beyond_bytes=None if memory.peak_bytes is None else max(0, memory.peak_bytes - memory.result_bytes),
            )  # fmt: skip
        self._calls.clean_up()
        return [rows[name] for name in asked.functions if name in rows], work

    def _work(self, sizes: Mapping[str, int], call: Call, passes: Mapping[str, CallPass]) -> list[Work]:
        """The work of this size: FLOPs as the operators of the reference, or else of the last function, count."""
        function = self.asked.reference or [*self.asked.functions.values()][-1]
        one = CallPass(function, call.ready(backward=self.asked.backward))
        counts = FlopCounts("half")
        try:
            with counts.running():
                drive(one, counts)
            self._calls.timing.synchronize()
        except Exception as error:  # of what it cannot run it knows no work
            let_go(error)
            counts.unknown["the reference"] += 1
            one = next(iter(passes.values()), one)
            with contextlib.suppress(Exception):
                one.forward()
        inputs = sum(tensor.nbytes for tensor in call.tensors)
        outputs = sum(out.nbytes for out in one.outs)
        leaves = sum(leaf.nbytes for leaf in one.leaves)
        one.prepare()
        # Backward reads what autograd keeps, and the outputs' gradients.
        kept = 0
        with contextlib.suppress(Exception):  # what cannot run keeps nothing that is known
            one.forward()
            kept = sum(one.saved_storages().values())
        one.prepare()
        flops = {phase: work.flops for phase, work in counts.work.items()} if not counts.unknown else {}
        return [
            Work(
                sizes=dict(sizes),
                inputs=words_of(call),
                forward_flops=flops.get(FORWARD),
                backward_flops=flops.get(BACKWARD),
                forward_bytes=inputs + outputs,
                backward_bytes=kept + outputs + leaves if leaves else 0,
            )
        ]


def with_ratios(rows: Sequence[Timing]) -> list[Timing]:
    """The rows with how many times as long each takes as the first of them that has a time, pair by pair."""
    base = next((row.both for row in rows if row.both is not None and row.both.count), None)
    if base is None:
        return list(rows)
    found: list[Timing] = []
    for row in rows:
        both = row.both
        ratios = (
            () if both is None else tuple(b / a for a, b in zip(base.values_s, both.values_s, strict=False) if a > 0)
        )
        if not ratios:
            found.append(row)
            continue
        samples = Samples(values_s=ratios, clock="ratio")
        found.append(msgspec.structs.replace(row, ratio=samples.median_s, interval=samples.interval()))
    return found


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """While open, the code inside may run for so long, and then TimeoutError is raised in it. In a thread that gets no
    signals it may run on."""
    if threading.current_thread() is not threading.main_thread() or not math.isfinite(seconds):
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutError(f"had not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
