"""How AdamW in one launch lays moments side by side, for the optimizer and for the prediction of memory."""

from collections.abc import Sequence

MOST_NUMBERS = 32 * 2**20
"""Numbers of a block, 128 MiB in fp32. One block for all would be a request that, near the limit, finds no room."""
_ALIGNED = 128
"""Each moment begins at a multiple of so many numbers: of 512 bytes, as an allocation of its own would."""


def aligned_numbers(numbers: int) -> int:
    """The numbers that a tensor of so many takes in a block."""
    return -(-numbers // _ALIGNED) * _ALIGNED


def moment_blocks(sizes: Sequence[int]) -> list[list[int]]:
    """The blocks for tensors of these sizes: in each the places of its tensors, one after the other. A tensor that is
    larger than a block has one alone."""
    blocks: list[list[int]] = []
    left = 0
    for place, size in enumerate(sizes):
        if not blocks or size > left:
            blocks.append([])
            left = MOST_NUMBERS
        blocks[-1].append(place)
        left -= size
    return blocks
