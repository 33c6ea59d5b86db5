"""`stepscope study quality`: the same training in every precision."""

from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.study_precision import Only, Plot, Read, answer
from stepscope.cli.sweep import words
from stepscope.core import interrupts
from stepscope.core.errors import EXIT_INTERRUPTED
from stepscope.core.experiment import Experiment
from stepscope.studies.request import Stage, Tell


def quality(
    model_size: Annotated[
        str | None, typer.Option("--model-size", help="cpu or gpu: what is trained; the device's if left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps of each run.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="The highest, after the warm-up.")] = None,
    variants: Annotated[
        str | None, typer.Option("--variants", help="Only these beside fp32, as in bf16,fp16-unscaled,bf16-pure.")
    ] = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    read: Read = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """A small transformer trained on real text in every precision: quality, and the step at which a run departs."""
    names = None if variants is None else tuple(words(variants, "--variants"))
    interrupted = False

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.quality import study_quality

        with interrupts.keeping():
            found = study_quality(
                lambda name, share: tell(Stage(name=name, fraction=share)),
                size=model_size,
                steps=steps,
                learning_rate=learning_rate,
                variants=names,
                device=device,
                seed=seed,
            )
        nonlocal interrupted
        interrupted = any(finding.kind == "interrupted" for finding in found.findings)
        return found

    answer(run, study="quality", read=read, plot=plot, json=json, only=only)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
