"""Work: the FLOPs and bytes of an operation or a step, with the convention that counted them."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]

CausalConvention = Literal["half", "full"]
"""Causal attention counted as the half that is needed, or as the full square that a plain product computes."""


class Convention(msgspec.Struct, frozen=True, kw_only=True):
    """What a FLOP count includes. Published figures differ by 2x when this goes unsaid."""

    causal: CausalConvention = "half"
    recompute: bool = False

    def __str__(self) -> str:
        return f"causal {self.causal}, recompute {'counted' if self.recompute else 'not counted'}"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs (a multiply-add counts two) and the fewest bytes that must cross device memory.

    bytes are None where no lower bound is stated. Adding unlike conventions raises ValueError.
    """

    flops: Count
    bytes_read: Count | None = None
    bytes_written: Count | None = None
    convention: Convention = Convention()

    def __add__(self, other: "Work") -> "Work":
        if self.convention != other.convention:
            raise ValueError(f"unlike FLOP conventions: {self.convention} and {other.convention}")
        return Work(
            flops=self.flops + other.flops,
            bytes_read=_sum(self.bytes_read, other.bytes_read),
            bytes_written=_sum(self.bytes_written, other.bytes_written),
            convention=self.convention,
        )

    @property
    def bytes_moved(self) -> int | None:
        return _sum(self.bytes_read, self.bytes_written)

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
