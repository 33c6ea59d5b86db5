"""`stepscope study NAME`: questions with an answer of their own."""

from pathlib import Path
from typing import Any, ClassVar

import typer

from stepscope.app.cli.output import Presentation
from stepscope.app.cli.studies import precision
from stepscope.app.cli.studies.attention import attention, attention_gate
from stepscope.app.cli.studies.collectives import collectives
from stepscope.app.cli.studies.steps import allocator, attention_step, compiled, kernels, parallel, speed
from stepscope.app.cli.verb import Verbs, study_now, verb


@verb(
    "study warmup",
    "stepscope study warmup --model small --seq-len 512",
    "stepscope study warmup --warmup 0,1,10 --steps 20",
)
def warmup(
    *,
    model: str = "tiny",
    seq_len: int = 128,
    batch_size: int = 4,
    dtype: str = "fp32",
    device: str,
    warmup: tuple[int, ...] = (0, 1, 2, 5),
    steps: int = 10,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """Measure a step after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    from stepscope.app.cli.sweep import measure_and_report, report_runs
    from stepscope.core.model_config import configure
    from stepscope.core.workload import Workload
    from stepscope.engine.plan import Policy, SweepPlan
    from stepscope.questions.warmup import answer_warmup, warmup_cells

    workload = Workload(model=configure(model), seq_len=seq_len, batch_size=batch_size, dtype=dtype)  # type: ignore[arg-type]
    cells = warmup_cells(workload, steps, warmup)
    plan = SweepPlan(cells=cells, devices=(device,), out=str(runs), tag=tag)
    measure_and_report(plan, Policy(), lambda found: report_runs(found, answer_warmup(found), shown))


class _Studies(Verbs):
    """The studies, each a verb."""

    verbs: ClassVar = {
        "warmup": warmup, "allocator": allocator, "kernels": kernels, "compile": compiled,
        "formats": precision.formats_study,
        "accumulation": precision.accumulation_study, "normalisation": precision.normalisation_study,
        "softmax": precision.softmax_study, "underflow": precision.underflow,
        "scaling": precision.scaling, "swallowed": precision.swallowed, "autocast": precision.autocast,
        "parity": precision.parity, "shadow": precision.shadow,
        "speed": speed, "quality": precision.quality, "attention": attention, "attention-step": attention_step,
        "attention-gate": attention_gate, "collectives": collectives, "parallel": parallel,
    }  # fmt: skip

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, study_now(args))


app = typer.Typer(cls=_Studies, help="Studies: one question each.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _studies() -> None:
    pass
