"""Two dimensions: neighbours divide each product, and pairs of neighbours the batch (Liang et al. 2024, TorchTitan).

With 2 n ranks, rank r is at (r // 2, r % 2) of a mesh. Its neighbour runs `tensor_sequence` with it on the same
samples, which sends much and waits for it, so the two should share the fastest links. The n ranks across hold the same
half of each product, and `fsdp2` shards it among them: a rank keeps 1 / 2n of every parameter.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stepscope.core.strategies import STRATEGIES
from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.parallel.strategies.fsdp2 import Local
from stepscope.training.parallel.strategies.tensor import checked, of_split
from stepscope.training.parallel.strategies.tensor_sequence import split_all
from stepscope.training.training_step import Ranks

_NAME = "fsdp2-tensor"


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """Split products between neighbours, then shard each block across pairs."""
    near = STRATEGIES[_NAME].near
    model = checked(whole, near, _NAME)
    broadcast_from_first(model)
    shape = (ranks.ranks // near, near)
    mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=("across", "near"))
    split_all(model, mesh["near"])
    for block in whole.blocks:
        fully_shard(block, mesh=mesh["across"])
    fully_shard(whole.forward, mesh=mesh["across"])
    return of_split(whole, local=lambda: Local(whole.forward))
