"""FLOPs of the parts of attention in one forward pass of the whole model, as written-out attention computes them.

With B = batch_size, H = heads, S = seq_len, D = head_dim, L = layers; the full square, since written-out causal
attention computes all of it and masks.
"""

from stepscope.core.work.operations import SOFTMAX_FLOPS
from stepscope.core.workload import Workload


def attention_product_flops(workload: Workload) -> int:
    """FLOPs of Q K^T, or of P V: 2 B H S S D in each of L layers."""
    return 2 * _scores(workload) * workload.model.head_dim


def softmax_flops(workload: Workload) -> int:
    """FLOPs of softmax over the scores: 5 B H S S in each of L layers."""
    return SOFTMAX_FLOPS * _scores(workload)


def _scores(workload: Workload) -> int:
    return workload.batch_size * workload.model.heads * workload.seq_len**2 * workload.model.layers
