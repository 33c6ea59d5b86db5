"""`STEPSCOPE_NATIVE=1` where the launcher in C++ cannot help, or cannot be kept."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import triton

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError
from stepscope.kernels import native


@pytest.fixture(autouse=True)
def _wanted_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setenv(NATIVE_LAUNCHER, "1")


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(InputError, match=r"cannot be kept in .*file/below.*: name another place in STEPSCOPE_CACHE"):
        native.build()


@pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.7.")), reason="another Triton")
@pytest.mark.parametrize("interpreted", [True, False])
def test_the_interpreter_needs_no_launcher(interpreted: bool, monkeypatch: pytest.MonkeyPatch):
    """To build one takes twenty seconds."""
    monkeypatch.setattr(native, "interpreted", lambda: interpreted)
    if interpreted:
        assert native.extension.__wrapped__() is None
        return
    with pytest.warns(UserWarning, match=r"kernels are launched from Python: the launcher in C\+\+"):
        assert native.extension.__wrapped__() is None
