"""The order of a launch's tiles: each once, heads in groups, heavy tiles of a group before its light ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import triton
import triton.language as tl

from stepscope.kernels.flash.configuration import BackwardConfiguration, ForwardConfiguration, tiles
from stepscope.kernels.flash.launch import _NUMBERS_TOGETHER
from stepscope.kernels.flash.tiles import turn_of
from stepscope.kernels.launching import heads_together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
a_few = st.integers(1, 9)


@triton.jit(do_not_specialize=["tiles", "batch_heads", "together"])
def note_places(HEADS, TILES, tiles, batch_heads, together, ROWS_FIRST: tl.constexpr):  # noqa: PLR0917  (a kernel)
    program = tl.program_id(0)
    head, tile = turn_of(program, tiles, batch_heads, together, ROWS_FIRST)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(HEADS + program, head)
    tl.store(TILES + program, tile)


@settings(max_examples=30, deadline=None)
@given(tiles=a_few, batch_heads=a_few, together=a_few, rows_first=st.booleans())
def test_each_tile_of_each_head_comes_once(tiles: int, batch_heads: int, together: int, rows_first: bool):
    heads, places = (torch.full((tiles * batch_heads,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    note_places[tiles * batch_heads,](heads, places, tiles, batch_heads, together, rows_first)  # pyright: ignore[reportArgumentType]
    found = list(zip(heads.tolist(), places.tolist(), strict=True))
    assert sorted(found) == [(head, tile) for head in range(batch_heads) for tile in range(tiles)]
    if rows_first:
        assert found == sorted(found)
    else:  # group by group, and in each tile by tile
        assert found == sorted(found, key=lambda place: (place[0] // together, place[1], place[0]))


@pytest.mark.parametrize(
    ("rows", "columns", "batch_heads", "together"),
    [
        (1024, 64, 48, 48),  # 64 would fit: one group
        (1024, 64, 80, 40),  # two of 40, not 64 and 16
        (1024, 64, 480, 60),
        (2048, 128, 16, 16),
        (1 << 20, 128, 16, 1),
        (1, 16, 100_000, 100_000),
    ],
)
def test_groups_stay_in_the_cache_and_are_even(rows: int, columns: int, batch_heads: int, together: int):
    assert heads_together(rows, columns, batch_heads, numbers=_NUMBERS_TOGETHER) == together


@given(
    rows=st.integers(1, 1 << 20), columns=st.sampled_from([16, 64, 128, 256]), batch_heads=st.integers(1, 1 << 16),
)  # fmt: skip
def test_no_group_is_larger_than_fits_and_none_is_empty(rows: int, columns: int, batch_heads: int):
    together = heads_together(rows, columns, batch_heads, numbers=_NUMBERS_TOGETHER)
    assert 1 <= together <= batch_heads
    assert together == 1 or together * rows * columns <= _NUMBERS_TOGETHER


def test_a_configuration_says_its_order():
    some = tiles(64, 64, 4, 2)
    assert str(ForwardConfiguration(tiles=some, rows_first=False)) == "64x64 w4 s2 tma heads-first"
    assert str(BackwardConfiguration(keys=some, queries=some, rows_first=False)).endswith("tma heads-first")
    assert "heads-first" not in str(BackwardConfiguration(keys=some, queries=some))
