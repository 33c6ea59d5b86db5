"""What torch.compile really did, from dynamo's counters: a fall-back to eager is silent otherwise."""

import torch._dynamo
from torch._dynamo import utils as dynamo_utils

from stepscope.core.evidence import CompileReport

_LIMIT_PHRASES = ("recompile limit exceeded", "recompile_limit", "cache_size_limit", "cache size limit")


def reset_compilation() -> None:
    """Forget compiled code and counters, so that the next report speaks of one workload only."""
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.clear_compilation_metrics()


def compile_report() -> CompileReport:
    """Read the counters gathered since `reset_compilation`."""
    counters = dynamo_utils.counters
    breaks = {_first_line(reason): count for reason, count in counters["graph_break"].items()}
    refusals = [*counters["graph_break"], *counters["unimplemented"]]
    metrics = dynamo_utils.get_compilation_metrics()
    # A compile id reads frame/attempt: attempt 1 and later of a frame are recompilations.
    forward_ids = {m.compile_id for m in metrics if m.compile_id and not m.compile_id.startswith("!")}
    recompiles = {i for i in forward_ids if "/" in i and i.rpartition("/")[2].split("_")[0] not in ("0", "")}
    reasons = [_first_line(m.recompile_reason) for m in metrics if getattr(m, "recompile_reason", None)]
    # A graph of autograd's that is found brings its inductor graphs along, which may be counted by themselves too.
    cached = max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
    seconds = [m.entire_frame_compile_time_s for m in metrics if m.entire_frame_compile_time_s]
    return CompileReport(
        frames_total=counters["frames"]["total"],
        frames_compiled=counters["frames"]["ok"],
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(breaks.values()),
        graph_break_reasons=tuple(breaks),
        recompiles=len(recompiles),
        recompile_reasons=tuple(dict.fromkeys(reasons)),
        limit_hit=any(phrase in str(reason).lower() for reason in refusals for phrase in _LIMIT_PHRASES),
        compile_s=sum(seconds) if seconds else None,
        cached_graphs=cached,
    )


def _first_line(reason: object) -> str:
    return (str(reason).splitlines() or ["(no reason given)"])[0][:200]
