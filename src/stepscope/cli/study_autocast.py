"""`stepscope study autocast`: what dtype everything has under autocast."""

from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.study_precision import Only, Read, answer
from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment
from stepscope.studies.request import Tell


def autocast(
    model: Annotated[str | None, typer.Option("--model", help="toy (default) or a preset, as in tiny.")] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--module",
            help="Your own, as package.module:factory, run with your rights. factory() returns (module, inputs, loss), "
            "or (module, inputs) or a module whose forward returns the loss.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="fp16 or bf16.")] = "bf16",
    device: options.Device = "auto",
    read: Read = None,
    only: Only = None,
    json: options.Json = False,
) -> None:
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    if model is not None and module is not None:
        raise InputError("--model and --module name two models: give one")

    def run(tell: Tell) -> Experiment:
        if module is not None:
            from stepscope.studies.autocast_of_own import autocast_of_own

            return autocast_of_own(module, dtype, device)
        from stepscope.numerics.autocast import study_autocast

        return study_autocast(model or "toy", None, dtype, device)

    answer(run, study="autocast", read=read, plot=None, json=json, only=only)
