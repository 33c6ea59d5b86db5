"""`stepscope study autocast`: what dtype everything has under autocast."""

from pathlib import Path

from stepscope.cli.studies.precision import answer
from stepscope.cli.verb import verb
from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment
from stepscope.engine.request import Tell


@verb(
    "study autocast",
    "stepscope study autocast --model tiny --dtype fp16",
    "stepscope study autocast --module my_package:my_factory --only modules",
    model="toy",
)
def autocast(
    *,
    model: str | None = None,
    module: str | None,
    dtype: str = "bf16",
    device: str,
    from_: Path | None,
    only: str | None,
    json: bool,
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

    answer(run, study="autocast", read=from_, save=None, json=json, only=only)
