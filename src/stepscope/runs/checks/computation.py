"""Checks of what was computed against what was asked: precision, attention, compile mode, optimizer, micro-batches.

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild. Each
reads what the step did, never what it was told to do.
"""

import re
from collections.abc import Iterable

from stepscope.core.answer import Finding, error, note, warning
from stepscope.core.errors import printable
from stepscope.core.evidence import StepObservation
from stepscope.core.parts import ATTENTIONS, AUTO, PARTS, Attention, Part, calls_in_forward
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, OPTIMIZER, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes
from stepscope.core.workloads import OF_ONE_LAUNCH, OPTIMIZERS, Compile, Optimizer, Workload
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


_MODES: dict[Compile, dict[str, bool]] = {
    "default": {"triton.cudagraphs": False, "max_autotune": False},
    "reduce-overhead": {"triton.cudagraphs": True, "max_autotune": False},
    "max-autotune": {"triton.cudagraphs": True, "max_autotune": True},
    "max-autotune-no-cudagraphs": {"triton.cudagraphs": False, "max_autotune": True},
    "blocks": {"triton.cudagraphs": False, "max_autotune": False},
}
"""What torch.compile's modes set (`torch._inductor.list_mode_options`)."""

_COUNTS_UPDATE = "aten::addcmul"
"""kernels/adamw.py: this operator, on four numbers, counts an update. Its kernel is no operator."""


_NORM_OPERATOR, _NORM_KERNEL = "aten::_foreach_norm", "square_sums"
"""What takes the norm of gradients that are clipped: training/optimizer.py, and kernels/adamw.py."""


def attention_mismatch(run: Run) -> Finding | None:
    """[27] The attention that ran, against the one asked for."""
    workload, evidence = run.workload, run.evidence
    asked = evidence.attention or workload.attention
    if asked is None or asked == AUTO or evidence.operators is None:
        return None
    record = ATTENTIONS[asked]
    calls, whole = _forward_calls(run)
    kernels = evidence.profile.kernels if evidence.profile else ()
    signs = {name: each.signs for name, each in ATTENTIONS.items() if each.signs}
    counted = {
        name: sum(count for operator, count in calls.items() if re.search(sign, operator))
        for name, sign in signs.items()
    }
    ran = [n for n, sign in signs.items() if counted[n] or any(re.search(sign, kernel.name) for kernel in kernels)]
    allowed = [name for name in signs if name == asked or name in record.chooses_among]
    strangers = [name for name in ran if name not in allowed]
    eager = workload.compile == "eager" and not _replayed(run)
    due = workload.layers * workload.accumulation if whole else 1
    times = sum(counted[name] for name in allowed)
    fault = ""
    if strangers and (eager or allowed):  # a compiler may make fused attention of one that is written out
        fault = f"{' and '.join(strangers)} ran"
    elif eager and not allowed and asked not in (found := _written_out(calls)):
        fault = f"{' or '.join(found)} ran" if found else "nothing of it ran"
    elif eager and allowed and times < due and not (record.compiler == "inductor" and (not kernels or ran)):
        # The host calls FlexAttention's kernels by names that only its code generator knows.
        fault = f"it ran {times} times where the step has {due} calls"
    elif not eager and record.signs_when_compiled and not ran and not _replayed(run):
        fault = "nothing of it ran"
    if not fault:
        return None
    return error(
        "attention-mismatch",
        f"Attention {asked} was asked for, but {fault}.",
        remedy="compare it as what it is; look for what chose another implementation",
        evidence={"asked": asked, "ran": ", ".join(ran), **{name: counted[name] for name in ran}},
    )


def _forward_calls(run: Run) -> tuple[dict[str, int], bool]:
    """The operators that forward called, and whether that is the whole model's: where forward and backward take turns,
    as in a pipeline, those of both, and of the blocks that this rank has."""
    calls = run.evidence.operators.calls if run.evidence.operators is not None else {}
    return (calls.get(FORWARD_BACKWARD, {}), False) if FORWARD not in calls else (calls[FORWARD], True)


def _written_out(calls: dict[str, int]) -> list[Attention]:
    """Attentions without signs that take their softmax by these operators."""
    softmax, maximum = bool(calls.get("aten::_softmax")), bool(calls.get("aten::amax"))
    if not softmax and not calls.get("aten::exp"):
        return []
    return [
        name
        for name, record in ATTENTIONS.items()
        if not (record.signs or record.chooses_among)
        and record.calls_softmax == softmax
        and (softmax or record.subtracts_maximum == maximum)
    ]


def part_mismatch(run: Run) -> Finding | None:
    """[27] How norm, rope, mlp and loss were computed, against what was asked for."""
    workload = run.workload
    if run.evidence.operators is None:
        return None
    parts: Iterable[Part] = workload.parts
    if workload.factory:
        parts = dict.fromkeys(found.part for found in run.evidence.parts if found.replaced)
    return next((found for part in parts if (found := _part_mismatch(run, workload, part)) is not None), None)


def part_left(run: Run) -> Finding | None:
    """[27] Modules of a user's model that other kernels were to compute, and that kept their own code."""
    left = [found for found in run.evidence.parts if found.modules and not found.replaced]
    if not left:
        return None
    first = left[0]
    others = "".join(f"; nor {one.modules} {one.type} ({one.part} {one.kernels}): {one.why}" for one in left[1:])
    return warning(
        "part-left",
        printable(
            f"{first.part} {first.kernels} was asked for, and did not replace {first.modules} {first.type}: {first.why}"
            f"{others}."
        ),
        remedy=f"compare it as what it is, or leave out {', '.join(dict.fromkeys(f'--{one.part}' for one in left))}",
        evidence={"part": first.part, "asked": first.kernels, "modules": first.modules, "where": first.where},
    )


def _part_mismatch(run: Run, workload: Workload, part: Part) -> Finding | None:
    assert run.evidence.operators is not None
    asked, ways = workload.parts[part], PARTS[part]
    (calls, _), profile = _forward_calls(run), run.evidence.profile
    kernels = profile.kernels if profile else ()
    counted = {
        name: sum(count for operator, count in calls.items() if re.search(way.signs, operator))
        for name, way in ways.items()
        if way.signs
    }
    ran = [n for n in counted if counted[n] or any(re.search(ways[n].signs, kernel.name) for kernel in kernels)]
    # A user's model may call a module as often as it likes, and other kernels beside it.
    sized = workload.layers > 0
    due = calls_in_forward(part, workload.layers) * workload.accumulation if sized else 1
    replayed = _replayed(run)
    seen = ways[asked].operators and not replayed
    fault = ""
    if sized and (strangers := [name for name in ran if name != asked]):
        fault = f"{' and '.join(strangers)} ran"
    elif seen and workload.compile == "eager" and counted[asked] < due:
        fault = f"it ran {counted[asked]} times where the step has {due} calls"
    elif (seen or (ways[asked].signs and kernels)) and asked not in ran:
        fault = "nothing of it ran"
    if not fault:
        return None
    return error(
        "part-mismatch",
        f"{part} {asked} was asked for, but {fault}.",
        remedy="compare it as what it is; look for what chose another implementation",
        evidence={"part": part, "asked": asked, "ran": ", ".join(ran)},
    )


def optimizer_mismatch(run: Run) -> Finding | None:
    """[27] The optimizer's implementation that ran, against the one asked for."""
    asked, operators = run.workload.optimizer, run.evidence.operators
    if asked is None or operators is None:
        return None
    if asked not in OPTIMIZERS:
        return None  # one of the user's own, whose operators nobody knows
    if run.workload.graph == "step":
        return None  # what is replayed calls no operator
    calls = operators.calls
    ran = _optimizer_of(calls.get(OPTIMIZER, {}))
    if asked == "adamw-under-backward":
        # On a CPU it has no stream to run beside backward, and updates after it, as it does of clipped gradients.
        may_be_after = not _on_gpu(run) or run.workload.clip is not None
        begun = calls.get(BACKWARD, {}).get(_COUNTS_UPDATE) or (ran == "adamw-one-launch" and may_be_after)
        ran = asked if begun else ran
    if ran == asked:
        return None
    if ran is None and run.workload.dtype == "fp16":
        return None  # the scaler may have skipped this very step: `optimizer-skipped` counts
    said = f"{ran} ran" if ran else "its phase updated nothing"
    return error(
        "optimizer-mismatch",
        f"Optimizer {asked} was asked for, but {said}.",
        remedy="compare it as what it is; look at how the optimizer is made, and whether its step runs",
        evidence={"asked": asked, "ran": ran},
    )


def _optimizer_of(calls: dict[str, int]) -> Optimizer | None:
    """The optimizer that ran, told by its operators; in this order, since on a CPU foreach calls those of the loop."""
    signs: tuple[tuple[str, Optimizer], ...] = (
        ("aten::_fused_adamw_", "adamw-fused"),
        ("aten::_foreach_addcdiv_", "adamw-foreach"),
        ("aten::bitwise_and_", "adamw-bf16-state"),
        ("aten::addcdiv_", "adamw-loop"),
        (_COUNTS_UPDATE, "adamw-one-launch"),
    )
    return next((optimizer for operator, optimizer in signs if calls.get(operator)), None)


def update_after_backward(run: Run) -> Finding | None:
    """[27] An update that was to hide under backward, and cannot."""
    workload = run.workload
    if workload.optimizer != "adamw-under-backward" or workload.clip is None or workload.phase != "train":
        return None
    return note(
        "update-after-backward",
        "The update ran after backward and not under it, in one launch: gradients are clipped by their global norm, "
        "which is known only when backward has ended.",
        remedy="leave out --clip to have it under backward; adamw-one-launch is the same step",
        evidence={"asked": workload.optimizer, "clip": workload.clip},
    )


def clip_mismatch(run: Run) -> Finding | None:
    """[27] Gradients that were to be clipped, and whose norm nobody took."""
    workload, operators = run.workload, run.evidence.operators
    if workload.clip is None or workload.phase != "train" or operators is None or workload.graph == "step":
        return None
    if operators.calls.get(OPTIMIZER, {}).get(_NORM_OPERATOR):
        return None
    kernels = run.evidence.profile.kernels if run.evidence.profile else ()
    if workload.optimizer in OF_ONE_LAUNCH and (not kernels or any(_NORM_KERNEL in each.name for each in kernels)):
        return None  # the kernel is no operator: without a profile of the GPU nothing can be told
    return error(
        "clip-mismatch",
        f"Gradients were to be clipped to a norm of {workload.clip:g}, but nothing took their norm.",
        remedy="compare it as a step that does not clip; look at what the optimizer's phase runs",
        evidence={"asked": workload.clip},
    )


def optimizer_skipped(run: Run) -> Finding | None:
    """[27] A step whose update was skipped has an optimizer phase of nothing."""
    updates = run.evidence.updates
    if updates is None or not updates.skipped:
        return None
    scale = f" The loss is scaled by {updates.loss_scale:g}." if updates.loss_scale is not None else ""
    return Finding(
        kind="optimizer-skipped",
        # From half of the steps on, the median is that of a step without an update.
        severity="error" if 2 * updates.skipped >= updates.steps else "warning",
        sentence=f"The optimizer left out its update in {updates.skipped} of {updates.steps} measured steps: their "
        f"optimizer phase did nothing.{scale}",
        remedy="in fp16 warm up until the scale has settled (more --warmup); else look for what keeps it from updating",
        evidence={"skipped": updates.skipped, "steps": updates.steps, "loss_scale": updates.loss_scale},
    )


def parameters_not_finite(run: Run) -> Finding | None:
    """[27] Steps on NaN and infinity train nothing."""
    updates = run.evidence.updates
    if updates is None or updates.parameters_finite is not False:
        return None
    return warning(
        "parameters-not-finite",
        "After the measured steps some parameters are NaN or infinite: the steps ran, but trained nothing.",
        remedy="another dtype or attention, or a scaled loss, keeps them finite",
        evidence={"loss_scale": updates.loss_scale},
    )


def compile_mode_mismatch(run: Run) -> Finding | None:
    """[27] The mode that torch.compile was given, by what its product says and by the CUDA graphs that it recorded."""
    report, asked = run.evidence.compilation, run.workload.compile
    step = run.samples.get(STEP)
    if report is None or asked == "eager" or step is None or not step.count:
        return None
    options, due = report.options or {}, _MODES[asked]
    wrong = [name for name in due if name in options and bool(options[name]) is not due[name]]
    fault = ""
    if wrong:
        fault = "the compiled step was made with " + ", ".join(f"{name} {options[name]}" for name in wrong)
    elif report.graphs_recorded and not due["triton.cudagraphs"]:
        fault = f"{report.graphs_recorded} CUDA graphs were recorded"
    elif _on_gpu(run) and report.frames_compiled and report.graphs_recorded == 0 and due["triton.cudagraphs"]:
        fault = "no CUDA graph was recorded: each kernel is launched by itself"
    elif report.parts_compiled == 0 and asked == "blocks":
        fault = "no block was compiled by itself"
    elif report.parts_compiled and asked != "blocks" and run.workload.layers:
        fault = f"{report.parts_compiled} modules were compiled by themselves"
    if not fault:
        return None
    return error(
        "compile-mode-mismatch",
        f"torch.compile {asked} was asked for, but {fault}.",
        remedy="compare it as what it is; TORCH_LOGS=perf_hints says why CUDA graphs were left out",
        evidence={"asked": asked, "graphs_recorded": report.graphs_recorded, **{n: str(options[n]) for n in wrong}},
    )


def accumulation_mismatch(run: Run) -> Finding | None:
    """[27] The micro-batches that ran, against those asked for: their number, and that they are the step's batch."""
    observation, workload = run.evidence.observation, run.workload
    if observation is None or observation.forward_tokens is None or _forward_elsewhere(observation):
        return None
    if workload.graph == "step":
        return None  # a graph that is replayed calls no module; what it holds was captured from such calls
    due, forwards = workload.accumulation, observation.model_forwards.get(FORWARD, 0)
    trains, updates = workload.phase != "forward", workload.phase == "train"
    fault, tokens = "", None if workload.tokens is None else workload.tokens // workload.token_parts
    if forwards < due:
        fault = f"the model's forward ran {forwards} times in a step, where {due} belong"
    elif tokens is not None and observation.forward_tokens != tokens:
        of_rank = f" of which {tokens:,} are this rank's" if tokens != workload.tokens else ""
        fault = f"forward took {observation.forward_tokens:,} tokens in a step of {workload.tokens:,}{of_rank}"
    elif observation.covers_batch is False:
        fault = "what forward took is not the step's batch"
    elif trains and observation.backward_passes != due:
        fault = f"backward reached the loss {observation.backward_passes} times in a step, where {due} belong"
    elif updates and (observation.optimizer_steps or 0) > 1:
        fault = f"the optimizer stepped {observation.optimizer_steps} times in a step"
    if not fault:
        return None
    return error(
        "accumulation-mismatch",
        f"A step of {workload.tokens or 0:,} tokens in {due} micro-batch{'es' if due > 1 else ''} was asked for, "
        f"but {fault}.",
        remedy="tokens/s and FLOP/s count the whole batch: make the step run it",
        evidence={
            "micro_batches": due,
            "forwards": forwards,
            "tokens": observation.forward_tokens,
            "backward_passes": observation.backward_passes,
        },
    )


def checkpointing_mismatch(run: Run) -> Finding | None:
    """[27] The blocks that backward ran again, against those that checkpointing has it run again."""
    observation, workload = run.evidence.observation, run.workload
    if (
        not workload.layers
        or observation is None
        or observation.blocks_again is None
        or _forward_elsewhere(observation)
    ):
        return None
    if workload.graph == "step":
        return None
    due = workload.layers * workload.accumulation if workload.checkpointing != "none" else 0
    if observation.blocks_again == due:
        return None
    return error(
        "checkpointing-mismatch",
        f"Checkpointing {workload.checkpointing} was asked for, but backward ran {observation.blocks_again} "
        f"blocks again, where {due} belong.",
        remedy="compare its memory and its time as what it is",
        evidence={"asked": workload.checkpointing, "blocks_again": observation.blocks_again, "due": due},
    )


def _forward_elsewhere(observation: StepObservation) -> bool:
    """Whether the whole model ran outside of forward. `phase-includes-forward` says so; nothing else can be told."""
    return any(count for phase, count in observation.model_forwards.items() if phase != FORWARD)


def _replayed(run: Run) -> bool:
    """Whether kernels run in replayed CUDA graphs, where no operator is called."""
    report = run.evidence.compilation
    return run.workload.graph == "step" or (report is not None and bool(report.graphs_recorded))


def _on_gpu(run: Run) -> bool:
    return run.environment is not None and run.environment.device_type != "cpu"
