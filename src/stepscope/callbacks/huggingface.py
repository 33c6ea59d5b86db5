"""A callback for the Trainer of Hugging Face's transformers: `Trainer(..., callbacks=[WatchCallback()])`."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from stepscope.engine.watched_run import Watched, watch


class WatchCallback(TrainerCallback):
    """Measures some steps of a training run. It takes the arguments of `stepscope.watch`; `watched.run` is the
    result."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.watched: Watched | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.watched = watch(known.get("model"), known.get("optimizer"), **self._options)
        self.watched.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.watched is not None:
            self.watched.end()
