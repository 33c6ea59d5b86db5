"""The model that a study looks at: the textbook's by its sizes, or one of the user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.app.cli.workloads import OneWorkload
from stepscope.core.answer import Answer
from stepscope.engine.request import Stage, Tell


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
        from stepscope.questions.of_own_model import answer_of_own, study_function

        named = {name: getattr(self, name) for name in ("model", "module", "arg", "batch_size", "seq_len")}
        said: Mapping[str, Any] = {name: value for name, value in named.items() if value not in (None, ())}
        own = OneWorkload(said).own
        if own is not None:
            return answer_of_own(study, own.factory, own.arguments, seed=self.seed, **options)
        workload = OneWorkload(said).workload(model="tiny", batch_size=4, seq_len=64)

        def told(name: str, share: float) -> None:
            tell(Stage(name=name, fraction=share))

        return study_function(study)(
            model=workload.model, batch_size=workload.batch_size, seq_len=workload.seq_len, seed=self.seed,
            tell=told, **options,
        )  # fmt: skip
