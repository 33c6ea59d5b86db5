"""Pipeline schedules by formula: the bubble, and how many micro-batches a rank holds at once.

1F1B: a rank idles (p - 1) of m + p - 1 turns (Narayanan et al. 2021, section 2.2). Interleaved, with v chunks a rank,
a turn is 1/v as long, and so is the idle time: (p - 1) / (v m) of the time that is worked (section 2.2, figure 4).
"""

from stepscope.core.layout import Layout


def bubble_turns(layout: Layout) -> float:
    """Idle time of a rank, in turns of one micro-batch's forward and backward through all its chunks."""
    return (layout.pipeline - 1) / layout.chunks


def chunks_in_flight(layout: Layout, rank: int) -> int:
    """Chunks whose activations a pipeline rank holds at once, at most.

    1F1B: the stages from this one to the last (Narayanan et al. 2021, figure 4). Interleaved: 2 (p - rank - 1) more
    than the (v - 1) p + 1 of the last rank (Megatron's warm-up, `forward_backward_pipelining_with_interleaving`;
    Korthikanti et al. 2022, section 4.2.3, for the first rank).
    """
    p, v = layout.pipeline, layout.chunks
    most = layout.micro_batches * v
    if v == 1:
        return min(most, p - rank)
    return min(most, 2 * (p - rank - 1) + (v - 1) * p + 1)
