"""`STEPSCOPE_NATIVE=1` where the launcher in C++ cannot help, or cannot be kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import torch
import triton
from torch import Tensor

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


@pytest.mark.parametrize(
    ("call", "learnt"),
    [
        (torch.empty_like, True),
        (lambda x: torch.empty_like(x).view(-1)[2:], True),
        (torch.zeros_like, False),
        (lambda x: x + 1, False),
        (lambda x: torch.empty(3, device="meta"), False),
        (lambda x: torch.ones(3).detach(), False),
    ],
)
def test_a_call_that_does_more_than_make_and_launch_is_not_learnt(call: Callable[[Tensor], Tensor], learnt: bool):
    """What no launch repeats, as zeros that a kernel adds to."""
    x = torch.ones(4, 5)
    watched = native.Watched([x])
    with watched.watching():
        out = call(x)
    ran = watched.ran([out])
    assert (ran is not None) is learnt
    if ran is not None:
        assert ran.made == [((4, 5), (5, 1), torch.float32)] and ran.results[0] == (
            1,
            out.storage_offset(),
            native.layout_of(out),
        )


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
