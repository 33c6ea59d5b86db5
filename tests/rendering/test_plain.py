"""Text in a pipe is what rich would lay out, which takes longer to import than most answers take to write."""

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

from stepscope.core.answer import PROSE, Answer, Finding, Line, table_of
from stepscope.rendering.cells import WIDTH, plain_text
from stepscope.rendering.terminal import CleanConsole, natural_width, parts_of, render_answer

texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Cc")), max_size=12)
figures = st.one_of(st.none(), st.floats(-1e6, 1e6))
words = st.lists(st.one_of(st.text("ab— 漢", max_size=30), st.text("xy", max_size=150)), max_size=9)
sentences = words.map(" ".join)


def by_rich(answer: Answer) -> str:
    """The answer as rich lays it out: a table as wide as it is, text at a fixed width."""
    text = ""
    for part in parts_of(render_answer(answer)):
        console = CleanConsole(width=WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
        if isinstance(part, Table):
            console.width = max(WIDTH, natural_width(part, console))
        console.print(part)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        text += "\n".join(lines).strip("\n") + "\n"
    return text


@settings(max_examples=200, deadline=None)
@given(
    heads=st.lists(st.sampled_from(["cell", "step ms", "findings", "x"]), min_size=5, max_size=5),
    rows=st.lists(st.tuples(texts, figures, texts, st.integers(0, 10**7), sentences), max_size=8),
    rules=st.sets(st.integers(0, 7), max_size=2),
    said=sentences,
)  # fmt: skip
def test_an_answer_in_a_pipe_is_that_of_rich(
    heads: list[str], rows: list[tuple[object, ...]], rules: set[int], said: str
):
    columns = [*zip(heads, ("", ".2f", "", ",", PROSE), strict=True)]
    table = table_of(*columns, rows=rows, title=said, notes=(Line(said),), rules=tuple(rules))  # type: ignore[arg-type]
    found = Finding(kind="odd", severity="note", sentence=said, remedy=said)
    answer = Answer(study="x", question=said, tables=(table,), findings=(found,), checked=True, asides=("", said))
    assert plain_text(answer) == by_rich(answer)


def test_thousands_of_rows_keep_their_columns():
    rows = [(f"run {i}", i / 7, "fast" if i % 2 else None) for i in range(3000)]
    lines = plain_text(Answer(study="x", question="", tables=(table_of("run", ("step", "s"), "tag", rows=rows),)))
    lines = lines.splitlines()
    assert len(lines) == 3002 and lines[2].startswith(" run 0") and lines[3].endswith("fast")
