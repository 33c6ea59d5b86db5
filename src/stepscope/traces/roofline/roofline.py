"""The roofline of a capture: its device work gathered by operator call, each distinct operator's work counted once.

Grouping is vectorised over all kernels; formulas run for each distinct (operator, shapes, dtypes), which are few.
"""

import json
import re
from typing import get_args

import polars as pl

from stepscope.core.device_spec import Ceilings, DeviceSpec, find_device_spec
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.work import CausalConvention, Work
from stepscope.core.work.operators.count import call_sight, call_work, is_product, operator_rule, recorded_call
from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.devices import device_names
from stepscope.traces.kernels.families import FAMILIES
from stepscope.traces.kernels.names.decoding import decode
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.roofline.peaks import (
    Arithmetic,
    Peak,
    Peaks,
    element_bytes,
    operand_arithmetic,
    peaks_for,
    product_arithmetic,
)
from stepscope.traces.roofline.roofs import OperatorRoof, PassRatio, Roofline, family_roof

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
    return Roofline(
        devices=devices,
        peaks=peaks,
        steps=attribution.steps,
        busy_ns=attribution.busy_ns,
        operators=operators,
        families=tuple(
            family_roof(family, (every, forward, backward), [each for each in operators if each.family == family])
            for family, every, forward, backward in _families(attribution).iter_rows()
        ),
        passes=_passes(attribution, operators),
        recorded=attribution.table.operators.height,
        shaped=attribution.table.operators["shapes"].count(),
    )


def _distinct(attribution: Attribution) -> pl.DataFrame:
    """A row for each distinct (operator, shapes, dtypes, values, phase, family, arithmetic), the busiest first."""
    calls = _calls(attribution)
    recorded = attribution.table.operators
    rows = calls["operator_row"]
    calls = calls.with_columns(
        [recorded[name].gather(rows).alias(name) for name in (*_RECORD, "process", "thread", "start_ns")]
    ).with_columns(
        recorded["name"].gather(rows).alias("operator"), recorded["duration_ns"].gather(rows).alias("host_ns")
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
    keys = [
        "operator",
        *_RECORD,
        "phase",
        "family",
        "arithmetic",
        "element_bytes",
        "between",
        "hidden",
    ]
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
            "start_ns", "duration_ns", "operator_row", "phase", "family", pl.col("name").alias("kernel"),
            (pl.col("free_ns").is_null() | (pl.col("free_ns") <= pl.col("launch_ns"))).alias("dry"),
        )
    )  # fmt: skip
    work = work.join(_kernels_say(work), on=["kernel", "family"], how="left", maintain_order="left")
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
        .with_columns(pl.col("kernel").cast(pl.String))
    )


def _kernels_say(work: pl.DataFrame) -> pl.DataFrame:
    """What the names say, each looked at once: `arithmetic`, `second_pass`, `element_bytes`, `between` memories."""
    distinct = work.select("kernel", "family").unique()
    names = distinct["kernel"].cast(pl.String).to_list()
    products = [family in _PRODUCTS for family in distinct["family"].to_list()]
    says = [product_arithmetic(name) for name in names]
    sizes = [element_bytes(name) for name in names]
    return distinct.with_columns(
        # What is no product computes on CUDA cores, in fp32 for 16-bit elements too.
        pl.Series(
            "arithmetic",
            [
                said if product else "fp64" if said == "fp64" else "fp32"
                for said, product in zip(says, products, strict=True)
            ],
            dtype=_ARITHMETIC,
        ),
        pl.Series("second_pass", [decode(name).second_pass for name in names], dtype=pl.Boolean),
        pl.Series("element_bytes", sizes, dtype=pl.Int64),
        pl.Series("between", [_BETWEEN_MEMORIES.search(name) is not None for name in names], dtype=pl.Boolean),
    )


def _leaves_work_to_inner(calls: pl.DataFrame) -> pl.Series:
    """Whether a call encloses another of the same rule, clone and its copy, say, or a product another product. The
    inner one's work counts."""
    distinct = calls["operator"].unique().to_list()
    rules = {
        name: _ANY_PRODUCT if rule.multiplies else rule.name
        for name in distinct
        if (rule := operator_rule(name)) is not None
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


def _roof(row: dict, peaks: Peaks, *, on_cpu: bool, causal: CausalConvention) -> OperatorRoof:
    call, arithmetic = None, row["arithmetic"]
    product = is_product(row["operator"])
    if product and (arithmetic is None or row["family"] in _UNTOLD):
        arithmetic = operand_arithmetic(_first_dtype(row["dtypes"]), on_cpu=on_cpu)
    # A product that launched copies and fills alone had nothing to multiply.
    multiplied = not product or row["family"] in (*_PRODUCTS, *_UNTOLD)
    counts = multiplied and not row["hidden"] and not row["between"]
    if counts and not (product and _OF_SPARSE.search(row["kernel"])):
        record = (row["operator"], row["shapes"], row["dtypes"])
        call = recorded_call(*record, values=row["values"], list_element_bytes=row["element_bytes"])
    work = call_work(call, causal) if call is not None else None
    compute_ns, memory_ns = _least_ns(work, peaks.flops_per_s.get(arithmetic or ""), peaks.bytes_per_s)
    same = (
        "operator",
        *_RECORD,
        "phase",
        "family",
        "kernel",
        "calls",
        "kernels",
        "device_ns",
        "family_ns",
    )
    return OperatorRoof(
        **{name: row[name] for name in (*same, "host_ns", "dry_share")},
        arithmetic=arithmetic,
        work=work,
        sight=call_sight(call) if call is not None and work is not None else None,
        is_open=counts and work is None and operator_rule(row["operator"]) is not None,
        compute_ns=compute_ns,
        memory_ns=memory_ns,
        on_cpu=on_cpu,
    )


def _first_dtype(dtypes: str | None) -> str | None:
    try:
        read = json.loads(dtypes or "[]")
    except (ValueError, RecursionError):
        return None
    return next((each for each in read if isinstance(each, str)), None) if isinstance(read, list) else None


def _least_ns(work: Work | None, compute: Peak | None, memory: Peak | None) -> tuple[float | None, float | None]:
    """The least time of one call for its FLOPs and for its bytes; work without FLOPs needs no rate for them."""
    if work is None:
        return None, None
    compute_ns = 0.0 if not work.flops else work.flops / compute.rate * 1e9 if compute else None
    memory_ns = work.bytes_moved / memory.rate * 1e9 if memory and work.bytes_moved is not None else None
    return compute_ns, memory_ns


def _families(attribution: Attribution) -> pl.DataFrame:
    """Time of each family: all, in forward, in backward."""
    spent = pl.col("duration_ns")
    return (
        attribution.work.group_by("family")
        .agg(
            spent.sum().alias("every"),
            spent.filter(pl.col("phase") == FORWARD).sum().alias(FORWARD),
            spent.filter(pl.col("phase") == BACKWARD).sum().alias(BACKWARD),
        )
        .sort(["every", "family"], descending=[True, False])
    )


def _passes(attribution: Attribution, operators: tuple[OperatorRoof, ...]) -> PassRatio:
    times = dict(attribution.kernels.group_by("phase").agg(pl.col("duration_ns").sum()).iter_rows())
    flops = {
        phase: sum(each.flops or 0 for each in operators if each.phase == phase and is_product(each.operator))
        for phase in (FORWARD, BACKWARD)
    }
    return PassRatio(
        forward_ns=times.get(FORWARD, 0),
        backward_ns=times.get(BACKWARD, 0),
        forward_flops=flops[FORWARD],
        backward_flops=flops[BACKWARD],
    )
