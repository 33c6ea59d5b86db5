"""A snapshot that others published, against what its training script must have allocated."""

from stepscope.memory.at_moment import moment_at
from stepscope.memory.explain import explain
from stepscope.memory.snapshot import read_snapshot
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
