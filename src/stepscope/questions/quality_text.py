"""The text that comes with stepscope, as bytes: `text/README.md` says whose it is and under what licence."""

import gzip
import math
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files

WORKS = {"alice.txt.gz": "Carroll, Alice in Wonderland", "paradise_lost.txt.gz": "Milton, Paradise Lost"}
LICENCE = "public domain"
BYTE_VALUES = 256
_HELD_OUT = 10
"""One part in so many of each work, its last, is for validation."""


@dataclass(frozen=True)
class BundledText:
    """The text that is trained on, and the text that is held out."""

    train: bytes
    held_out: bytes

    @property
    def unigram_loss(self) -> float:
        """The loss on held-out text, in nats a byte, of a model that knows only how often each byte is in the other.

        Every count is one more than it is, so that no byte is impossible.
        """
        counts, total = Counter(self.train), len(self.train) + BYTE_VALUES
        held_out = Counter(self.held_out)
        return -sum(n * math.log((counts[byte] + 1) / total) for byte, n in held_out.items()) / len(self.held_out)


def bundled_text() -> BundledText:
    """The text, read from the installed package: nothing is downloaded."""
    works = [gzip.decompress(files("stepscope.questions").joinpath("text", name).read_bytes()) for name in WORKS]
    cuts = [len(work) - len(work) // _HELD_OUT for work in works]
    return BundledText(
        train=b"".join(work[:cut] for work, cut in zip(works, cuts, strict=True)),
        held_out=b"".join(work[cut:] for work, cut in zip(works, cuts, strict=True)),
    )
