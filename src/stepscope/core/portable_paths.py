"""Names of source files without the place where this machine keeps them: what is written can be shown to others."""

import functools
import sysconfig
from pathlib import Path, PurePath

import stepscope


@functools.cache
def install_places() -> tuple[str, ...]:
    """Directories that packages and the standard library lie in, each with a slash at its end, longest first."""
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    places.add(str(Path(stepscope.__file__).parents[1]))
    return tuple(sorted((f"{place}/" for place in places if place), key=len, reverse=True))


def without_install_places(text: str) -> str:
    """The text, with files named from their package on: `torch/nn/modules/module.py`."""
    for place in install_places():
        text = text.replace(place, "")
    return text


def portable_path(file: str) -> str:
    """A file's name from its package on; of a file in no package (a script, generated code) its last two parts."""
    for place in install_places():
        if file.startswith(place):
            return file.removeprefix(place)
    path = PurePath(file)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else file
