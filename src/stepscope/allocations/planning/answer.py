"""A plan as an Answer: the best layouts, why others are not, what bounds a step, where it stops scaling."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepscope.allocations.planning.search import (
    CHECKPOINTINGS,
    COMMUNICATION_BYTES,
    MIXTURES,
    Machine,
    Plan,
    Planned,
    Question,
    planned,
    planned_step,
    search,
)
from stepscope.allocations.planning.times import (
    LAUNCH_S,
    PARTS,
    STEP_SPREAD,
    Clock,
    Simulated,
    beside,
    rates_of,
    said_of,
)
from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import OF_COMPILED_PARTS, divisors
from stepscope.allocations.prediction.layouts import RankMemory, RankNeeds, bytes_of
from stepscope.core import answer
from stepscope.core.attention_support import is_predicted
from stepscope.core.checkpointing import offload_of, selective_of
from stepscope.core.device_spec import DATASHEET, DeviceSpec, find_device_spec, stated_bytes
from stepscope.core.errors import InputError
from stepscope.core.formulas.communication import (
    Group,
    SharedLayer,
    bus_bandwidth,
    bus_bytes_per_s,
    layer_bytes,
    ring_all_reduces_s,
    transfer_s,
    transfers_of,
)
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.formulas.spelled import cell_name, run_command
from stepscope.core.layout import SHARDINGS, Layout, settled, step_of
from stepscope.core.model_config import configure
from stepscope.core.networks import MOST_RANKS, Network, network_for
from stepscope.core.run import Run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import GIB, counted, format_bytes, format_rate, format_seconds, format_share
from stepscope.core.workloads import TextbookWorkload, by_sizes

# How a plan changes with the number of ranks, and with the speed of the links.


DOUBLINGS = range(-3, 4)
_WORTH_IT = 1.5
"""A doubling that makes a step less than so many times faster is where a plan says that scaling stops."""
LINK_FACTORS = (0.25, 0.5, 2.0, 4.0)


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout for another number of ranks and the same batch."""

    ranks: int
    best: Planned | None
    why_not: str = ""


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The best step with links of another speed."""

    links: str
    factor: float
    best: Planned


def scaling(plan: Plan, machine: Machine) -> tuple[Scaled, ...]:
    """The best layouts for fewer ranks and more, of the kind of sharding and checkpointing that is best here."""
    if not plan.best:
        return ()
    best = plan.best[0].layout
    fixed = {name: value for name, value in plan.question.fixed.items() if name not in ("data", "shard")}
    if best.data * best.context > 1:
        fixed["sharding"] = best.sharding
    # A mixture is what the memory of so many ranks leaves: other numbers have another, or no need of one.
    alike = best.checkpointing in CHECKPOINTINGS
    checkpointings = (best.checkpointing,) if alike else plan.question.checkpointings
    rows: list[Scaled] = []
    for exact in (plan.question.ranks * 2.0**power for power in DOUBLINGS):
        ranks = int(exact)
        if ranks != exact or not 1 <= ranks <= MOST_RANKS:
            continue
        question = msgspec.structs.replace(plan.question, ranks=ranks, fixed=fixed, checkpointings=checkpointings)
        other = plan if ranks == plan.question.ranks else search(question, machine, shown=1)
        reasons = other.too_large or other.refused
        why_not = "" if other.best else max(reasons, key=reasons.__getitem__, default="no layout")
        rows.append(Scaled(ranks=ranks, best=next(iter(other.best), None), why_not=why_not))
    return tuple(rows)


def stops_at(scaled: tuple[Scaled, ...], ranks: int) -> Scaled | None:
    """The first number of ranks, from this one on, whose doubling is not worth it; None where each is."""
    known = [one for one in scaled if one.ranks >= ranks and one.best]
    for one, twice in itertools.pairwise(known):
        if one.best and twice.best and one.best.time.step_s / twice.best.time.step_s < _WORTH_IT:
            return one
    return known[-1] if known and known[-1].ranks < scaled[-1].ranks else None


def sensitivity(plan: Plan, machine: Machine) -> tuple[Sensitivity, ...]:
    """The best of the fastest layouts, should links within nodes, or between them, be slower or faster."""
    if not plan.best or plan.question.ranks == 1:
        return ()
    memory = RankMemory(plan.question.workload, plan.question.model)
    rows: list[Sensitivity] = []
    network = machine.network
    for links, which in (("within a node", "inside"), ("between nodes", "between")):
        if links == "between nodes" and plan.question.ranks <= network.node:
            continue
        for factor in LINK_FACTORS:
            clock = Clock(plan.question.workload, memory, machine.rates, network.faster(**{which: factor}))
            candidates = {*plan.fastest, *(one.layout for one in plan.best)}
            layout = min(candidates, key=lambda layout, clock=clock: (clock.step(layout).step_s, layout.name))
            best = Planned(layout=layout, time=clock.step(layout), peak_bytes=0, needs=None)
            rows.append(Sensitivity(links=links, factor=factor, best=best))
    return tuple(rows)


class Planning(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an answer is made of."""

    plan: Plan
    machine: Machine
    spec: DeviceSpec
    scaled: tuple[Scaled, ...] = ()
    sensitive: tuple[Sensitivity, ...] = ()
    even: Simulated | None = None
    """The best layout played without stragglers."""
    uneven: Simulated | None = None
    """The same with stragglers."""
    spread: float = STEP_SPREAD


def answer_plan(planning: Planning) -> answer.Answer:
    """The Answer to which layout is best."""
    plan, workload = planning.plan, planning.plan.question.workload
    return answer.Answer(
        study="plan",
        question=f"Which layout of {workload.model.name} is fastest on {plan.question.ranks:,} x {planning.spec.name}?",
        lead=tuple(_lead(planning)),
        tables=tuple(_tables(planning)),
        panels=tuple(_panels(planning)),
        findings=tuple(_findings(planning)),
        asides=(
            "On paper: nothing was run. Uneven experts, failures, data loading, limits of power and temperature, "
            "and contention between collectives are not in the formulas.",
        ),
    )


def _lead(planning: Planning) -> Iterable[answer.Line]:
    question, network = planning.plan.question, planning.machine.network
    workload, model = question.workload, question.model
    sizes = ", ".join(f"{field} {size:,}" for field, size in workload.model.sizes.items())
    experts = f", {model.experts} experts of which {model.active} active" if model.experts > 1 else ""
    yield answer.Line(f"{workload.model.name}: {model.parameters:,} parameters ({sizes}{experts})", "strong")
    yield answer.Line(
        f"{counted(workload.batch_size, 'sequence')} of {workload.seq_len:,} = {workload.tokens:,} tokens a step, "
        f"{workload.dtype}, {workload.attention} attention, "
        f"{'eager' if workload.compile == 'eager' else f'torch.compile {workload.compile}'}, {workload.optimizer}"
    )
    yield answer.Line(
        f"{question.ranks:,} x {planning.spec.name}; {network.name}: {network.node} GPUs at "
        f"{format_rate(network.inside_bytes_per_s, 'B/s')}, nodes at {format_rate(network.between_bytes_per_s, 'B/s')} "
        f"a GPU, of which collectives reach {network.share:.0%}"
    )
    if network.measured:
        # Latency and bandwidth of an all-reduce stand for all kinds, or those of the first kind.
        numbers = sorted({fit.ranks for fit in network.measured})
        kinds = list(dict.fromkeys(fit.kind for fit in network.measured))
        kind = "all-reduce" if "all-reduce" in kinds else kinds[0]
        fit = network.fit_for(kind, question.ranks)
        assert fit is not None
        rate = bus_bandwidth(kind, 1, fit.ranks, 1 / fit.bytes_per_s) if fit.bytes_per_s else None
        moved = f", and moves bytes at {format_rate(rate, 'B/s')} of bus bandwidth" if rate else ""
        others = "; other numbers of ranks keep its bus bandwidth" if set(numbers) != {question.ranks} else ""
        yield answer.Line(
            f"Within a node, {', '.join(kinds)} take what was measured over {fit.backend} among "
            f"{' and '.join(map(str, numbers))} ranks ({network.source}), not what the name says: among {fit.ranks}, "
            f"{kind} waits {format_seconds(fit.latency_s)}{moved}{others}."
        )
    of_blocks = (OF_COMPILED_PARTS,) if workload.compile == "blocks" else ()
    for sentence in (*planning.machine.rates.assumptions, *of_blocks):
        yield answer.Line(sentence, "aside")
    if question.ranks > 1:
        products, other_kernels = beside(planning.machine.rates, network)
        whose = "measured over NCCL on two H100" if network.beside is None else "as --network says"
        yield answer.Line(
            f"While a collective runs, matrix products take {products:.2f} times as long, and other kernels "
            f"{other_kernels:.2f} times ({whose}).",
            "aside",
        )


def _tables(planning: Planning) -> Iterable[answer.Table]:
    plan = planning.plan
    yield answer.text(*_headline(planning))
    if plan.best:
        best = plan.best[0]
        yield _best_table(planning)
        parts = [(part, best.time.parts[part], best.time.parts[part] / best.time.step_s) for part in PARTS]
        yield answer.table_of(
            "part",
            ("seconds", "s"),
            ("share", "%"),
            title="What the best step is made of",
            rows=[row for row in parts if row[1]],
        )
        if best.needs is not None:
            yield _memory_table(best.needs, planning)
        if plan.question.ranks > 1:
            yield _traffic_table(best, planning)
    grids = [(reason, "ways to share out ranks", count) for reason, count in plan.refused.items()]
    layouts = [(reason, "layouts", count) for reason, count in plan.too_large.items()]
    rows = [*sorted(grids, key=lambda row: -row[2]), *sorted(layouts, key=lambda row: -row[2])]
    fitting = f"{plan.fitting:,} of {counted(plan.layouts, 'layout')} fit, of {plan.grids:,} ways to share out "
    yield answer.table_of(
        ("why not", answer.PROSE),
        "what",
        ("how many", ","),
        title="Why others are not",
        rows=rows,
        notes=answer.as_lines(f"{fitting}{counted(plan.question.ranks, 'rank')}."),
    )
    if planning.scaled:
        yield _scaling_table(planning)
    if planning.sensitive:
        best = planning.plan.best[0]
        yield answer.table_of(
            "links", ("rate", "{:.2f} x"), ("step", "s"), ("change", "+%"), "best layout",
            title="If links were slower or faster",
            rows=[
                (
                    one.links, one.factor, one.best.time.step_s, one.best.time.step_s / best.time.step_s - 1,
                    one.best.layout.name if one.best.layout != best.layout else "the same",
                )
                for one in planning.sensitive
            ],
            notes=answer.as_lines("The best of the fastest layouts of the search, each timed again."),
        )  # fmt: skip
    if planning.even is not None:
        yield _simulation_table(planning)


def _headline(planning: Planning) -> Iterable[answer.Line]:
    plan, budget = planning.plan, planning.machine.budget
    if not plan.best:
        if plan.nearest is None:
            yield answer.Line("There is no layout: see the reasons below.", "bad")
            return
        needs = format_bytes(plan.nearest.peak_bytes)
        yield answer.Line(
            f"Nothing fits into {budget.said}. {_described(plan.nearest.layout)}, whose states are smallest, needs "
            f"{needs} on a rank: {plan.question.what_would_fit}.",
            "bad",
        )
        return
    best = plan.best[0]
    yield answer.Line(
        f"Best: {_described(best.layout)}. A step takes {format_seconds(best.time.step_s)}, "
        f"{format_share(_mfu(best, planning))} MFU, {_tokens(best, planning):,.0f} tokens/s; "
        f"{format_bytes(best.peak_bytes)} of {format_bytes(budget.usable_bytes)} on the rank that needs most.",
        "good",
    )
    if best.host_bytes:
        yield answer.Line(
            f"Blocks that offload keep {format_bytes(best.host_bytes)} of each rank in the host's memory."
        )
    model, checkpointing = plan.question.model, best.layout.checkpointing
    yield answer.Line(
        f"To plan it alone: --layout {settled(best.layout, model.experts)} --checkpointing {checkpointing}", "aside"
    )
    ran = step_of(plan.question.workload, best.layout) if model.experts == 1 and model.form is None else None
    other = f"no product of run is in {model.form.name}" if model.form else "no strategy of --parallel is this layout"
    command = run_command(ran) if ran is not None else None
    yield answer.Line(f"To run it: {command or f'your own trainer; {other}'}", "aside")
    simple = plan.simplest
    if simple is not None:
        slower = format_share(simple.time.step_s / best.time.step_s - 1)
        yield answer.Line(
            f"Simpler, and {slower} slower: {_described(simple.layout)} ({format_bytes(simple.peak_bytes)})."
        )
    parts = sorted(best.time.parts.items(), key=lambda part: -part[1])
    shares = [f"{name} ({format_share(seconds / best.time.step_s)})" for name, seconds in parts[:3] if seconds]
    yield answer.Line(f"What bounds it: {', then '.join(shares)}.")
    stop = stops_at(planning.scaled, plan.question.ranks)
    if stop is not None:
        yield answer.Line(
            f"With this batch it stops scaling at {counted(stop.ranks, 'rank')}: twice as many make a step less than "
            "1.5 times faster, or cannot share it."
        )


def _described(layout: Layout) -> str:
    return f"{layout.name}, {layout.micro_batches:,} x {layout.micro_batch}, checkpointing {layout.checkpointing}"


def _mfu(planned: Planned, planning: Planning, ranks: int | None = None) -> float:
    question = planning.plan.question
    flops = question.model.step_flops(question.workload.tokens, question.workload.seq_len)
    peak = planning.machine.rates.peak_flops_per_s * (ranks or question.ranks)
    return flops / planned.time.step_s / peak


def _tokens(planned: Planned, planning: Planning) -> float:
    return planning.plan.question.workload.tokens / planned.time.step_s


def _best_table(planning: Planning) -> answer.Table:
    names = dict.fromkeys(planned.layout.sharding for planned in planning.plan.best)
    return answer.table_of(
        "layout", ("micro-batches", answer.TEXT), "checkpointing", ("step", "s"), ("MFU", "%"),
        ("tokens/s a GPU", ",.0f"), ("peak", "B"), "bound by",
        title="Best layouts",
        rows=[
            (
                one.layout.name, f"{one.layout.micro_batches} x {one.layout.micro_batch}", one.layout.checkpointing,
                one.time.step_s, _mfu(one, planning), _tokens(one, planning) / planning.plan.question.ranks,
                one.peak_bytes, one.time.bound,
            )
            for one in planning.plan.best
        ],
        notes=answer.as_lines(
            "tp, cp, pp, ep, dp: tensor (with sequence), context, pipeline, expert and data parallel; v: chunks of an "
            "interleaved pipeline.",
            *(
                legend
                for k_of, legend in ((selective_of, MIXTURES), (offload_of, said_of(planning.machine.rates)))
                if any(k_of(one.layout.checkpointing) for one in planning.plan.best)
            ),
            *(
                f"{name}: {SHARDINGS[name].words} ({SHARDINGS[name].source})."
                for name in names
                if planning.plan.question.ranks > 1
            ),
        ),
    )  # fmt: skip


def _memory_table(needs: RankNeeds, planning: Planning) -> answer.Table:
    parts = {
        "parameters": needs.parameters,
        "gradients": needs.gradients,
        "moments of the optimizer": needs.moments,
        "buckets of gradients": needs.buckets,
        "gathered or cast copies": needs.gathered,
        "saved for micro-batches in flight": needs.saved,
        "the micro-batch at work": needs.working,
        "data and workspaces": needs.fixed,
    }
    left = planning.machine.budget.usable_bytes - COMMUNICATION_BYTES
    return answer.table_of(
        "memory of a rank",
        ("bytes", "B"),
        ("share", "%"),
        title="Memory of the rank that needs most",
        rows=[(name, count, count / needs.peak) for name, count in parts.items() if count],
        notes=answer.as_lines(
            f"Pipeline rank {needs.rank}. A layout fits where its peak and 4 % more are within {format_bytes(left)}: "
            f"what the device has, less its context and {format_bytes(COMMUNICATION_BYTES)} for NCCL, an assumption."
        ),
    )


def _traffic_table(best: Planned, planning: Planning) -> answer.Table:
    question, layout = planning.plan.question, best.layout
    rows: list[tuple[answer.Cell, ...]] = []
    sizes = bytes_of(question.workload, layout.sharding)
    for transfer in transfers_of(question.model, layout, question.workload.seq_len, sizes):
        rounds = 1 if transfer.when == "step" else layout.micro_batches
        times, group = rounds * transfer.times, transfer.group
        rows.append(
            (
                f"{transfer.dimension}: {transfer.what}, {transfer.when}",
                transfer.kind,
                f"{group.ranks} by {group.stride}",
                transfer.message_bytes,
                times,
                rounds * transfer.link_bytes,
                times * transfer_s(planning.machine.network, transfer),
                "as far as it goes" if transfer.overlaps else "no",
            )
        )
    return answer.table_of(
        "what", "collective", ("ranks", answer.TEXT), ("message", "B"), ("times a step", ","), ("bytes on a link", "B"),
        ("seconds", "s"), "hidden", title="What a rank sends in a step",
        rows=rows,
        notes=answer.as_lines("Bytes by the formulas of nccl-tests; seconds by latency and bandwidth, hidden or not."),
    )  # fmt: skip


def _scaling_table(planning: Planning) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    alone_s = _first_s(planning.scaled)
    for one in planning.scaled:
        if one.best is None:
            rows.append((one.ranks, None, None, None, None, f"none: {one.why_not}"))
            continue
        step, layout = one.best.time.step_s, one.best.layout
        rows.append(
            (
                one.ranks,
                step,
                _mfu(one.best, planning, one.ranks),
                alone_s / step / one.ranks,
                one.best.time.bound,
                f"{layout.name}, {layout.micro_batches} x {layout.micro_batch}",
            )
        )
    mixed = planning.plan.best[0].layout.checkpointing not in planning.plan.question.tried
    alike = ", with any checkpointing," if mixed else " and checkpointing"
    return answer.table_of(
        ("ranks", ","), ("step", "s"), ("MFU", "%"), ("efficiency", "%"), "bound by", "best layout",
        title="Strong scaling: the same batch on more ranks", rows=rows,
        tones={i: "strong" for i, one in enumerate(planning.scaled) if one.ranks == planning.plan.question.ranks},
        notes=answer.as_lines(
            f"Of the kind of sharding{alike} that is best above; efficiency against the first row that has a step."
        ),
    )  # fmt: skip


def _first_s(scaled: Sequence[Scaled]) -> float:
    """Seconds of all ranks together in the step of the first number of ranks that has one."""
    return next((one.best.time.step_s * one.ranks for one in scaled if one.best), 0.0)


def _simulation_table(planning: Planning) -> answer.Table:
    formula_s = planning.plan.best[0].time.step_s
    rows: list[tuple[answer.Cell, ...]] = [("by formula", formula_s, 0.0, None)]
    for name, played in (
        ("played, ranks alike", planning.even),
        (f"played, ranks differ by {planning.spread:.1%}", planning.uneven),
    ):
        if played is not None:
            rows.append((name, played.step_s, played.step_s / formula_s - 1, played.idle_share))
    replicas = f"; {planning.uneven.replicas} data-parallel replicas were played." if planning.uneven else "."
    return answer.table_of(
        "step",
        ("seconds", "s"),
        ("over the formula", "+%"),
        ("ranks wait", "%"),
        title="The step played through",
        rows=rows,
        notes=answer.as_lines(
            "Each rank's speed is drawn once from a normal distribution of that standard deviation, with a fixed seed"
            + replicas
        ),
    )


_COLOURS = {
    "products and attention": ("matrix products", "attention", "run again"),
    "elementwise and launches": ("elementwise", "launches"),
    "tensor parallel": ("tensor parallel",),
    "context and expert parallel": ("context parallel", "expert parallel"),
    "pipeline": ("pipeline sends", "pipeline bubble"),
    "data parallel": ("data parallel", "slower beside collectives", "copies for collectives"),
    "optimizer": ("optimizer",),
}
"""Parts that share a colour in the plot: it can tell eight apart."""


def _panels(planning: Planning) -> Iterable[answer.Panel]:
    best = planning.plan.best
    if not best:
        return
    yield answer.Panel(
        x_title="",
        y_title="seconds",
        kind="stack",
        points=tuple(
            answer.Point(line=name, name=one.layout.name, y=seconds)
            for one in best
            for name, parts in _COLOURS.items()
            if (seconds := sum(one.time.parts[part] for part in parts))
        ),
        frame=answer.Frame(heading="What a step is made of, by layout", line_title="part"),
    )
    curve = [(float(one.ranks), one.best.time.step_s) for one in planning.scaled if one.best is not None]
    if len(curve) > 1:
        alone_s = _first_s(planning.scaled)
        yield answer.Panel(
            x_title="ranks",
            y_title="seconds a step",
            x_log=True,
            y_log=True,
            points=(
                *(answer.Point(line="ideal", x=ranks, y=alone_s / ranks) for ranks, _ in curve),
                *(answer.Point(line="planned", x=ranks, y=step_s) for ranks, step_s in curve),
            ),
            frame=answer.Frame(heading="Strong scaling", line_title="step"),
        )
    played = planning.uneven or planning.even
    if played is not None and played.slices:
        yield answer.Panel(
            x_title="ms",
            y_title="",
            points=(),
            kind="timeline",
            slices=played.slices,
            frame=answer.Frame(
                heading="The best step, played through",
                note="timeline: one data-parallel replica, as simulated",
                x_ends=(0.0, max(one.end for one in played.slices)),
            ),
        )


_NEARLY_FULL = 0.85
"""The share of the memory above which a step may wait for its allocator: 8 billion parameters on two H200 did at 95 %,
and did not at 75 % (docs/planning.md); between these nothing was measured."""


def _findings(planning: Planning) -> Iterable[answer.Finding]:
    plan = planning.plan
    if not plan.best:
        yield answer.warning("nothing-fits", "No layout fits.", {"layouts": plan.layouts, "ranks": plan.question.ranks})
        return
    best = plan.best[0]
    communication = sum(seconds for part, seconds in best.time.parts.items() if "parallel" in part or "sends" in part)
    share = communication / best.time.step_s
    if plan.question.ranks > 1:
        yield answer.note(
            "exposed-communication",
            f"Communication that nothing hides takes {format_share(share)} of the best step.",
            {"seconds": communication, "share": share},
        )
    budget = planning.machine.budget.usable_bytes
    last, offloaded = selective_of(best.layout.checkpointing), offload_of(best.layout.checkpointing)
    if (last or offloaded) and best.peak_bytes > _NEARLY_FULL * budget:
        other = "selective-K of fewer" if last else "offload-K of more"
        yield answer.note(
            "nearly-full",
            f"The best layout fills {format_share(best.peak_bytes / budget)} of a rank's memory. PyTorch's cache holds "
            "more than a peak, and where it has to give memory back within a step the GPU waits, which no plan counts: "
            f"measure it beside --checkpointing {other} blocks.",
            {"peak_bytes": best.peak_bytes, "usable_bytes": budget},
        )
    bubble = best.time.parts["pipeline bubble"] / best.time.step_s
    if bubble > 0.1:
        yield answer.note(
            "pipeline-bubble",
            f"Ranks of the best layout idle {format_share(bubble)} of the step in the pipeline's bubble.",
            {"share": bubble},
            "more micro-batches (a larger batch), or more chunks a rank",
        )


# One feed-forward layer in closed form, beside what a plan counts of it.


_ONE_AXIS = ("6 B D F / N", "12 B D F / N")
_FORMS: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "DP": (
        (_ONE_AXIS[0], "0", "any number"),
        (_ONE_AXIS[1], "6 e D F (N - 1) / (N W)", "1 + 2 B W / (e C)"),
    ),
    "FSDP": (
        (_ONE_AXIS[0], "3 e D F (N - 1) / (N W)", "1 + 2 B W / (e C)"),
        (_ONE_AXIS[1], "6 e D F (N - 1) / (N W)", "1 + 2 B W / (e C)"),
    ),
    "TP": (
        (_ONE_AXIS[0], "2 e B D (N - 1) / (N W)", "1 + 3 F W / (e C)"),
        (_ONE_AXIS[1], "2 e B D (N - 1) / (N W)", "1 + 6 F W / (e C)"),
    ),
    "FSDP with TP": (
        (_ONE_AXIS[0], "max(3 e D F (n - 1), 2 e B D (t - 1)) / (N W)", "(1 + 2 B W / (e C)) (1 + 3 F W / (e C))"),
        (_ONE_AXIS[1], "max(6 e D F (n - 1), 2 e B D (t - 1)) / (N W)", "(1 + 2 B W / (e C)) (1 + 6 F W / (e C))"),
    ),
}
"""By layout, in forward and backward: FLOPs of a GPU, seconds that it sends, and the GPUs until it is bound by that.
`SharedLayer.passes` computes them."""


def answer_closed_forms(question: Question, spec: DeviceSpec, flops_per_s: float, network: Network) -> answer.Answer:
    """What computing and sending one feed-forward layer of the model takes by DP, FSDP, TP and both, in closed form.

    flops_per_s: what matrix products reach on a GPU.
    """
    workload, config, ranks = question.workload, question.workload.model, question.ranks
    fit = network.fit_for("all-reduce", ranks)
    rate = bus_bytes_per_s(network, Group(ranks, 1))
    if fit is not None and fit.bytes_per_s:
        rate = bus_bandwidth("all-reduce", 1, fit.ranks, 1 / fit.bytes_per_s)
    size = bytes_of(workload, "zero3").compute
    layer = SharedLayer(
        d_model=config.d_model, d_ff=config.d_ff, tokens=workload.tokens, element_bytes=size, flops_per_s=flops_per_s,
        bytes_per_s=rate,
    )  # fmt: skip
    both = {one: layer.passes(ranks, one)[-2] for one in divisors(ranks)}
    tensor = int(question.fixed.get("tensor", min(both, key=lambda t: max(both[t].data_bytes, both[t].tensor_bytes))))
    passes = layer.passes(ranks, tensor)
    rows: list[tuple[answer.Cell, ...]] = []
    for one in passes:
        computes, sends = one.flops / flops_per_s, max(one.data_bytes, one.tensor_bytes) / rate
        sent, planned_bytes = one.data_bytes + one.tensor_bytes, _bytes_by_plan(question, one.layout, one.when, tensor)
        most, in_turn = (None if bound == float("inf") else bound for bound in (one.most, one.most_in_turn))
        rows.append(
            (
                one.layout, one.when, one.flops, computes, sent, sends,
                "communication" if sends > computes else "computing", most,
                in_turn if one.layout == "FSDP with TP" else None, planned_bytes,
            )
        )  # fmt: skip
    message = 3 * config.d_model * config.d_ff * size
    best_s, naive_s = ring_all_reduces_s(message, ranks, rate)
    whose = f"what was measured ({network.source})" if fit is not None and fit.bytes_per_s else network.name
    return answer.Answer(
        study="plan",
        question=f"When does communication bound a feed-forward layer of {config.name}, by layout?",
        lead=(
            answer.Line(f"One feed-forward layer of {config.name} on {ranks:,} x {spec.name}, by formula", "strong"),
            answer.Line(
                f"D = {config.d_model:,}, F = {config.d_ff:,}, B = {workload.tokens:,} tokens, e = {size} bytes "
                f"({workload.dtype}), N = {ranks:,}; FSDP with TP: n = {ranks // tensor:,}, t = {tensor:,}"
            ),
            answer.Line(
                f"C = {format_rate(flops_per_s, 'FLOP/s')}, what products are taken to reach (--efficiency); W = "
                f"{format_rate(rate, 'B/s')} out of a GPU, of {whose} (--network)"
            ),
        ),
        tables=(
            answer.table_of(
                "layout", "pass", ("FLOPs of a GPU", "FLOP"), ("computing", "s"), ("sent", "B"), ("sending", "s"),
                "bound by", ("GPUs until bound", ",.1f"), ("sent in turn", ",.1f"), ("sent by plan", "B"),
                title="Computing and sending, with the numbers put in", rows=rows,
                notes=answer.as_lines(
                    "Bound by communication: sending takes longer than computing beside it. GPUs until bound: with "
                    "this B and F; of FSDP with TP at the best n and t, both kinds sent at once, or in turn.",
                    f"Sent by plan: what `stepscope plan` counts of this layer in {workload.dtype}. It reduces "
                    "gradients in the dtype of parameters, and has TP's all-reduces in two halves.",
                ),
            ),
            answer.table_of(
                "layout", "pass", ("FLOPs of a GPU", answer.TEXT), ("seconds of sending", answer.TEXT),
                ("GPUs until bound", answer.TEXT), title="The formulas",
                rows=[
                    (name, when, *forms)
                    for name, both_passes in _FORMS.items()
                    for when, forms in zip(("forward", "backward"), both_passes, strict=True)
                ],
                notes=answer.as_lines(
                    "Sent in turn, with a = 2 B W / (e C) and b = 3 F W / (e C), in backward 6 F W / (e C): "
                    "(a + b + a b)^2 / (4 a b) GPUs.",
                ),
            ),
            answer.table_of(
                "ring", ("formula", answer.TEXT), ("seconds", "s"), title=f"All-reduce of {format_bytes(message)}, the "
                "layer's gradients",
                rows=[
                    ("reduce-scatter, then all-gather", "2 (N - 1) / N S / W", best_s),
                    ("whole messages passed on", "(N - 1) S / W", naive_s),
                ],
                notes=answer.as_lines(f"The second sends N / 2 = {ranks / 2:g} times as much."),
            ),
        ),
        asides=("On paper: nothing was run. Latency and what collectives take from computing are not in these forms.",),
    )  # fmt: skip


def _bytes_by_plan(question: Question, name: str, when: str, tensor: int) -> float | None:
    """The bytes that a plan's rank sends of one feed-forward layer; None where ranks cannot share the batch evenly."""
    data, ranks = {"TP": 1, "FSDP with TP": question.ranks // tensor}.get(name, question.ranks), question.ranks
    workload, sharding = question.workload, "ddp" if name in ("DP", "TP") else "zero3"
    if workload.batch_size % data:
        return None
    size, shard = workload.batch_size // data, data if sharding == "zero3" else 1
    layout = Layout(data=data, tensor=ranks // data, sharding=sharding, shard=shard, micro_batch=size)
    return layer_bytes(workload.model, layout, workload.seq_len, bytes_of(workload, sharding), when == "forward")


# Plans beside what others published, and beside stored runs: the difference, whatever it is.


# What others published of training over many GPUs: the layout, and the figures that a plan is set beside.


_H100 = DATASHEET["NVIDIA H100 80GB HBM3"]
_H100_96 = msgspec.structs.replace(
    _H100,
    name="H100 96GB HBM2e, 500 W",
    memory_bytes=stated_bytes("96G"),
    peak_bytes_per_s=2.4e12,
    source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
)
_HERD = "Grattafiori et al. 2024, table 4"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a publication, and what is known of how it came about."""

    source: str
    model: str
    layout: Layout
    seq_len: int
    batch_size: int
    spec: DeviceSpec
    compile: str = "default"
    mfu: float | None = None
    """Share of the device's peak, as published."""
    tokens_per_s: float | None = None
    """Tokens a second of each GPU, as published."""
    peak_gib: float | None = None
    unknown: str = ""
    """What the source does not say, and what stands for it here."""


def _herd(ranks: int, context: int, data: int, batch_of_data: int, mfu: float) -> tuple[Published, ...]:
    """Once for each number of chunks that 126 blocks and 16 ranks allow."""
    length = 131_072 if context > 1 else 8_192
    return tuple(
        Published(
            source=_HERD, model="llama3-405B", seq_len=length, batch_size=batch_of_data * data, spec=_H100, mfu=mfu,
            layout=Layout(
                tensor=8, context=context, pipeline=16, data=data, sharding="zero1-master", shard=data * context,
                chunks=chunks, micro_batch=1, micro_batches=batch_of_data,
            ),
            unknown=f"{ranks:,} GPUs; how many chunks a rank has",
        )
        for chunks in (1, 2, 4, 8)
    )  # fmt: skip


def _titan(data: int, compiled: str, tokens_per_s: float, peak_gib: float) -> Published:
    return Published(
        source=_TITAN, model="llama3-8B", seq_len=8_192, batch_size=2 * data, spec=_H100_96, compile=compiled,
        layout=Layout(data=data, shard=data, sharding="zero3", micro_batch=2, checkpointing="selective"),
        tokens_per_s=tokens_per_s, peak_gib=peak_gib,
        unknown="rates under a limit of 500 W; what its allocator reserved beyond the peak, which is in its figures; "
        "its selective checkpointing runs every second product again",
    )  # fmt: skip


PUBLISHED = (
    *_herd(8_192, 1, 64, 32, 0.43),
    *_herd(16_384, 1, 128, 16, 0.41),
    *_herd(16_384, 16, 8, 16, 0.38),
    _titan(8, "eager", 5_762, 82.4),
    _titan(8, "default", 6_667, 77.0),
    _titan(128, "eager", 5_605, 67.0),
    _titan(128, "default", 6_514, 62.0),
)


NetworkOf = Callable[[DeviceSpec], Network]
"""The network that joins devices of a kind."""


def answer_verification(runs: Sequence[Run], network_of: NetworkOf = network_for) -> answer.Answer:
    """The Answer to how far plans are off. network_of: the network that joined the devices of the runs."""
    measured = [row for run in runs if (row := _measured_row(run, network_of)) is not None]
    unknown = dict.fromkeys((one.source, one.unknown.rpartition("GPUs; ")[2]) for one in PUBLISHED)
    public = answer.table_of(
        ("published", answer.PROSE), ("measured", "text"), ("planned", "text"), ("difference", "+%"),
        ("peak, GiB", ".1f"), ("planned, GiB", ".1f"), ("of peak", "+%"),
        title="Published figures", rows=map(_published_row, PUBLISHED),
        notes=answer.as_lines(*(f"{source}. What a plan of it does not know: {what}." for source, what in unknown)),
    )  # fmt: skip
    stored = answer.table_of(
        "run", ("step", "s"), ("planned", "s"), ("difference", "+%"), ("peak", "B"), ("planned peak", "B"),
        ("of peak", "{:+.3f} %"), ("computing", "%"),
        title="Stored runs", rows=sorted(measured, key=lambda row: str(row[0])),
        notes=answer.as_lines(
            "The peak of one GPU is the one that `stepscope fit` predicts, where it does. Computing: the part of the "
            "step in which the device (of ranks, the first one's) computes, by the profiled step."
        ),
    )  # fmt: skip
    return answer.Answer(
        study="plan",
        question="How far are plans from what was measured?",
        lead=(
            answer.Line("Plans beside published figures, and beside stored runs", "strong"),
            answer.Line(
                "Every plan assumes the same shares of the datasheet's rates, measured on an H200 (`stepscope plan` "
                "names them)."
            ),
        ),
        tables=(public, stored) if measured else (public,),
        findings=tuple(_findings_of_verification(measured)),
    )


def _published_row(one: Published) -> tuple[answer.Cell, ...]:
    config = configure(one.model)
    workload = TextbookWorkload(
        model=config, batch_size=one.batch_size, seq_len=one.seq_len, dtype="bf16", attention="flash",
        compile="eager" if one.compile == "eager" else "default", optimizer="adamw-fused",
    )  # fmt: skip
    model, rates = PlannedModel(config=config), rates_of(one.spec, workload)
    memory = RankMemory(workload, model)
    prediction = planned(one.layout, memory, Clock(workload, memory, rates, network_for(one.spec)))
    step, ranks = prediction.time.step_s, one.layout.ranks
    if one.mfu is not None:
        published, form = one.mfu, "{:.1%} MFU"
        plan = model.step_flops(workload.tokens, workload.seq_len) / step / ranks / rates.peak_flops_per_s
    else:
        published, form, plan = one.tokens_per_s, "{:,.0f} tokens/s", workload.tokens / step / ranks
    assert published is not None
    peak = prediction.peak_bytes / GIB
    return (
        f"{one.model}, {ranks:,} GPUs, sequence {one.seq_len:,}, {one.layout.name}, {one.compile}",
        form.format(published),
        form.format(plan),
        plan / published - 1,
        one.peak_gib,
        peak,
        peak / one.peak_gib - 1 if one.peak_gib else None,
    )


def _measured_row(run: Run, network_of: NetworkOf) -> tuple[answer.Cell, ...] | None:
    """A run beside its plan; None for what no plan is of."""
    workload = run.workload
    environment, step = run.environment, run.samples.get("step")
    spec = find_device_spec(environment.device_name) if environment else None
    if spec is None or step is None or run.status != "done" or workload.phase != "train":
        return None
    # The peak of the rank that needed most, or of the only one.
    of_ranks = [one.memory for one in run.shared.ranks] if run.shared is not None else []
    peaks = [memory.allocated_peak for memory in (run.evidence.memory, *of_ranks) if memory is not None]
    measured_s, measured = step.median_s, max((peak for peak in peaks if peak is not None), default=None)
    try:
        prediction = by_sizes(workload, lambda sized: planned_step(sized, spec, network_of(spec)))
        if measured_s is None or prediction is None:
            return None
        alone = workload.parallel == NOT_PARALLEL
        peak = estimate(workload).peak_bytes if alone and is_predicted(workload) else prediction.peak_bytes
    except InputError:  # no plan is of such a step
        return None
    # The device computes for so much of a step, communication left out; None where no step was profiled.
    profile, computing_s = run.evidence.profile, None
    if profile is not None:
        computing_s = profile.busy_s if run.shared is None else profile.computation_s
    plan = prediction.time.step_s
    return (
        cell_name(workload), measured_s, plan, plan / measured_s - 1, measured, peak if measured else None,
        100 * (peak / measured - 1) if measured else None,
        None if computing_s is None else min(1.0, computing_s / measured_s),
    )  # fmt: skip


_BUSY = 0.8
"""The least part of a step in which a device computes that does not wait for its host: `launch-bound` has the same."""


def _findings_of_verification(rows: list[tuple[answer.Cell, ...]]) -> Iterable[answer.Finding]:
    """How far plans are off; of steps whose devices wait apart: what a host needs, no plan knows."""
    if not rows:
        return
    steps = [abs(float(row[3])) for row in rows if isinstance(row[3], float)]
    peaks = [abs(float(row[6])) / 100 for row in rows if isinstance(row[6], float)]
    known = [(abs(float(row[3])), row[7]) for row in rows if isinstance(row[3], float) and isinstance(row[7], float)]
    waiting = [off for off, share in known if share < _BUSY]
    busy = [off for off, share in known if share >= _BUSY]
    yield answer.note(
        "steps-off",
        f"Of {len(steps)} steps, plans are off by {statistics.median(steps):.1%} in the median, and by "
        f"{max(steps):.1%} at most.",
        {"median": statistics.median(steps), "worst": max(steps)},
    )
    if waiting and busy:
        yield answer.note(
            "steps-busy",
            f"In {len(busy)} of them the device computes for at least {_BUSY:.0%} of the step: plans of these are off "
            f"by {statistics.median(busy):.1%} in the median, and by {max(busy):.1%} at most.",
            {"median": statistics.median(busy), "worst": max(busy)},
        )
    if waiting:
        yield answer.note(
            "steps-waiting",
            f"In {len(waiting)} the device waits for longer, for its host or for other ranks. A plan counts "
            f"{LAUNCH_S * 1e6:.0f} us for each launch of a step op by op, and some ms for the hooks of sharded "
            "blocks: what a slower host, other hooks and compiled blocks take beyond that is not planned.",
            {"steps": len(waiting), "worst": max(waiting)},
        )
    if peaks:
        yield answer.note(
            "peaks-off",
            f"Of {len(peaks)} peaks of memory, by {statistics.median(peaks):.3%} in the median, and by "
            f"{max(peaks):.2%} at most.",
            {"median": statistics.median(peaks), "worst": max(peaks)},
        )
