"""What a sweep and the process that talks with Ray say to each other, a line of JSON each."""

import msgspec

from stepscope.core.errors import EXIT_WRONG_INPUT
from stepscope.core.run import Run
from stepscope.engine.request import StepRequest


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the whole sweep: the first line to the courier."""

    address: str
    """`auto`, or `ray://HOST:PORT`."""
    device: str
    """auto, cpu or cuda: whether a cell needs a GPU of its node."""
    out: str
    """Where runs land."""
    timeout_s: float
    """Seconds that one cell may take."""
    folder: str
    """The sweep's current directory: a cell's too, on nodes that have it."""
    variables: dict[str, str] = {}
    """Environment variables of the sweep that say how libraries compute."""
    key: str
    """The sweep's key."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cell to measure, or the order to stop."""

    number: int = 0
    node: str = ""
    """The node's id."""
    request: StepRequest | None = None
    modules: tuple[str, ...] | None = None
    """What a process that forks cells imports besides; None where the cell is a Python of its own."""
    stop: bool = False
    """The cells that run save what they have, and come home."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that measures cells."""

    id: str
    name: str
    slots: int
    """Cells that it measures at a time: one on each GPU, or one."""
    gpus: int = 0
    """GPUs that it has for cells; none where cells are measured on its CPUs."""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the courier says: of a cell where `number` is given, else of nodes or of the whole cluster."""

    node: Node | None = None
    """A node that has joined."""
    ready: bool = False
    """All nodes that were there at the start have been named."""
    number: int | None = None
    stage: str = ""
    """The cell has begun, and is at this stage."""
    detail: str = ""
    directory: str | None = None
    """The cell's run lies in this directory."""
    run: Run | None = None
    """The cell's run, where it left no directory."""
    stopped: bool = False
    """The cell was stopped, and has saved what it had."""
    lost: str | None = None
    """The cell's node, or the process on it, has died: in words."""
    killed: str | None = None
    """The cell was ended from outside, and would be again."""
    error: str | None = None
    """What ends the whole sweep."""
    exit_code: int = EXIT_WRONG_INPUT
