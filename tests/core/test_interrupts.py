"""Signals to real processes: the exit code of the signal, one line at most, and what was measured is kept."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.core import interrupts
from stepscope.core.run_directory import load_runs
from tests.app.cli.test_cli import run_until
from tests.conftest import at_length
from tests.hostile import signals
from tests.hostile.campaign import as_in_a_terminal, wait_until_it_answers
from tests.hostile.signals import CODES, QUICK

pytestmark = pytest.mark.slow

SENT = [pytest.param(number, id=number.name) for number in CODES]


@pytest.fixture(autouse=True)
def _in_a_terminal() -> Iterator[None]:
    """Commands inherit what the tests' own process ignores: SIGHUP under nohup."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)}
    as_in_a_terminal()
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("sent", "delay_s"),
    [
        *((signal.SIGINT, delay_s) for delay_s in (0.0, 0.4, 1.3)),
        *at_length((signal.SIGINT, 0.1), (signal.SIGINT, 0.8)),
    ]
    + [
        case
        for sent in CODES if sent != signal.SIGINT
        for case in [(sent, 0.4), *at_length(*((sent, delay_s) for delay_s in (0.0, 0.1, 0.8, 1.3)))]
    ],
    ids=str,
)  # fmt: skip
def test_a_signal_while_the_command_and_torch_are_imported(sent: signal.Signals, delay_s: float, tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "run", *QUICK, "--runs", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until_it_answers(process.pid)
    time.sleep(delay_s)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    said = [line for line in stderr.splitlines() if not line.startswith("stepscope: build tiny")]
    assert (process.returncode, said) in (
        (CODES[sent], ["stepscope: interrupted"]),
        (CODES[sent], ["stepscope: warm-up", "stepscope: interrupted"]),
    )


def test_signals_at_random_moments():
    assert signals.main(["--signals", "4", "--span", "4", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    "sent", [SENT[0], *(pytest.param(*sent.values, marks=pytest.mark.long, id=sent.id) for sent in SENT[1:])]
)
def test_what_was_measured_is_kept_however_often_it_is_asked(sent: signal.Signals, tmp_path: Path):
    process = run_until(("measure",), *QUICK, "--steps", "10000000", "--runs", str(tmp_path))
    time.sleep(0.5)
    for _ in range(5):
        process.send_signal(sent)
        time.sleep(0.01)
    stdout, stderr = told(process, timeout=60)
    assert process.returncode == CODES[sent] and "interrupted (measure" in stdout
    assert stderr.splitlines()[-1] == "stepscope: interrupted" and "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path])
    assert run.status == "interrupted" and run.samples["step"].count >= 1 and run.summary["step_median_s"]


def told(process: "subprocess.Popen[str]", timeout: float) -> tuple[str, str]:
    """What it printed by its end; one that does not end is killed, and nothing of it stays behind."""
    try:
        return process.communicate(timeout=timeout)
    finally:
        process.kill()


def test_a_signal_that_another_thread_receives_ends_a_wait():
    """As of a pool's thread: the main thread's own system call goes on."""

    def receive() -> None:
        time.sleep(0.3)  # the main thread waits by then
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    waited_for = subprocess.Popen(["sleep", "60"])
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.raising():
            threading.Thread(target=receive).start()
            interrupts.awaited(waited_for.wait)
        assert time.monotonic() - began < 30
    finally:
        waited_for.kill()
    assert interrupts.awaited(waited_for.wait) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        interrupts.awaited(lambda: subprocess.run(["sleep", "60"], timeout=0.1, check=False))


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path):
    """nohup, and a script's jobs in the background."""
    code = (
        "import os, signal, sys\nfor s in (1, 2): signal.signal(s, signal.SIG_IGN)\nos.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, "-m", "stepscope", "run", *QUICK, "--no-profile",
         "--runs", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until_it_answers(process.pid)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    _, stderr = told(process, timeout=120)
    assert process.returncode == 0 and "interrupted" not in stderr


def in_a_process(code: str, *, sent: int = signal.SIGINT) -> subprocess.CompletedProcess[str]:
    """Code that sends signals to itself by `send()`, with the handlers installed."""
    head = f"import os, sys\nfrom stepscope.core import interrupts\nsend = lambda: os.kill(os.getpid(), {int(sent)})\n"
    return subprocess.run(
        [sys.executable, "-c", head + "interrupts.install()\n" + textwrap.dedent(code)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_an_interrupt_that_python_drops_is_raised_again():
    done = in_a_process(
        """
        import time
        class Dropped:
            def __del__(self):
                send()
                for _ in range(10): pass
        try:
            with interrupts.keeping():
                Dropped()
                time.sleep(10)
        except KeyboardInterrupt:
            print("kept")
        sys.exit(interrupts.exit_code(0))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "kept\n", "")


def test_an_interrupt_that_a_library_drops_is_found_at_the_next_step():
    done = in_a_process(
        """
        with interrupts.keeping():
            try:
                send()
                for _ in range(10): pass
            except BaseException:
                pass
            try:
                interrupts.check()
            except KeyboardInterrupt:
                print("kept")
        """
    )
    assert done.stdout == "kept\n"


def test_an_interrupt_during_an_import_ends_the_process_or_waits_for_the_import_to_end(tmp_path: Path):
    (tmp_path / "heavy.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.2)\nprint('imported')\n"
    )
    head = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    at_once = in_a_process(head + "with interrupts.raising():\n    import heavy\n")
    assert (at_once.returncode, at_once.stdout, at_once.stderr) == (143, "", "stepscope: interrupted\n")
    later = in_a_process(
        head + "import time\ntry:\n    with interrupts.keeping():\n        import heavy\n        time.sleep(10)\n"
        "except KeyboardInterrupt:\n    print('kept')\n    sys.exit(interrupts.exit_code(0))\n"
    )
    assert (later.returncode, later.stdout, later.stderr) == (143, "imported\nkept\n", "")


def test_what_follows_at_once_is_the_same_request_and_a_later_one_ends_the_process():
    done = in_a_process(
        """
        import time
        with interrupts.raising():
            try:
                send()
                time.sleep(10)
            except KeyboardInterrupt:
                send()
                time.sleep(0)
                print("told what was measured", flush=True)
                time.sleep(0.6)
                send()
                time.sleep(10)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "told what was measured\n", "stepscope: interrupted\n")


def test_a_signal_after_the_last_line_changes_neither_the_code_nor_the_words():
    """Python restores the system's answers while it takes itself down, and runs finalisers after that."""
    done = in_a_process(
        """
        class Late:
            def __del__(self, send=send):
                send()
        late = Late()
        with interrupts.notifying(lambda: None):
            send()
        interrupts.leaving()
        print("the last line", flush=True)
        sys.modules["kept until the end"] = late
        sys.exit(interrupts.exit_code(0))
        """,
        sent=signal.SIGTERM,
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "the last line\n", "")


def test_a_notebook_keeps_pythons_own_ctrl_c():
    """measure_step holds Ctrl-C back while it saves, and gives it back."""
    code = (
        "import os, signal\nfrom stepscope.core import interrupts\n"
        "try:\n    with interrupts.held():\n        os.kill(os.getpid(), 2)\n        print('saved')\n"
        "except KeyboardInterrupt:\n    print('raised after')\n"
        "assert signal.getsignal(2) is signal.default_int_handler and interrupts.received() is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "saved\nraised after\n"


def test_a_forked_helper_ends_as_any_process_does():
    done = in_a_process(
        """
        import time
        if (child := os.fork()) == 0:
            time.sleep(10)
        time.sleep(0.2)
        os.kill(child, 15)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interrupts.received())
        """
    )
    assert (done.stdout, done.stderr) == ("-15 None\n", "")
