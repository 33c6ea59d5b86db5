"""A long table is written as rich would write it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.answer import table_of
from stepscope.rendering import terminal as plain
from stepscope.rendering.terminal import make_table, plain_part

texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Cc")), max_size=12)


figures = st.one_of(st.none(), st.floats(-1e6, 1e6))


def both_ways(table: object, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The text as a long table, and as rich writes it."""
    with monkeypatch.context() as patched:
        patched.setattr(plain, "MANY_ROWS", 1)
        quick = plain_part(make_table(table))  # type: ignore[arg-type]
    return quick, plain_part(make_table(table))  # type: ignore[arg-type]


@settings(max_examples=200)
@given(
    heads=st.lists(st.sampled_from(["cell", "step ms", "findings", "x"]), min_size=2, max_size=4),
    rows=st.lists(st.tuples(texts, figures, texts, st.integers(0, 10**7)), min_size=1, max_size=8),
    rules=st.sets(st.integers(1, 7), max_size=2),
)  # fmt: skip
def test_a_long_table_is_that_of_rich(heads: list[str], rows: list[tuple[object, ...]], rules: set[int]):
    columns = [(heads[i % len(heads)], unit) for i, unit in enumerate(("", ".2f", "", ","))]
    table = table_of(*columns, rows=rows, rules=tuple(sorted(rule for rule in rules if rule < len(rows))))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as monkeypatch:
        quick, by_rich = both_ways(table, monkeypatch)
    assert quick == by_rich


def test_thousands_of_rows_keep_their_columns():
    table = table_of(
        "run", ("step", "s"), "tag", rows=[(f"run {i}", i / 7, "fast" if i % 2 else None) for i in range(3000)]
    )
    lines = plain_part(make_table(table)).splitlines()
    assert len(lines) == 3002 and lines[2].startswith(" run 0") and lines[3].endswith("fast")
