"""How near each operator comes to what the device can do: the roofline (Williams, Waterman and Patterson 2009).

Work is counted on the call that launched the kernels, from its recorded shapes and dtypes (`operator_work`), and time
is that of the kernels launched inside the call. An operator's bound is the larger of FLOPs over the peak rate of the
arithmetic it used and bytes over the bandwidth of device memory. It is a bound on traffic with device memory: operands
that stay in the L2 cache, or are broadcast views, can take an operator below it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stepscope.core.work import Work
from stepscope.core.work.operators.attention import Sight
from stepscope.traces.kernels.families import Family
from stepscope.traces.roofline.peaks import Peaks

Verdict = Literal["compute-bound", "memory-bound", "launch-bound"]
"""compute-bound: FLOPs take longer at their peak than bytes at theirs. memory-bound: bytes do. launch-bound: the host
takes longer over a call (the median of the operator's own time on the host, that of operators it calls included) than
the device (the mean), and in at least half of the calls the stream had run dry when the first kernel was launched.
The second condition leaves out hosts that take long because they wait for room in a full queue. A profiler slows the
host: what is launch-bound in a trace may not be without one."""

DRY_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class OperatorRoof:
    """All calls of one operator with the same shapes, dtypes, phase, family and arithmetic, over the whole capture.

    `shapes`, `dtypes`, `values`: as recorded, JSON text; values of operators whose work depends on them. `family`: that
    of most of the call's kernel time, which is `family_ns` of `device_ns`. `kernel`: the longest. `arithmetic`: what
    its products, or else its elements, are computed in; None where neither kernel nor dtypes say. `host_ns`: median of
    a call's time on the host. `dry_share`: calls whose first kernel was launched after the stream had run dry. `work`:
    of one call, None where no rule counts it. `compute_ns`, `memory_ns`: of one call at the peak rates, None where work
    or rate is not known. `sight`: which keys the queries of fused attention see. `is_open`: whether a rule counts such
    calls, but the record does not say enough.
    """

    operator: str
    shapes: str | None
    dtypes: str | None
    values: str | None
    phase: str | None
    family: Family
    kernel: str
    arithmetic: str | None
    calls: int
    kernels: int
    device_ns: int
    family_ns: int
    host_ns: int
    dry_share: float
    work: Work | None
    compute_ns: float | None
    memory_ns: float | None
    on_cpu: bool = False
    sight: Sight | None = None
    is_open: bool = False

    @property
    def flops(self) -> int | None:
        return self.work.flops * self.calls if self.work else None

    @property
    def bytes_moved(self) -> int | None:
        return self.work.bytes_moved * self.calls if self.work and self.work.bytes_moved is not None else None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.work.arithmetic_intensity if self.work else None

    @property
    def flops_per_s(self) -> float | None:
        """Achieved, by device time."""
        return _rate(self.flops, self.device_ns)

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved: the fewest bytes over device time, more than the memory gives where a cache held them."""
        return _rate(self.bytes_moved, self.device_ns)

    @property
    def bound_ns(self) -> float | None:
        """The least time for all calls at the peak rates."""
        if self.compute_ns is None or self.memory_ns is None:
            return None
        return max(self.compute_ns, self.memory_ns) * self.calls

    @property
    def over_bound(self) -> float | None:
        """Device time over its bound."""
        return self.device_ns / self.bound_ns if self.bound_ns else None

    @property
    def is_launch_bound(self) -> bool:
        return not self.on_cpu and self.host_ns * self.calls > self.device_ns and self.dry_share >= DRY_SHARE

    @property
    def verdict(self) -> Verdict | None:
        """What holds the operator back; None where its bound is not known and it is not launch-bound."""
        if self.is_launch_bound:
            return "launch-bound"
        if not self.bound_ns or self.compute_ns is None or self.memory_ns is None:
            return None
        return "compute-bound" if self.compute_ns >= self.memory_ns else "memory-bound"


@dataclass(frozen=True, kw_only=True)
class FamilyRoof:
    """One family of kernels over the whole capture.

    `device_ns`: all its kernels, copies and fills. `forward_ns`, `backward_ns`: those of these phases. `covered_ns`:
    the part of it in operators whose work is known; `flops` and `bytes_moved` are theirs. `bounded_ns`: the part whose
    bound, `bound_ns`, is known too. `verdict`: the one that holds for more of its time than any other, `verdict_ns`,
    which may be a small part; None without any.
    """

    family: Family
    device_ns: int
    forward_ns: int
    backward_ns: int
    covered_ns: int
    flops: int
    bytes_moved: int
    bounded_ns: int
    bound_ns: float
    verdict: Verdict | None
    verdict_ns: int

    @property
    def coverage(self) -> float:
        """Share of the family's time in operators whose work is known."""
        return self.covered_ns / self.device_ns if self.device_ns else 0.0

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of what is covered."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    @property
    def flops_per_s(self) -> float | None:
        return _rate(self.flops, self.covered_ns)

    @property
    def bytes_per_s(self) -> float | None:
        return _rate(self.bytes_moved, self.covered_ns)

    @property
    def over_bound(self) -> float | None:
        """Time over its bound, of what has one."""
        return self.bounded_ns / self.bound_ns if self.bound_ns else None

    @property
    def verdict_share(self) -> float | None:
        """Share of the family's time for which the verdict holds."""
        return self.verdict_ns / self.device_ns if self.verdict and self.device_ns else None

    @property
    def mostly(self) -> Verdict | None:
        """The verdict, if it holds for more than half of the family's time."""
        return self.verdict if 2 * self.verdict_ns > self.device_ns else None

    @property
    def backward_over_forward(self) -> float | None:
        """None where either of them did not run."""
        return self.backward_ns / self.forward_ns if self.forward_ns and self.backward_ns else None


@dataclass(frozen=True, kw_only=True)
class PassRatio:
    """Forward and backward of the capture. Times are of kernels, without copies and fills.

    FLOPs are those of matrix products and fused attention, as run: recomputation in backward is counted. Without it
    each product has two in backward (Kaplan et al. 2020, section 2.1), so that the ratio of FLOPs is 2.
    """

    forward_ns: int
    backward_ns: int
    forward_flops: int
    backward_flops: int

    @property
    def time_ratio(self) -> float | None:
        """None where either of them did not run."""
        return self.backward_ns / self.forward_ns if self.forward_ns and self.backward_ns else None

    @property
    def flops_ratio(self) -> float | None:
        return self.backward_flops / self.forward_flops if self.forward_flops else None


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A capture's operators and families, the busiest first. Totals are of the whole capture, of `steps` steps.

    `devices`: the names of those that ran something, where the trace says them. `busy_ns`: all device work.
    `recorded`: the calls of operators in the capture, and `shaped` those with shapes, whether or not they launched.
    """

    devices: tuple[str, ...]
    peaks: Peaks
    steps: int
    busy_ns: int
    operators: tuple[OperatorRoof, ...]
    families: tuple[FamilyRoof, ...]
    passes: PassRatio
    recorded: int
    shaped: int

    @property
    def covered_ns(self) -> int:
        """Device time of operators whose work is known."""
        return sum(each.device_ns for each in self.operators if each.work)

    def self_check(self) -> None:
        """Raise AssertionError where time was counted twice, or families do not make up the whole."""
        assert sum(each.device_ns for each in self.operators) <= self.busy_ns, "operators take more than the device"
        assert sum(each.device_ns for each in self.families) == self.busy_ns, "families are not all device work"
        for each in self.families:
            assert 0 <= each.bounded_ns <= each.covered_ns <= each.device_ns, f"{each.family}: covered is not a part"


def family_roof(family: Family, times_ns: tuple[int, int, int], operators: Iterable[OperatorRoof]) -> FamilyRoof:
    """The family's kernels (`times_ns`: all, forward, backward) with the sums over its operators."""
    own = list(operators)
    covered = [each for each in own if each.work and each.bytes_moved is not None]
    bounded = [each for each in covered if each.bound_ns is not None]
    by_verdict: dict[Verdict, int] = {}
    for each in own:
        if each.verdict:
            by_verdict[each.verdict] = by_verdict.get(each.verdict, 0) + each.family_ns
    verdict = max(by_verdict, key=lambda name: by_verdict[name]) if by_verdict else None
    return FamilyRoof(
        family=family,
        device_ns=times_ns[0],
        forward_ns=times_ns[1],
        backward_ns=times_ns[2],
        covered_ns=sum(each.family_ns for each in covered),
        flops=sum(each.flops or 0 for each in covered),
        bytes_moved=sum(each.bytes_moved or 0 for each in covered),
        bounded_ns=sum(each.family_ns for each in bounded),
        bound_ns=sum(each.bound_ns or 0.0 for each in bounded),
        verdict=verdict,
        verdict_ns=by_verdict[verdict] if verdict else 0,
    )


def _rate(amount: int | None, time_ns: int) -> float | None:
    return amount / time_ns * 1e9 if amount is not None and time_ns else None
