"""Changes to a step that may make it fit: the words and the option of each, and plans of several."""

import math
from collections.abc import Iterable

import msgspec

from stepscope.core.checkpointing import selective_of


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change to a step: its words, the options that ask for it, and the fields of the workload that it sets."""

    change: str
    options: str
    fields: dict[str, str | int]


Lever = tuple[Change, ...]
"""Settings of one option, the mildest first."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a step that make it fit, as predicted."""

    change: str
    options: str
    """For the command line."""
    peak_bytes: int


def setting(words: str, option: str, value: str | int) -> Change:
    """The change that one option makes."""
    return Change(
        change=words, options=f"{option} {value}", fields={option.removeprefix("--").replace("-", "_"): value}
    )


FUSED_ADAMW = setting("fused AdamW", "--optimizer", "adamw-fused")
STATE_IN_BF16 = setting("optimizer state in bf16", "--optimizer", "adamw-bf16-state")
AUTOCAST = setting("bf16 autocast", "--dtype", "bf16")
SELECTIVE = setting("checkpointing that keeps matrix products", "--checkpointing", "selective")
KEEP_ATTENTION = setting("checkpointing that keeps attention's outputs", "--checkpointing", "attention")


def mixed(checkpointing: str) -> Change:
    """The checkpointing `selective-K`."""
    last = selective_of(checkpointing)
    words = "1 block" if last == 1 else f"{last} blocks"
    return setting(f"checkpointing that keeps matrix products of the last {words}", "--checkpointing", checkpointing)


def checkpointed_blocks(k: int) -> Change:
    """Checkpointing of whole blocks, k together."""
    words = "checkpointing of every block" if k == 1 else f"checkpointing of every {k} blocks together"
    return setting(words, "--checkpointing", f"every-{k}")


def micro_batches(batch: int, accumulation: int, most: int | None = None) -> Lever:
    """The batch in more equal micro-batches than it has."""
    small = [d for d in range(1, math.isqrt(batch) + 1) if batch % d == 0]
    divisors = sorted({*small, *(batch // d for d in small)})
    return tuple(
        setting(f"{n} micro-batches of {batch // n}", "--accumulation", n)
        for n in divisors
        if accumulation < n <= (most or batch)
    )


def together(changes: Iterable[Change]) -> Change:
    """Several changes as one."""
    parts = tuple(changes)
    return Change(
        change=", ".join(part.change for part in parts),
        options=" ".join(part.options for part in parts if part.options),
        fields={name: value for part in parts for name, value in part.fields.items()},
    )
