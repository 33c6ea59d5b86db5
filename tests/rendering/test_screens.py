"""What the verbs print on screens of 60, 80 and 120 columns and into a pipe, from stored results.

STEPSCOPE_UPDATE_GOLDEN=1 writes tests/golden/screens anew.
"""

import io
import re
import shlex
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from stepscope.app.cli.app import app
from stepscope.app.cli.output import present
from stepscope.core.answer import Answer, Line
from stepscope.core.answer import Table as Figures
from stepscope.rendering.cells import plain_text
from stepscope.rendering.terminal import NARROWEST, CleanConsole, fitted
from tests.shown import check_golden

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden" / "screens"
WIDTHS = (60, 80, 120)
COMMANDS = {
    "show": "show xl-b4-s512-fp32 --runs results/h200/limit-80GiB",
    "ls": "ls results/h200/compile",
    "table": "table results/h200/best --rows model,compile --value forward,backward,optimizer,step,mfu_datasheet",
    "trace": "trace tests/data/kineto_train.json.gz",
    "trace-against": "trace tests/data/kineto_train.json.gz --against tests/data/kineto_inference_bf16.json.gz",
    "memory": "memory small-b4-s512-bf16-train --runs results/h200/memory-recorded",
    "fit": "fit --model xl --seq-len 1024 --memory 80GiB",
    "fit-peak": "fit --model xl",
    "fit-tensors": "fit --model xl --seq-len 1024 --tensors",
    "fit-against": "fit --against results/h200/limit-80GiB",
    "models": "models",
    "device": "device --from results/h200/device.json",
    "kernel": "kernel sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4",
    "study-kernels": "study kernels --from results/h200/kernels --where model=small --only b,c,h",
    "study-compile": "study compile --from results/h200/compile --only costs",
    "study-speed": "study speed --from results/h200/precision-speed --only amdahl",
    "study-attention": "study attention --from results/h200/attention/seeds.json --only cs336-2025",
    "study-attention-step": "study attention-step --from results/h200/attention-steps --only medians",
    "study-attention-gate": "study attention-gate --from results/h200/attention/gate.json",
    "study-softmax": "study softmax --from results/cpu/precision/softmax.json --only error",
    "study-quality": "study quality --from results/cpu/precision/quality.json --only runs",
}


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(command: str, width: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a verb prints on a screen so wide, or into a pipe."""
    stream = io.StringIO() if width is None else Screen()
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("sys.stdout", stream)
        for name, value in {"COLUMNS": str(width or 80), "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        app(shlex.split(command), standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def words_of(text: str) -> set[str]:
    """The words, without sparklines: a pipe has none, and a narrow screen neither."""
    prose = re.sub(r"^Every measured step, ms\n(?:.+\n)+", "", text, flags=re.MULTILINE)
    return set(re.sub("─+", " ", prose).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_verb_fits_the_screen_and_breaks_no_word(name: str, monkeypatch: pytest.MonkeyPatch):
    piped = printed(COMMANDS[name], None, monkeypatch)
    shown = {width: printed(COMMANDS[name], width, monkeypatch) for width in WIDTHS}
    whole = words_of(piped)
    for width, text in shown.items():
        assert max(map(len, text.splitlines())) <= width
        longer = " ".join(word for word in whole if len(word) > width)  # in a sentence: a path, a kernel's name
        broken = {word for word in words_of(text) - whole if "…" not in word and word not in longer}
        assert not broken, f"at {width}: {sorted(broken)}"
        if name not in ("ls", "trace-against"):  # whose columns give way; whose kernels are cut on one line
            lost = {word for word in whole - words_of(text) if len(word) <= NARROWEST and "…" not in word}
            assert not lost, f"at {width}: {sorted(lost)}"
    parts = {"a pipe": piped, **{f"{width} columns": text for width, text in shown.items()}}
    golden = "".join(f"==== {where}: stepscope {COMMANDS[name]}\n{text}" for where, text in parts.items())
    file = GOLDEN / f"{name}.txt"
    check_golden(golden, file)


def test_a_run_is_one_line_of_a_list(monkeypatch: pytest.MonkeyPatch):
    runs = len(list((ROOT / "results/h200/compile").glob("*/run.json")))
    for width in (40, *WIDTHS, None):
        lines = [
            line for line in printed(COMMANDS["ls"], width, monkeypatch).splitlines() if re.match(r" ?\d{8}T", line)
        ]
        assert len(lines) == runs


def test_a_terminal_gets_colours_and_no_control_character_of_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", screen := Screen())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = Figures(title="a\x1b[2J", columns=("name", "ms"), rows=(("b\x1b[2J", 1.5),), notes=(Line("c", "good"),))
    present(Answer(study="s", question="asked", tables=(table,)))
    shown = screen.getvalue()
    assert "\x1b[1masked\x1b[0m" in shown and "\x1b[1;32mc\x1b[0m" in shown
    assert "\x1b[2J" not in shown and shown.count(r"\u001b[2J") == 2
    assert r"\u001b[1" not in shown


def lines_of(table: Table, width: int) -> list[list[str]]:
    console = CleanConsole(width=width, file=io.StringIO())
    found = []
    for part in fitted(table, console):
        with console.capture() as capture:
            console.print(part)
        found.append([line.rstrip() for line in capture.get().splitlines() if line.strip()])
    return found


def grid(*heads: str, figures_from: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i >= figures_from else "left")
    return table


def test_text_folds_first_then_names_are_shortened_then_columns_go_below():
    table = grid("name", "what it is", "ms", "GiB", figures_from=2)
    table.add_row("blocks.0.attention.scores", "a product of two matrices", "12.345 ms", "1,234.50 GiB")
    ((_, only),) = lines_of(table, 200)
    assert only == "blocks.0.attention.scores a product of two matrices 12.345 ms 1,234.50 GiB"
    (folded,) = lines_of(table, 60)
    assert len(folded) == 4 and folded[1].startswith("blocks.0.attention.scores a ")
    long = grid("name", "ms", figures_from=1)
    long.add_row("x" * 50 + "end", "12.3")
    ((_, shortened),) = lines_of(long, 40)
    assert re.fullmatch(r"x+…x+end 12\.3", shortened) and len(shortened) == 40
    wide = grid("model", "seq", *(f"figure_{i}" for i in range(6)), figures_from=1)
    for seq in ("128", "256"):
        wide.add_row("small", seq, *(f"{i}00.00" for i in range(6)))
    parts = lines_of(wide, 40)
    assert len(parts) == 2 and all(line.startswith(("model", "small 128", "small 256")) for p in parts for line in p)
    assert [part[1].split()[2:] for part in parts] == [
        [f"{i}00.00" for i in range(3)],
        [f"{i}00.00" for i in range(3, 6)],
    ]


def test_a_line_keeps_its_first_column_and_drops_the_last():
    table = Table(box=None, pad_edge=False)
    for head in ("run", "cell", "status", "findings"):
        table.add_column(head, no_wrap=True)
    table.add_row("20261121T041327.986", "small-b4-s512-fp32-train-1234abcd", Text("done"), "launch-bound, low-rate")
    ((head, row),) = lines_of(table, 64)
    assert head.split() == ["run", "cell", "status"] and row.split()[0] == "20261121T041327.986" and "…" not in row
    ((_, row),) = lines_of(table, 60)
    assert row.split()[2] == "done" and "…" in row.split()[1]


def test_a_pipe_gets_no_colours_even_where_the_environment_forces_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    answer = Answer(study="demo", question="Is it plain?", lead=(Line("It is.", "strong"),), tables=())
    assert plain_text(answer) == "It is.\n"
