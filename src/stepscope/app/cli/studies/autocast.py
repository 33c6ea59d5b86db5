"""`stepscope study autocast`: what dtype everything has under autocast."""

from typing import Any

from stepscope.app.cli.studies.answering import of_own_model, refuse_sizes, study_verb
from stepscope.core.answer import Answer


@study_verb(
    "autocast",
    "stepscope study autocast --model tiny --dtype fp16 --rules cuda",
    "stepscope study autocast --module train.py:make --arg width=64 --only modules",
    plot=False,
    model="toy",
    rules="the device's",
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def autocast(
    *, model: str | None = None, module: str | None, arg: tuple[str, ...] = (), batch_size: int | None,
    seq_len: int | None, dtype: str = "bf16", device: str, rules: str | None,
) -> Answer:  # fmt: skip
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "rules": rules}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("autocast", module, model, arg, "--dtype", "--rules", **sizes, **options):
        return found
    refuse_sizes(**sizes)
    from stepscope.questions.autocast.study import study_autocast

    return study_autocast(model or "toy", **options)
