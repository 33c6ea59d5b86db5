"""`stepscope study autocast`: what dtype everything has under autocast."""

from stepscope.cli.studies.answering import study_verb
from stepscope.cli.workloads import factory_arguments, own_model
from stepscope.core.answer import Answer


@study_verb(
    "autocast",
    "stepscope study autocast --model tiny --dtype fp16 --rules cuda",
    "stepscope study autocast --module train.py:make --arg width=64 --only modules",
    plot=False,
    model="toy",
    rules="the device's",
)
def autocast(
    *, model: str | None = None, module: str | None, arg: tuple[str, ...] = (), dtype: str = "bf16", device: str,
    rules: str | None,
) -> Answer:  # fmt: skip
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    own = own_model(module, model)
    arguments = factory_arguments(own, arg)
    if own is not None:
        from stepscope.studies.of_own_model import AUTOCAST, answer_of_own

        return answer_of_own(AUTOCAST, own, arguments, dtype=dtype, device=device, rules=rules)
    from stepscope.numerics.autocast.study import study_autocast

    return study_autocast(model or "toy", None, dtype, device, rules)
