"""The launcher in C++ where it cannot be built, kept, or help."""

import fcntl
import hashlib
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
from stepscope.kernels import native
from stepscope.recording import environment

KNOWN = pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.7.")), reason="another Triton")


@pytest.fixture(autouse=True)
def _as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "caches"))
    monkeypatch.delenv(NATIVE_LAUNCHER, raising=False)
    monkeypatch.setattr(environment, "_from_python", [])
    monkeypatch.setattr(native, "interpreted", lambda: False)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"cannot be kept in .*file/below.*: name another place in STEPSCOPE_CACHE"):
        native.build()


@KNOWN
@pytest.mark.filterwarnings("error")
def test_without_a_compiler_python_launches_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CXX", "/no/compiler -m64")
    assert native.extension.__wrapped__() is None
    said = (
        "stepscope: kernels are launched from Python: the launcher in C++ cannot be built (/no/compiler is not found)"
    )
    assert capsys.readouterr().err == f"{said}: install g++ and ninja\n"
    assert environment.launcher() == {"launcher": "Python"}


@pytest.mark.parametrize(("value", "said"), [(" off", ""), ("no", ""), ("2", "STEPSCOPE_NATIVE is '2': write 0 or 1")])
def test_its_variable_is_read_as_it_is_meant(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(NATIVE_LAUNCHER, value)
    monkeypatch.setenv("CXX", "/no/compiler")
    assert native.extension.__wrapped__() is None
    lines = capsys.readouterr().err.splitlines()
    assert (not lines) if not said else said in lines[0]


def test_where_it_is_not_wanted_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(NATIVE_LAUNCHER, "0")
    assert native.extension.__wrapped__() is None
    assert environment.launcher() == {"launcher": "Python"} and not (tmp_path / "caches").exists()


def test_the_interpreter_needs_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It launches nothing, so the run says nothing of launches."""
    monkeypatch.setattr(native, "interpreted", lambda: True)
    assert native.extension.__wrapped__() is None
    assert environment.launcher() == {} and not (tmp_path / "caches").exists()


BUILDS = pytest.mark.skipif(
    not shutil.which("c++") or not shutil.which("ninja"), reason="no C++ compiler or no ninja here"
)


def compiler(folder: Path, what: str) -> Path:
    """A compiler that does this with the launcher's source, and all else as the system's."""
    made = folder / "c++"
    made.write_text(f'#!/bin/sh\ncase "$*" in *native.cpp*) ;; *) exec c++ "$@" ;; esac\n{what}\n')
    made.chmod(0o755)
    return made


@BUILDS
def test_what_a_compiler_refuses_is_tried_again_only_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each process would wait for it otherwise. A make that runs us has a job server, which is not ninja's."""
    monkeypatch.setenv("MAKEFLAGS", " -j2 --jobserver-auth=98,99")
    calls = tmp_path / "calls"
    refuses = f"echo >> {calls}; echo 'native.cpp:1: error: no such header' >&2; exit 1"
    monkeypatch.setenv("CXX", str(compiler(tmp_path, refuses)))

    def tries() -> int:
        before = len(calls.read_text()) if calls.exists() else 0
        said = r"\(native.cpp:1: error: no such header\): install .*, then set STEPSCOPE_NATIVE=1, which tries again$"
        with pytest.raises(InputError, match=said):
            native.build()
        return len(calls.read_text()) - before

    assert tries() > 0
    assert tries() == 0
    monkeypatch.setenv(NATIVE_LAUNCHER, "1")
    assert tries() > 0
    (place,) = (tmp_path / "caches").iterdir()
    assert {file.suffix for file in place.iterdir()} == {".lock", ".failed"}, "nothing of a build stays"


@BUILDS
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("kill -9 $$", r"\(.*\): the next process tries again"),
        ("echo 'native.o: error: No space left on device' >&2; exit 1", "No space left on device.*: the next process"),
        ("sleep 60", r"\(it took more than 3 s\): the next process tries again"),
    ],
)
def test_what_passes_is_tried_again(what: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_PATIENCE_S", 3.0 if "sleep" in what else 60.0)
    monkeypatch.setenv("CXX", str(compiler(tmp_path, what)))
    with pytest.raises(InputError, match=said):
        native.build()
    (place,) = (tmp_path / "caches").iterdir()
    assert {file.suffix for file in place.iterdir()} == {".lock"}


def test_half_a_library_is_none(monkeypatch: pytest.MonkeyPatch):
    """It would end the process that loads it."""
    path = library_of(b"whole")
    assert native.build() == path
    path.write_bytes(b"who")
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(InputError, match="/no/compiler is not found"):
        native.build()


def library_of(content: bytes) -> Path:
    """A library as it was built."""
    path = native.library_path()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
    return path


@KNOWN
def test_what_cannot_be_loaded_is_named_with_its_remedy(capsys: pytest.CaptureFixture[str]):
    path = library_of(b"no library")
    assert native.extension.__wrapped__() is None
    assert f"remove {path}, and it is built again" in capsys.readouterr().err


def test_who_comes_while_another_process_builds_waits_for_it(capfd: pytest.CaptureFixture[str]):
    path = native.library_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    found: list[Path] = []
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(native.build()), daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        library_of(b"built meanwhile")
    waiting.join(10)
    assert found == [path]
    assert "another process builds the launcher in C++: waiting for it" in capfd.readouterr().err


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
