"""`stepscope study underflow`, `scaling` and `swallowed`: gradients and updates in 16 bits."""

from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.study_precision import Plot, Read, answer
from stepscope.cli.sweep import numbers
from stepscope.core.experiment import Experiment
from stepscope.core.model_config import configure
from stepscope.studies.request import Tell

Model = Annotated[str, typer.Option("--model", help="A preset.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences in a step.")]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")]


def underflow(
    model: Model = "tiny",
    vocabulary: options.Vocabulary = None,
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 64,
    format_name: Annotated[
        str, typer.Option("--format", help="By kind of module in this one: fp16, bf16, fp8-e5m2 or fp8-e4m3.")
    ] = "fp16",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    read: Read = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """The exponents of a training step's gradients against each format, without and with a loss scale."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.gradient_underflow import study_underflow

        return study_underflow(
            model=configure(model, vocabulary=vocabulary),
            batch_size=batch_size,
            seq_len=seq_len,
            format_name=format_name,
            device=device,
            seed=seed,
        )

    answer(run, study="underflow", read=read, plot=plot, json=json)


def scaling(
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = 200,
    growth_interval: Annotated[
        int, typer.Option("--growth-interval", help="Steps without an overflow until the scale grows.")
    ] = 20,
    overflow_at: Annotated[
        str | None, typer.Option("--overflow-at", help="Steps that are made to overflow, as in 7,8,60.")
    ] = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    read: Read = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    planted = None if overflow_at is None else tuple(numbers(overflow_at, "--overflow-at"))

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.loss_scaling import study_scaling

        return study_scaling(steps=steps, growth_interval=growth_interval, planted=planted, device=device, seed=seed)

    answer(run, study="scaling", read=read, plot=plot, json=json)
