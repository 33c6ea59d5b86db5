"""`stepscope study speed`: forward and backward in fp32, TF32 and bf16, measured and captured here, or before."""

from pathlib import Path

from stepscope.cli.captured_runs import type_of_device
from stepscope.cli.options import settings_from
from stepscope.cli.presentation import Presentation
from stepscope.cli.studies.answering import Answering, Comparing
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer
from stepscope.core.workload import DTYPES
from stepscope.engine.request import TraceRequest


@verb(
    "study speed",
    "stepscope study speed --model small,medium --dtype fp32,bf16",
    "stepscope study speed --from results/h200/precision-speed --only amdahl",
    model="small to 2.7B; tiny,small on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="fp32,tf32,bf16",
)
def speed(
    *,
    model: tuple[str, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
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
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    given = {
        "model": model, "seq_len": seq_len, "batch_size": None if batch_size is None else (batch_size,), "dtype": dtype,
    }  # fmt: skip
    from stepscope.analysis.comparisons.precision.answer import answer_speed
    from stepscope.analysis.comparisons.precision.cells import TimedCell, pair_up
    from stepscope.studies.precision_speed import dtypes_here, sizes_for, speed_cells

    lacking: tuple[str, ...] = ()

    def answer(cells: list[TimedCell], unread: int) -> Answer:
        return answer_speed(pair_up(cells, dtype or DTYPES), lacking=lacking, unread=unread)

    comparing = Comparing(
        verb="speed",
        answering=Answering(study="speed", shown=shown, save=save),
        cell=lambda run, digest: TimedCell(run=run, digest=digest),
        answer=answer,
        keep_digests=keep_digests,
    )
    if from_:
        comparing.from_stored(from_, given)
        return
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import SweepPlan

    device_type = type_of_device(device)
    usual = sizes_for(device_type)
    here, lacking = dtypes_here(dtype or usual.dtypes.split(","), device_type)
    plan = SweepPlan(
        cells=speed_cells(
            models=[configure(name) for name in model or usual.models.split(",")],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=here,
            settings=settings_from(warmup, steps, seconds, no_profile=device_type == "cpu"),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=TraceRequest(tools=("kineto",), steps=1),
    )

    comparing.measured(plan)
