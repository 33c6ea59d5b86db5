"""What the step study is asked, and what it tells while it works. Apart from it, since neither needs torch."""

from collections.abc import Callable

import msgspec

from stepscope.core.run import Settings
from stepscope.core.workload import Workload


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, how, and where the run goes. Travels to a cell's process as JSON."""

    workload: Workload
    settings: Settings = Settings()
    device: str = "auto"
    out: str = "runs"
    tag: str | None = None
    sweep: str | None = None
    memory_limit_bytes: int | None = None
    peak_flops_per_s: float | None = None


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Where the study stands, for a display: a name, what is known in words, and how much is done (None: unknown)."""

    name: str
    detail: str = ""
    fraction: float | None = None


Tell = Callable[[Stage], None]
