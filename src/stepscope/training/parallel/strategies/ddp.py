"""PyTorch's own data parallel: buckets in the order in which backward filled them, all-reduced while it goes on."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from stepscope.core.errors import InputError
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks

_WAITS = "Expected to have finished reduction"


class _Named(DistributedDataParallel):
    """It waits for every parameter's gradient, and says in one line that one never came."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if _WAITS not in str(error):
                raise
            raise InputError(
                "a parameter of the model got no gradient, and PyTorch's DistributedDataParallel waits for it: say "
                "--parallel ddp:unused=yes, or train the parameter"
            ) from None


def ddp(whole: Whole, ranks: Ranks) -> Spread:
    """Wrap the module; it averages gradients within backward."""
    chosen = whole.record.chosen
    module = _Named(
        whole.forward, bucket_cap_mb=float(chosen("bucket")), find_unused_parameters=chosen("unused") == "yes"
    )
    return replicated(whole, module, local=module.no_sync)
