"""The launcher in C++ where it cannot be built, kept, or help."""

import fcntl
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import torch
import triton
from torch import Tensor

from stepscope.core.environment import NATIVE_LAUNCHER
from stepscope.core.errors import InputError
from stepscope.kernels import native, native_library
from stepscope.measure import launcher

KNOWN = pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.7.")), reason="another Triton")


@pytest.fixture(autouse=True)
def _as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "caches"))
    monkeypatch.delenv(NATIVE_LAUNCHER, raising=False)
    monkeypatch.setattr(launcher, "_from_python", [])
    monkeypatch.setattr(native_library, "interpreted", lambda: False)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"cannot be kept in .*file/below.*: name another place in STEPSCOPE_CACHE"):
        native_library.build()


@KNOWN
def test_without_a_compiler_python_launches_and_the_run_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.warns(UserWarning, match=r"from Python: .* \(/no/compiler is not found\): install g\+\+ and ninja$"):
        assert native_library.extension.__wrapped__() is None
    assert launcher.launcher() == {"launcher": "Python"}


def test_where_it_is_not_wanted_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(NATIVE_LAUNCHER, "0")
    assert native_library.extension.__wrapped__() is None
    assert launcher.launcher() == {"launcher": "Python"} and not (tmp_path / "caches").exists()


def test_the_interpreter_needs_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It launches nothing, so the run says nothing of launches."""
    monkeypatch.setattr(native_library, "interpreted", lambda: True)
    assert native_library.extension.__wrapped__() is None
    assert launcher.launcher() == {} and not (tmp_path / "caches").exists()


@pytest.mark.skipif(not shutil.which("c++") or not shutil.which("ninja"), reason="no C++ compiler or no ninja here")
def test_a_build_that_failed_is_tried_again_only_if_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process would wait for it otherwise."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *native.cpp*) ;; *) exec c++ "$@" ;; esac\n'
        f"echo >> {calls}; echo 'native.cpp:1: error: no such header' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def tries() -> int:
        before = len(calls.read_text()) if calls.exists() else 0
        said = r"\(native.cpp:1: error: no such header\): install .*, then set STEPSCOPE_NATIVE=1, which tries again$"
        with pytest.raises(InputError, match=said):
            native_library.build()
        return len(calls.read_text()) - before

    assert tries() > 0
    assert tries() == 0
    monkeypatch.setenv(NATIVE_LAUNCHER, "1")
    assert tries() > 0
    (place,) = (tmp_path / "caches").iterdir()
    assert {file.suffix for file in place.iterdir()} == {".lock", ".failed"}, "nothing of a build stays"


def test_who_comes_while_another_process_builds_waits_for_it():
    path = native_library.library()
    assert path is not None
    path.parent.mkdir(parents=True)
    found: list[Path] = []
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(native_library.build()), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        path.touch()
    waiting.join(10)
    assert found == [path]


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
