"""`stepscope study quality`: the same training in every precision."""

from pathlib import Path

import typer

from stepscope.cli.studies.precision import answer
from stepscope.cli.verb import verb
from stepscope.core import interrupts
from stepscope.core.errors import EXIT_INTERRUPTED
from stepscope.core.experiment import Experiment
from stepscope.engine.request import Stage, Tell


@verb(
    "study quality",
    "stepscope study quality --save curves.svg",
    "stepscope study quality --from results/h200/precision/quality.json --only runs",
)
def quality(
    *,
    model_size: str | None,
    seed: int,
    steps: int | None,
    learning_rate: float | None,
    variants: tuple[str, ...] | None,
    device: str,
    from_: Path | None,
    only: str | None,
    save: Path | None,
    json: bool,
) -> None:
    """A small transformer trained on real text in every precision: quality, and the step at which a run departs."""
    interrupted = False

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.quality import study_quality

        with interrupts.keeping():
            found = study_quality(
                lambda name, share: tell(Stage(name=name, fraction=share)),
                size=model_size,
                steps=steps,
                learning_rate=learning_rate,
                variants=variants,
                device=device,
                seed=seed,
            )
        nonlocal interrupted
        interrupted = any(finding.kind == "interrupted" for finding in found.findings)
        return found

    answer(run, study="quality", read=from_, save=save, json=json, only=only)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
