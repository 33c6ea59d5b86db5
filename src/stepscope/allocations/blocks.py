"""Finds what each block of the model saves for backward, and the gradients that it leaves."""

import re
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from stepscope.allocations.explain import Explained
from stepscope.core.range_names import FORWARD

_BLOCK = re.compile(r"((?:\w+\.)*?\w+\.\d+)(?:\.|$)")
CONTRIBUTORS = 5


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """A tensor that a block saves."""

    operator: str
    name: str
    module: str
    """The module's path inside the block."""
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    site: str


@dataclass(frozen=True, kw_only=True)
class SavedByBlock:
    """What one block of the model saves for backward; `alike` names blocks that save the same."""

    block: str
    saved_bytes: int
    saved_tensors: int
    gradient_bytes: int
    largest: tuple[Contributor, ...]
    alike: tuple[str, ...] = ()
    """The other blocks with the same figures."""


def block_of(path: str) -> str:
    """The block that a module or parameter belongs to: `blocks.3` of `blocks.3.attention.query`; '' outside of all."""
    found = _BLOCK.match(path)
    return found[1] if found else ""


def saved_by_block(explained: Explained) -> list[SavedByBlock]:
    """What each block saves, in the order of the model: what is alive when the last forward ends. Modules outside of
    all blocks stand under ''. Empty where modules are not known."""
    table = explained.allocations
    if not table.height or not (table["module"] != "").any():
        return []
    forwards = [span for span in explained.phases if span.name == FORWARD]
    saved = pl.col("category") == "saved for backward"
    if forwards:
        end = explained.snapshot.last_event_until(explained.snapshot.start_us + forwards[-1].end_us)
        saved_table = explained.alive(end).filter(saved)
    else:
        saved_table = table.filter(saved)
    gradients: dict[str, int] = {}
    for name, module, count in (
        table.filter(pl.col("category") == "gradients").select("name", "module", "requested").iter_rows()
    ):
        block = block_of(name or module)
        gradients[block] = gradients.get(block, 0) + count
    found: dict[str, list[dict[str, Any]]] = {}
    for row in saved_table.sort("alloc_event").iter_rows(named=True):
        found.setdefault(block_of(row["module"]), []).append(row)
    return [
        SavedByBlock(
            block=block,
            saved_bytes=sum(row["requested"] for row in rows),
            saved_tensors=len(rows),
            gradient_bytes=gradients.get(block, 0),
            largest=tuple(
                _contributor(row, block) for row in sorted(rows, key=lambda r: -r["requested"])[:CONTRIBUTORS]
            ),
        )
        for block, rows in sorted(found.items(), key=lambda item: _natural(item[0]))
    ]


def _contributor(row: dict[str, Any], block: str) -> Contributor:
    inside = row["module"].removeprefix(block).removeprefix(".")
    return Contributor(
        operator=row["operator"],
        name=row["name"],
        module="|".join(part for part in (inside, row["part"]) if part),
        shape=None if row["shape"] is None else tuple(row["shape"]),
        dtype=row["dtype"],
        bytes=row["requested"],
        site=row["site"],
    )


def _natural(path: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.split("."))


def alike(blocks: list[SavedByBlock]) -> list[SavedByBlock]:
    """The blocks with those of the same figures merged into one, in the order of the first of each."""
    merged: dict[tuple[int, int, int, bool], SavedByBlock] = {}
    for one in blocks:
        key = (one.saved_bytes, one.saved_tensors, one.gradient_bytes, bool(one.block))
        first = merged.get(key)
        merged[key] = one if first is None else replace(first, alike=(*first.alike, one.block))
    return list(merged.values())
