"""Checks of what a user's loop or model does in each of its steps, that costs time or memory or leaves it untrained.

The evidence is of a few steps that were looked at after the timed ones. The numbers in brackets are the rows of
docs/measuring.md.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepscope.allocations.left_behind import growth_finding
from stepscope.core.answer import Finding, note, warning
from stepscope.core.evidence import CodeLine
from stepscope.core.range_names import DATA, FORWARD, REST, STEP, TIMED
from stepscope.core.run import Run
from stepscope.core.samples import MINIMUM_FOR_INTERVAL, Samples
from stepscope.core.units import counted, format_bytes, format_seconds, format_share
from stepscope.runs.metrics import on_gpu

DATA_SHARE = 0.1
REST_SHARE = 0.2
FP32_SHARE = 0.01
"""A position's angles or a router's few columns are meant to be fp32, and take less."""
AGAIN_SHARE = 0.1
MANY_TENSORS = 10
_REMEDIES = {
    ("transformers", "waiting-for-data"): "TrainingArguments(dataloader_num_workers=2) or more, or a cheaper collator",
    ("transformers", "rest-is-large"): "it is what Trainer does in each step, callbacks and clipping too: a larger "
    "per_device_train_batch_size has it less often for a sample; logging_steps from 10 on keeps logging out of it",
    ("transformers", "host-waits"): "TrainingArguments(logging_nan_inf_filter=False) for Trainer's own line; a line of "
    "yours: read it every logging_steps steps",
    ("transformers", "batch-not-pinned"): "leave TrainingArguments(dataloader_pin_memory=True), the default",
    ("transformers", "optimizer-loops"): 'TrainingArguments(optim="adamw_torch_fused")',
    ("transformers", "checkpointing-not-needed"): "TrainingArguments(gradient_checkpointing=False)",
    ("transformers", "fp32-beside-half"): "leave casting to TrainingArguments(bf16=True), unless fp32 is meant there",
    ("lightning", "rest-is-large"): "it is what Trainer and its callbacks do in each step: a larger "
    "log_every_n_steps, fewer callbacks, self.log(on_step=False)",
    ("lightning", "host-waits"): "give self.log the tensor itself; Lightning reads it every log_every_n_steps steps",
    ("accelerate", "micro-batches-synchronised"): "with accelerator.accumulate(model): round each micro-batch",
}
"""What helps where a library runs the loop, in place of what helps in a loop of the user's own."""
DIFFERENT_SHAPES = 3
"""Two shapes are those of whole batches and of an epoch's last one."""


def memory_kept(run: Run) -> Iterator[Finding]:
    """[33] Graphs of earlier steps that a loop keeps, as a list of losses does; [41] memory that grows from step to
    step, where several steps were recorded."""
    habits = run.evidence.habits
    if habits is not None and habits.graphs_alive is not None and habits.graphs_alive >= habits.steps - 1:
        yield warning(
            "graph-kept-alive",
            f"The graphs of the {habits.graphs_alive} steps before were still alive when a step had ended: memory "
            "grows from step to step.",
            {"graphs": habits.graphs_alive},
            "keep loss.item() or loss.detach(), never a loss or an output itself",
        )
    if run.evidence.growth is not None and (growth := growth_finding(run.evidence.growth)) is not None:
        yield growth


def left_untrained(run: Run) -> Iterator[Finding]:
    """[32] Parameters that require a gradient and get none; [43] that get gradients and are updated, and do not change;
    [34] dropout or batch norm in eval mode in a step that trains."""
    habits = run.evidence.habits
    if habits is None:
        return
    if count := habits.without_gradient_count:
        verb, had = "requires" if count == 1 else "require", "only zeros" if habits.gradients_hold_zeros else "none"
        yield warning(
            "no-gradient",
            f"{counted(count, 'parameter')} that {verb} a gradient had {had} in {habits.steps} steps: "
            f"{_first(habits.without_gradient, count)}.",
            {"parameters": count, "first": habits.without_gradient[0]},
            "look why the loss does not depend on them, or whether zero_grad comes between backward and the update; "
            "requires_grad_(False) for what is not meant to train",
        )
    if (fixed := habits.unchanged) is not None:
        half = [dtype for dtype in fixed.dtypes if dtype in ("bfloat16", "float16")]
        if fixed.at_rate_zero:
            why = f" {fixed.at_rate_zero} of them {'is' if fixed.at_rate_zero == 1 else 'are'} in a group with lr=0."
            remedy = "give their group a learning rate; requires_grad_(False) for what is not meant to train"
        elif not fixed.held:
            why = " No optimizer holds them."
            remedy = "make the optimizer from the parameters of the model that trains"
        elif half:
            why = f" An update that is small beside a number in {half[0]} is lost when the sum is rounded."
            remedy = "keep the parameters in fp32 and compute under autocast, or update fp32 copies of them"
        else:
            why = ""
            remedy = "look whether the learning rate is too small for their numbers, or a hook undoes the update"
        yield warning(
            "parameters-unchanged",
            f"{counted(fixed.count, 'parameter')} of {fixed.parameters} got gradients and updates, and "
            f"{'holds' if fixed.count == 1 else 'hold'} the same numbers as before: "
            f"{_first(fixed.names, fixed.count)}.{why}",
            {"parameters": fixed.count, "first": fixed.names[0], "at_rate_zero": fixed.at_rate_zero},
            remedy,
        )
    if count := habits.in_eval_mode_count:
        named = f"{counted(count, 'module')} {'was' if count == 1 else 'were'}"
        yield warning(
            "eval-while-training",
            f"{named} in eval mode while the model trained: {_first(habits.in_eval_mode, count)}.",
            {"modules": count, "first": habits.in_eval_mode[0]},
            "model.train() before the loop and after each evaluation",
        )


def time_beside_training(run: Run) -> Iterator[Finding]:
    """[28] A loop that waits for its next batch; [29] a scheduler, a logger or clipping that takes a share of the step.

    What evaluates is no part of the rest, and nor is a forward that cannot be told from it, since the loop calls no
    module.
    """
    if (data := _portion(run, DATA, DATA_SHARE)) is not None:
        yield warning(
            "waiting-for-data",
            f"The loop waited for its next batch for {format_share(data.share)} of the time ({data}).",
            {"share": data.share, "from_share": DATA_SHARE},
            _remedy(
                run,
                "waiting-for-data",
                "more workers in the DataLoader (num_workers), less work for each sample, or a cheaper collate "
                "function",
            ),
        )
    loop, rest = run.evidence.loop, _portion(run, REST, REST_SHARE)
    if rest is None or loop is None or not loop.modules:
        return
    lines = run.evidence.habits.rest_lines if run.evidence.habits is not None else ()
    named = ", ".join(f"{format_share(line.share)} at {line.where}{line.call and f' ({line.call})'}" for line in lines)
    plain = "log and schedule less often; a loss outside of the model, clipping and zero_grad are in it, too"
    if lines:
        plain = "make what these lines do cheaper, do it in a worker, or less often"
    remedy = _remedy(run, "rest-is-large", plain)
    if rest.only_in:
        remedy = "look what those steps do beside training: they may save, log or schedule"
        if loop.saved is not None and loop.saved.steps * loop.saved.median_s >= _beyond_median_s(run.samples[REST]) / 2:
            remedy = f"save less often, or what is needed: {loop.saved}"
    yield warning(
        "rest-is-large",
        f"{format_share(rest.share)} of the time is neither data, forward, backward nor optimizer ({rest})."
        + (f" Of that passes {named}." if named else ""),
        {"share": rest.share, "from_share": REST_SHARE},
        remedy,
    )


def more_than_needed(run: Run) -> Iterator[Finding]:
    """[30] Lines at which the host waits for the device in every step; [35] products in fp32 where others are in 16
    bits; [37] accumulation that synchronises gradients over the ranks in each micro-batch; [44] checkpointing beside
    free memory."""
    habits = run.evidence.habits
    if habits is None:
        return
    again, free = run_again(run), habits.free_bytes
    if run.evidence.loop is not None and again >= AGAIN_SHARE and free is not None and 2 * habits.again_bytes < free:
        yield note(
            "checkpointing-not-needed",
            f"Backward runs {format_share(again)} of forward's products again, by checkpointing, while "
            f"{format_bytes(free)} of memory are free: without it a step keeps at most "
            f"{format_bytes(habits.again_bytes)} more.",
            {"share": again, "again_bytes": habits.again_bytes, "free_bytes": free},
            _remedy(run, "checkpointing-not-needed", "leave checkpointing off"),
        )
    if reads := habits.host_reads:
        evidence = {"lines": len(reads), "first": reads[0].where}
        remedy = _remedy(run, "host-waits", "read it every so many steps, or keep loss.detach() and read that later")
        if on_gpu(run):
            sentence = f"In every step the host waits for the GPU to finish, at {_lines(reads)}."
            yield warning("host-waits", sentence, evidence, remedy)
        else:
            sentence = (
                f"Every step reads values that the model computes, at {_lines(reads)}. That costs nothing on a CPU; on "
                "a GPU the host would wait there until all it has launched is done."
            )
            yield note("host-waits", sentence, evidence, remedy)
    share = habits.fp32_share or 0.0
    if habits.half_products is not None and share >= FP32_SHARE:
        yield warning(
            "fp32-beside-half",
            f"{format_share(share)} of the FLOPs of forward's products took fp32 operands, in "
            f"{', '.join(habits.fp32_products)}, where others took {habits.half_products}.",
            {"share": share, "first": habits.fp32_products[0]},
            _remedy(
                run,
                "fp32-beside-half",
                "call them inside autocast, or convert their parameters, unless fp32 is meant there",
            ),
        )
    if habits.micro_batches is not None and habits.synchronised:
        yield warning(
            "micro-batches-synchronised",
            f"Of {habits.micro_batches} micro-batches, {habits.synchronised} before the last synchronised their "
            "gradients over the ranks, which the last does for all.",
            {"micro_batches": habits.micro_batches, "synchronised": habits.synchronised},
            _remedy(
                run,
                "micro-batches-synchronised",
                "with model.no_sync(): round forward and backward of all micro-batches but the last",
            ),
        )


def small_habits(run: Run) -> Iterator[Finding]:
    """[36] Copies to the GPU from memory that is not pinned; [31] zero_grad(set_to_none=False), which keeps gradients
    through forward, fills them with zeros and adds to them; [38] an optimizer that goes over its tensors one after
    another; [39] inputs whose shape changes from step to step."""
    habits = run.evidence.habits
    if habits is None:
        return
    if lines := habits.unpinned:
        yield note(
            "batch-not-pinned",
            f"Every step copies to the GPU from memory that is not pinned, at {_lines(lines)}: the host waits for the "
            "copy, and the GPU computes nothing beside it.",
            {"lines": len(lines), "first": lines[0].where},
            _remedy(run, "batch-not-pinned", "DataLoader(pin_memory=True) and .to(device, non_blocking=True)"),
        )
    if habits.zeroed_gradients:
        yield note(
            "gradients-zeroed",
            f"{counted(habits.zeroed_gradients, 'gradient')} ({format_bytes(habits.zeroed_bytes)}) held zeros when "
            "backward began: they take memory during forward, and time to be filled and added to.",
            {"gradients": habits.zeroed_gradients, "bytes": habits.zeroed_bytes},
            "optimizer.zero_grad(), which sets them to None",
        )
    operators, tensors = habits.optimizer_operators, habits.optimizer_tensors
    one_by_one = operators is not None and MANY_TENSORS <= tensors <= operators
    if one_by_one and (on_gpu(run) or habits.optimizer_loops):
        yield note(
            "optimizer-loops",
            f"The optimizer goes over its {tensors} tensors one after another: {operators} operators a step.",
            {"tensors": tensors, "operators": operators},
            _remedy(run, "optimizer-loops", "fused=True, or leave foreach to PyTorch"),
        )
    if (shapes := len(habits.input_shapes)) >= DIFFERENT_SHAPES:
        yield note(
            "shapes-change",
            f"In {habits.forwards} calls the model's input had {shapes} shapes "
            f"({_first(habits.input_shapes[:3], shapes)}): the times are of steps of different sizes.",
            {"shapes": shapes, "calls": habits.forwards},
            "pad to a few lengths: compiled code, tuned kernels and the allocator's blocks are then used again",
        )


def run_again(run: Run) -> float:
    """The share of forward's products that backward runs again; 0 where neither was counted."""
    habits, work = run.evidence.habits, run.work.get(FORWARD)
    return habits.again_flops / work.flops if habits is not None and work is not None and work.flops else 0.0


def _remedy(run: Run, kind: str, plain: str) -> str:
    """What helps, in the words of the library that runs the loop."""
    return _REMEDIES.get((run.evidence.loop.library if run.evidence.loop is not None else "", kind), plain)


@dataclass(frozen=True)
class _Portion:
    """A part's share of the time: of the median step, as the table shows it, or of all steps together."""

    share: float
    part_s: float
    step_s: float
    only_in: str = ""
    """The steps that make up the part, where the median step has little of it."""

    def __str__(self) -> str:
        which = f"a step on average: {self.only_in}" if self.only_in else "a step"
        return f"{format_seconds(self.part_s)} of {format_seconds(self.step_s)} {which}"


def _portion(run: Run, name: str, from_share: float) -> _Portion | None:
    """The part's share of the median step where that is large enough; else of all steps, where some of them make up
    most of it, as a loader with workers waits in some steps only. None of a few steps, in which one line of a log or
    one batch is a large share."""
    part, step = run.samples.get(name), run.samples.get(STEP)
    if run.evidence.loop is None or part is None or step is None or step.count < MINIMUM_FOR_INTERVAL:
        return None
    usual_s, step_s = part.median_s or 0.0, step.median_s or 0.0
    if step_s and usual_s / step_s >= from_share:
        return _Portion(usual_s / step_s, usual_s, step_s)
    if not step_s or not (part.mean_s or 0.0) / (step.mean_s or 1.0) >= from_share:
        return None
    slow = [value - usual_s for value in part.values_s if value - usual_s > max(usual_s, step_s / 4)]
    others = sum(_beyond_median_s(run.samples[other]) for other in TIMED if other != name and other in run.samples)
    # One slow step stands for nothing, and what slows the machine slows every part.
    if len(slow) < 2 or _beyond_median_s(part) < others:
        return None
    only_in = f"{counted(len(slow), 'step')} of {step.count} took {format_seconds(statistics.median(slow))} more"
    return _Portion((part.mean_s or 0.0) / (step.mean_s or 1.0), part.mean_s or 0.0, step.mean_s or 0.0, only_in)


def _beyond_median_s(samples: Samples) -> float:
    """The time by which samples exceed their median, added up."""
    median_s = samples.median_s or 0.0
    return sum(max(0.0, value - median_s) for value in samples.values_s)


def _lines(lines: Sequence[CodeLine]) -> str:
    named = [f"{line.where} ({line.call})" if line.call else line.where for line in lines]
    return _first(named[:3], len(named))


def _first(names: Sequence[str], count: int) -> str:
    """The first few names, and how many there are besides."""
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"{', '.join(names)}{more}"
