"""The model that a question looks at, by its options: the textbook's by its sizes, or a user's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.options import MODEL, Option, refuse_beside
from stepscope.engine.request import Stage, Tell
from stepscope.engine.workload_options import OneWorkload

Configuration = Annotated[
    str | None, Option("The config.json of a Hugging Face model, which gets random weights.", MODEL)
]


@dataclass(frozen=True, kw_only=True)
class OneModel:
    """Options that name one model and its batch; None for what the study chooses."""

    model: str | None = None
    module: str | None = None
    arg: tuple[str, ...] = ()
    batch_size: int | None = None
    seq_len: int | None = None
    seed: int = 0

    def answer(self, study: str, tell: Tell, **options: Any) -> Answer:
        """What the study of this name answers. A user's own model runs in another process.

        Raises InputError for options that say nothing of such a model.
        """
        from stepscope.questions.study_apart import study_apart, study_function

        named = {name: getattr(self, name) for name in ("model", "module", "arg", "batch_size", "seq_len")}
        said: Mapping[str, Any] = {name: value for name, value in named.items() if value not in (None, ())}
        own = OneWorkload(said).user_workload
        if own is not None:
            return study_apart(study, own.factory, own.arguments, seed=self.seed, **options)
        workload = OneWorkload(said).workload(model="tiny", batch_size=4, seq_len=64)

        def told(name: str, share: float) -> None:
            tell(Stage(name=name, fraction=share))

        return study_function(study)(
            model=workload.model,
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            seed=self.seed,
            tell=told,
            **options,
        )


def of_own_model(
    study: str, module: str | None, model: str | None, arg: Sequence[str], *takes: str, batch_size: int | None = None,
    seq_len: int | None = None, **options: Any,
) -> Answer | None:  # fmt: skip
    """The study's answer about a model of the user's own; None where none was named.

    takes: what else it reads. batch_size and seq_len: of a config.json's batch; a factory has arguments of its own.
    """
    named = {"module": module, "model": model, "arg": arg, "batch_size": batch_size, "seq_len": seq_len}
    own = OneWorkload({name: value for name, value in named.items() if value not in (None, ())}).user_workload
    if own is None:
        return None
    from stepscope.questions.study_apart import study_apart

    refuse_beside("--module" if module else "--model", "--arg", "--batch-size", "--seq-len", *takes)
    return study_apart(study, own.factory, own.arguments, **options)


def refuse_preset(model: str | None) -> None:
    """Raise InputError for a preset, where a study has a small model of its own, or none."""
    if model is not None:
        raise InputError(f"--model {model} is no config.json: this study takes one, or none at all")


def given_ones(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: the study itself has values for the others."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_sizes(**sizes: int | None) -> None:
    """Raise InputError for sizes of a batch, where a study has them of a config.json only."""
    given = ", ".join(f"--{name.replace('_', '-')}" for name in given_ones(sizes))
    if given:
        raise InputError(f"{given} belongs to --model CONFIG.json here: leave it out, or name one")
