"""Where a sweep's cells are measured, one at a time in each place: a device of this machine, or a node of a cluster."""

from collections.abc import Callable, Sequence
from typing import Protocol

from stepscope.core.errors import StepscopeError
from stepscope.core.run import Run
from stepscope.engine.forks import Forks
from stepscope.engine.measured_cell import MeasuredCell
from stepscope.engine.request import StepRequest, Tell


class PlaceLost(StepscopeError):
    """Raised where a place has gone. `began`: whether it was measuring the cell by then."""

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class Place(Protocol):
    """Measures one cell at a time."""

    device: str
    """The device as a request names it."""
    unlike: bool
    """Whether its device may be of another kind than those of other places."""

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, on disk. Raises PlaceLost where the cell must be measured elsewhere.

        modules: what a process that forks cells imports besides; None where the cell is a Python of its own.
        """
        ...


class DevicePlace:
    """A device of this machine."""

    unlike = False

    def __init__(self, device: str, timeout_s: float, next_mark: Callable[[], str], forks: Forks | None) -> None:
        self.device = device
        self._timeout_s, self._next_mark, self._forks = timeout_s, next_mark, forks

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, on disk. The sweep's own server, where it has one, forks those that may be forked."""
        fork = self._forks.fork if self._forks is not None and modules is not None else None
        return await MeasuredCell(request, self._timeout_s, self._next_mark, fork, tell).run()
