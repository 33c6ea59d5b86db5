"""What a shell offers after an option: names of models, runs, devices, formats."""

from pathlib import Path

import typer

from stepscope.core.options import completed


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The runs under --runs, the newest first, and `last`. A part of a name is enough, from wherever it begins."""
    from stepscope.core.run_directory import find_run_files

    files = list(find_run_files(Path(ctx.params.get("runs") or "runs")))
    names = ("last", *(file.parent.name for file in reversed(files)))
    return [name[name.index(incomplete) :] for name in names if incomplete in name]


def device_names(incomplete: str) -> list[str]:
    """The devices whose datasheets are known, each by the word of its name that has a number."""
    from stepscope.core.device_spec import DATASHEET

    found = dict.fromkeys(word for name in DATASHEET for word in name.split() if any(map(str.isdigit, word)))
    return completed(*found)(incomplete)
