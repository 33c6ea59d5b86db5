"""`stepscope study autocast`: what dtype everything has under autocast."""

from stepscope.cli.studies.answering import study_verb
from stepscope.core.answer import Answer
from stepscope.core.errors import InputError


@study_verb(
    "autocast",
    "stepscope study autocast --model tiny --dtype fp16 --rules cuda",
    "stepscope study autocast --module my_package:my_factory --only modules",
    plot=False,
    model="toy",
    rules="the device's",
)
def autocast(
    *, model: str | None = None, module: str | None, dtype: str = "bf16", device: str, rules: str | None
) -> Answer:
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    if model is not None and module is not None:
        raise InputError("--model and --module name two models: give one")
    if module is not None:
        from stepscope.studies.autocast_of_own import autocast_of_own

        return autocast_of_own(module, dtype, device, rules)
    from stepscope.numerics.autocast.study import study_autocast

    return study_autocast(model or "toy", None, dtype, device, rules)
