"""`stepscope plan`: a step over many GPUs on paper. Nothing is run."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from stepscope.app.cli.options import device_names
from stepscope.app.cli.output import Presentation, told_where_long
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.float_formats import BLOCK_FORMATS, MULTIPLIED_BLOCKS
from stepscope.core.networks import NETWORKS
from stepscope.core.options import BUDGET, MODEL, PARALLEL, WORKLOAD, Option, Rule, completed, verb
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.workload_options import OneWorkload

if TYPE_CHECKING:
    from stepscope.allocations.planning.answer import Planning
    from stepscope.allocations.planning.search import Plan, Question
    from stepscope.core.answer import Answer
    from stepscope.core.networks import Network

Device = Annotated[
    str,
    Option("The device of each rank by its name, as in H100, A100 or B200.", BUDGET, complete=device_names),
]
BatchTokens = Annotated[int | None, Option("Tokens in a step, in place of --batch-size.", WORKLOAD, metavar="N")]
Experts = Annotated[int, Option("Feed-forward networks in each block.", MODEL, least=1)]
ActiveExperts = Annotated[int, Option("Experts that each token goes through.", MODEL, least=1)]
Ranks = Annotated[int, Option("GPUs, one rank each.", PARALLEL)]
JoinedBy = Annotated[
    str | None,
    Option(
        "What joins GPUs and nodes: a name, figures, or both, as in nvlink4-ib400,"
        "between=100GB; or what `study collectives --json` wrote (default: as the device is usually sold).",
        PARALLEL,
        metavar="NAME|FILE|FIGURES",
        complete=completed(*NETWORKS),
    ),
]
Layout = Annotated[
    str | None,
    Option(
        "Dimensions that are settled, as in tensor=8,pipeline=4,sharding=zero3.", PARALLEL, metavar="DIMENSION=N,..."
    ),
]
Efficiency = Annotated[
    float | None,
    Option(
        "Share of the peak that matrix products reach (default: as measured on an H200).", PARALLEL, metavar="SHARE"
    ),
]
Spread = Annotated[
    float | None,
    Option(
        "Relative standard deviation of ranks' speeds in the simulation (default: as measured on an H200).",
        PARALLEL,
        metavar="SHARE",
    ),
]
Recipe = Annotated[
    str | None,
    Option(
        "The format of blocks that operands of the blocks' linear layers are in.", WORKLOAD, choices=MULTIPLIED_BLOCKS
    ),
]
Explain = Annotated[bool, Option("Closed forms of one feed-forward layer by DP, FSDP and TP, in place of a search.")]
Verify = Annotated[bool, Option("Set plans beside what others published, and beside runs (--against).")]
Against = Annotated[tuple[Path, ...], Option("With --verify: stored runs.", metavar="DIR")]


@verb(
    "plan",
    "stepscope plan --model llama3-70B --ranks 64 --device H100 --seq-len 8192 --batch-size 512",
    "stepscope plan --explain --model cs336-2026-xl --ranks 8 --device B200 --batch-tokens 65536",
    conflicts=(
        Rule("alone", ("--verify", "--against", "--network")),
        Rule("alone", ("--against", "--verify", "--network"), "{} says nothing with --verify: leave it out"),
        Rule("conflict", ("--explain", "--recipe"), "{} say nothing together: closed forms are of 16 bits"),
        Rule("conflict", ("--explain", "--spread"), "{} say nothing together: closed forms have no simulation"),
        Rule("unread", ("--phase",), "--phase says nothing with plan: a plan is of a training step"),
        Rule(
            "unread", ("--accumulation",),
            "--accumulation says nothing with plan: a plan chooses micro-batches: say --layout micro-batch=1",
        ),
        Rule("unread", ("--clip",), "--clip says nothing with plan: a plan has no time of clipping"),
        Rule("conflict", ("--batch-size", "--batch-tokens"), "{} both say how much a step takes: give one of them"),
    ),
    model="small", seq_len="512", dtype="bf16", attention="flash", compile="default", optimizer="adamw-fused",
    checkpointing="the best of none, selective, selective-K, offload-K (eager, no graph), attention and every-1",
    phase="train",
)  # fmt: skip
def command(
    *,
    workload: OneWorkload,
    ranks: Ranks = 1,
    device: Device = "H100",
    network: JoinedBy,
    layout: Layout,
    batch_tokens: BatchTokens,
    experts: Experts = 1,
    active_experts: ActiveExperts = 1,
    recipe: Recipe = None,
    efficiency: Efficiency,
    spread: Spread,
    explain: Explain = False,
    verify: Verify = False,
    against: Against = (),
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Plan a step on paper, over one GPU to 100,000: every layout, which fit, which is fastest, and what bounds it."""
    if verify or against:
        _verify(against, network, save, shown)
        return
    form = None if recipe is None else BLOCK_FORMATS[choose(recipe, MULTIPLIED_BLOCKS, "recipe")]
    step, checkpointings = _step(workload, batch_tokens, in_blocks=recipe is not None)
    from stepscope.allocations.planning.search import Question
    from stepscope.core.formulas.planned_model import PlannedModel
    from stepscope.core.layout import parse_layout
    from stepscope.core.model_config import whole_number
    from stepscope.core.networks import MOST_RANKS

    whole_number(ranks, "--ranks", 1, MOST_RANKS)
    question = Question(
        workload=step,
        model=PlannedModel(config=step.model, experts=experts, active=active_experts, form=form),
        ranks=ranks,
        node=1,
        fixed=parse_layout(layout) if layout else {},
        checkpointings=checkpointings,
    )
    if explain:
        shown.show(_explained(question, device, network, efficiency), save=save)
        return
    gc.disable()  # a symbolic step makes a million objects, none of them in a cycle
    with told_where_long("looking through layouts"):
        planning = _planned(question, device, network, {"efficiency": efficiency, "spread": spread})
    gc.enable()
    from stepscope.allocations.planning.answer import answer_plan

    answer = answer_plan(planning)
    _keep(planning, runs)
    shown.show(answer, save=save)


def _step(
    workload: OneWorkload, batch_tokens: int | None, *, in_blocks: bool
) -> tuple[TextbookWorkload, tuple[str, ...]]:
    """The step, and the checkpointing to try where one is given. in_blocks: whether its operands are. Raises InputError
    for a step of which no plan is."""
    if workload.user_workload is not None:
        raise InputError("a plan is of the textbook's model: give --model a preset, and no --module or config.json")
    options = dict(workload.options)
    if batch_tokens is not None:
        length = int(options.get("seq_len", 512))
        if batch_tokens < 1 or batch_tokens % length:
            raise InputError(f"--batch-tokens {batch_tokens} are not sequences of {length}: give a multiple of it")
        options["batch_size"] = batch_tokens // length
    usual = {"dtype": "bf16-master", "compile": "blocks"} if in_blocks else {"dtype": "bf16", "compile": "default"}
    step = OneWorkload(options).workload(
        model="small", seq_len=512, attention="flash", optimizer="adamw-fused", **usual
    )
    if in_blocks:
        from stepscope.allocations.prediction.estimate import check_operands

        check_operands(step)
    checkpointings = (options["checkpointing"],) if "checkpointing" in options else ()
    return msgspec.structs.replace(step, checkpointing="none"), checkpointings


def _planned(question: "Question", device: str, network: str | None, shares: Mapping[str, float | None]) -> "Planning":
    from stepscope.allocations.planning.answer import Planning, scaling, sensitivity
    from stepscope.allocations.planning.search import Machine, search
    from stepscope.allocations.planning.times import STEP_SPREAD, rates_of, simulate
    from stepscope.allocations.prediction.fit import budget_of_spec
    from stepscope.core.device_spec import device_named
    from stepscope.core.networks import network_for

    spread = STEP_SPREAD if shares["spread"] is None else shares["spread"]
    if not 0 <= spread < 0.5:
        raise InputError(f"--spread is {spread:g}: write a share from 0 to 0.5, as in 0.01 for 1 %")
    spec = device_named(device)
    joined = _network(network, network_for(spec)) if network else network_for(spec)
    machine = Machine(
        budget=budget_of_spec(spec),
        rates=rates_of(spec, question.workload, shares["efficiency"], question.model.form),
        network=joined,
    )
    plan = search(msgspec.structs.replace(question, node=joined.node), machine)
    if not plan.layouts:
        raise InputError(_no_layout(plan))
    even = uneven = None
    if plan.best:
        best = plan.best[0]
        even = simulate(best.layout, best.time)
        uneven = simulate(best.layout, best.time, spread) if spread and question.ranks > 1 else None
    return Planning(
        plan=plan, machine=machine, spec=spec, scaled=scaling(plan, machine),
        sensitive=sensitivity(plan, machine), even=even, uneven=uneven, spread=spread,
    )  # fmt: skip


def _explained(question: "Question", device: str, network: str | None, efficiency: float | None) -> "Answer":
    """Closed forms of a feed-forward layer of the model. Raises InputError for layouts that these are not of."""
    from stepscope.allocations.planning.answer import answer_closed_forms
    from stepscope.allocations.planning.times import rates_of
    from stepscope.core.device_spec import device_named
    from stepscope.core.networks import network_for

    if question.model.experts > 1 or set(question.fixed) - {"tensor"}:
        raise InputError("--explain is of one feed-forward layer, and of --layout it reads tensor=N: leave others out")
    if question.ranks % int(question.fixed.get("tensor", 1)):
        raise InputError(f"tensor={question.fixed['tensor']} does not divide --ranks {question.ranks}")
    spec = device_named(device)
    joined = _network(network, network_for(spec)) if network else network_for(spec)
    rates = rates_of(spec, question.workload, efficiency)
    return answer_closed_forms(question, spec, rates.matmul_flops_per_s, joined)


def _network(text: str, usual: "Network") -> "Network":
    """The network that --network says: by name or figures, or as a file of `study collectives` has measured it."""
    from stepscope.core.networks import measured_network, parse_network

    file, _, figures = text.partition(",")
    if not file.endswith(".json"):
        return parse_network(text, usual)
    from stepscope.core.answer import decode_answer
    from stepscope.core.files import read_named
    from stepscope.questions.collectives import fits_in

    answer = decode_answer(read_named(Path(file)), file)
    joined = parse_network(figures, usual) if figures else usual
    return measured_network(joined, fits_in(answer, file), f"{file}, {answer.device}, {answer.date}")


def _no_layout(plan: "Plan") -> str:
    """Why a question has no layout, whatever would fit."""
    question = plan.question
    settled = ",".join(f"{name}={value}" for name, value in question.fixed.items())
    fault = f"{question.ranks} ranks{f' with --layout {settled}' if settled else ''} have no layout"
    if not plan.grids:
        return f"{fault}: these dimensions do not divide the ranks; choose divisors, or leave some out"
    reasons = sorted(plan.refused, key=lambda reason: -plan.refused[reason])
    sizes = question.model.config
    figures = (
        f"heads {sizes.heads}, of keys {sizes.key_heads}, d_ff {sizes.d_ff}, {sizes.layers} blocks, sequences "
        f"{question.workload.batch_size} of {question.workload.seq_len}"
    )
    why = "; ".join(reasons) or "chunks of a pipeline need micro-batches in multiples of its ranks"
    others = ", --checkpointing" if question.checkpointings else ""
    return f"{fault}: {why} ({figures}); choose other ranks, another --layout{others} or --batch-size"


def _keep(planning: "Planning", runs: Path) -> None:
    """Keep the forecast of one GPU's peak beside the runs that will show whether it came true."""
    question = planning.plan.question
    if question.ranks > 1 or not planning.plan.best or question.model.form is not None:
        return
    from stepscope.core.run_directory import forecast_of_peak, keep_forecasts

    best = planning.plan.best[0]
    workload = msgspec.structs.replace(
        question.workload, accumulation=best.layout.micro_batches, checkpointing=best.layout.checkpointing
    )
    budget = planning.machine.budget.usable_bytes
    forecast = forecast_of_peak("plan", workload.key, best.peak_bytes, budget_bytes=budget, fits=True)
    if fault := keep_forecasts(runs, [forecast]):
        warn(fault)


def _verify(against: tuple[Path, ...], network: str | None, save: Path | None, shown: Presentation) -> None:
    from stepscope.allocations.planning.answer import answer_verification
    from stepscope.core.networks import network_for
    from stepscope.core.run_directory import load_runs

    runs, faults = load_runs(list(against)) if against else ([], [])
    for fault in faults:
        warn(f"left out: {fault}")
    answer = answer_verification(
        runs, lambda spec: _network(network, network_for(spec)) if network else network_for(spec)
    )
    shown.show(answer, save=save)
