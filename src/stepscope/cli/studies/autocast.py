"""`stepscope study autocast`: what dtype everything has under autocast."""

from typing import Any

from stepscope.cli.studies.answering import of_own_model, study_verb
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
    options: dict[str, Any] = {"dtype": dtype, "device": device, "rules": rules}
    if found := of_own_model("autocast", module, model, arg, "--dtype", "--rules", **options):
        return found
    from stepscope.numerics.autocast.study import study_autocast

    return study_autocast(model or "toy", **options)
