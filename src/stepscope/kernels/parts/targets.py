"""The check that PyTorch's cross-entropy makes of its targets, for the losses of others that make none."""

import torch
from torch import Tensor


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int = -100) -> None:
    """Check that each target (...) is a token, from 0 to vocabulary - 1, or `ignore_index`.

    On a CPU it raises PyTorch's IndexError, which names the first that is not. On a GPU, and in what is compiled, the
    device asserts it, and nobody waits: the error comes at the next call that does.
    """
    fits = (targets >= 0) & (targets < vocabulary) | (targets == ignore_index)
    if targets.is_cuda or torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(fits.all(), "Target is out of bounds: it is neither a token nor ignore_index")
    elif not fits.all():
        raise IndexError(f"Target {int(targets[~fits][0])} is out of bounds.")
