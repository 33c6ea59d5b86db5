"""PyTorch's own data parallel: buckets in the order in which backward filled them, all-reduced while it goes on."""

from torch.nn.parallel import DistributedDataParallel

from stepscope.parallel.ranks import Ranks
from stepscope.parallel.spread import Spread, Whole, replicated


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """Wrap the module; it averages gradients within backward."""
    module = DistributedDataParallel(whole.forward, bucket_cap_mb=float(whole.record.chosen("bucket")))
    return replicated(whole, module, local=module.no_sync)
