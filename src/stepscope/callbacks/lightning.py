"""A callback for Lightning: `Trainer(..., callbacks=[WatchCallback()])`."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stepscope.engine.watched_run import Watched, watch


class WatchCallback(Callback):
    """Measures some steps of a fit. It takes the arguments of `stepscope.watch`; `watched.run` is the result."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.watched: Watched | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        self.watched = watch(pl_module, optimizer, **self._options)
        self.watched.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watched is not None:
            self.watched.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.watched is not None:
            self.watched.end(exception)
