"""Which attention runs: what a machine lacks for one, what `auto` picks, and whether its memory is predicted."""

import importlib.util
import os
from collections.abc import Callable
from typing import TypeGuard

from stepscope.core import parts
from stepscope.core.errors import InputError
from stepscope.core.precisions import PRECISIONS
from stepscope.core.workloads import TextbookWorkload, Workload


def fault_here(name: parts.Attention, device_type: str) -> str | None:
    """What this machine lacks for the implementation, to follow its name; None where it has all."""
    return triton_fault(device_type) if parts.ATTENTIONS[name].compiler == "triton" else None


def triton_fault(device_type: str) -> str | None:
    """What this machine lacks for a kernel in Triton, to follow its name; None where it has all."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if device_type != "cuda" and os.environ.get(parts.INTERPRETER) != "1":
        return f"runs on {device_type} in Triton's interpreter only, with {parts.INTERPRETER}=1 in the environment"
    return None


FaultHere = Callable[[parts.Attention, str], str | None]
"""A function (name, device type) -> what a machine lacks for the implementation, or None; `fault_here` is one."""


def find_fault(name: parts.Attention, call: parts.AttentionCall, here: FaultHere = fault_here) -> str | None:
    """Why the implementation cannot run this call on the machine; None where it can. The name is not `auto`."""
    return parts.ATTENTIONS[name].fault(call) or here(name, call.device_type)


def runnable(call: parts.AttentionCall, here: FaultHere = fault_here) -> list[parts.Attention]:
    """The attentions that can be proposed for such a call."""
    return [n for n, record in parts.ATTENTIONS.items() if record.proposed and find_fault(n, call, here) is None]


def resolve_attention(
    name: parts.Attention, call: parts.AttentionCall, here: FaultHere = fault_here
) -> parts.Attention:
    """The implementation that the name stands for: itself, or for `auto` the first preferred one that runs so.

    Raises an InputError that says what the named one lacks, and which ones would work.
    """
    name = parts.choose_name(name, parts.attention_names(), "attention")
    if name == parts.AUTO:
        for each in parts.PREFERRED.get(call.device_type, parts.PREFERRED_ELSEWHERE):
            if find_fault(each, call, here) is None:
                return each
        raise InputError(f"no attention runs on {call.device_type} in {call.dtype}: choose cpu or cuda")
    fault = find_fault(name, call, here)
    if fault is None:
        return name
    others = runnable(call, here)
    remedy = f"choose one of {', '.join(others)}" if others else "none of the others does"
    raise InputError(f"attention {name} {fault}: {remedy}")


def attention_of(workload: TextbookWorkload, device_type: str, here: FaultHere = fault_here) -> parts.Attention:
    """The implementation that a workload's model runs: the one it names, or what `auto` picks.

    Raises an InputError that says what the named one lacks, and which ones would work.
    """
    return resolve_attention(workload.attention, _call(workload, device_type), here)


def _call(workload: TextbookWorkload, device_type: str) -> parts.AttentionCall:
    return parts.AttentionCall(
        device_type=device_type, dtype=PRECISIONS[workload.dtype].tensors, head_dim=workload.model.head_dim,
        queries=workload.seq_len, keys=workload.seq_len, heads=workload.model.heads, key_heads=workload.model.key_heads,
        window=workload.model.window, scoring=_of_scores(workload) is not None, backward=workload.phase != "forward",
    )  # fmt: skip


def predicted_attention(workload: TextbookWorkload, device_type: str) -> parts.Attention:
    """The implementation that a workload's model runs on a machine with everything installed, if it is predicted.

    Raises InputError where it is not: the symbolic model does not know what such a step keeps, or makes on the way.
    """
    call = _call(workload, device_type)

    def fault(name: parts.Attention) -> str | None:
        return find_fault(name, call, lambda _name, _device: None)  # about a machine that lacks nothing

    predicted, asked = [name for name in _predicted(workload) if fault(name) is None], workload.attention
    if asked in parts.ATTENTIONS and (why := fault(asked)) is not None:
        said = f"attention {asked} {why}"
    else:
        name = resolve_attention(asked, call, lambda _name, _device: None)
        if name in predicted:
            return name
        step = "a step" if as_eager(workload) else "a compiled step"
        with_ = _of_scores(workload) or (workload.model.window and "a window")
        with_ = f" and {with_}" if with_ else ""
        said = f"the memory of {step} with attention {name}{with_} is not predicted"
    raise InputError(f"{said}: choose one of {', '.join(predicted)}")


def is_predicted(workload: Workload) -> TypeGuard[TextbookWorkload]:
    """Whether a workload's memory can be predicted: the model is the textbook's, with an attention that can be,
    wherever that attention runs, and with parts that can be."""
    return (
        workload.sizes is not None
        and workload.attention in (*((parts.AUTO,) if _is_plain(workload) else ()), *_predicted(workload))
        and unpredicted(workload) is None
    )


def as_eager(workload: Workload) -> bool:
    """Whether a step's memory is predicted from operations as PyTorch calls them; compiled block by block, it keeps at
    most as much, and more is kept free."""
    return workload.compile in ("eager", "blocks")


def unpredicted(workload: TextbookWorkload) -> str | None:
    """What of a workload's choices, its attention apart, keeps its memory from being predicted, with the remedy; None
    where nothing does."""
    eager = as_eager(workload)
    if PRECISIONS[workload.dtype].scaled and not eager:
        # AOTAutograd chooses whether backward gets an operand in 16 bits or in 8, and by what kernels it is cast.
        return f"the memory of a compiled step in {workload.dtype} is not predicted: ask for --compile eager or blocks"
    if workload.projections != "apart" and not eager:
        # Whether the compiler keeps them or their product, of which all are parts, no peak has shown.
        return (
            "the memory of a compiled step with projections joint is not predicted: choose --projections apart, or "
            "--compile eager or blocks"
        )
    if unknown := parts.unpredicted_parts(workload.parts, eager=eager):
        step = "a step" if eager else "a compiled step"
        neither = eager or parts.unpredicted_parts(workload.parts, eager=True)
        return (
            f"the memory of {step} with {', '.join(f'{part} {workload.parts[part]}' for part in unknown)} is not "
            f"predicted: choose {' '.join(f'--{part} reference' for part in unknown)}"
            f"{'' if neither else ', or --compile eager or blocks'}"
        )
    return None


def _predicted(workload: TextbookWorkload) -> list[parts.Attention]:
    steps = ("always", "eager") if as_eager(workload) else ("always",)
    # With a window the kernels in Triton make no mask; those written out make one, as long as no compiler does. Others
    # run another kernel. With a softcap or sinks, whose peaks are known of these kernels alone, they are the only ones.
    plain, eager = _is_plain(workload), as_eager(workload) and _of_scores(workload) is None
    return [
        name
        for name, record in parts.ATTENTIONS.items()
        if record.predicted in steps and (plain or record.compiler == "triton" or (eager and record.memory == "scores"))
    ]


def _is_plain(workload: TextbookWorkload) -> bool:
    return workload.model.window is None and _of_scores(workload) is None


def _of_scores(workload: TextbookWorkload) -> str | None:
    """What the model does to scores, in words; None where it does nothing."""
    return "a softcap" if workload.model.softcap is not None else "sinks" if workload.model.sinks else None
