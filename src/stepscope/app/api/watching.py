"""`stepscope.watch`, whose run shows itself in a notebook as others do."""

import stepscope.app.api.shown  # noqa: F401  # pyright: ignore[reportUnusedImport]  (tells IPython how a Run is shown)
from stepscope.engine.watched_run import Watched, watch

__all__ = ["Watched", "watch"]
