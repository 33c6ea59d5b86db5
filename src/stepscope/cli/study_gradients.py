"""`stepscope study underflow`, `scaling` and `swallowed`: gradients and updates in 16 bits."""

from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.study_precision import Only, Plot, Read, answer
from stepscope.cli.sweep import numbers, words
from stepscope.core.errors import InputError
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
    only: Only = None,
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

    answer(run, study="underflow", read=read, plot=plot, json=json, only=only)


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
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    planted = None if overflow_at is None else tuple(numbers(overflow_at, "--overflow-at"))

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.loss_scaling import study_scaling

        return study_scaling(steps=steps, growth_interval=growth_interval, planted=planted, device=device, seed=seed)

    answer(run, study="scaling", read=read, plot=plot, json=json, only=only)


def swallowed(
    steps: Annotated[int, typer.Option("--steps", help="Training steps of each run.")] = 40,
    learning_rates: Annotated[
        str, typer.Option("--learning-rates", help="Shares of swallowed updates at each of these.")
    ] = "1e-5,1e-4,1e-3,1e-2",
    remedies_at: Annotated[float, typer.Option("--remedies-at", help="The learning rate of the remedies.")] = 1e-4,
    model: Model = "tiny",
    d_model: options.DModel = 64,
    d_ff: options.DFf = 256,
    layers: options.Layers = 2,
    vocabulary: options.Vocabulary = 256,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 32,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    read: Read = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside fp32."""
    rates = _rates(learning_rates)

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.swallowed_updates import study_swallowed

        return study_swallowed(
            model=configure(model, d_model=d_model, d_ff=d_ff, layers=layers, vocabulary=vocabulary),
            steps=steps,
            learning_rates=rates,
            remedies_at=remedies_at,
            batch_size=batch_size,
            seq_len=seq_len,
            device=device,
            seed=seed,
        )

    answer(run, study="swallowed", read=read, plot=plot, json=json, only=only)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words(text, "--learning-rates"))
    except ValueError:
        raise InputError(f"cannot read --learning-rates {text!r}: write numbers, as in 1e-4,1e-3") from None
