"""Checks of what a user's loop or model does in each of its steps, that costs time or memory or leaves it untrained.

The evidence is of a few steps that were looked at after the timed ones. The numbers in brackets are the rows of
docs/measuring.md.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepscope.allocations.left_behind import growth_finding
from stepscope.core.answer import Finding, note, warning
from stepscope.core.evidence import CodeLine, Habits
from stepscope.core.range_names import DATA, REST, STEP, TIMED
from stepscope.core.run import Run
from stepscope.core.samples import MINIMUM_FOR_INTERVAL, Samples
from stepscope.core.units import counted, format_bytes, format_seconds, format_share

DATA_SHARE = 0.1
REST_SHARE = 0.2
FP32_SHARE = 0.01
"""A position's angles or a router's few columns are meant to be fp32, and take less."""
MANY_TENSORS = 10
DIFFERENT_SHAPES = 3
"""Two shapes are those of whole batches and of an epoch's last one."""


def _of_habits(judged: Callable[[Habits], Finding | None]) -> Callable[[Run], Finding | None]:
    """A check of what the steps did; a run whose steps nobody looked at has no such finding."""

    @functools.wraps(judged)
    def check(run: Run) -> Finding | None:
        return judged(run.evidence.habits) if run.evidence.habits is not None else None

    return check


def waiting_for_data(run: Run) -> Finding | None:
    """[28] A loop that waits for its next batch."""
    portion = _portion(run, DATA, DATA_SHARE)
    if portion is None:
        return None
    return warning(
        "waiting-for-data",
        f"The loop waited for its next batch for {format_share(portion.share)} of the time ({portion}).",
        {"share": portion.share, "from_share": DATA_SHARE},
        "more workers in the DataLoader (num_workers), less work for each sample, or a cheaper collate function",
    )


def rest_is_large(run: Run) -> Finding | None:
    """[29] A scheduler, a logger or clipping that takes a share of the step. What evaluates is no part of the rest, and
    nor is a forward that cannot be told from it, since the loop calls no module."""
    loop, portion = run.evidence.loop, _portion(run, REST, REST_SHARE)
    if portion is None or loop is None or not loop.modules:
        return None
    remedy = "log and schedule less often; a loss outside of the model, clipping and zero_grad are in it, too"
    if portion.only_in:
        remedy = "look what those steps do beside training: they may save, log or schedule"
        if loop.saved is not None and loop.saved.steps * loop.saved.median_s >= _beyond_median_s(run.samples[REST]) / 2:
            remedy = f"save less often, or what is needed: {loop.saved}"
    return warning(
        "rest-is-large",
        f"{format_share(portion.share)} of the time is neither data, forward, backward nor optimizer ({portion}).",
        {"share": portion.share, "from_share": REST_SHARE},
        remedy,
    )


def host_reads(run: Run) -> Finding | None:
    """[30] Lines at which the host waits for the device in every step."""
    habits = run.evidence.habits
    if habits is None or not habits.host_reads:
        return None
    lines, evidence = _lines(habits.host_reads), {"lines": len(habits.host_reads), "first": habits.host_reads[0].where}
    remedy = "read it every so many steps, or keep loss.detach() and read that later"
    if _on_gpu(run):
        return warning(
            "host-waits", f"In every step the host waits for the GPU to finish, at {lines}.", evidence, remedy
        )
    return note(
        "host-waits",
        f"Every step reads values that the model computes, at {lines}. That costs nothing on a CPU; on a GPU the host "
        "would wait there until all it has launched is done.",
        evidence,
        remedy,
    )


@_of_habits
def gradients_zeroed(habits: Habits) -> Finding | None:
    """[31] zero_grad(set_to_none=False): gradients are kept through forward, filled with zeros, and added to."""
    if not habits.zeroed_gradients:
        return None
    return note(
        "gradients-zeroed",
        f"{counted(habits.zeroed_gradients, 'gradient')} ({format_bytes(habits.zeroed_bytes)}) held zeros when "
        "backward began: they take memory during forward, and time to be filled and added to.",
        {"gradients": habits.zeroed_gradients, "bytes": habits.zeroed_bytes},
        "optimizer.zero_grad(), which sets them to None",
    )


@_of_habits
def no_gradient(habits: Habits) -> Finding | None:
    """[32] Parameters that require a gradient and get none."""
    if not habits.without_gradient_count:
        return None
    count = habits.without_gradient_count
    verb, had = "requires" if count == 1 else "require", "only zeros" if habits.gradients_hold_zeros else "none"
    return warning(
        "no-gradient",
        f"{counted(count, 'parameter')} that {verb} a gradient had {had} in {habits.steps} steps: "
        f"{_first(habits.without_gradient, count)}.",
        {"parameters": count, "first": habits.without_gradient[0]},
        "look why the loss does not depend on them, or whether zero_grad comes between backward and the update; "
        "requires_grad_(False) for what is not meant to train",
    )


@_of_habits
def parameters_unchanged(habits: Habits) -> Finding | None:
    """[43] Parameters that get gradients and are updated, and do not change."""
    found = habits.unchanged
    if found is None:
        return None
    half = [dtype for dtype in found.dtypes if dtype in ("bfloat16", "float16")]
    if found.at_rate_zero:
        why = f" {found.at_rate_zero} of them {'is' if found.at_rate_zero == 1 else 'are'} in a group with lr=0."
        remedy = "give their group a learning rate; requires_grad_(False) for what is not meant to train"
    elif not found.held:
        why, remedy = " No optimizer holds them.", "make the optimizer from the parameters of the model that trains"
    elif half:
        why = f" An update that is small beside a number in {half[0]} is lost when the sum is rounded."
        remedy = "keep the parameters in fp32 and compute under autocast, or update fp32 copies of them"
    else:
        why, remedy = "", "look whether the learning rate is too small for their numbers, or a hook undoes the update"
    return warning(
        "parameters-unchanged",
        f"{counted(found.count, 'parameter')} of {found.parameters} got gradients and updates, and "
        f"{'holds' if found.count == 1 else 'hold'} the same numbers as before: {_first(found.names, found.count)}."
        f"{why}",
        {"parameters": found.count, "first": found.names[0], "at_rate_zero": found.at_rate_zero},
        remedy,
    )


@_of_habits
def graphs_pile_up(habits: Habits) -> Finding | None:
    """[33] Graphs of earlier steps that a loop keeps, as a list of losses does."""
    if habits.graphs_alive is None or habits.graphs_alive < habits.steps - 1:
        return None
    return warning(
        "graph-kept-alive",
        f"The graphs of the {habits.graphs_alive} steps before were still alive when a step had ended: memory grows "
        "from step to step.",
        {"graphs": habits.graphs_alive},
        "keep loss.item() or loss.detach(), never a loss or an output itself",
    )


def memory_grows(run: Run) -> Finding | None:
    """[41] Memory that grows from step to step, where several steps were recorded."""
    return growth_finding(run.evidence.growth) if run.evidence.growth is not None else None


@_of_habits
def eval_while_training(habits: Habits) -> Finding | None:
    """[34] Dropout or batch norm in eval mode in a step that trains."""
    if not habits.in_eval_mode_count:
        return None
    count = habits.in_eval_mode_count
    return warning(
        "eval-while-training",
        f"{counted(count, 'module')} {'was' if count == 1 else 'were'} in "
        f"eval mode while the model trained: {_first(habits.in_eval_mode, count)}.",
        {"modules": count, "first": habits.in_eval_mode[0]},
        "model.train() before the loop and after each evaluation",
    )


@_of_habits
def fp32_beside_half(habits: Habits) -> Finding | None:
    """[35] Products in fp32 where others are in 16 bits."""
    if habits.half_products is None or (habits.fp32_share or 0.0) < FP32_SHARE:
        return None
    share = habits.fp32_share or 0.0
    return warning(
        "fp32-beside-half",
        f"{format_share(share)} of the FLOPs of forward's products took fp32 operands, in "
        f"{', '.join(habits.fp32_products)}, where others took {habits.half_products}.",
        {"share": share, "first": habits.fp32_products[0]},
        "call them inside autocast, or convert their parameters, unless fp32 is meant there",
    )


@_of_habits
def unpinned_batch(habits: Habits) -> Finding | None:
    """[36] Copies to the GPU from memory that is not pinned."""
    if not habits.unpinned:
        return None
    return note(
        "batch-not-pinned",
        f"Every step copies to the GPU from memory that is not pinned, at {_lines(habits.unpinned)}: the host waits "
        "for the copy, and the GPU computes nothing beside it.",
        {"lines": len(habits.unpinned), "first": habits.unpinned[0].where},
        "DataLoader(pin_memory=True) and .to(device, non_blocking=True)",
    )


@_of_habits
def synchronises_micro_batches(habits: Habits) -> Finding | None:
    """[37] Accumulation that synchronises gradients over the ranks in each micro-batch."""
    if habits.micro_batches is None or not habits.synchronised:
        return None
    return warning(
        "micro-batches-synchronised",
        f"Of {habits.micro_batches} micro-batches, {habits.synchronised} before the last synchronised their gradients "
        "over the ranks, which the last does for all.",
        {"micro_batches": habits.micro_batches, "synchronised": habits.synchronised},
        "with model.no_sync(): round forward and backward of all micro-batches but the last",
    )


def optimizer_loops(run: Run) -> Finding | None:
    """[38] An optimizer that goes over its tensors one after another."""
    habits = run.evidence.habits
    if habits is None or habits.optimizer_operators is None or habits.optimizer_tensors < MANY_TENSORS:
        return None
    if habits.optimizer_operators < habits.optimizer_tensors or not (_on_gpu(run) or habits.optimizer_loops):
        return None
    return note(
        "optimizer-loops",
        f"The optimizer goes over its {habits.optimizer_tensors} tensors one after another: "
        f"{habits.optimizer_operators} operators a step.",
        {"tensors": habits.optimizer_tensors, "operators": habits.optimizer_operators},
        "fused=True, or leave foreach to PyTorch",
    )


@_of_habits
def shapes_change(habits: Habits) -> Finding | None:
    """[39] Inputs whose shape changes from step to step."""
    if len(habits.input_shapes) < DIFFERENT_SHAPES:
        return None
    return note(
        "shapes-change",
        f"In {habits.forwards} calls the model's input had {len(habits.input_shapes)} shapes "
        f"({_first(habits.input_shapes[:3], len(habits.input_shapes))}): the times are of steps of different sizes.",
        {"shapes": len(habits.input_shapes), "calls": habits.forwards},
        "pad to a few lengths: compiled code, tuned kernels and the allocator's blocks are then used again",
    )


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


def _on_gpu(run: Run) -> bool:
    return run.environment is not None and run.environment.device_type == "cuda"
