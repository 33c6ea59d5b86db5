"""Reads the program behind `stepscope watch --`: a script, a module, or a launcher whose workers are then watched."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from stepscope.core.errors import InputError

_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("accelerate", "deepspeed")
"""Programs that start the script in other processes. They can start another program there instead."""


@dataclass(frozen=True)
class Program:
    """A script or a module, and its arguments."""

    target: str
    """The script's path, or the module's name."""
    arguments: tuple[str, ...]
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """The program as the user wrote it behind `--`."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @property
    def title(self) -> str:
        """The program without its folder, and its arguments."""
        return " ".join([self.target if self.is_module else Path(self.target).name, *self.arguments])


@dataclass(frozen=True)
class Launch:
    """A launch by torchrun: its own options, and the program that each worker runs."""

    options: tuple[str, ...]
    program: Program


def program_of(words: list[str]) -> Program | Launch:
    """The program that these words run. Raises InputError where it cannot be watched."""
    if not words:
        raise InputError("no script to watch: write stepscope watch -- train.py, or -- -m package")
    first, rest = words[0], words[1:]
    if _PYTHON.fullmatch(Path(first).name) and not Path(first).is_dir():
        if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            raise InputError(f"cannot watch {' '.join(words[:2])!r}: leave out python and its options, name the script")
        first, rest = rest[0], rest[1:]
    if first == "-m":
        if not rest:
            raise InputError("no module behind -m: write stepscope watch -- -m package")
        if rest[0] in ("torch.distributed.run", "torch.distributed.launch"):
            return _launch(rest[1:])
        return Program(rest[0], tuple(rest[1:]), is_module=True)
    if Path(first).name == "torchrun":
        return _launch(rest)
    if Path(first).name in _LAUNCHERS:
        raise InputError(
            f"{first} starts the script in processes of its own: write {first} ... --no_python stepscope watch -- "
            "train.py, so that each of them is watched"
        )
    return Program(_script(first), tuple(rest))


def _script(name: str) -> str:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise InputError(f"{name} is a folder: name a script in it, or -m package")
    if path.exists():
        return name
    installed = shutil.which(name)
    if installed is None:
        raise InputError(f"no script at {name}")
    with Path(installed).open("rb") as file:
        if not re.match(rb"#!.*python", file.readline(200)):
            raise InputError(f"{name} is no Python program: name the script that it runs")
    return installed


def _launch(words: list[str]) -> Launch:
    from torch.distributed.run import get_args_parser  # noqa: PLC0415  (torch, which nothing else here needs)

    found = get_args_parser().parse_args(words)
    script, arguments = str(found.training_script), [str(word) for word in found.training_script_args]
    options = words[: len(words) - len(arguments) - 1]
    if found.no_python:
        raise InputError("with --no-python torchrun comes first: torchrun ... --no-python stepscope watch -- train.py")
    if found.module:
        options = [word for word in options if word not in ("-m", "--module")]
        return Launch(tuple(options), Program(script, tuple(arguments), is_module=True))
    return Launch(tuple(options), Program(_script(script), tuple(arguments)))


def launch_command(launch: Launch, options: list[str]) -> list[str]:
    """The torchrun command that runs `stepscope watch` with these options in each worker."""
    worker = [sys.executable, "-m", "stepscope", "watch", *options, "--", *launch.program.words]
    return [sys.executable, "-m", "torch.distributed.run", *launch.options, "--no-python", *worker]
