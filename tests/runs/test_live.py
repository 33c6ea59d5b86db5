"""The figures of a watched script in words."""

import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from stepscope.runs.live import (
    LIVE_FILE,
    LiveFigures,
    is_late,
    is_over,
    live_line,
    named_figures,
    process_began,
    read_live,
    write_live,
)

LIVE = LiveFigures(
    run="20261128T120000.000-gpt", written="2026-11-28T12:00:00+00:00", stage="running", step=12_345, idle_s=0.02,
    step_s=0.05, samples_per_s=160.0, tokens_per_s=163_840.0, mfu=0.412, data_share=0.031, memory_bytes=3 << 30,
    memory_left_bytes=77 << 30, steps_left=7200, steps_of="the Trainer", world_size=2, host=socket.gethostname(),
    pid=os.getpid(), pid_began=process_began(os.getpid()) or "",
)  # fmt: skip


def written(seconds_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()


def test_one_line_has_what_is_known():
    assert live_line(LIVE) == (
        "step 12,345, 7,200 steps and 6 min 0 s to go, 50 ms a step, 163,840 tokens/s, MFU 41.2 %, "
        "waits for data 3.1 %, memory 3.00 GiB (77.00 GiB left), rank 0 of 2"
    )
    least = LiveFigures(run="r", written="", stage="measuring", step=3, idle_s=90.0)
    assert live_line(least) == "step 3 (measuring), none ended for 1 min 30 s"


def test_a_table_names_each_figure():
    assert dict(named_figures(LIVE)) == {
        "step": "12,345", "to go": "7,200 steps and 6 min 0 s, by the Trainer", "a step": "50 ms",
        "tokens/s": "163,840",
        "samples/s": "160", "MFU": "41.2 %", "waits for data": "3.1 %", "memory": "3.00 GiB",
        "memory left": "77.00 GiB", "figures of": "rank 0 of 2",
    }  # fmt: skip


def test_a_process_that_is_gone_writes_no_more():
    gone = msgspec.structs.replace(LIVE, written=written(200), pid_began="1")
    assert is_over(gone) == "it stopped writing 3 min 20 s ago at step 12,345, and its process is gone"
    elsewhere = msgspec.structs.replace(gone, host="another machine")
    assert is_over(elsewhere) is None and is_late(elsewhere) == "nothing was written for 3 min 20 s"
    assert is_over(LIVE) is None and is_late(msgspec.structs.replace(LIVE, written=written(1))) is None
    assert is_over(msgspec.structs.replace(LIVE, stage="over")) == "it is over, after 12,345 steps"


def test_what_is_written_is_read_and_what_is_damaged_is_not(tmp_path: Path):
    write_live(LIVE, tmp_path)
    assert read_live(tmp_path) == LIVE and [file.name for file in tmp_path.iterdir()] == [LIVE_FILE]
    (tmp_path / LIVE_FILE).write_text('{"run": 3')
    assert read_live(tmp_path) is None
