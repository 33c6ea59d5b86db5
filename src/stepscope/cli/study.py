"""`stepscope study NAME`: questions with an answer of their own."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import options, study_gradients, study_precision
from stepscope.cli.output import show
from stepscope.cli.study_attention import attention
from stepscope.cli.study_autocast import autocast
from stepscope.cli.study_compile import compiled
from stepscope.cli.study_kernels import kernels
from stepscope.cli.study_quality import quality
from stepscope.cli.study_speed import speed

app = typer.Typer(help="Studies: one question each.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _studies() -> None:
    pass


@app.command("warmup")
def warmup(
    model: Annotated[str, typer.Option("--model", help="A preset.")] = "tiny",
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences in a step.")] = 4,
    dtype: Annotated[str, typer.Option("--dtype", help=options.DTYPE_HELP)] = "fp32",
    warmups: Annotated[str, typer.Option("--warmups", help="Numbers of warm-up steps.")] = "0,1,2,5",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Measured steps.")] = 10,
    device: options.Device = "auto",
    tag: options.Tag = None,
    out: options.Out = Path("runs"),
    json: options.Json = False,
) -> None:
    """The same step after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    from stepscope.cli.sweep import measure_and_report, numbers, report_sweep
    from stepscope.core.model_config import configure
    from stepscope.core.workload import Workload
    from stepscope.report.warmup import render_warmup
    from stepscope.studies.sweep_plan import Policy, SweepPlan
    from stepscope.studies.warmup import warmup_cells

    workload = Workload(model=configure(model), seq_len=seq_len, batch_size=batch_size, dtype=dtype)  # type: ignore[arg-type]
    cells = warmup_cells(workload, steps, tuple(numbers(warmups, "--warmups")))
    plan = SweepPlan(cells=cells, devices=(device,), out=str(out), tag=tag)
    measure_and_report(plan, Policy(), lambda runs: report_sweep(runs, True) if json else show(render_warmup(runs)))


app.command("kernels")(kernels)
app.command("compile")(compiled)
app.command("formats")(study_precision.formats)
app.command("accumulation")(study_precision.accumulation)
app.command("normalisation")(study_precision.normalisation)
app.command("softmax")(study_precision.softmax)
app.command("underflow")(study_gradients.underflow)
app.command("scaling")(study_gradients.scaling)
app.command("swallowed")(study_gradients.swallowed)
app.command("autocast")(autocast)
app.command("speed")(speed)
app.command("quality")(quality)
app.command("attention")(attention)
