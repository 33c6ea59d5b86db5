"""PyTorch's own data parallel: buckets in the order in which backward filled them, all-reduced while it goes on."""

from torch.nn.parallel import DistributedDataParallel

from stepscope.parallel.ranks import Ranks
from stepscope.parallel.spread import Spread, Whole, replicated


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """Wrap the module; it averages gradients within backward."""
    module = DistributedDataParallel(whole.forward)
    return replicated(whole, module, local=module.no_sync)
