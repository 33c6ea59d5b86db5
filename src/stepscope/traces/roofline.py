"""The roofline of a capture: its device work gathered by operator call, each distinct operator's work counted once.

Grouping is vectorised over all kernels; formulas run for each distinct (operator, shapes, dtypes), which are few.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import msgspec
import polars as pl
from msgspec.structs import asdict

from stepscope.core.answer import TEXT, Line, Panel, Point, Table, as_lines, table_of, text
from stepscope.core.device_spec import Ceilings, DeviceSpec, find_device_spec
from stepscope.core.errors import InputError, name_shown
from stepscope.core.formulas import CausalConvention, Work
from stepscope.core.formulas.operator_formulas import ELEMENT_BYTES, Sight
from stepscope.core.formulas.operator_rules import RULE_OF, call_sight, call_work, is_product, recorded_call
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.units import format_rate, format_share, ms_text
from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.occupation import device_names
from stepscope.traces.kernels.families import FAMILIES, Family
from stepscope.traces.kernels.names import decode
from stepscope.traces.nesting import Nest, numbered

# The highest rates of a device, measured where they were measured and by the datasheet otherwise; each says which.


Arithmetic = Literal["fp64", "fp32", "tf32", "3xtf32", "bf16", "fp16", "fp8", "int8", "int32"]
"""What multiplies. fp32: CUDA cores. tf32, bf16, fp16, fp8: Tensor Cores. 3xtf32: fp32 products as three in TF32."""

_OF_OPERANDS: dict[str, Arithmetic] = {
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "at::BFloat16": "bf16",
    "c10::Half": "fp16",
    "at::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """A rate in FLOP/s or bytes/s, and where it comes from."""

    rate: float
    source: str


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that bound an operator. A rate that is neither measured nor documented is missing, never guessed."""

    flops_per_s: Mapping[str, Peak] = msgspec.field(default_factory=dict[str, Peak])
    """Peak FLOP/s by `Arithmetic`."""
    bytes_per_s: Peak | None = None
    """Peak bandwidth of device memory: bytes read plus bytes written per second."""


def peaks_for(spec: DeviceSpec | None, ceilings: Ceilings | None, device_names: Collection[str] = ()) -> Peaks:
    """Measured ceilings first, then the datasheet. `device_names`: the devices that a trace names, if it does.

    Raises InputError where ceilings were measured on another device than the trace's.
    """
    if ceilings is not None and device_names and set(device_names) != {ceilings.device_name}:
        traced = ", ".join(sorted(device_names))
        raise InputError(f"the ceilings were measured on {ceilings.device_name}, but the trace is of {traced}")
    rates: dict[str, Peak] = {}
    memory = None
    if spec is not None:
        rates = {dtype: Peak(rate=rate, source=spec.source) for dtype, rate in spec.peak_flops_per_s.items()}
        memory = Peak(rate=spec.peak_bytes_per_s, source=spec.source) if spec.peak_bytes_per_s else None
    if ceilings is not None:
        best = ceilings.matmul.items()
        measured = {dtype: Peak(rate=one.rate, source=f"measured: {one.operation}") for dtype, one in best}
        rates |= measured
        if ceilings.copy is not None:
            memory = Peak(rate=ceilings.copy.rate, source=f"measured: {ceilings.copy.operation}")
    if "tf32" in rates:
        rates["3xtf32"] = Peak(rate=rates["tf32"].rate / 3, source=f"a third of TF32's, {rates['tf32'].source}")
    return Peaks(flops_per_s=rates, bytes_per_s=memory)


def product_arithmetic(kernel: str) -> Arithmetic | None:
    """The arithmetic of a kernel of matrix products or attention, as far as its name says; else None."""
    decoded = decode(kernel)
    if decoded.second_pass:
        return None
    if decoded.input_dtype == "fp32" and decoded.unit == "tensor core":
        return "3xtf32"
    if decoded.input_dtype is None and decoded.unit == "cuda core":
        return "fp32"
    return decoded.input_dtype


def operand_arithmetic(dtype: str | None, *, on_cpu: bool) -> Arithmetic | None:
    """The arithmetic of a product by its operands' dtype. None for fp32 on a GPU: CUDA cores, TF32, or emulation."""
    if dtype == "float":
        return "fp32" if on_cpu else None
    return _OF_OPERANDS.get(dtype or "")


_OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?l?>")
_FUNCTOR = re.compile(r"Functor<(double|float|c10::BFloat16|c10::Half),")
"""The functor that a kernel over lists applies: its first type is the elements', hyperparameters have their own."""
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def element_bytes(kernel: str) -> int | None:
    """Bytes of the elements that a kernel reads and writes, where its name says one size and no other."""
    if opaque := _OPAQUE.search(kernel):
        return int(opaque[1])
    if "multi_tensor_apply_kernel<" in kernel:
        functor = _FUNCTOR.search(kernel)
        return ELEMENT_BYTES[functor[1]] if functor else None
    decoded = decode(kernel)
    same = decoded.input_dtype == decoded.output_dtype
    return _DTYPE_BYTES.get(decoded.input_dtype or "") if same else None


# How near each operator comes to what the device can do: the roofline (Williams, Waterman and Patterson 2009).
#
# Work is counted on the call that launched the kernels, from its recorded shapes and dtypes (`call_work`), and time
# is that of the kernels launched inside the call. An operator's bound is the larger of FLOPs over the peak rate of the
# arithmetic it used and bytes over the bandwidth of device memory. It is a bound on traffic with device memory:
# operands that stay in the L2 cache, or are broadcast views, can take an operator below it.


Verdict = Literal["compute-bound", "memory-bound", "launch-bound"]
"""compute-bound: FLOPs take longer at their peak than bytes at theirs. memory-bound: bytes do. launch-bound: the host
takes longer over a call (the median of the operator's own time on the host, that of operators it calls included) than
the device (the mean), and in at least half of the calls the stream had run dry when the first kernel was launched.
The second condition leaves out hosts that take long because they wait for room in a full queue. A profiler slows the
host: what is launch-bound in a trace may not be without one."""

DRY_SHARE = 0.5


class OperatorRoof(msgspec.Struct, frozen=True, kw_only=True):
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
        return self.work.flops / self.work.bytes_moved if self.work and self.work.bytes_moved else None

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


class FamilyRoof(msgspec.Struct, frozen=True, kw_only=True):
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


class PassRatio(msgspec.Struct, frozen=True, kw_only=True):
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


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
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


def _family_roofs(attribution: Attribution, operators: tuple[OperatorRoof, ...]) -> Iterator[FamilyRoof]:
    """The families of all device work, the busiest first, with the sums over their operators."""
    spent = pl.col("duration_ns")
    times = attribution.work.group_by("family").agg(
        spent.sum().alias("device_ns"),
        spent.filter(pl.col("phase") == FORWARD).sum().alias("forward_ns"),
        spent.filter(pl.col("phase") == BACKWARD).sum().alias("backward_ns"),
    )
    for row in times.sort("device_ns", "family", descending=[True, False]).iter_rows(named=True):
        of_family = [each for each in operators if each.family == row["family"]]
        covered = [each for each in of_family if each.work and each.bytes_moved is not None]
        bounded = [each for each in covered if each.bound_ns is not None]
        by_verdict: Counter[Verdict] = Counter()
        for each in of_family:
            if each.verdict:
                by_verdict[each.verdict] += each.family_ns
        verdict, verdict_ns = next(iter(by_verdict.most_common(1)), (None, 0))
        yield FamilyRoof(
            **row,
            covered_ns=sum(each.family_ns for each in covered),
            flops=sum(each.flops or 0 for each in covered),
            bytes_moved=sum(each.bytes_moved or 0 for each in covered),
            bounded_ns=sum(each.family_ns for each in bounded),
            bound_ns=sum(each.bound_ns or 0.0 for each in bounded),
            verdict=verdict,
            verdict_ns=verdict_ns,
        )


def _rate(amount: int | None, time_ns: int) -> float | None:
    return amount / time_ns * 1e9 if amount is not None and time_ns else None


_PRODUCTS = ("matrix multiplication", "attention (fused)", "convolution")
_UNTOLD = ("other", "Triton/compiled fusion")
"""Families of kernels whose names do not say whether they are products."""
_RECORD = ("shapes", "dtypes", "values")
_ANY_PRODUCT = "product"
_BETWEEN_MEMORIES = re.compile(r"\b(?:HtoD|DtoH|HtoH|PtoP)\b")
"""Copies that are not bound by the device's own memory."""
_OF_SPARSE = re.compile(r"csrmm|csrmv|spmm|spmv|(?:cu|hip|roc)sparse(?!lt)")
"""Kernels of operands in which zeros are left out: a product's shapes do not say how much it multiplies."""
_FAMILY = pl.Enum(FAMILIES)
_ARITHMETIC = pl.Enum(get_args(Arithmetic))


def roofline(
    attribution: Attribution,
    spec: DeviceSpec | None = None,
    ceilings: Ceilings | None = None,
    *,
    causal: CausalConvention = "half",
) -> Roofline:
    """Every operator of the capture against the device's peaks, and the families of kernels.

    Peaks: `ceilings`, the rates measured on this device; what they lack from `spec`, or where none is given from the
    datasheet of the device that the trace names. An unknown device has no bounds. Copies between host and device have
    no work here: another memory bounds them. Kernels launched in no operator (graphs, compiled code outside PyTorch's
    operators) count in their family's time alone. Raises InputError for ceilings of another device.
    """
    devices = device_names(attribution)
    if spec is None and len(devices) == 1:
        spec = find_device_spec(devices[0])
    peaks = peaks_for(spec, ceilings, devices)
    operators = tuple(
        _roof(row, peaks, on_cpu=attribution.table.on_cpu, causal=causal)
        for row in _distinct(attribution).iter_rows(named=True)
    )
    times = dict(attribution.kernels.group_by("phase").agg(pl.col("duration_ns").sum()).iter_rows())
    flops = {
        phase: sum(each.flops or 0 for each in operators if each.phase == phase and is_product(each.operator))
        for phase in (FORWARD, BACKWARD)
    }
    return Roofline(
        devices=devices,
        peaks=peaks,
        steps=attribution.steps,
        busy_ns=attribution.busy_ns,
        operators=operators,
        families=tuple(_family_roofs(attribution, operators)),
        passes=PassRatio(
            forward_ns=times.get(FORWARD, 0),
            backward_ns=times.get(BACKWARD, 0),
            forward_flops=flops[FORWARD],
            backward_flops=flops[BACKWARD],
        ),
        recorded=attribution.table.operators.height,
        shaped=attribution.table.operators["shapes"].count(),
    )


def _distinct(attribution: Attribution) -> pl.DataFrame:
    """A row for each distinct (operator, shapes, dtypes, values, phase, family, arithmetic), the busiest first."""
    calls = _calls(attribution)
    recorded = attribution.table.operators
    rows = calls["operator_row"]
    calls = calls.with_columns(
        *(recorded[name].gather(rows) for name in (*_RECORD, "process", "thread", "start_ns")),
        recorded["name"].gather(rows).alias("operator"),
        recorded["duration_ns"].gather(rows).alias("host_ns"),
    )
    calls = calls.with_columns(
        _leaves_work_to_inner(calls),
        # Only lists of tensors, and calls without dtypes, need the element's size: it would part calls that are alike.
        pl.when(
            pl.col("dtypes").cast(pl.String).str.contains("TensorList")
            | (pl.col("dtypes").is_null() & pl.col("shapes").is_not_null())
        )
        .then("element_bytes")
        .alias("element_bytes"),
    )
    keys = ["operator", *_RECORD, "phase", "family", "arithmetic", "element_bytes", "between", "hidden"]
    return (
        calls.group_by(keys)
        .agg(
            pl.len().alias("calls"),
            pl.col("kernels", "device_ns", "family_ns").sum(),
            pl.col("host_ns").median().round().cast(pl.Int64),
            pl.col("dry").mean().alias("dry_share"),
            pl.col("kernel").get(pl.col("family_ns").arg_max()),
        )
        .sort(["device_ns", *keys], descending=[True, *(False for _ in keys)])
    )


def _calls(attribution: Attribution) -> pl.DataFrame:
    """A row for each operator call that launched something, with its kernels' sums and what the chief ones say.

    A call may launch kernels of several families; it counts as of the one that most of its time is of. Only a call of
    a convolution is one, however long it takes to change layouts for it.
    """
    stream = ["process", "device", "stream"]
    work = (
        attribution.with_free_ns.filter(pl.col("operator_row").is_not_null())
        .sort([*stream, "start_ns"])
        .select(
            "start_ns",
            "duration_ns",
            "operator_row",
            "phase",
            "family",
            pl.col("name").alias("kernel"),
            (pl.col("free_ns").is_null() | (pl.col("free_ns") <= pl.col("launch_ns"))).alias("dry"),
        )
    )
    distinct = work.select("kernel", "family").unique()
    names = distinct["kernel"].cast(pl.String).to_list()
    says = [product_arithmetic(name) for name in names]
    # What is no product computes on CUDA cores, in fp32 for 16-bit elements too.
    arithmetic = [
        dtype if family in _PRODUCTS else "fp64" if dtype == "fp64" else "fp32"
        for dtype, family in zip(says, distinct["family"], strict=True)
    ]
    work = work.join(
        distinct.with_columns(
            pl.Series("arithmetic", arithmetic, dtype=_ARITHMETIC),
            pl.Series("second_pass", [decode(name).second_pass for name in names], dtype=pl.Boolean),
            pl.Series("element_bytes", [element_bytes(name) for name in names], dtype=pl.Int64),
            pl.Series("between", [_BETWEEN_MEMORIES.search(name) is not None for name in names], dtype=pl.Boolean),
        ),
        on=["kernel", "family"],
        how="left",
        maintain_order="left",
    )
    # Most calls launch one kernel, of which nothing has to be chosen.
    several = work["operator_row"].is_duplicated()
    one = work.filter(~several).with_columns(
        pl.lit(1, pl.UInt32).alias("kernels"),
        pl.col("duration_ns").alias("device_ns"),
        pl.col("duration_ns").alias("family_ns"),
    )
    calls = _of_several_kernels(work.filter(several))
    calls = pl.concat([calls, one.select(calls.columns)]).sort("operator_row")
    return calls.with_columns(pl.col("kernel").cast(pl.String))


def _of_several_kernels(work: pl.DataFrame) -> pl.DataFrame:
    """The calls that launched this work, by the sums of their kernels and what the chief ones say."""
    # A second pass adds up what a split product left, and says nothing of how it was multiplied.
    chief = pl.when("second_pass").then(-1).otherwise("duration_ns").arg_max()
    parts = work.group_by("operator_row", "family").agg(
        pl.len().alias("kernels"),
        pl.col("duration_ns").sum().alias("device_ns"),
        pl.col("start_ns").min(),
        pl.col("dry").get(pl.col("start_ns").arg_min()),
        pl.col("kernel", "phase", "arithmetic", "element_bytes", "between").get(chief),
    )
    convolves = pl.col("family") == "convolution"
    chief = pl.col("device_ns").arg_max()
    if (parts["family"] == "convolution").any():  # to ask it of each call takes as long as all the rest
        chief = pl.when(convolves.any() & ~convolves).then(-1).otherwise("device_ns").arg_max()
    return (
        parts.sort("operator_row", "family")  # for a draw to end the same way each time
        .group_by("operator_row", maintain_order=True)
        .agg(
            pl.col("kernels").sum(),
            pl.col("device_ns").sum(),
            pl.col("device_ns").get(chief).alias("family_ns"),
            pl.col("dry").get(pl.col("start_ns").arg_min()),
            pl.col("family", "kernel", "phase", "arithmetic", "element_bytes").get(chief),
            pl.col("between").any(),
        )
    )


def _leaves_work_to_inner(calls: pl.DataFrame) -> pl.Series:
    """Whether a call encloses another of the same rule, clone and its copy, say, or a product another product. The
    inner one's work counts."""
    distinct = calls["operator"].unique().to_list()
    rules = {
        name: _ANY_PRODUCT if rule.multiplies else rule.name
        for name in distinct
        if (rule := RULE_OF.get(name)) is not None
    }
    ruled = (
        calls.select("operator", "process", "thread", "start_ns", pl.col("host_ns").alias("duration_ns"))
        .with_row_index("call")
        .with_columns(pl.col("operator").replace_strict(rules, default=None, return_dtype=pl.String).alias("rule"))
        .drop_nulls("rule")
    )
    ruled = ruled.with_columns(numbered(ruled, ["process", "thread", "rule"]).alias("track"))
    nest = Nest(ruled, "track")
    hidden = ruled["call"].gather(nest.rows(nest.parent.drop_nulls().unique()))
    return pl.int_range(calls.height, dtype=pl.UInt32, eager=True).is_in(hidden.implode()).alias("hidden")


def _roof(row: dict[str, Any], peaks: Peaks, *, on_cpu: bool, causal: CausalConvention) -> OperatorRoof:
    call, arithmetic = None, row["arithmetic"]
    product = is_product(row["operator"])
    if product and (arithmetic is None or row["family"] in _UNTOLD):
        first = next((each for each in _listed(row["dtypes"]) if isinstance(each, str)), None)
        arithmetic = operand_arithmetic(first, on_cpu=on_cpu)
    # A product that launched copies and fills alone had nothing to multiply.
    multiplied = not product or row["family"] in (*_PRODUCTS, *_UNTOLD)
    counts = multiplied and not row["hidden"] and not row["between"]
    if counts and not (product and _OF_SPARSE.search(row["kernel"])):
        record = (row["operator"], row["shapes"], row["dtypes"])
        call = recorded_call(*record, values=row["values"], list_element_bytes=row["element_bytes"])
    work = call_work(call, causal) if call is not None else None
    compute_ns = memory_ns = None  # the least time of one call; work without FLOPs needs no rate for them
    if work is not None:
        compute, memory = peaks.flops_per_s.get(arithmetic or ""), peaks.bytes_per_s
        compute_ns = 0.0 if not work.flops else work.flops / compute.rate * 1e9 if compute else None
        memory_ns = work.bytes_moved / memory.rate * 1e9 if memory and work.bytes_moved is not None else None
    same = ("operator", *_RECORD, "phase", "family", "kernel", "calls", "kernels", "device_ns", "family_ns")
    return OperatorRoof(
        **{name: row[name] for name in (*same, "host_ns", "dry_share")},
        arithmetic=arithmetic,
        work=work,
        sight=call_sight(call) if call is not None and work is not None else None,
        is_open=counts and work is None and row["operator"] in RULE_OF,
        compute_ns=compute_ns,
        memory_ns=memory_ns,
        on_cpu=on_cpu,
    )


def _listed(text: str | None) -> list[Any]:
    """The list that a record's JSON text is; empty where it is none."""
    try:
        read: Any = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return cast("list[Any]", read) if isinstance(read, list) else []


# The roofline as parts of an answer, as a panel, and as plain data.


OPERATORS_SHOWN = 12
_SHAPES_SHOWN = 3
_NEARLY_ALL, _HARDLY_ANY = 0.995, 0.005
_SURELY_BELOW = 0.99
_LINES = 8
"""Lines that a plot tells apart: the roofs, and the busiest families."""
_RATES = (("FLOP/B", ".3g"), ("TFLOP/s", "TFLOP/s of FLOP/s"), ("GB/s", "GB/s of B/s"))


def roofline_tables(roofline: Roofline, top: int = OPERATORS_SHOWN) -> tuple[Table, ...]:
    """The families with a sentence each, then the operators that take most of the device's time."""
    sentences: list[str] = []
    if any(each.work for each in roofline.operators):
        sentences = [family_sentence(each, roofline.steps) for each in roofline.families if each.device_ns]
    passes = roofline.passes
    if passes.time_ratio:
        forward, backward = (ms_text(ns / roofline.steps, 2, 3) for ns in (passes.forward_ns, passes.backward_ns))
        flops = f" for {passes.flops_ratio:.2f} times its matrix FLOPs" if passes.flops_ratio else ""
        sentences.append(
            f"Backward takes {passes.time_ratio:.2f} times forward ({backward} against {forward} ms a step of "
            f"kernels){flops}."
        )
    cautions = [Line(words, "aside") for words in _cautions(roofline)]
    heading, families = text(*_heading(roofline)), _family_table(roofline)
    if not roofline.operators:
        return heading, msgspec.structs.replace(families, notes=(*as_lines(*sentences), *cautions))
    left = roofline.operators[top:]
    rest_ns = sum(each.device_ns for each in left) / roofline.steps
    more = [f"{len(left)} more take {ms_text(rest_ns, 2, 3)} ms a step."] if left else []
    return (
        heading,
        msgspec.structs.replace(families, notes=as_lines(*sentences)),
        msgspec.structs.replace(_operator_table(roofline, top), notes=as_lines(*more, *cautions)),
    )


def roofline_panel(roofline: Roofline) -> Panel | None:
    """The families' work against the device's roofs, on logarithmic axes; None where none has a place there."""
    families = [
        Point(line=each.family, x=each.intensity, y=each.flops_per_s)
        for each in roofline.families
        if each.intensity and each.flops_per_s
    ]
    memory = roofline.peaks.bytes_per_s
    if not families or memory is None:
        return None
    used = {each.arithmetic for each in roofline.operators if each.flops}
    peaks = {name: peak.rate for name, peak in roofline.peaks.flops_per_s.items() if name in used}
    ridges = [rate / memory.rate for rate in peaks.values()]
    places = [*(point.x for point in families), *ridges]
    roofs = [
        Point(line=f"roof, {name}", x=x, y=min(rate, x * memory.rate))
        for name, rate in peaks.items()
        for x in sorted({min(places) / 2, rate / memory.rate, max(places) * 2})
    ]
    shown = families[: _LINES - len(peaks)]
    return Panel(x_title="FLOP/B", y_title="FLOP/s", points=(*roofs, *shown), x_log=True, y_log=True)


def family_sentence(family: FamilyRoof, steps: int) -> str:
    """What the family takes, how dense its work is, and what holds it back."""
    takes = ms_text(family.device_ns / steps, 2, 3)
    sentence = f"{family.family[0].upper()}{family.family[1:]} kernels take {takes} ms a step"
    if max(family.coverage, family.verdict_share or 0.0) < _HARDLY_ANY:
        return f"{sentence}; {'the work of nearly all of them' if family.covered_ns else 'their work'} is not known."
    if family.intensity is not None:
        sentence += f" at {family.intensity:.3g} FLOP/B"
    if family.covered_ns and family.coverage < _NEARLY_ALL:
        sentence += f" (work known for {format_share(family.coverage)} of it)"
    if family.verdict is not None and family.verdict_share is not None:
        sentence += f": {family.verdict}"
        if family.verdict_share < _NEARLY_ALL:
            sentence += f" in {format_share(family.verdict_share)} of it"
        if family.over_bound is not None:
            sentence += f", {family.over_bound:.2f} times their bound of {ms_text(family.bound_ns / steps, 2, 3)} ms"
    else:
        sentence += "; their bound is not known"
    return sentence + "."


def _heading(roofline: Roofline) -> Iterator[Line | str]:
    where = ", ".join(roofline.devices) or "a device the trace does not name"
    yield Line(f"Roofline of {where}: work, and the least time it takes there", "strong")
    used = {each.arithmetic for each in roofline.operators if each.flops}
    rates = [
        f"{name} {format_rate(peak.rate, 'FLOP/s')} ({peak.source})"
        for name, peak in roofline.peaks.flops_per_s.items()
        if name in used
    ]
    if (memory := roofline.peaks.bytes_per_s) is not None:
        rates.append(f"device memory {format_rate(memory.rate, 'B/s')} ({memory.source})")
    yield f"Peaks: {'; '.join(rates or ['none known, so that nothing has a bound'])}."
    convention = next((each.work.convention for each in roofline.operators if each.work), None)
    if convention is None:
        if not roofline.recorded:
            why = "the trace holds no operators with shapes (torch.profiler, record_shapes)"
        elif not roofline.shaped:
            why = "the operators in this trace have no shapes (torch.profiler, record_shapes)"
        elif not roofline.operators:
            why = "of no kernel is it known which operator launched it, so the shapes of operators do not tell"
        else:
            why = "the operators that launched kernels have no shapes, or no rule counts them"
        yield f"No work is known: {why}."
    else:
        share = roofline.covered_ns / roofline.busy_ns if roofline.busy_ns else 0.0
        yield f"Work is known for {format_share(share)} of device time ({convention})."
        for sight in ("assumed causal", "assumed not causal"):
            unsure = [each for each in roofline.operators if each.sight == sight and _is_half(each)]
            if unsure:
                calls = sum(each.calls for each in unsure) / roofline.steps
                yield (
                    f"Attention is {sight} in {calls:g} calls a step, whose record does not say it: torch.profiler "
                    "with record_shapes says it since PyTorch 2.1."
                )
    unsized = [each for each in roofline.operators if each.is_open and is_product(each.operator)]
    if unsized:
        calls = sum(each.calls for each in unsized) / roofline.steps
        share = sum(each.device_ns for each in unsized) / roofline.busy_ns if roofline.busy_ns else 0.0
        names = ", ".join(sorted({name_shown(each.operator.removeprefix("aten::")) for each in unsized}))
        yield (
            f"The record leaves open the sizes of {calls:g} products a step: their FLOPs are missing ({names}; "
            f"{format_share(share)} of device time)."
        )


def _is_half(operator: OperatorRoof) -> bool:
    """Whether its FLOPs depend on whether it is causal."""
    return operator.work is not None and operator.work.convention.causal == "half"


def _cautions(roofline: Roofline) -> Iterator[str]:
    """How to read a verdict, and why a time may be shorter than its bound."""
    if any(each.is_launch_bound for each in roofline.operators):
        yield "Launch-bound: the host takes longer over a call than the device; under a profiler the more so."
    below = [each for each in roofline.operators if (each.over_bound or 1.0) < _SURELY_BELOW]
    by_flops = [(each.compute_ns or 0.0) >= (each.memory_ns or 0.0) for each in below]
    if not all(by_flops):
        yield "In less time than their bound by bytes: operands stayed in the L2 cache, or were broadcast views."
    if any(by_flops):
        yield "In less time than their bound by FLOPs: causal attention counted full, or a peak of other shapes."


def _family_table(roofline: Roofline) -> Table:
    return table_of(
        "family, a step", ("ms", "ms of ns"), ("of it known", "%"), *_RATES, ("bound ms", "ms of ns"),
        ("x bound", ".2f"), ("mostly", TEXT), ("bwd/fwd", ".2f"),
        rows=[
            (
                each.family,
                each.device_ns / roofline.steps,
                each.coverage if each.covered_ns else None,
                *_rates(each),
                each.bound_ns / roofline.steps if each.bound_ns else None,
                each.over_bound,
                each.mostly,
                each.backward_over_forward,
            )
            for each in roofline.families
        ],
    )  # fmt: skip


def _operator_table(roofline: Roofline, top: int) -> Table:
    labels = _labels(roofline.operators[:top])
    return table_of(
        "operator", "phase", ("calls", "g"), ("ms a step", "ms of ns"), ("host us", "us of ns"),
        ("device us", "us of ns"), *_RATES, ("x bound", ".2f"), ("verdict", TEXT),
        rows=[
            (
                label,
                each.phase,
                each.calls / roofline.steps,
                each.device_ns / roofline.steps,
                each.host_ns,
                each.device_ns / each.calls,
                *_rates(each),
                each.over_bound,
                each.verdict,
            )
            for each, label in zip(roofline.operators[:top], labels, strict=True)
        ],
    )  # fmt: skip


def _rates(roof: FamilyRoof | OperatorRoof) -> tuple[float | None, float | None, float | None]:
    """FLOP/B, FLOP/s and B/s; no FLOP/s where the work is of bytes alone."""
    return roof.intensity, roof.flops_per_s if roof.flops else None, roof.bytes_per_s


def _labels(operators: Sequence[OperatorRoof]) -> list[str]:
    """A label for each row. Those alike in one phase have their family behind them or, where that is one, a number."""
    labels: list[str] = []
    for each in operators:  # what its products are computed in, and the first shapes: `bmm fp32 48x512x64 48x64x512`
        arithmetic = each.arithmetic if each.family in _PRODUCTS else None
        sight = each.sight if _is_half(each) and each.sight != "causal" else None
        parts = (each.operator.removeprefix("aten::"), arithmetic, shapes_label(each.shapes), sight)
        labels.append(" ".join(name_shown(part) for part in parts if part))
    alike: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    for i, each in enumerate(operators):
        alike[labels[i], each.phase].append(i)
    for rows in alike.values():
        by_family = len({operators[i].family for i in rows}) == len(rows)
        for number, i in enumerate(rows if len(rows) > 1 else (), 1):
            labels[i] += f" ({operators[i].family if by_family else number})"
    return labels


def shapes_label(shapes: str | None) -> str:
    """The first shapes of a call, `48x512x64 48x64x512`, from their JSON text."""
    labels: list[str] = []
    for shape in _listed(shapes):
        if isinstance(shape, list) and shape:
            sizes = cast("list[Any]", shape)
            labels.append(f"[{len(sizes)} tensors]" if isinstance(sizes[0], list) else "x".join(map(str, sizes)))
        elif shape:
            labels.append("?")
    return " ".join(labels[:_SHAPES_SHOWN]) + (" .." if len(labels) > _SHAPES_SHOWN else "")


def roofline_as_json(roofline: Roofline) -> dict[str, Any]:
    """Plain data. Counts, times (ns), FLOPs and bytes are per step, `host_ns` per call; rates are per second."""
    steps = roofline.steps
    passes = roofline.passes
    memory = roofline.peaks.bytes_per_s
    return {
        "devices": list(roofline.devices),
        "steps": steps,
        **_per_step(roofline, steps, "busy_ns", "covered_ns"),
        "peaks": {
            "flops_per_s": {name: asdict(peak) for name, peak in roofline.peaks.flops_per_s.items()},
            "bytes_per_s": asdict(memory) if memory else None,
        },
        "passes": {
            **_per_step(passes, steps, "forward_ns", "backward_ns"),
            "time_ratio": passes.time_ratio,
            **_per_step(passes, steps, "forward_flops", "backward_flops"),
            "flops_ratio": passes.flops_ratio,
        },
        "families": [
            {
                "family": each.family,
                **_per_step(each, steps, "device_ns", "forward_ns", "backward_ns"),
                **values_of(each, "backward_over_forward", "coverage"),
                **_per_step(each, steps, "flops", bytes="bytes_moved"),
                **values_of(each, *_AGAINST_THE_ROOF),
                "bound_ns": each.bound_ns / steps if each.bound_ns else None,
                **values_of(each, "over_bound", "verdict", "verdict_share"),
            }
            for each in roofline.families
        ],
        "operators": [
            {
                **values_of(each, "operator", "shapes", "dtypes", "phase", "family", "kernel", "values", "arithmetic"),
                **_per_step(each, steps, "calls", "kernels", "device_ns"),
                **values_of(each, "host_ns", "dry_share"),
                **_per_step(each, steps, "flops", bytes="bytes_moved"),
                "convention": str(each.work.convention) if each.work else None,
                "attention": each.sight,
                "work_open": each.is_open,
                **values_of(each, *_AGAINST_THE_ROOF),
                **_per_step(each, steps, "bound_ns"),
                **values_of(each, "over_bound", "verdict"),
            }
            for each in roofline.operators
        ],
    }


_AGAINST_THE_ROOF = ("intensity", "flops_per_s", "bytes_per_s")


def values_of(record: object, *names: str) -> dict[str, Any]:
    """The named fields of a record, in this order."""
    return {name: getattr(record, name) for name in names}


def _per_step(record: object, steps: int, *names: str, **others: str) -> dict[str, float | None]:
    """Fields over the steps, under their own names or, of `others`, under these; None where they are not known."""
    totals = {name: getattr(record, field) for name, field in (dict(zip(names, names, strict=True)) | others).items()}
    return {name: None if total is None else total / steps for name, total in totals.items()}
