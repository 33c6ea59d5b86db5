"""The bench itself: each size judged, then one pass for first call and memory, then all that is right timed in turns.

What was measured is told as it comes; Ctrl-C leaves it.
"""

import contextlib
import inspect
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

from stepscope.core.errors import InputError, install_places, named_line, one_line
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.samples import Samples
from stepscope.core.units import format_seconds
from stepscope.questions.bench_gate import (
    AS_TIMED,
    DTYPES,
    SMALL,
    Case,
    call_of,
    draw_call,
    tensor_names,
    variations,
    words_of,
)
from stepscope.questions.bench_inputs import TensorSpec, odd, size_words, smaller
from stepscope.questions.bench_result import Bench, Timed, Timing, Verdict, Work
from stepscope.questions.function_calls import CallPass, FunctionCalls, settings_for
from stepscope.recording.device import is_out_of_memory, let_go
from stepscope.recording.environment import read_environment
from stepscope.recording.flops import FlopCounts
from stepscope.recording.leads import launches_hidden
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import drive
from stepscope.training.judging import Call, Function

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
        self.interpreted = [
            name
            for name, function in asked.functions.items()
            if "triton" in sys.modules
            and any(type(one).__name__ == "InterpretedFunction" for one in reached_by(function))
        ]
        """Functions that call a kernel which Triton's interpreter runs: themselves, or what they name in their file."""

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
                with patience(self.asked.patience_s):
                    drive(one)
                    self._calls.timing.synchronize()
                self._first_s[name] = self._clock() - began
            except TimeoutError as error:
                self.given_up[name] = f"its first call {error}"
            except (Exception, SystemExit) as error:  # the gate says what it raises
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
            return Verdict(function=name, case=label, inputs=words_of(call), dtype=asked.dtype, judged="not judged",
                           reason=why)  # fmt: skip

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
        yield from variations(draw(smaller(specs, most)), draw(odd(specs, most)))

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


def reached_by(function: Any) -> Iterator[Any]:
    """The function, what it names in the user's own files, and so on; of libraries the kernels alone."""
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        one = inspect.unwrap(one) if callable(one) else one
        one = getattr(one, "__self__", one)  # the class of `Function.apply`
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, type):
            methods = [getattr(value, "__func__", value) for value in vars(one).values()]
            waiting += [method for method in methods if inspect.isfunction(method)]
        elif inspect.isfunction(one):
            names = one.__code__.co_names
            near = [one.__globals__[name] for name in names if name in one.__globals__]
            modules = [value for value in near if inspect.ismodule(value) and _is_of_user(value)]
            near += [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
            waiting += [value for value in near if hasattr(value, "fn") or _is_of_user(value)]
        elif hasattr(one, "fn"):  # a kernel under an autotuner
            waiting.append(one.fn)


def _is_of_user(value: Any) -> bool:
    """Whether a module, or what a value is defined in, lies in no library."""
    module = value if inspect.ismodule(value) else sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return bool(file) and not file.startswith(install_places())
