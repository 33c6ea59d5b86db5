"""A snapshot that others published, against what its training script must have allocated."""

from stepscope.allocations.at_moment import moment_at
from stepscope.allocations.explain import explain
from stepscope.allocations.snapshot import read_snapshot
from tests.public import public_capture

WIDTH, HIDDEN, BLOCKS, VOCABULARY, FLOAT32 = 2560, 10240, 32, 10000, 4
"""The sizes of the resident tensors give them: 2 of 10000 x 2560 (embedding and head), 96 of 2560 x 10240 (three of
SwiGLU in each block), 128 of 2560 x 2560 (four of attention), 65 of 2560 (two norms in each block, and the last)."""


def test_parameters_gradients_and_state_of_a_published_snapshot():
    """AdamW keeps two tensors of each parameter's size. This script makes them anew within each of its steps, which
    PyTorch marks by a range of its own name; both the old and the new ones are state, and no temporaries."""
    block = 3 * WIDTH * HIDDEN + 4 * WIDTH * WIDTH + 2 * WIDTH
    parameters = FLOAT32 * (2 * VOCABULARY * WIDTH + BLOCKS * block + WIDTH)
    found = explain(read_snapshot(public_capture("cs336_memory_ctx128_training.pickle.gz")))
    found.self_check()
    held = moment_at(found).categories
    assert parameters == held["parameters"] == held["gradients"] == 13_627_238_400
    assert held["optimizer state"] == 2 * parameters
    assert held["workspaces"] == 2 * 8_519_680


def test_what_forward_keeps_in_a_published_snapshot():
    """Four sequences of 128 tokens and 32 heads: the sizes of the residual stream (512 x 2560) and of the scores
    (4 x 32 x 128 x 128) give them. In each block stay, of the residual stream's size: the input times the reciprocal
    root and the result of both norms, rotated queries and keys in two tensors each, the values, attention's output
    and both sums; of SwiGLU's width: two products, a sigmoid, its product and the gated one; of the scores': their
    exponentials and the softmax. The rest is small: where each row's maximum lies (8 bytes) and the sum of its
    exponentials, the mask, the rotations, and a root for each token and norm. Then come the embedding, the last norm
    and the logits.
    """
    tokens, sequence, rows = 4 * 128, 128, 4 * 32 * 128
    stream, hidden, scores = (FLOAT32 * count for count in (tokens * WIDTH, tokens * HIDDEN, rows * sequence))
    head_width = WIDTH // 32
    small = (8 + FLOAT32) * rows + sequence**2 + 2 * FLOAT32 * sequence * head_width + 2 * FLOAT32 * tokens
    block = 10 * stream + 5 * hidden + 2 * scores + small
    last = 3 * stream + FLOAT32 * tokens + FLOAT32 * tokens * VOCABULARY
    found = explain(read_snapshot(public_capture("cs336_memory_ctx128_training.pickle.gz")))
    held = moment_at(found).categories
    assert held["saved for backward"] == BLOCKS * block + last == 5_615_814_656
    # The peak is at the end of forward: all that forward makes and frees again is gone.
    assert held["temporaries"] == 0
    assert held["there before"] < 0.001 * found.peak_bytes
