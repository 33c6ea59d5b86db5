"""The files that a cell leaves on its node, on their way to the sweep's run directory."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.run import Run
from stepscope.core.run_directory import create_run_directory, encode_run, save_run, write_atomically
from stepscope.core.run_files import RUN_FILE

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
