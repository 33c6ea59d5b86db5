"""`stepscope study compile`: the whole model, eager against compiled, measured and captured here, or before."""

from stepscope.app.cli.studies.answering import Answering, AskedStepsOfAny
from stepscope.app.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.engine.request import TraceRequest


@verb(
    "study compile",
    "stepscope study compile --model small --compile default,max-autotune",
    "stepscope study compile --module train.py:make --prices",
    model="small,large,2.7B; tiny on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    phase="forward,train",
    attention="reference",
    compile="default",
)
def compiled(
    *,
    asked: AskedStepsOfAny,
    phase: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    compile: tuple[str, ...] | None,
    warmup: int | None,
    prices: bool,
) -> None:
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    from stepscope.questions.compile.answer import answer_compile
    from stepscope.questions.compile.cells import CompileCell, pair_up
    from stepscope.questions.compile.study import BASELINE, ON_CPU, ON_GPU, check_modes, cold_caches, compile_cells

    if prices:
        _prices(asked, warmup, phase, attention, compile)
        return

    def answer(cells: list[CompileCell], unread: int) -> Answer:
        return answer_compile(pair_up(cells), unread=unread)

    comparing = asked.comparing("compile", CompileCell, answer)
    if asked.from_:
        modes = None if compile is None else (BASELINE, *check_modes(compile))
        comparing.from_stored(asked.from_, {**asked.given, "phase": phase, "attention": attention, "compile": modes})
        return
    phases, modes = phase or ("forward", "train"), check_modes(compile or ("default",))
    if asked.is_own:
        compared = {"phase": phases, "compile": (BASELINE, *modes), "attention": attention}
        cells = asked.own_cells(ON_CPU, ON_GPU, warmup, **compared)
    else:
        cells = compile_cells(
            phases=phases, modes=modes, attentions=attention or ("reference",), **asked.sizes(ON_CPU, ON_GPU, warmup)
        )
    trace = TraceRequest(tools=() if asked.device_type == "cpu" else ("kineto",), steps=1)
    with cold_caches():
        comparing.measured(asked.plan(cells, trace))


def _prices(asked: AskedStepsOfAny, warmup: int | None, *others: tuple[str, ...] | None) -> None:
    """The price of each graph break and recompilation of the user's own module."""
    from stepscope.core.own_workload import OwnWorkload
    from stepscope.questions.compile.price_study import compile_prices
    from stepscope.questions.compile.prices import answer_prices
    from stepscope.questions.compile.study import ON_CPU, ON_GPU

    if not asked.is_own:
        raise InputError("--prices is for a module of your own: add --module FILE:FACTORY")
    if asked.from_ or any(others):
        raise InputError(
            "--prices compiles the whole step in the default mode: leave out --from, --phase and --compile"
        )
    cells = asked.own_cells(ON_CPU, ON_GPU, warmup)
    cell = next(iter(cells))
    if len(cells) > 1:
        raise InputError("--prices takes one workload: give one value for each option")
    workload = cell.workload
    assert isinstance(workload, OwnWorkload)
    answering = Answering(study="compile", shown=asked.shown, save=None)
    answering.run(lambda tell: answer_prices(compile_prices(workload, asked.device, cell.settings)))
