"""`stepscope study compile`: the whole model, eager against compiled, measured and captured here, or before."""

from pathlib import Path

from stepscope.cli.captured_runs import type_of_device
from stepscope.cli.options import settings_from
from stepscope.cli.presentation import Presentation
from stepscope.cli.studies.answering import Answering, Comparing
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.engine.request import TraceRequest


@verb(
    "study compile",
    "stepscope study compile --model small --compile default,max-autotune",
    "stepscope study compile --from results/h200/compile --only findings",
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
    model: tuple[str, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
    phase: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    compile: tuple[str, ...] | None,
    device: str,
    warmup: int | None,
    steps: int | None,
    seconds: float = 1.0,
    keep_digests: bool,
    runs: Path,
    from_: tuple[Path, ...] = (),
    tag: str | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    given = {
        "model": model, "seq_len": seq_len, "batch_size": None if batch_size is None else (batch_size,),
        "dtype": dtype, "phase": phase, "attention": attention,
    }  # fmt: skip
    from stepscope.analysis.comparisons.compiling.answer import answer_compile
    from stepscope.analysis.comparisons.compiling.cells import CompileCell, pair_up
    from stepscope.studies.compile_study import BASELINE, check_modes, cold_caches, compile_cells, sizes_for

    def answer(cells: list[CompileCell], unread: int) -> Answer:
        return answer_compile(pair_up(cells), unread=unread)

    comparing = Comparing(
        verb="compile",
        answering=Answering(study="compile", shown=shown, save=save),
        cell=lambda run, digest: CompileCell(run=run, digest=digest),
        answer=answer,
        keep_digests=keep_digests,
    )
    if from_:
        modes = None if compile is None else (BASELINE, *check_modes(compile))
        comparing.from_stored(from_, {**given, "compile": modes})
        return
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import SweepPlan

    device_type = type_of_device(device)
    usual = sizes_for(device_type)
    on_cpu = device_type == "cpu"
    plan = SweepPlan(
        cells=compile_cells(
            models=[configure(name) for name in model or usual.models.split(",")],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=dtype or usual.dtypes.split(","),
            phases=phase or usual.phases.split(","),
            modes=check_modes(compile or ("default",)),
            attentions=attention or ("reference",),
            settings=settings_from(warmup, steps, seconds, no_profile=on_cpu),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=TraceRequest(tools=() if on_cpu else ("kineto",), steps=1),
    )

    with cold_caches():
        comparing.measured(plan)
