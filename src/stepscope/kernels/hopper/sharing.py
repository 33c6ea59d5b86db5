"""How programs of the backward kernel share tiles of keys, so that fewer multiprocessors are idle at its end."""

from typing import NamedTuple

from stepscope.kernels.launching import tiles_of

_MOST_PARTS = 8
"""The most programs that share a tile of keys: what they leave takes memory."""
_VISITS_TO_BEGIN = 3
"""What a program's beginning and end take of its time, in visits of tiles of queries."""
_VISITS_TO_ADD = 6
"""What it takes to add parts up, a launch of its own, in visits of tiles of queries."""


class Sharing(NamedTuple):
    """How programs share the tiles of keys of a backward pass."""

    whole: int
    """The first tiles, which have a program each."""
    shared: int
    """The tiles after them, which have several."""
    parts: int
    """The programs of each of these, with a part of the queries each."""

    @property
    def programs(self) -> int:
        """The number of programs."""
        return self.whole + self.shared * self.parts


def shared_tiles(tiles: int, visits: int, multiprocessors: int) -> Sharing:
    """The sharing of so many tiles of keys, each with so many visits of tiles of queries, that ends first.

    A multiprocessor has one program at a time. Without a mask all take equally long, so they run in rounds, and in the
    last round multiprocessors that have none wait for the whole of one. Parts of programs wait for less.
    """
    last = tiles % multiprocessors
    least, best = visits + _VISITS_TO_BEGIN, 1
    for parts in range(2, min(_MOST_PARTS, visits) + 1):
        rounds = tiles_of(last * parts, multiprocessors)
        needed = rounds * (tiles_of(visits, parts) + _VISITS_TO_BEGIN) + _VISITS_TO_ADD
        if last and needed < least:
            least, best = needed, parts
    return Sharing(tiles - last, last, best) if best > 1 else Sharing(tiles, 0, 1)
