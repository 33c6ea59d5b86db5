"""`stepscope study quality`: the same training in every precision."""

from typing import Any

from stepscope.app.cli.against import options_in
from stepscope.app.cli.studies.answering import of_own_model, refuse_preset, refuse_sizes, study_verb
from stepscope.core import interrupts
from stepscope.core.answer import Answer
from stepscope.engine.request import Stage, Tell


@study_verb(
    "quality",
    "stepscope study quality --module train.py:make --save curves.svg",
    'stepscope study quality --variants bf16 --against "--dtype bf16-master --kernels fused"',
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def quality(
    tell: Tell, *, module: str | None, arg: tuple[str, ...] = (), model: str | None, batch_size: int | None,
    seq_len: int | None, model_size: str | None, seed: int, steps: int | None, learning_rate: float | None,
    variants: tuple[str, ...] | None, against: tuple[str, ...] = (), device: str,
) -> Answer:  # fmt: skip
    """A small transformer trained on real text in every precision: quality, and the step at which a run departs.

    With --module or --model CONFIG.json: that model, trained on its own batches, by its own optimizer or by AdamW. With
    --against: by whole steps of these options, too, with their kernels, compiler, optimizer and graphs.
    """
    asked = {"steps": steps, "learning_rate": learning_rate, "variants": variants, "seed": seed}
    read = [f"--{name.replace('_', '-')}" for name in asked]
    options: dict[str, Any] = {**asked, "device": device}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("quality", module, model, arg, *read, **sizes, **options):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    changes = [options_in(text) for text in against]
    from stepscope.questions.quality.study import study_quality

    with interrupts.keeping():
        return study_quality(
            lambda name, share: tell(Stage(name=name, fraction=share)), size=model_size, against=changes, **options
        )
