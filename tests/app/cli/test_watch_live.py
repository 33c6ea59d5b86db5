"""What a watched script does now: in the run's folder, in a second terminal, and in the script's own."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tqdm import tqdm

from stepscope.app.verbs import watch
from stepscope.runs.live import LIVE_FILE, LiveFigures, read_live, write_live
from tests.command import stepscope

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters())
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(int(sys.argv[1]), 8)), batch_size=4, num_workers=1)):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.004)
    if step % 25 == 0:
        print("loss", step, "of a script that prints", end="")
        print("!")
"""
COMMAND = (sys.executable, "-m", "stepscope")


def live_of(runs: Path, seconds: float, stage: str) -> LiveFigures:
    """The live figures of the one run, as soon as they are of this stage."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for file in runs.glob(f"*/{LIVE_FILE}"):
            if (live := read_live(file.parent)) is not None and live.stage == stage and live.data_share is not None:
                return live
        time.sleep(0.1)
    raise AssertionError(f"no figures of stage {stage} in {runs}")


@pytest.mark.slow
def test_two_terminals_show_what_a_script_does_until_it_is_killed(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process, terminal = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [*COMMAND, "watch", "--steps", "2:6", "--", "train.py", "400000"])
    try:
        live = live_of(tmp_path / "runs", 60, "running")
        assert live.pid == process and live.step > 10 and live.steps_left is None
        assert live.step_s is not None and 0.004 < live.step_s < 0.1
        assert live.samples_per_s == pytest.approx(4 / live.step_s)
        assert live.data_share is not None and 0 < live.data_share < 0.9
        assert live.memory_bytes is not None and live.memory_left_bytes is not None
        words = [*COMMAND, "show", "last", "--live", "--json"]
        follows = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert follows.stdout is not None
        first, second = (json.loads(follows.stdout.readline())["step"] for _ in range(2))
        assert live.step <= first < second
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert follows.wait(30) == 0
    done = stepscope("show", "last", "--live", cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"it stopped writing \d+ s ago at step [\d,]+, and its process is gone: this is what", done.stderr)
    assert "4 steps of one process measured" in done.stdout
    rank = tmp_path / "runs" / "20991231T000000.000-of-another-rank"
    rank.mkdir()
    (rank / "run.json").write_text("{}")
    assert stepscope("show", "last", "--live", cwd=tmp_path).stdout == done.stdout

    written = b""
    while select.select([terminal], [], [], 1)[0]:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # Linux says so where the process has ended
            break
    lines = written.decode().split("\r\n")
    renewed = [int(step.replace(",", "")) for step in re.findall(r"\r\x1b\[2Kstep ([\d,]+),", written.decode())]
    assert len(renewed) >= 2 and renewed == sorted(renewed)
    stays = [line.rpartition("\r\x1b[2K")[2] for line in lines[:-1]]
    printed = [f"loss {step} of a script that prints!" for step in range(0, 25 * len(lines), 25)]
    scripts = [line for line in stays if "loss" in line]
    assert len(scripts) >= 3 and scripts == printed[: len(scripts)]
    assert len(stays) == len(scripts) + 1 and any(line.startswith("stepscope: measured: ") for line in stays)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Onto(Terminal):
    """Another stream onto the same terminal."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def write(self, text: str) -> int:
        return self.terminal.write(text)


def test_where_the_script_draws_a_line_comes_each_half_minute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    figures = LiveFigures(run="r", written="2026-11-28T12:00:00Z", stage="running", step=7, idle_s=0.0, step_s=0.5)
    terminal = Terminal()
    line = watch._LiveLine(terminal)
    with tqdm(total=3, file=io.StringIO()):
        line.show(figures)
        assert terminal.getvalue() == ""
        monkeypatch.setattr(watch, "_PLAIN_EVERY_S", 0.0)
        line.show(figures)
    assert terminal.getvalue() == "\r\x1b[2Kstepscope: step 7, 500 ms a step\n"


def test_a_line_stands_alone_above_the_scripts_bar(monkeypatch: pytest.MonkeyPatch):
    both = io.StringIO()
    monkeypatch.setattr("sys.stderr", both)
    with tqdm(total=3, file=both, ascii=True, ncols=40) as bar:
        bar.update(1)
        watch._LiveLine(both).say("measured")
    before, _, after = both.getvalue().partition("stepscope: measured\n")
    assert before.endswith("\r") and not before.rpartition("\r")[0].rpartition("\r")[2].strip(), "the bar is wiped"
    assert "/3 [" in after, "and drawn again below"


def test_a_run_without_live_figures_is_shown_as_it_is():
    done = stepscope("show", next(Path("results/cpu/first").glob("*tiny-b4-s128-fp32*")), "--live")
    assert "no live figures are kept of this run" in done.stderr and "tiny" in done.stdout


def test_nothing_of_the_scripts_last_line_is_wiped_away_or_continued(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "rich.live", raising=False)  # Tests of sweeps import it: a script that may draw.
    figures = LiveFigures(run="r", written="2026-11-28T12:00:00Z", stage="running", step=7, idle_s=0.0, step_s=0.5)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", Onto(terminal))
    line = watch._LiveLine(terminal)
    try:
        print("dots ..", end="")
        line.show(figures)
        assert terminal.getvalue() == "dots .."
        line.say("measured")
        print("\x1b[32mgreen\x1b[0m")
        line.show(msgspec.structs.replace(figures, step=8))
        print("5 %\r10 %", end="")
        line.say("again")
        print("\r100 %", end="")
    finally:
        line.close()
    shown = terminal.getvalue().partition("dots ..")[2]
    wiped = "\r\x1b[2K"
    assert shown == (
        f"\nstepscope: measured\n\x1b[32mgreen\x1b[0m\n{wiped}step 8, 500 ms a step{wiped}"
        f"5 %\r10 %{wiped}stepscope: again\n\r100 %\n"
    )


def test_a_signal_handler_may_print_while_the_script_prints(monkeypatch: pytest.MonkeyPatch):
    class Interrupted(Terminal):
        def write(self, text: str) -> int:
            if text == "loss":
                print("handler")
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Interrupted())
    line = watch._LiveLine(Terminal())
    print("loss")
    line.close()
    assert sys.stdout.getvalue() == "handler\nloss\n"  # type: ignore[attr-defined]


def test_live_figures_survive_a_disk_that_is_full_for_a_while(tmp_path: Path):
    figures = LiveFigures(run="r", written="2026-11-28T12:00:00Z", stage="running", step=7, idle_s=0.0)
    with pytest.raises(OSError):
        write_live(figures, tmp_path / "gone")
    write_live(figures, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [LIVE_FILE]
