"""What `stepscope fit` says while it looks: on a terminal, in a pipe, and where a signal ends it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory
from stepscope.app.verbs.fit import _predicted, _Told  # pyright: ignore[reportPrivateUsage]
from stepscope.core.units import format_bytes
from stepscope.engine.workload_options import ManyWorkloads
from tests.shown import check_golden, screen_of

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "screens" / "fit-interrupted.txt"
FACTORY = """
import time
import torch
from torch import nn

def make(batch_size=256, seq_len=64):
    if seq_len != 64:
        time.sleep(60)
    net = nn.Sequential(nn.Embedding(1000, 64), *[nn.Linear(64, 64) for _ in range(8)])
    return net, torch.randint(0, 1000, (batch_size, seq_len)), lambda output: output.square().mean()
"""
COMMAND = (sys.executable, "-m", "stepscope", "fit", "--module", "own.py:make", "--memory", "90MiB")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FACTORY)
    return tmp_path


def test_a_terminal_keeps_what_was_found_before_ctrl_c(folder: Path):
    """The search for the longest sequence does not end, and by then the peak and the plans are known."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"}
        os.execv(sys.executable, COMMAND)
    written, asked = b"", False
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
            if b"trying --seq-len" in written and not asked:
                os.write(terminal, b"\x03")
                asked = True
    except OSError:  # Linux says so where the other side is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    order = ("adamw-foreach", "loading own.py", "97,280 parameters", "The peak is", "trying --", "it fits with")
    found = [written.decode().find(part) for part in order]
    assert -1 not in found and found == sorted(found)
    assert re.search(r"trying --\S+ \S+ .*\(about \d+ s left\)", written.decode())
    check_golden(screen_of(written).replace("^C", ""), GOLDEN)


def test_a_pipe_gets_each_stage_once_and_a_sigterm_to_all_leaves_the_answer(folder: Path):
    command = [*COMMAND, "--json"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line.removeprefix("stepscope: ").rstrip())
            if "trying --seq-len" in line:
                os.killpg(process.pid, signal.SIGTERM)
        document = json.loads(process.stdout.read())
    assert process.returncode == 128 + signal.SIGTERM
    assert document["fits"] is False and document["plans"] and document["largest_batch"] is None
    assert len(said) == len(set(said))
    assert said[-2:] == ["interrupted by SIGTERM: this is what was known", "interrupted"]
    for plan in document["plans"]:
        assert any(line.startswith(f"it fits with {plan['options']}: ") for line in said)


def test_a_pipe_hears_each_row_of_a_table_and_the_largest_sizes_before_the_end():
    """Whatever is known is said when it is, and not only in the answer."""
    said: list[str] = []
    told = _Told(lambda stage: said.append(stage.name))
    budget = budget_of_memory(2**40)
    steps = ManyWorkloads({"model": ("tiny",), "seq_len": (64, 128)}).workloads()
    fits = [_predicted(step, [budget], search=False) for step in steps]
    for step, fit in zip(steps, fits, strict=True):
        told.ended(step, fit)
    assert [line.rpartition(": ")[2] for line in said] == [
        f"{format_bytes(fit.peak_bytes)}, fits into {budget.said}" for [fit] in fits
    ]
    told.know([msgspec.structs.replace(fits[0][0], longest_sequence=512)], several=False)
    told.know([msgspec.structs.replace(fits[0][0], longest_sequence=512, largest_batch=2048)], several=False)
    assert said[-2:] == ["the longest sequence that fits is 512", "the largest batch that fits is 2,048"]
    card = budget_of_device("4090")
    told.know([msgspec.structs.replace(fits[0][0], budget=card, longest_sequence=512)], several=True)
    assert said[-1] == "the longest sequence that fits into 23.46 GiB of NVIDIA GeForce RTX 4090 is 512"
