"""Checks of what was computed: is it what the workload asked for?

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

from stepscope.core.answer import Finding, error, note, warning
from stepscope.core.parts import ATTENTIONS
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes
from stepscope.runs.metrics import buffers_by_formula
from stepscope.traces.kernels.names import decode, is_tf32

TF32_ERROR = 1e-5
"""Relative error of the fp32 probe above which TF32 ran: true fp32 is near 2e-7, TF32 near 3e-4."""

_MATH = "aten::_scaled_dot_product_attention_math"
"""PyTorch's attention of plain operators."""

_REASONS = 3
"""Reasons that a sentence quotes."""

_WORKSPACES = 96 * 2**20
"""Libraries keep some memory of their own: cuBLAS 32 MiB for each of a step's two threads, on Hopper."""


_SMALL_SHARE = 0.01
"""The share of the time of all products that those in fp32 may take where 16 bits were asked for: Hugging Face's models
multiply positions by frequencies in fp32, once in a step, since 16 bits are too few for an angle."""


_IN_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def precision_mismatch(run: Run) -> Finding | None:
    """[3] The precision that ran, against the precision asked for."""
    precision, observation = run.evidence.precision, run.evidence.observation
    dtype = run.workload.dtype
    tf32, fp32 = _products_in_tf32_and_fp32(run)
    by_attention = _attention_in_fp32(run) and _others_beside(fp32, run)
    fault = ""
    if precision is not None:
        probe = precision.probe_relative_error
        if dtype == "fp32" and tf32:
            fault = f"fp32 was asked for, but {tf32[0]} ran: products were rounded to TF32's 10 bits"
        elif dtype == "fp32" and probe > TF32_ERROR:
            fault = f"fp32 was asked for, but a product's error of {probe:.1e} is TF32's (true fp32: 2e-7)"
        elif dtype == "tf32" and probe < TF32_ERROR:
            fault = f"tf32 was asked for, but a product's error of {probe:.1e} is true fp32's (TF32: 3e-4)"
        elif PRECISIONS[dtype].products == 2 and fp32 and not by_attention and not _take_little(fp32, run):
            fault = f"{dtype} was asked for, but {fp32[0]} ran: a product in true fp32"
    expected = _IN_TORCH[PRECISIONS[dtype].tensors]
    if not fault and observation and observation.product_dtypes:
        # Attention's own products may be fp32 beside others of 16 bits. Without others autocast took no effect.
        excused = _attention_in_fp32(run) and expected in observation.product_dtypes
        scaled = [found for found in observation.product_dtypes if found.startswith("float8")]
        allowed = {expected, *(("float32",) if excused else ()), *(scaled if PRECISIONS[dtype].scaled else ())}
        if expected == "float32":
            allowed.add("complex64")  # two numbers in fp32
        strangers = [found for found in observation.product_dtypes if found not in allowed]
        if PRECISIONS[dtype].scaled and not scaled:
            strangers = list(observation.product_dtypes)
        if strangers:
            fault = f"{dtype} was asked for, but matrix products took {', '.join(strangers)} operands"
    if not fault:
        return None
    return error(
        "precision-mismatch",
        fault[0].upper() + fault[1:] + ".",
        remedy="compare it as what it is; torch.set_float32_matmul_precision decides between fp32 and TF32",
        evidence={
            "asked": dtype,
            "probe_relative_error": precision.probe_relative_error if precision else None,
            "tf32_kernels": len(tf32) if precision else None,
        },
    )


def attention_in_fp32(run: Run) -> Finding | None:
    """[3] An attention that leaves the 16 bits that were asked for, by its own design."""
    observation = run.evidence.observation
    seen = observation.product_dtypes if observation else None
    if not _attention_in_fp32(run) or "float32" not in (seen or ()):
        return None
    attention = run.workload.attention or "scaled_dot_product_attention"
    return note(
        "attention-in-fp32",
        f"{run.workload.dtype} was asked for, and {attention} multiplies in fp32 all the same: PyTorch's "
        "math kernel is made so.",
        {"asked": run.workload.dtype},
        "take another attention, or torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    )


def _attention_in_fp32(run: Run) -> bool:
    """Whether attention multiplies in fp32 though 16 bits were asked for. Which attention a module of one's own gets is
    known from the operators that ran: PyTorch itself takes the math kernel for dropout on a CPU, for instance."""
    if run.workload.dtype in ("fp32", "tf32"):
        return False
    if run.workload.attention is None:
        return run.evidence.profile is not None and _MATH in run.evidence.profile.attention_operators
    record = ATTENTIONS.get(run.workload.attention)
    return record is not None and record.in_fp32


def _others_beside(fp32: tuple[str, ...], run: Run) -> bool:
    """Whether the profiled step multiplied by other kernels than these, too."""
    kernels = run.evidence.profile.kernels if run.evidence.profile else ()
    return any(kernel.name not in fp32 and decode(kernel.name).transposes for kernel in kernels)


def _take_little(fp32: tuple[str, ...], run: Run) -> bool:
    """Whether these kernels took next to nothing of the time of the products that were profiled."""
    kernels = run.evidence.profile.kernels if run.evidence.profile else ()
    # Two kernels may have one name here: long names are cut off.
    products = [kernel for kernel in kernels if decode(kernel.name).transposes]
    taken = sum(kernel.total_s for kernel in products if kernel.name in fp32)
    known = {kernel.name for kernel in products}.issuperset(fp32)
    return known and taken < _SMALL_SHARE * sum(kernel.total_s for kernel in products)


def _products_in_tf32_and_fp32(run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the kernels that took products in TF32, and of those that took them in true fp32.

    Not every TF32 kernel is named so: cutlass_80_tensorop_s1688gemm is one.
    """
    precision, profile = run.evidence.precision, run.evidence.profile
    tf32, fp32 = (precision.tf32_kernels, precision.fp32_kernels) if precision else ((), ())
    products = [
        decoded for kernel in (profile.kernels if profile else ()) if (decoded := decode(kernel.name)).transposes
    ]
    return (
        tuple(dict.fromkeys([*tf32, *(product.name for product in products if is_tf32(product))])),
        tuple(dict.fromkeys([*fp32, *(product.name for product in products if product.input_dtype == "fp32")])),
    )


def compile_not_used(run: Run) -> Finding | None:
    """[5] A compiled object was made, but the one that was timed was not it."""
    report = run.evidence.compilation
    if run.workload.compile == "eager" or report is None or report.frames_compiled or not _measured(run):
        return None
    return error(
        "compile-not-used",
        f"The workload says compile {run.workload.compile}, but no frame was compiled "
        f"({report.frames_total} seen): what was timed ran eagerly.",
        remedy="call the object that torch.compile returned",
        evidence={"frames_total": report.frames_total, "frames_compiled": 0},
    )


def compile_fallback(run: Run) -> Finding | None:
    """[4] torch.compile that gave up and ran eagerly, or compiled only pieces."""
    report = run.evidence.compilation
    if report is None or not _measured(run):
        return None
    broken, again = _reasons(report.graph_break_reasons), _reasons(report.recompile_reasons)
    while_fixed = " while this workload's shapes were fixed" if run.evidence.loop is None else ""
    faults = (
        (report.limit_hit, f"hit its recompile limit after {report.recompiles} recompilations and ran eagerly",
         "keep shapes fixed in one process, or measure each cell in a process of its own (stepscope sweep)"),
        (report.graph_breaks, f"broke the graph {report.graph_breaks} times{broken}; the pieces between run eagerly",
         "TORCH_LOGS=graph_breaks shows where"),
        (report.frames_compiled < report.frames_total,
         f"compiled {report.frames_compiled} of {report.frames_total} frames; the others ran eagerly",
         "TORCH_LOGS=dynamo shows why"),
        (report.recompiles and not report.limit_hit, f"recompiled {report.recompiles} times{while_fixed}{again}",
         "TORCH_LOGS=recompiles shows why"),
    )  # fmt: skip
    evidence = {name: int(getattr(report, name)) for name in ("graphs", "graph_breaks", "recompiles", "limit_hit")}
    happened = [(did, remedy) for fault, did, remedy in faults if fault]
    if not happened:
        return None
    say = error if report.limit_hit else warning
    sentence = f"torch.compile {'. It '.join(did for did, _ in happened)}."
    return say("compile-fallback", sentence, evidence, remedy="; ".join(remedy for _, remedy in happened))


def phase_includes_forward(run: Run) -> Finding | None:
    """[6] A 'backward' that runs the forward again, or more forwards in a step than it has micro-batches.

    What checkpointing runs again in backward is blocks, not the model.
    """
    observation = run.evidence.observation
    if observation is None:
        return None
    for phase, count in observation.model_forwards.items():
        if phase == FORWARD_BACKWARD:
            continue  # forwards and backwards of micro-batches take turns there, stage by stage
        allowed = run.workload.accumulation if phase == FORWARD else 0
        if count > allowed:
            return error(
                "phase-includes-forward",
                f"The model's forward ran {count} times in the phase '{phase}', where {allowed} belong: "
                f"its time is not {phase} alone.",
                remedy="time each phase of the same step between its own marks",
                evidence={"phase": phase, "forwards": count},
            )
    return None


def autocast_scope(run: Run) -> Finding | None:
    """[7] Autocast belongs round forward and loss of one step, nothing else."""
    observation = run.evidence.observation
    if observation is None:
        return None
    wrapped = [
        place
        for place, on in (
            ("the whole step", observation.autocast_outside),
            (BACKWARD, observation.autocast_in_backward),
            ("the optimizer", observation.autocast_in_optimizer),
        )
        if on
    ]
    if not wrapped:
        return None
    return error(
        "autocast-scope",
        f"Autocast was on round {' and '.join(wrapped)}: its cache of cast weights outlives the update.",
        remedy="open autocast anew in each step, round forward and loss only",
        evidence={"wrapped": ", ".join(wrapped)},
    )


def graph_kept_alive(run: Run) -> Finding | None:
    """[8] An earlier step's graph still held when a step begins makes its memory figures those of two."""
    observation, memory = run.evidence.observation, run.evidence.memory
    extra = None
    if memory and memory.after_parameters is not None and memory.resident_expected is not None:
        # What was asked for tells, where it is known: each of a thousand tensors may hold a remainder of up to 1 MiB.
        held = memory.requested_before if memory.requested_before is not None else memory.after_parameters
        surplus = held - memory.resident_expected - buffers_by_formula(run)
        # Allocation sizes round up, and libraries keep workspaces; a graph is as large as what backward needs.
        if memory.saved_for_backward and surplus > max(0.5 * memory.saved_for_backward, _WORKSPACES):
            extra = surplus
    if not extra and not (observation and observation.graphs_alive_before):
        return None
    size = f" ({format_bytes(extra)} beyond parameters, optimizer state and batches)" if extra else ""
    return error(
        "graph-kept-alive",
        f"Tensors that an earlier step saved for backward were still alive when the step began{size}: "
        "its memory is that of two graphs.",
        remedy="drop the loss and outputs of a step, or detach them, before the next begins",
        evidence={"surplus_bytes": extra},
    )


def _reasons(reasons: tuple[str, ...]) -> str:
    """The first few reasons in brackets, and how many there are besides."""
    more = f"; and {len(reasons) - _REASONS} more" if len(reasons) > _REASONS else ""
    return f" ({'; '.join(reasons[:_REASONS])}{more})" if reasons else ""


def _measured(run: Run) -> bool:
    """Whether any step was timed: a run interrupted while it compiled says nothing of what compiling gives."""
    step = run.samples.get(STEP)
    return step is not None and step.count > 0
