"""Checks of what was computed against what was asked: precision, attention, compile mode, optimizer, micro-batches.

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild. Each
reads what the step did, never what it was told to do.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from stepscope.core.answer import Finding, error, note, warning
from stepscope.core.checkpointing import spans_of
from stepscope.core.errors import printable
from stepscope.core.evidence import KernelTotal, ProfiledStep
from stepscope.core.parts import ATTENTIONS, AUTO, PARTS, Part, calls_in_forward, is_users
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, OPTIMIZER, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes
from stepscope.core.workloads import OF_ONE_LAUNCH, OPTIMIZERS, Compile, Optimizer
from stepscope.runs.metrics import buffers_by_formula, on_gpu

if TYPE_CHECKING:
    from stepscope.traces.kernels.names import KernelName

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


def precision(run: Run) -> Iterator[Finding]:
    """[3] The precision that ran, against the precision asked for; and an attention that leaves the 16 bits that were
    asked for, by its own design."""
    probed, observation = run.evidence.precision, run.evidence.observation
    dtype, in_fp32 = run.workload.dtype, _attention_in_fp32(run)
    operands = observation.product_dtypes if observation and observation.product_dtypes else ()
    # A CPU's are operators, whose names say nothing of the products inside.
    products = _products(run.evidence.profile) if run.evidence.profile and on_gpu(run) else []
    # Not every TF32 kernel is named so: cutlass_80_tensorop_s1688gemm is one.
    by_dtype = {dtype: [name.name for _, name in products if name.input_dtype == dtype] for dtype in ("tf32", "fp32")}
    tf32 = list(dict.fromkeys([*(probed.tf32_kernels if probed else ()), *by_dtype["tf32"]]))
    fp32 = list(dict.fromkeys([*(probed.fp32_kernels if probed else ()), *by_dtype["fp32"]]))
    fault = ""
    if probed is not None:
        probe = probed.probe_relative_error
        if dtype == "fp32" and tf32:
            fault = f"fp32 was asked for, but {tf32[0]} ran: products were rounded to TF32's 10 bits"
        elif dtype == "fp32" and probe > TF32_ERROR:
            fault = f"fp32 was asked for, but a product's error of {probe:.1e} is TF32's (true fp32: 2e-7)"
        elif dtype == "tf32" and probe < TF32_ERROR:
            fault = f"tf32 was asked for, but a product's error of {probe:.1e} is true fp32's (TF32: 3e-4)"
        elif PRECISIONS[dtype].products == 2 and fp32:
            by_attention = in_fp32 and any(kernel.name not in fp32 for kernel, _ in products)
            # Two kernels may have one name here: long names are cut off.
            known = {kernel.name for kernel, _ in products}.issuperset(fp32)
            taken_s = sum(kernel.total_s for kernel, _ in products if kernel.name in fp32)
            take_little = known and taken_s < _SMALL_SHARE * sum(kernel.total_s for kernel, _ in products)
            if not by_attention and not take_little:
                fault = f"{dtype} was asked for, but {fp32[0]} ran: a product in true fp32"
    if not fault and operands:
        expected = _IN_TORCH[PRECISIONS[dtype].tensors]
        # Attention's own products may be fp32 beside others of 16 bits. Without others autocast took no effect.
        excused = in_fp32 and expected in operands
        scaled = [operand for operand in operands if operand.startswith("float8")]
        allowed = {expected, *(("float32",) if excused else ()), *(scaled if PRECISIONS[dtype].scaled else ())}
        if expected == "float32":
            allowed.add("complex64")  # two numbers in fp32
        strangers = [operand for operand in operands if operand not in allowed]
        if PRECISIONS[dtype].scaled and not scaled:
            strangers = list(operands)
        if strangers:
            fault = f"{dtype} was asked for, but matrix products took {', '.join(strangers)} operands"
    if fault:
        yield error(
            "precision-mismatch",
            fault[0].upper() + fault[1:] + ".",
            remedy="compare it as what it is; torch.set_float32_matmul_precision decides between fp32 and TF32",
            evidence={
                "asked": dtype,
                "probe_relative_error": probed.probe_relative_error if probed else None,
                "tf32_kernels": len(tf32) if probed else None,
            },
        )
    if in_fp32 and "float32" in operands:
        attention = run.workload.attention or "scaled_dot_product_attention"
        yield note(
            "attention-in-fp32",
            f"{dtype} was asked for, and {attention} multiplies in fp32 all the same: PyTorch's math kernel is made "
            "so.",
            {"asked": dtype},
            "take another attention, or torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
        )


def _products(profile: ProfiledStep) -> "list[tuple[KernelTotal, KernelName]]":
    """The kernels that multiply matrices, each with what its name says."""
    if not profile.kernels:
        return []
    from stepscope.traces.kernels.names import decode  # noqa: PLC0415  (only a GPU's kernels have such names)

    decoded = [(kernel, decode(kernel.name)) for kernel in profile.kernels]
    return [(kernel, name) for kernel, name in decoded if name.transposes]


def _attention_in_fp32(run: Run) -> bool:
    """Whether attention multiplies in fp32 though 16 bits were asked for. Which attention a user's module gets is known
    from the operators that ran: PyTorch itself takes the math kernel for dropout on a CPU, for instance."""
    if run.workload.dtype in ("fp32", "tf32"):
        return False
    if run.workload.attention is None:
        return run.evidence.profile is not None and _MATH in run.evidence.profile.attention_operators
    record = ATTENTIONS.get(run.workload.attention)
    return record is not None and record.in_fp32


def compile_not_used(run: Run) -> Iterator[Finding]:
    """[5] A compiled object was made, but the one that was timed was not it."""
    report = run.evidence.compilation
    if run.workload.compile != "eager" and report is not None and not report.frames_compiled and _measured(run):
        yield error(
            "compile-not-used",
            f"The workload says compile {run.workload.compile}, but no frame was compiled "
            f"({report.frames_total} seen): what was timed ran eagerly.",
            remedy="call the object that torch.compile returned",
            evidence={"frames_total": report.frames_total, "frames_compiled": 0},
        )


def compile_fallback(run: Run) -> Iterator[Finding]:
    """[4] torch.compile that gave up and ran eagerly, or compiled only pieces."""
    report = run.evidence.compilation
    if report is None or not _measured(run):
        return
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
    if happened:
        say = error if report.limit_hit else warning
        sentence = f"torch.compile {'. It '.join(did for did, _ in happened)}."
        yield say("compile-fallback", sentence, evidence, remedy="; ".join(remedy for _, remedy in happened))


def step_held_together(run: Run) -> Iterator[Finding]:
    """[6] A 'backward' that runs the forward again, or more forwards in a step than it has micro-batches: what
    checkpointing runs again in backward is blocks, not the model. [7] Autocast belongs round forward and loss of one
    step, nothing else. [8] An earlier step's graph still held when a step begins makes its memory figures those of two.
    """
    observation, memory = run.evidence.observation, run.evidence.memory
    for phase, count in observation.model_forwards.items() if observation is not None else ():
        allowed = run.workload.accumulation if phase == FORWARD else 0
        # Forwards and backwards of micro-batches take turns in FORWARD_BACKWARD, stage by stage.
        if phase != FORWARD_BACKWARD and count > allowed:
            yield error(
                "phase-includes-forward",
                f"The model's forward ran {count} times in the phase '{phase}', where {allowed} belong: "
                f"its time is not {phase} alone.",
                remedy="time each phase of the same step between its own marks",
                evidence={"phase": phase, "forwards": count},
            )
            break
    if observation is not None:
        places = (
            ("the whole step", observation.autocast_outside),
            (BACKWARD, observation.autocast_in_backward),
            ("the optimizer", observation.autocast_in_optimizer),
        )
        if wrapped := [place for place, on in places if on]:
            yield error(
                "autocast-scope",
                f"Autocast was on round {' and '.join(wrapped)}: its cache of cast weights outlives the update.",
                remedy="open autocast anew in each step, round forward and loss only",
                evidence={"wrapped": ", ".join(wrapped)},
            )
    extra = None
    if memory and memory.after_parameters is not None and memory.resident_expected is not None:
        # What was asked for tells, where it is known: each of a thousand tensors may hold a remainder of up to 1 MiB.
        held = memory.requested_before if memory.requested_before is not None else memory.after_parameters
        surplus = held - memory.resident_expected - buffers_by_formula(run)
        # Allocation sizes round up, and libraries keep workspaces; a graph is as large as what backward needs.
        if memory.saved_for_backward and surplus > max(0.5 * memory.saved_for_backward, _WORKSPACES):
            extra = surplus
    if extra or (observation and observation.graphs_alive_before):
        size = f" ({format_bytes(extra)} beyond parameters, optimizer state and batches)" if extra else ""
        yield error(
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


def _forward_calls(run: Run) -> tuple[dict[str, int], bool]:
    """The operators that forward called, and whether that is the whole model's: where forward and backward take turns,
    as in a pipeline, those of both, and of the blocks that this rank has."""
    calls = run.evidence.operators.calls if run.evidence.operators is not None else {}
    return (calls.get(FORWARD_BACKWARD, {}), False) if FORWARD not in calls else (calls[FORWARD], True)


def _implementations_seen(run: Run, signs: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """How often forward called operators with each implementation's sign, and those seen there or among the kernels."""
    calls, _ = _forward_calls(run)
    kernels = run.evidence.profile.kernels if run.evidence.profile else ()
    times = {
        name: sum(count for operator, count in calls.items() if re.search(sign, operator))
        for name, sign in signs.items()
    }
    ran = [n for n, sign in signs.items() if times[n] or any(re.search(sign, kernel.name) for kernel in kernels)]
    return times, ran


def attention_mismatch(run: Run) -> Iterator[Finding]:
    """[27] The attention that ran, against the one asked for."""
    workload, evidence = run.workload, run.evidence
    wanted = evidence.attention or workload.attention
    if wanted is None or wanted == AUTO or is_users(wanted) or evidence.operators is None:
        return
    if any(one.part == "attention" and not one.replaced for one in evidence.parts):
        return  # others run in the modules that were left, which `part-left` says
    record = ATTENTIONS[wanted]
    calls, whole = _forward_calls(run)
    kernels = evidence.profile.kernels if evidence.profile else ()
    signs = {name: each.signs for name, each in ATTENTIONS.items() if each.signs}
    times, ran = _implementations_seen(run, signs)
    allowed = [name for name in signs if name == wanted or name in record.chooses_among]
    strangers = [name for name in ran if name not in allowed]
    eager = workload.compile == "eager" and not _replayed(run)
    due = workload.layers * workload.accumulation if whole else 1
    called = sum(times[name] for name in allowed)
    # Attentions without signs are told by the operators that take their softmax.
    softmax, maximum = bool(calls.get("aten::_softmax")), bool(calls.get("aten::amax"))
    written_out = [
        name
        for name, each in ATTENTIONS.items()
        if (softmax or calls.get("aten::exp"))
        and not (each.signs or each.chooses_among)
        and each.calls_softmax == softmax
        and (softmax or each.subtracts_maximum == maximum)
    ]
    fault = ""
    if strangers and (eager or allowed):  # a compiler may make fused attention of one that is written out
        fault = f"{' and '.join(strangers)} ran"
    elif eager and not allowed and wanted not in written_out:
        fault = f"{' or '.join(written_out)} ran" if written_out else "nothing of it ran"
    elif eager and allowed and called < due and not (record.compiler == "inductor" and (not kernels or ran)):
        # The host calls FlexAttention's kernels by names that only its code generator knows.
        fault = f"it ran {called} times where the step has {due} calls"
    elif not eager and record.signs_when_compiled and not ran and not _replayed(run):
        fault = "nothing of it ran"
    if fault:
        yield error(
            "attention-mismatch",
            f"Attention {wanted} was asked for, but {fault}.",
            remedy="compare it as what it is; look for what chose another implementation",
            evidence={"asked": wanted, "ran": ", ".join(ran), **{name: times[name] for name in ran}},
        )


def parts_mismatch(run: Run) -> Iterator[Finding]:
    """[27] How norm, rope, mlp and loss were computed, against what was asked for; and modules of a user's model that
    other kernels were to compute, and that kept their own code."""
    parts: Iterable[Part] = run.workload.parts
    if run.workload.factory:
        parts = dict.fromkeys(part for one in run.evidence.parts if one.replaced for part in PARTS if part == one.part)
    if run.evidence.operators is not None:
        yield from itertools.islice((mismatch for part in parts for mismatch in _part_mismatch(run, part)), 1)
    left = [one for one in run.evidence.parts if one.modules and not one.replaced]
    if left:
        first = left[0]
        options = ", ".join(dict.fromkeys(f"--{one.part}" for one in left))
        others = "".join(f"; nor {one.modules} {one.type} ({one.part} {one.kernels}): {one.why}" for one in left[1:])
        yield warning(
            "part-left",
            printable(
                f"{first.part} {first.kernels} was asked for, and did not replace {first.modules} {first.type}: "
                f"{first.why}{others}."
            ),
            remedy=f"compare it as what it is, or leave out {options}",
            evidence={"part": first.part, "asked": first.kernels, "modules": first.modules, "where": first.where},
        )


def _part_mismatch(run: Run, part: Part) -> Iterator[Finding]:
    workload, ways = run.workload, PARTS[part]
    wanted = workload.parts[part]
    times, ran = _implementations_seen(run, {name: way.signs for name, way in ways.items() if way.signs})
    # A user's model may call a module as often as it likes, and other kernels beside it.
    sized = workload.layers > 0
    due = calls_in_forward(part, workload.layers) * workload.accumulation if sized else 1
    has_kernels = run.evidence.profile is not None and bool(run.evidence.profile.kernels)
    recorded = ways[wanted].operators and not _replayed(run)
    fault = ""
    if sized and (strangers := [name for name in ran if name != wanted]):
        fault = f"{' and '.join(strangers)} ran"
    elif recorded and workload.compile == "eager" and times[wanted] < due:
        fault = f"it ran {times[wanted]} times where the step has {due} calls"
    elif (recorded or (ways[wanted].signs and has_kernels)) and wanted not in ran:
        fault = "nothing of it ran"
    if fault:
        yield error(
            "part-mismatch",
            f"{part} {wanted} was asked for, but {fault}.",
            remedy="compare it as what it is; look for what chose another implementation",
            evidence={"part": part, "asked": wanted, "ran": ", ".join(ran)},
        )


_OPTIMIZER_SIGNS: tuple[tuple[str, Optimizer], ...] = (
    ("aten::_fused_adamw_", "adamw-fused"),
    ("aten::_foreach_addcdiv_", "adamw-foreach"),
    ("aten::bitwise_and_", "adamw-bf16-state"),
    ("aten::addcdiv_", "adamw-loop"),
    (_COUNTS_UPDATE, "adamw-one-launch"),
)
"""The operators that tell an optimizer; in this order, since on a CPU foreach calls those of the loop."""


def optimizer_mismatch(run: Run) -> Iterator[Finding]:
    """[27] The optimizer's implementation that ran, against the one asked for; gradients that were to be clipped, and
    whose norm nobody took."""
    workload, operators = run.workload, run.evidence.operators
    if operators is None or workload.graph == "step":  # what is replayed calls no operator
        return
    wanted, calls = workload.optimizer, operators.calls
    of_update = calls.get(OPTIMIZER, {})
    ran = next((optimizer for operator, optimizer in _OPTIMIZER_SIGNS if of_update.get(operator)), None)
    if wanted == "adamw-under-backward":
        # On a CPU it has no stream to run beside backward, and updates after it, as it does of clipped gradients.
        may_be_after = not on_gpu(run) or workload.clip is not None
        begun = calls.get(BACKWARD, {}).get(_COUNTS_UPDATE) or (ran == "adamw-one-launch" and may_be_after)
        ran = wanted if begun else ran
    if wanted == "adamw-8bit" and ran == "adamw-one-launch":  # the same launch, by the same operators
        ran = wanted
    # In fp16 the scaler may have skipped this very step: `optimizer-skipped` counts. A user's own optimizer has
    # operators that nobody knows.
    if wanted in OPTIMIZERS and ran != wanted and not (ran is None and workload.dtype == "fp16"):
        yield error(
            "optimizer-mismatch",
            f"Optimizer {wanted} was asked for, but {f'{ran} ran' if ran else 'its phase updated nothing'}.",
            remedy="compare it as what it is; look at how the optimizer is made, and whether its step runs",
            evidence={"asked": wanted, "ran": ran},
        )
    if workload.clip is None or workload.phase != "train" or of_update.get(_NORM_OPERATOR):
        return
    kernels = run.evidence.profile.kernels if run.evidence.profile else ()
    # The kernel is no operator: without a profile of the GPU nothing can be told.
    may_be_taken = not kernels or any(_NORM_KERNEL in each.name for each in kernels)
    if not (workload.optimizer in OF_ONE_LAUNCH and may_be_taken):
        yield error(
            "clip-mismatch",
            f"Gradients were to be clipped to a norm of {workload.clip:g}, but nothing took their norm.",
            remedy="compare it as a step that does not clip; look at what the optimizer's phase runs",
            evidence={"asked": workload.clip},
        )


def update_after_backward(run: Run) -> Iterator[Finding]:
    """[27] An update that was to hide under backward, and cannot."""
    workload = run.workload
    if workload.optimizer == "adamw-under-backward" and workload.clip is not None and workload.phase == "train":
        yield note(
            "update-after-backward",
            "The update ran after backward and not under it, in one launch: gradients are clipped by their global "
            "norm, which is known only when backward has ended.",
            remedy="leave out --clip to have it under backward; adamw-one-launch is the same step",
            evidence={"asked": workload.optimizer, "clip": workload.clip},
        )


def moments_in_blocks(run: Run) -> Iterator[Finding]:
    """[27] An optimizer whose moments share a scale with so many others that it is not AdamW."""
    if run.workload.optimizer == "torchao.AdamW8bit" and run.workload.phase == "train":
        yield note(
            "moments-in-blocks",
            "The optimizer keeps moments in blocks of 256 of 8 bits. Beside a gradient 10,000 times as large as its "
            "neighbours' it moved these six times as far as AdamW does (torchao 0.18).",
            remedy="compare the loss with that of adamw-fused before a long run",
            evidence={"optimizer": run.workload.optimizer, "block": 256},
        )


def updates_made(run: Run) -> Iterator[Finding]:
    """[27] A step whose update was skipped has an optimizer phase of nothing; one on NaN or infinity trains nothing."""
    updates = run.evidence.updates
    if updates is None:
        return
    if updates.skipped:
        scale = f" The loss is scaled by {updates.loss_scale:g}." if updates.loss_scale is not None else ""
        # From half of the steps on, the median is that of a step without an update.
        say = error if 2 * updates.skipped >= updates.steps else warning
        yield say(
            "optimizer-skipped",
            f"The optimizer left out its update in {updates.skipped} of {updates.steps} measured steps: their "
            f"optimizer phase did nothing.{scale}",
            remedy="in fp16 warm up until the scale has settled (more --warmup); else look for what keeps it from "
            "updating",
            evidence={"skipped": updates.skipped, "steps": updates.steps, "loss_scale": updates.loss_scale},
        )
    if updates.parameters_finite is False:
        yield warning(
            "parameters-not-finite",
            "After the measured steps some parameters are NaN or infinite: the steps ran, but trained nothing.",
            remedy="another dtype or attention, or a scaled loss, keeps them finite",
            evidence={"loss_scale": updates.loss_scale},
        )


def compile_mode_mismatch(run: Run) -> Iterator[Finding]:
    """[27] The mode that torch.compile was given, by what its product says and by the CUDA graphs that it recorded."""
    report, mode = run.evidence.compilation, run.workload.compile
    if report is None or mode == "eager" or not _measured(run):
        return
    options, due = report.options or {}, _MODES[mode]
    wrong = [name for name in due if name in options and bool(options[name]) is not due[name]]
    fault = ""
    if wrong:
        fault = "the compiled step was made with " + ", ".join(f"{name} {options[name]}" for name in wrong)
    elif report.graphs_recorded and not due["triton.cudagraphs"]:
        fault = f"{report.graphs_recorded} CUDA graphs were recorded"
    elif on_gpu(run) and report.frames_compiled and report.graphs_recorded == 0 and due["triton.cudagraphs"]:
        fault = "no CUDA graph was recorded: each kernel is launched by itself"
    elif report.parts_compiled == 0 and mode == "blocks":
        fault = "no block was compiled by itself"
    elif report.parts_compiled and mode != "blocks" and run.workload.layers:
        fault = f"{report.parts_compiled} modules were compiled by themselves"
    if fault:
        yield error(
            "compile-mode-mismatch",
            f"torch.compile {mode} was asked for, but {fault}.",
            remedy="compare it as what it is; TORCH_LOGS=perf_hints says why CUDA graphs were left out",
            evidence={"asked": mode, "graphs_recorded": report.graphs_recorded, **{n: str(options[n]) for n in wrong}},
        )


def micro_batches_mismatch(run: Run) -> Iterator[Finding]:
    """[27] The micro-batches that ran, against those asked for: their number, and that they are the step's batch; and
    the blocks that backward ran again, against those that checkpointing has it run again."""
    observation, workload = run.evidence.observation, run.workload
    # A graph that is replayed calls no module; what it holds was captured from such calls.
    if observation is None or workload.graph == "step":
        return
    # Where the whole model ran outside of forward, `phase-includes-forward` says so; nothing else can be told.
    if any(count for phase, count in observation.model_forwards.items() if phase != FORWARD):
        return
    micro_batches, forwards = workload.accumulation, observation.model_forwards.get(FORWARD, 0)
    trains, updates = workload.phase != "forward", workload.phase == "train"
    fault, tokens = "", None if workload.tokens is None else workload.tokens // workload.token_parts
    if forwards < micro_batches:
        fault = f"the model's forward ran {forwards} times in a step, where {micro_batches} belong"
    elif tokens is not None and observation.forward_tokens not in (tokens, None):
        of_rank = f" of which {tokens:,} are this rank's" if tokens != workload.tokens else ""
        fault = f"forward took {observation.forward_tokens:,} tokens in a step of {workload.tokens:,}{of_rank}"
    elif observation.covers_batch is False:
        fault = "what forward took is not the step's batch"
    elif trains and observation.backward_passes != micro_batches:
        passes = observation.backward_passes
        fault = f"backward reached the loss {passes} times in a step, where {micro_batches} belong"
    elif updates and (observation.optimizer_steps or 0) > 1:
        fault = f"the optimizer stepped {observation.optimizer_steps} times in a step"
    if fault and observation.forward_tokens is not None:
        yield error(
            "accumulation-mismatch",
            f"A step of {workload.tokens or 0:,} tokens in {micro_batches} micro-batch"
            f"{'es' if micro_batches > 1 else ''} was asked for, but {fault}.",
            remedy="tokens/s and FLOP/s count the whole batch: make the step run it",
            evidence={
                "micro_batches": micro_batches,
                "forwards": forwards,
                "tokens": observation.forward_tokens,
                "backward_passes": observation.backward_passes,
            },
        )
    blocks = 0
    if workload.checkpointing != "none":
        spans = spans_of(workload.checkpointing, workload.layers)
        blocks = micro_batches * sum(span.blocks if span.calls is None else span.runs_again[0] for span in spans)
    if workload.layers and observation.blocks_again not in (blocks, None):
        yield error(
            "checkpointing-mismatch",
            f"Checkpointing {workload.checkpointing} was asked for, but backward ran {observation.blocks_again} "
            f"blocks again, where {blocks} belong.",
            remedy="compare its memory and its time as what it is",
            evidence={"asked": workload.checkpointing, "blocks_again": observation.blocks_again, "due": blocks},
        )


def _replayed(run: Run) -> bool:
    """Whether kernels run in replayed CUDA graphs, where no operator is called."""
    report = run.evidence.compilation
    return run.workload.graph == "step" or (report is not None and bool(report.graphs_recorded))
