"""Tables at the width of a screen: what is shortened can still be told apart."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from stepscope.core.answer import table_of
from stepscope.rendering.terminal import CleanConsole, fitted, make_table

GEMMS = [f"sm80_xmma_gemm_f32f32_f32f32_f32_{layout}_n_tilesize{tile}_cublas" for layout in ("tn", "nt") for tile in
         ("64x64x8", "128x64x8", "128x128x8")]  # fmt: skip


def shown(names: Sequence[str], width: int) -> list[str]:
    """The first column of a table at that width."""
    console = CleanConsole(width=width, color_system=None)
    table = make_table(table_of("kernel", ("calls", "d"), rows=[(name, 12) for name in names]))
    pieces = fitted(table, console)
    assert isinstance(pieces[0], Table)
    with console.capture() as printed:
        console.print(pieces[0])
    return [line.rsplit(None, 1)[0].strip() for line in printed.get().splitlines() if line.rstrip().endswith("12")]


@pytest.mark.parametrize("width", [36, 40, 60])
def test_kernels_that_differ_in_the_middle_are_told_apart(width: int):
    assert len(set(shown(GEMMS, width))) == len(GEMMS)
    assert shown(GEMMS[:1] * 2, width) == [shown(GEMMS[:1], width)[0]] * 2


def test_the_cut_shows_where_two_differ():
    found = shown([GEMMS[0], GEMMS[3]], 40)
    assert found == ["sm80_xmma_…tn_n_tile…x8_cublas", "sm80_xmma_…nt_n_tile…x8_cublas"]


@given(st.lists(st.text("ab", min_size=60, max_size=90), unique=True, max_size=6))
def test_names_without_spaces_are_told_apart(names: list[str]):
    assert len(set(shown(names, 40))) == len(names)


def test_names_that_look_the_same_once_they_are_cleaned_are_numbered():
    assert shown(["a\nb", "a b", "[bold]a b", "a\nb"], 80) == ["a b", "a b (2)", "[bold]a b", "a b"]
    assert shown(["x" * 500, "x" * 499 + "\u202e", "x" * 600], 500)[2].endswith(" (2)")
