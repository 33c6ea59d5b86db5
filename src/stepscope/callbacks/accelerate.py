"""A tracker for Hugging Face's Accelerate: `Accelerator(log_with=WatchTracker())`.

Between `accelerator.init_trackers(...)` and `accelerator.end_training()` the loop is watched.
"""

from typing import Any

from accelerate.tracking import GeneralTracker

from stepscope.engine.watched_run import Watched, watch


class WatchTracker(GeneralTracker):
    """Measures some steps of the loop. It takes the arguments of `stepscope.watch`; `watched.run` is the result."""

    name = "stepscope"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.watched: Watched = watch(**options)

    @property
    def tracker(self) -> Watched:
        """What was measured, as `accelerator.get_tracker("stepscope", unwrap=True)` asks for it."""
        return self.watched

    def start(self) -> None:
        self.watched.start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        pass

    def finish(self) -> None:
        self.watched.end()
