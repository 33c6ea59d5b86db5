"""Parameters and model FLOPs of the transformer in `training/transformer.py`.

With d = d_model, f = d_ff, L = layers, V = vocabulary, B = batch_size, S = seq_len, and heads that share no keys:

parameters   those of `block_shapes` and `shapes_outside_blocks`:
             2 V d  (embedding, untied head)  +  L (4 d^2 + 3 d f + 2 d)  +  d (final norm); with sinks L heads more

forward      products of activations with weights, 2 FLOPs a weight and token (Kaplan et al. 2020, table 1):
             2 B S (L (4 d^2 + 3 d f) + d V)
             attention scores and output, 2 products of 2 B S S d each: 4 B S^2 d L, full square;
             half of it where causal attention is counted as what is needed (S^2 / 2 of the square), and with a window
             of w < S keys the pairs that are seen: w S - w (w - 1) / 2 of the square.
backward     every product has two in backward (dX and dW, or dQ and dK...): twice the forward.

The embedding is a gather, not a product. Norms, RoPE, softmax, SwiGLU's gate and the optimizer are elementwise
and not counted as model FLOPs (Chowdhery et al. 2022, appendix B, whose MFU this is). Nor is what checkpointing runs
again in backward: that is `recomputed_flops`, and model FLOPs and it together are hardware FLOPs. Accumulation changes
no FLOPs: the micro-batches are the batch.
"""

import math
from collections.abc import Sequence

from stepscope.core.formulas import CausalConvention, Convention, Work, adamw_work
from stepscope.core.model_config import ModelConfig
from stepscope.core.parts import scores_of
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workloads import OF_ONE_LAUNCH, StepChoices, TextbookWorkload, Workload, by_sizes

Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters, (out, in), by name."""


def block_shapes(config: ModelConfig) -> Shapes:
    """Shapes of one block's parameters by their names inside it, in the order in which the model has them."""
    d, f, k = config.d_model, config.d_ff, config.key_width
    sinks: Shapes = {"attention.sinks": (config.heads,)} if config.sinks else {}
    return {
        "attention_norm.weight": (d,),
        **sinks,
        "attention.query.weight": (d, d),
        "attention.key.weight": (k, d),
        "attention.value.weight": (k, d),
        "attention.output.weight": (d, d),
        "feed_forward_norm.weight": (d,),
        "feed_forward.gate.weight": (f, d),
        "feed_forward.up.weight": (f, d),
        "feed_forward.down.weight": (d, f),
    }


def shapes_outside_blocks(config: ModelConfig) -> Shapes:
    """Shapes of the parameters that no block holds: embedding, head and final norm."""
    d, words = config.d_model, config.vocabulary
    head = {} if config.tied else {"head.weight": (words, d)}
    return {"embedding.weight": (words, d), "norm.weight": (d,), **head}


def count_of(shapes: Shapes) -> int:
    """Number of elements of all these parameters."""
    return sum(map(math.prod, shapes.values()))


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters of the transformer."""
    return count_of(shapes_outside_blocks(config)) + config.layers * count_of(block_shapes(config))


def forward_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """Model FLOPs of one forward pass, loss excluded."""
    of_head = 2 * workload.tokens * workload.model.d_model * workload.model.vocabulary
    return linear_flops(workload) + of_head + _attention_flops(workload, causal)


def linear_flops(workload: TextbookWorkload) -> int:
    """FLOPs of the blocks' linear layers in one forward pass."""
    matrices = {name: shape for name, shape in block_shapes(workload.model).items() if len(shape) > 1}
    return 2 * workload.tokens * workload.model.layers * count_of(matrices)


def recomputed_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """FLOPs of forward's products that a step's checkpointing runs again in backward, counted as model FLOPs are.

    every-K: the forward of all blocks, but for one product in each group. Backward needs the input of the group's last
    product (down), not its output, and PyTorch stops where nothing more is needed. nested-K: each block as every-1, and
    each call that holds calls up to the input of its last one. attention: as every-1, but for attention itself.
    selective: 0, since what it runs again is elementwise; none: 0.
    """
    config, attention = workload.model, _attention_flops(workload, causal)
    layers, last = config.layers, 2 * workload.tokens * config.d_model * config.d_ff
    blocks = forward_flops(workload, causal) - 2 * workload.tokens * config.d_model * config.vocabulary
    again = 0
    for span in filter(lambda span: span.multiplies_again, workload.spans):
        of_span = blocks if span.attends_again else blocks - attention
        runs, cut = span.runs_again
        again += of_span * runs // layers - cut * last
    return again


def product_counts(workload: TextbookWorkload) -> tuple[int, int]:
    """Numbers of matrix products: in a forward pass, and again in one micro-batch's backward, as checkpointing asks for
    (`recomputed_flops`). A layer has seven linear maps (query, key, value, output, gate, up, down), and the two of
    attention unless it is one fused kernel; the model has the head."""
    each = 9 if scores_of(workload.attention) == "whole" else 7
    runs = [span.runs_again for span in workload.spans if span.multiplies_again]
    again = sum(blocks * each - cut for blocks, cut in runs)
    return workload.model.layers * each + 1, again


def moment_bytes(workload: StepChoices) -> int:
    """Bytes of an element of each of AdamW's two moments, without the scale that 256 of 8 bits share."""
    of_optimizer = {"adamw-bf16-state": 2, "adamw-8bit": 1}
    return of_optimizer.get(str(workload.optimizer), PRECISIONS[workload.dtype].moments)


def master_bytes(workload: StepChoices) -> int:
    """Bytes of what is kept of a weight's master beside the weight; 0 where there is none. The kernel of all parameters
    keeps what the weight has not."""
    precision = PRECISIONS[workload.dtype]
    beside = precision.masters - precision.weights
    return beside if precision.masters and workload.optimizer in OF_ONE_LAUNCH else precision.masters


def state_bytes(workload: StepChoices) -> int:
    """Bytes of AdamW's state of a weight: both moments, and its master."""
    return 2 * moment_bytes(workload) + master_bytes(workload)


def phase_work(workload: TextbookWorkload, causal: CausalConvention = "half") -> dict[str, Work]:
    """Work of each phase that the workload runs: model FLOPs, and the optimizer's bytes."""
    convention = Convention(causal=causal)
    forward = forward_flops(workload, causal)
    phases = {FORWARD: Work(flops=forward, convention=convention)}
    if workload.phase != "forward":
        phases[BACKWARD] = Work(flops=2 * forward, convention=convention)
    if workload.phase == "train":
        precision = PRECISIONS[workload.dtype]
        count = parameter_count(workload.model)
        optimizer = adamw_work(count, precision.weights, moment_bytes(workload), master_bytes(workload))
        # The norm that clips must be known before the first update: every gradient is read once more.
        of_norm = count * precision.weights if workload.clip is not None else 0
        phases[OPTIMIZER] = Work(
            flops=0,
            bytes_read=(optimizer.bytes_read or 0) + of_norm,
            bytes_written=optimizer.bytes_written,
            convention=convention,
        )
    return phases


def known_work(workload: Workload) -> dict[str, Work]:
    """Work of each phase, where it is known before anything runs: that of the textbook's model."""
    return by_sizes(workload, phase_work) or {}


def step_flops(workload: TextbookWorkload, causal: CausalConvention = "half") -> int:
    """Model FLOPs of one whole step."""
    return sum(work.flops for work in phase_work(workload, causal).values())


def _attention_flops(workload: TextbookWorkload, causal: CausalConvention) -> int:
    """FLOPs of the products of queries with keys, and of weights with values, in one forward pass."""
    pairs_twice = seen_twice(workload.seq_len, workload.model.window) if causal == "half" else 2 * workload.seq_len**2
    return 2 * workload.batch_size * pairs_twice * workload.model.d_model * workload.model.layers


def seen_twice(seq_len: int, window: int | None) -> int:
    """Twice the pairs of a query and a key that it sees: of causal attention the square, of a window what is in it."""
    if window is None or window >= seq_len:
        return seq_len**2
    return 2 * window * seq_len - window * (window - 1)


# How AdamW in one launch lays moments side by side, for the optimizer and for the prediction of memory.


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
