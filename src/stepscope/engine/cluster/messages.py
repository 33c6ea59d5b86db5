"""What a sweep and the process that talks with Ray say to each other, a line of JSON each."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.core.errors import EXIT_WRONG_INPUT, InputError, StepscopeError
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, create_run_directory, encode_run, save_run, write_atomically
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


# The files that a cell leaves on its node, on their way to the sweep's run directory.


Carried = dict[str, dict[str, bytes]]
"""By a run directory's name, its files by their path in it."""


def pack(out: Path) -> Carried:
    """All files of the run directories in `out`."""
    return {
        directory.name: {
            str(file.relative_to(directory)): file.read_bytes()
            for file in sorted(directory.rglob("*"))
            if file.is_file() and not file.is_symlink()
        }
        for directory in sorted(out.iterdir())
        if directory.is_dir() and (directory / RUN_FILE).is_file()
    }


def land(carried: Carried, out: Path) -> list[Path]:
    """Write the run directories into `out`, each run.json last. A name that is taken makes way by a millisecond.

    Raises StepscopeError, which names where the run was saved, if the disk refuses.
    """
    return [_land(files, out) for _, files in sorted(carried.items())]


def _land(files: dict[str, bytes], out: Path) -> Path:
    data = files[RUN_FILE]
    run = msgspec.json.decode(data, type=Run)
    began = datetime.strptime(run.id.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    try:
        directory = create_run_directory(out, run.workload, began)
    except InputError:
        save_run(run, out / run.id)  # it finds another place, and says where
        raise
    if directory.name != run.id:
        run = msgspec.structs.replace(run, id=directory.name)
        data = encode_run(run)
    try:
        for name, content in files.items():
            if name != RUN_FILE:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
        write_atomically(data, directory / RUN_FILE)
    except OSError:
        save_run(run, directory)  # the files beside it have no room; the run finds another place, and says where
        raise StepscopeError(f"cannot write the files of {run.id} to {directory}: only its run.json is there") from None
    return directory
