"""Code of the user's own in a process of its own."""

from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.engine.user_code import ask_apart

INTERRUPTED = """
import os
import signal

os.kill(os.getpid(), signal.SIGINT)

from stepscope.engine.user_code import answer_apart

answer_apart(lambda: "made")
"""


def test_a_signal_while_the_child_imports_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Ctrl-C in a terminal goes to the child, too."""
    (tmp_path / "interrupted_import.py").write_text(INTERRUPTED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2] / 'src'}")
    with pytest.raises(InputError, match=r"^the child: KeyboardInterrupt was raised"):
        ask_apart("interrupted_import", what="the child")
    assert capfd.readouterr().err == ""
