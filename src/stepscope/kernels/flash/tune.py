"""Tuning of the FlashAttention kernels for one class of calls: a bounded list, a bounded time, a stored choice.

    tune(q, k, v, causal=True, seconds=60)        prints as the chosen configurations and their times

The order is: the forward kernel, whole backward passes by the kernel in Gluon if there is one, the two kernels of other
backward passes one by one, then whole passes made of the fastest of each. Every list begins with the configuration that
is used without tuning, so a short budget never chooses worse than none. Candidates that are wrong or do not compile get
no time. If a kernel in Gluon is fastest, the choice also names the fastest of the others, for calls of the class that
the kernel does not take.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
import torch
from torch import Tensor
from triton.errors import TritonError

from stepscope.core.errors import InputError
from stepscope.core.run import Settings
from stepscope.kernels.flash import launch, tuning_cache
from stepscope.kernels.flash.attention import check_inputs
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    HopperBackward,
    HopperForward,
    Precision,
    Problem,
    Tiles,
    default_backward,
    default_forward,
    hopper_columns,
    tiles,
)
from stepscope.kernels.flash.tuning_cache import Choice, device_name, keep
from stepscope.recording.leads import median_call_s


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A tile shape for one of the two kernels of a backward pass."""

    kernel: Literal["keys", "queries"]
    tiles: Tiles
    tma: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.tiles}{' tma' if self.tma else ''}"


Candidate = ForwardConfiguration | BackwardConfiguration | Part
_Candidate = TypeVar("_Candidate", bound=Candidate)
_Whole = TypeVar("_Whole", ForwardConfiguration, BackwardConfiguration)

MOST = 10
"""The most candidates in a list: configurations of one kernel, or whole backward passes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The time and error of a candidate."""

    ms: float
    """The candidate's median time in milliseconds."""
    of_allowed: float
    """The candidate's largest error as a share of the allowed error. The candidate is wrong above 1, or if NaN."""


Measure = Callable[[Candidate], Trial]
"""A function that runs a candidate. If that fails, it raises a TritonError, RuntimeError or ValueError."""


_SHAPES: dict[str, dict[int, tuple[tuple[int, int, int, int, bool], ...]]] = {
    "forward": {
        64: ((64, 128, 4, 2, True), (64, 64, 4, 3, False), (64, 128, 4, 3, True), (64, 64, 4, 2, True),
             (128, 64, 4, 3, False), (128, 128, 8, 2, True)),
        128: ((64, 128, 4, 1, True), (64, 64, 4, 3, True), (128, 64, 8, 3, False), (128, 64, 8, 3, True),
              (128, 32, 4, 3, False)),
        256: ((64, 64, 4, 2, True), (128, 64, 8, 2, True), (64, 32, 4, 2, False)),
    },
    "keys": {
        64: ((64, 64, 4, 3, True), (128, 64, 4, 2, True), (128, 64, 4, 2, False), (64, 64, 4, 2, False),
             (32, 128, 4, 3, False)),
        128: ((64, 64, 4, 2, True), (64, 128, 8, 3, True), (64, 64, 4, 2, False), (64, 128, 8, 2, False),
              (32, 64, 4, 2, False)),
        256: ((32, 64, 8, 2, True), (32, 64, 4, 1, False), (32, 32, 4, 1, False)),
    },
    "queries": {
        64: ((128, 64, 8, 3, True), (64, 64, 4, 2, True), (64, 64, 4, 2, False), (64, 64, 4, 3, True),
             (128, 32, 4, 3, False)),
        128: ((64, 64, 4, 2, True), (128, 64, 8, 3, True), (64, 64, 4, 2, False), (64, 32, 4, 2, False)),
        256: ((64, 32, 8, 2, True), (32, 64, 4, 1, False), (32, 32, 4, 1, False)),
    },
}  # fmt: skip
"""Candidates (block_m, block_n, num_warps, num_stages, tma), by the largest suitable head dimension."""
_SHAPES_FP32: dict[str, dict[int, tuple[tuple[int, int, int, int, bool], ...]]] = {
    "forward": {
        64: ((128, 64, 8, 2, True), (64, 64, 4, 2, True), (64, 32, 4, 2, True), (64, 32, 4, 2, False),
             (32, 32, 4, 2, False)),
        256: ((128, 64, 8, 2, True), (64, 32, 4, 2, False), (32, 32, 4, 2, False), (32, 32, 4, 1, False)),
    },
    "keys": {
        64: ((64, 128, 8, 2, False), (32, 32, 4, 2, False), (32, 128, 8, 2, False), (32, 32, 8, 1, False)),
        256: ((32, 32, 4, 2, False), (32, 32, 8, 1, False)),
    },
    "queries": {
        64: ((128, 64, 8, 2, False), (32, 32, 4, 2, False), (64, 32, 4, 2, True), (32, 32, 8, 1, False)),
        256: ((32, 32, 4, 2, False), (32, 32, 8, 1, False)),
    },
}  # fmt: skip
_SHAPES_SPLIT: dict[str, dict[int, tuple[tuple[int, int, int, int, bool], ...]]] = {
    "forward": {
        256: ((64, 64, 4, 1, True), (128, 64, 8, 1, True), (128, 32, 8, 2, True), (64, 32, 4, 2, True),
              (64, 64, 4, 1, False), (64, 32, 4, 1, False)),
    },
    "keys": {
        256: ((32, 64, 4, 2, True), (16, 64, 4, 2, True), (32, 64, 4, 2, False), (32, 32, 4, 1, False)),
    },
    "queries": {
        256: ((64, 32, 4, 2, True), (64, 16, 4, 2, True), (64, 32, 4, 2, False), (32, 32, 4, 1, False)),
    },
}  # fmt: skip
"""Tile shapes for fp32 as "bf16x6". An operand is three 16-bit tiles, so shared memory holds few operands."""


_HOPPER_FORWARDS = {
    64: (
        HopperForward(consumers=1, late=True, max_registers=128),
        HopperForward(consumers=3),
        HopperForward(late=True),
    ),
    128: (
        HopperForward(turns=True, late=True),
        HopperForward(late=True),
        HopperForward(turns=True, late=True, stages=3),
    ),
}
_HOPPER_BACKWARDS = {
    64: (
        HopperBackward(v_in_registers=True, spread=True, share=True, ahead=True),
        HopperBackward(v_in_registers=True),
    ),
    128: (HopperBackward(), HopperBackward(spread=True, share=True)),
}
"""Configurations of the kernels in Gluon to try, by the columns of their tiles."""


def _listed(problem: Problem, kernel: str) -> list[tuple[Tiles, bool]]:
    fp32 = _SHAPES_SPLIT if problem.precision == "bf16x6" else _SHAPES_FP32
    lists = (fp32 if problem.bytes_per_element == 4 else _SHAPES)[kernel]
    shapes = next(shapes for limit, shapes in lists.items() if problem.head_dim <= limit)
    described = problem.capability >= (9, 0)
    shapes_and_tma = [(tiles(*shape[:4]), shape[4]) for shape in shapes if described or not shape[4]]
    if kernel == "keys" and problem.capability[0] == 9 and problem.head_dim <= 64 and problem.bytes_per_element == 2:
        shapes_and_tma.insert(0, (tiles(64, 64, 4, 2, 168), True))
    return shapes_and_tma


def _hopper_columns(problem: Problem) -> int | None:
    """The columns of tiles of the kernels in Gluon; None where they do not take the problem."""
    takes = problem.capability == (9, 0) and problem.bytes_per_element == 2
    return hopper_columns(problem.head_dim) if takes else None


def forward_candidates(problem: Problem, *, hopper: bool = True) -> list[ForwardConfiguration]:
    """At most ten forward configurations to try, the default first; without `hopper`, none of the kernel in Gluon."""
    default = default_forward(problem)
    plain = msgspec.structs.replace(default, hopper=None)
    first = [default if hopper else plain]
    if hopper and (columns := _hopper_columns(problem)) is not None:
        first += [msgspec.structs.replace(default, hopper=each) for each in _HOPPER_FORWARDS[columns]]
    listed = [
        ForwardConfiguration(tiles=each, tma=tma, rows_first=default.rows_first)
        for each, tma in _listed(problem, "forward")
    ]
    return list(dict.fromkeys([*first, plain, *listed]))[:MOST]


def backward_candidates(problem: Problem, *, hopper: bool = True) -> list[BackwardConfiguration]:
    """Whole backward passes to try first, the default before others; at most ten with those that `search` adds."""
    default = default_backward(problem)
    plain = msgspec.structs.replace(default, hopper=None)
    candidates = [default if hopper else plain]
    if hopper and (columns := _hopper_columns(problem)) is not None:
        # Under a causal mask nothing is spread.
        listed = [each for each in _HOPPER_BACKWARDS[columns] if not (each.spread and problem.causal)]
        candidates += [msgspec.structs.replace(default, hopper=each) for each in listed]
    return list(dict.fromkeys([*candidates, plain]))


def part_candidates(problem: Problem, kernel: Literal["keys", "queries"]) -> list[Part]:
    """At most ten configurations to try for one kernel of the backward pass, the default first."""
    default = default_backward(problem)
    chosen = default.keys if kernel == "keys" else default.queries
    first = [] if chosen is None else [Part(kernel=kernel, tiles=chosen, tma=default.tma)]
    listed = [Part(kernel=kernel, tiles=each, tma=tma) for each, tma in _listed(problem, kernel)]
    return list(dict.fromkeys([*first, *listed]))[:MOST]


class Search:
    """A search that measures candidates until the budget of seconds is spent, and finishes the last one."""

    def __init__(self, measure: Measure, seconds: float, now: Callable[[], float], tell: Callable[[str], None]) -> None:
        self.measure, self.now, self.tell = measure, now, tell
        self.deadline = now() + seconds
        self.trials: dict[Candidate, float] = {}
        """The time of each correct candidate in milliseconds."""

    def try_all(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if self.now() >= self.deadline:
                return
            try:
                trial = self.measure(candidate)
            except (TritonError, RuntimeError, ValueError) as error:  # compilation may raise any of these
                self.tell(f"{candidate}: {type(error).__name__}")
                continue
            if trial.of_allowed <= 1:
                self.trials[candidate] = trial.ms
                self.tell(f"{candidate}: {trial.ms:.3f} ms")
            else:
                self.tell(f"{candidate}: wrong, {trial.of_allowed:.2f} of the error allowed")

    def fastest(self, candidates: Sequence[_Candidate]) -> _Candidate | None:
        right = [candidate for candidate in candidates if candidate in self.trials]
        return min(right, key=lambda candidate: self.trials[candidate], default=None)


def search(
    problem: Problem,
    measure: Measure,
    *,
    batch_heads: int,
    seconds: float,
    hopper: bool = True,
    deterministic: bool = False,
    now: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """The fastest correct configurations of a problem, by `measure`. The forward pass gets at most half the budget.

    `hopper`: whether the kernels in Gluon take the measured calls. `deterministic`: whether PyTorch must be
    deterministic. The backward kernel in Gluon then takes no call, and its default is left unchanged.
    """
    trying = Search(measure, seconds / 2, now, tell)
    started = trying.deadline - seconds / 2
    forwards = forward_candidates(problem, hopper=hopper)
    trying.try_all(forwards)
    trying.deadline = started + seconds
    whole = backward_candidates(problem, hopper=hopper and not deterministic)
    trying.try_all(whole)
    # Both kernels must be measured before whole passes, so they come first, in turn.
    keys, queries = part_candidates(problem, "keys"), part_candidates(problem, "queries")
    in_turn = [
        part for at in range(max(len(keys), len(queries))) for part in (*keys[at : at + 1], *queries[at : at + 1])
    ]
    passes_reserve = (trying.deadline - trying.now()) / 4
    trying.deadline -= passes_reserve
    trying.try_all(in_turn)
    trying.deadline += passes_reserve
    rows_first = default_backward(problem).rows_first
    passes = [each for each in _passes(trying, keys, queries, rows_first) if each not in whole]
    trying.try_all(passes)

    forward, forward_ms = _chosen(trying, forwards, default_forward(problem))
    backward, backward_ms = _chosen(trying, [*whole, *passes], default_backward(problem))
    if deterministic and hopper:
        backward = msgspec.structs.replace(backward, hopper=default_backward(problem).hopper)
    return Choice(
        problem=problem,
        batch_heads=batch_heads,
        forward=forward,
        backward=backward,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        default_forward_ms=trying.trials.get(forwards[0]),
        default_backward_ms=trying.trials.get(whole[0]),
        deterministic=deterministic,
    )


def _passes(trying: Search, keys: list[Part], queries: list[Part], rows_first: bool) -> list[BackwardConfiguration]:
    """Whole passes of the fastest kernels: with descriptors and with pointers, apart and joint."""
    passes = []
    for tma in (True, False):
        over_keys, over_queries = (trying.fastest([p for p in parts if p.tma == tma]) for parts in (keys, queries))
        if over_keys is not None and over_queries is not None:
            passes += [
                BackwardConfiguration(
                    way=way, keys=over_keys.tiles, queries=over_queries.tiles, tma=tma, rows_first=rows_first
                )
                for way in ("apart", "joint")
            ]
    return passes


def _chosen(trying: Search, candidates: list[_Whole], default: _Whole) -> tuple[_Whole, float | None]:
    """The fastest candidate and its milliseconds, or the default and None if nothing was measured."""
    fastest = trying.fastest(candidates)
    if fastest is None:
        return default, None
    ms = trying.trials[fastest]
    others = trying.fastest([each for each in candidates if each.hopper is None])
    if fastest.hopper is not None and others is not None:
        return msgspec.structs.replace(others, hopper=fastest.hopper), ms
    return fastest, ms


_NEXT_TO_NOTHING = 1e-30
"""The largest allowed error if the exact result is zero."""
_TIMED = Settings(warmup_floor=1, warmup_cap=1000, warmup_seconds=0.01, steps_floor=3, steps_cap=10_000, seconds=0.05)


class OnDevice:
    """A measurement on the tensors of a call: results against PyTorch's own attention, then the device's own time."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, problem: Problem) -> None:
        self.q, self.k, self.v = (t.detach() for t in (q, k, v))
        self.causal = causal
        self.precision: Precision = problem.precision
        self.rows_first = default_backward(problem).rows_first
        self.scale = q.shape[3] ** -0.5
        leaves = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        self.gradient = torch.randn_like(self.q)
        out = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )
        out.backward(self.gradient)
        self.truth = {"out": out.detach()} | {
            name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True) if leaf.grad is not None
        }
        # The limit allows two roundings of numbers near the tensor's maximum, and the errors of two sums.
        share = {torch.float32: 2e-5, torch.float16: 0.005, torch.bfloat16: 0.02}[q.dtype]
        if problem.precision == "tf32":
            share = 0.01
        self.allowed = {name: share * float(t.abs().max()) for name, t in self.truth.items()}
        self.results = {name: torch.empty_like(t) for name, t in self.truth.items()}
        self.logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        self.out = self.results["out"]
        self._has_forward = False

    def __call__(self, candidate: Candidate) -> Trial:
        """Compile the candidate, run it into poisoned output tensors, compare, then time it."""
        if isinstance(candidate, ForwardConfiguration):
            run, names = self._forward(candidate), ("out",)
        else:
            if not self._has_forward:
                raise RuntimeError("no forward configuration was right: backward has nothing to go by")
            run, names = self._backward(candidate)
        for name in names:
            self.results[name].fill_(float("nan"))
        run()
        worst = 0.0
        for name in names:
            error = float((self.results[name] - self.truth[name]).abs().max()) / (
                self.allowed[name] or _NEXT_TO_NOTHING
            )
            worst = error if not error <= worst else worst
        if not worst <= 1:
            return Trial(ms=float("inf"), of_allowed=worst)
        if isinstance(candidate, ForwardConfiguration) and not self._has_forward:
            self._has_forward = True
            self.out = self.results["out"].clone()
            self.saved_logsumexp = self.logsumexp.clone()
        return Trial(ms=median_call_s(run, self.q.device, _TIMED) * 1e3, of_allowed=worst)

    def _forward(self, configuration: ForwardConfiguration) -> Callable[[], object]:
        if configuration.hopper is not None and not launch.in_gluon(
            self.q, self.k, self.v, self.out, configuration.hopper, limited=False, plain=not self.causal
        ):
            raise _not_taken(configuration)
        return lambda: launch.launch_forward(
            self.q, self.k, self.v, self.results["out"], self.logsumexp, causal=self.causal, scale=self.scale,
            window=None, precision=self.precision, configuration=configuration,
        )  # fmt: skip

    def _backward(self, candidate: BackwardConfiguration | Part) -> tuple[Callable[[], object], tuple[str, ...]]:
        statistics, sums = launch.statistics_for(self.q), None
        hopper = candidate.hopper if isinstance(candidate, BackwardConfiguration) else None
        if hopper is not None and hopper.heads:
            if not launch.in_gluon(self.q, self.k, self.v, self.gradient, hopper, limited=False, plain=not self.causal):
                raise _not_taken(candidate)
        elif isinstance(candidate, BackwardConfiguration) and hopper is not None:
            sums = launch.sums_for(
                candidate, statistics, self.q, self.k, self.v, self.gradient, causal=self.causal, limited=False
            )
            if sums is None:
                raise _not_taken(candidate)
        backward = launch.Backward(
            self.gradient, self.q, self.k, self.v, self.out, self.saved_logsumexp,
            self.results["dq"], self.results["dk"], self.results["dv"], statistics,
            causal=self.causal, scale=self.scale, window=None, precision=self.precision, tma=candidate.tma,
            rows_first=candidate.rows_first if isinstance(candidate, BackwardConfiguration) else self.rows_first,
            sums=sums,
        )  # fmt: skip
        if isinstance(candidate, BackwardConfiguration):
            return lambda: launch.run_backward(backward, candidate), ("dq", "dk", "dv")
        backward.split()
        if candidate.kernel == "queries":
            return lambda: backward.over_queries(candidate.tiles, prepare=True), ("dq",)
        backward.preprocess()
        return lambda: backward.over_keys(candidate.tiles), ("dk", "dv")


def _not_taken(candidate: Candidate) -> ValueError:
    # A launch here would run another kernel, and its time would count as this candidate's.
    return ValueError(f"{candidate}: the kernel for Hopper does not take this call")


def tune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    seconds: float = 60.0,
    measure: Measure | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Choose configurations for calls like this one, store the choice on disk, and use it from now on.

    q is (B, H, S, D), k and v are (B, H', T, D). The choice is used by calls of the same head_dim, dtype width, mask
    and number of queries up to the next power of two. If PyTorch must be deterministic, only deterministic backward
    passes are measured, and other processes keep the default's kernel in Gluon. `measure` replaces the measurement, as
    in tests.
    """
    check_inputs(q, k, v)
    if seconds <= 0:
        raise InputError(f"tuning takes a budget above zero seconds, not {seconds:g}")
    if measure is None and q.device.type != "cuda":
        raise InputError(f"tuning flash attention measures on an NVIDIA GPU, and these tensors lie on {q.device}")
    problem = tuning_cache.problem_of(q, causal=causal)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        measure = measure or OnDevice(q, k, v, causal=causal, problem=problem)
        choice = search(
            problem, measure, batch_heads=q.shape[0] * q.shape[1], seconds=seconds, tell=tell,
            hopper=launch.hopper_takes(q, k, v, limited=False),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    if choice.forward_ms is not None or choice.backward_ms is not None:
        keep(device_name(q.device), choice)
        tuning_cache.forget()
    return choice
