"""What an nsys export says of kernels and copies beside their times: sizes, kinds of memory, grids, registers."""

import polars as pl

from stepscope.traces.readers.nsys_tables import NO_NUMBER
from stepscope.traces.table import DETAIL_SCHEMA

_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
DETAILS = ("bytes", "srcKind", "dstKind", *_GRID, *_BLOCK, "registersPerThread")
"""Columns of the tables of work that are read where they are there."""

_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
"""Kinds of memory by the numbers of the export, as Kineto writes them."""


def detail_columns(frame: pl.DataFrame) -> list[pl.Expr]:
    """The columns of DETAIL_SCHEMA; null where the export does not say them."""
    found = {
        "bytes": _number("bytes"),
        "memory": pl.concat_str(_memory("srcKind"), pl.lit(" -> "), _memory("dstKind")),
        "grid": _list(_GRID),
        "block": _list(_BLOCK),
        "registers": _number("registersPerThread"),
    }
    needed = {
        "bytes": ("bytes",),
        "memory": ("srcKind", "dstKind"),
        "grid": _GRID,
        "block": _BLOCK,
        "registers": ("registersPerThread",),
    }
    return [
        (found[name] if name in found and set(needed[name]) <= set(frame.columns) else pl.lit(None))
        .cast(dtype, strict=False)
        .alias(name)
        for name, dtype in DETAIL_SCHEMA.items()
    ]


def _number(column: str) -> pl.Expr:
    return pl.when(pl.col(column) >= 0).then(pl.col(column))


def _memory(column: str) -> pl.Expr:
    return pl.col(column).replace_strict(_MEMORY, default=None, return_dtype=pl.String)


def _list(columns: tuple[str, ...]) -> pl.Expr:
    told = pl.all_horizontal(pl.col(columns) != NO_NUMBER)
    return pl.when(told).then(pl.format("[{}, {}, {}]", *columns))
