"""What one of N GPUs needs when parameters, gradients and optimizer state are sharded over them.

Fully sharded data parallelism (Rajbhandari et al. 2020, ZeRO stage 3; PyTorch's `fully_shard`, block by block): each
GPU keeps one N-th of parameters, gradients and optimizer state, and its own batch's activations whole. Beside that,
    forward    the gathered weights of two blocks, the one at work and the one fetched ahead, and of embedding and head
    backward   the same, and the whole gradients of two blocks on their way to their owners, and of embedding and head
    optimizer  nothing: it works on the shards
The peak is this formula's alone; what ranks really keep between steps, `stepscope run --parallel` measures.
"""

from stepscope.core.memory_notes import MemoryCategory
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workload import Workload
from stepscope.memory.prediction.estimate import MemoryEstimate
from stepscope.work.transformer import block_shapes, count_of, shapes_outside_blocks

_SHARDED: tuple[MemoryCategory, ...] = ("parameters", "gradients", "optimizer state")
_BLOCKS_GATHERED = 2


def sharded_peak(workload: Workload, alone: MemoryEstimate, gpus: int) -> int:
    """Peak bytes on each of `gpus`, from the estimate of the same step on one."""
    config = workload.model
    size = PRECISIONS[workload.dtype].weights
    block, outside_blocks = count_of(block_shapes(config)), count_of(shapes_outside_blocks(config))
    gathered = size * (_BLOCKS_GATHERED * block + outside_blocks)
    extra = {FORWARD: gathered, BACKWARD: 2 * gathered, OPTIMIZER: 0}
    peaks: list[int] = []
    for phase, alive in alone.by_phase.items():
        sharded = sum(alive.get(category, 0) for category in _SHARDED)
        if phase == OPTIMIZER:
            sharded += alive.get("temporaries", 0)
        peaks.append(sum(alive.values()) - sharded + -(-sharded // gpus) + extra[phase])
    return max(peaks)
