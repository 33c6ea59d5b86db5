"""What every study that compares runs refuses."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from stepscope.app.cli.app import app
from stepscope.core.errors import InputError
from tests.command import stepscope


def check_refused(study: str, lone: Path, own: Iterable[tuple[list[object], str]]) -> None:
    """Each of these arguments is refused in one line that holds the words beside it, and so is what no study takes.

    lone: a folder with a run that nothing is beside.
    """
    empty = lone.with_name("empty")
    empty.mkdir()
    cases: list[tuple[list[object], str]] = [
        (["--from", empty], "no run here"),
        (["--from", lone.with_name("none")], "it is no folder"),
        (["--from", lone, "--dtype", "fp31"], "unknown dtype 'fp31'"),
        (["--device", "cpu", "--model", "huge"], "unknown model 'huge'"),
        *own,
    ]
    for arguments, words in cases:
        with pytest.raises(InputError) as refused:
            app(["study", study, *map(str, arguments)], standalone_mode=False)
        assert words in str(refused.value) and "\n" not in str(refused.value)
    done = stepscope("study", study, "--from", empty)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
