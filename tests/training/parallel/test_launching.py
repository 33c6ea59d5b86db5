"""Ranks that this machine starts, with the real thing: processes over gloo that die, hang and are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.strategies import STRATEGIES
from stepscope.training.parallel.launching import launch

ROOT = Path(__file__).parents[3]
CALL = "tests.training.parallel.called:call"


@pytest.fixture(autouse=True)
def _finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))


def children() -> list[int]:
    """The processes of ranks that live."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command, parent = (place / "cmdline").read_bytes(), (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"-m\0stepscope.training.parallel.launching" in command and parent[0] != "Z" and _of_this_test(place):
            found.append(int(place.name))
    return found


def _of_this_test(place: Path) -> bool:
    try:
        return f"LAUNCH_TEST={os.getpid()}".encode() in (place / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def gone_within(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not children():
            return True
        time.sleep(0.05)
    return False


def test_every_rank_s_value_comes_home_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    stages: list[tuple[int, str]] = []
    done = launch(CALL, {"word": "hé"}, ranks=2, device="cpu", tell=lambda rank, stage: stages.append((rank, stage)))
    found = [json.loads(value) for value in done.values]
    assert found == [{"sum": 3, "rank": rank, "said": "hé", "device": "cpu"} for rank in (0, 1)]
    assert done.threads == 1  # of two
    assert done.start_s is not None and done.start_s > 0
    assert [stage for rank, stage in stages if rank == 1] == ["meeting the others", "begin", "the lesson"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 of 2 failed during the lesson: ValueError: no more and a second line (tests/"),
        ("kill", "rank 1 of 2 was killed by SIGKILL during the lesson"),
        pytest.param("exit", "rank 1 of 2 ended with code 7 during the lesson: the last line", marks=pytest.mark.long),
        ("hang", "ranks 0, 1 hang during the lesson: no rank came on in 3 seconds, and all are ended"),
    ],
)
def test_the_rank_that_fails_is_named(how: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_TEST", str(os.getpid()))
    with pytest.raises(StepscopeError) as caught:
        launch(CALL, {"at": 1, "how": how}, ranks=2, device="cpu", silent_s=3)
    assert str(caught.value).startswith(said)
    assert gone_within(5)


def test_what_the_user_can_mend_is_wrong_input():
    with pytest.raises(InputError, match="this cannot be: say another"):
        launch(CALL, {"at": 0, "how": "refuse"}, ranks=2, device="cpu")
    with pytest.raises(InputError, match="--ranks is 0"):
        launch(CALL, {}, ranks=0, device="cpu")
    with pytest.raises(InputError, match="cuda"):
        launch(CALL, {}, ranks=999, device="cuda")
    with pytest.raises(InputError, match="--ranks 999999 are as many processes"):
        launch(CALL, {}, ranks=999999, device="cpu")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_no_rank_outlives_its_starter(number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_TEST", str(os.getpid()))
    code = (
        "from stepscope.training.parallel.launching import launch\n"
        "def tell(rank, stage):\n"
        "    print(stage, flush=True)\n"
        f"launch({CALL!r}, {{'at': 1, 'how': 'hang'}}, ranks=2, device='cpu', tell=tell)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert starter.stdout is not None
    while b"lesson" not in (line := starter.stdout.readline()):
        assert line, "the ranks ended before they began"
    assert len(children()) == 2
    starter.send_signal(number)
    starter.wait(20)
    assert gone_within(10)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", [name for name, record in STRATEGIES.items() if record.captured])
def test_a_shared_step_that_is_replayed_trains_as_it_does_otherwise(strategy: str):
    done = launch("tests.training.parallel.called:losses", {"strategy": strategy}, ranks=2, device="cuda")
    first, second = (json.loads(value) for value in done.values)
    assert first["step"] == pytest.approx(first["none"], rel=1e-4)
    assert second["step"] == pytest.approx(second["none"], rel=1e-4)
    assert first["none"][-1] != pytest.approx(first["none"][3], rel=1e-3)  # it trains
    assert first["none"] != second["none"]  # each on a part of its own
