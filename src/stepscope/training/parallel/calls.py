"""What a rank's process is asked to run, and what it tells its starter."""

import importlib
from typing import Protocol

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.ranks import RankPlace


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is asked to run, where, and as whom."""

    function: str
    argument: msgspec.Raw
    device: str
    place: RankPlace


class Say(Protocol):
    """Tells the starter of a rank its stage, and beside it what it knows already, as JSON."""

    def __call__(self, stage: str, part: bytes = b"") -> object: ...


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells its starter, a line each: a stage that begins, or its end."""

    stage: str = ""
    part: msgspec.Raw = msgspec.Raw()
    """What the function knows already, as JSON: kept where ranks end before they return a value."""
    value: msgspec.Raw = msgspec.Raw()
    """What the function returned, as JSON: the last word."""
    threads: int | None = None
    error: str = ""
    """Why it failed, in a line: the last word."""
    wrong_input: bool = False
    """Whether the error is the user's to mend, and the same on all ranks."""


def run_call(call: Call, say: Say, *, gather: bool = False) -> tuple[list[bytes], int | None]:
    """What the function returns here, as JSON, or on all ranks with `gather`; and the CPU threads of this rank."""
    from stepscope.recording.device import resolve_device  # noqa: PLC0415  (torch, after the lifeline)
    from stepscope.training.parallel.ranks import join  # noqa: PLC0415

    device = resolve_device(call.device, call.place)
    ranks = join(call.place, device)
    say("begin")
    if gather:  # somebody else started the ranks, each with words of its own
        asked = ranks.gathered((call.function, bytes(call.argument)))
        other = next((rank for rank, one in enumerate(asked) if one != asked[0]), None)
        if other is not None:
            raise InputError(f"rank {other} is asked for something else than rank 0: give all the same options")
    module, _, name = call.function.partition(":")
    value = msgspec.json.encode(
        getattr(importlib.import_module(module), name)(bytes(call.argument), ranks, device, say)
    )
    values: list[bytes] = ranks.gathered(value) if gather else [value]
    ranks.barrier()  # the first rank's process holds what the others still talk through
    ranks.part()  # not where this rank failed: its process ends, and nothing may delay its word
    return values, ranks.threads
