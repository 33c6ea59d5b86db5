"""PyTorch's context parallel: each sequence is split over the ranks, and keys and values go round in attention.

Within `context_parallel`, F.scaled_dot_product_attention is one of all ranks, forward and backward, for the kernels of
GPUs alone. It is entered before a step's first forward and left when its gradients are averaged, so that nothing else
of the process meets it. It splits the rotary positions itself; the tokens are split alike
(training/parallel/step.py).
"""

import contextlib
from typing import Any, cast

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.parallel.strategies.ddp_textbook import BucketedDataParallel
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import Transformer


def context(whole: Whole, ranks: Ranks) -> Spread:
    """Run steps within PyTorch's context, and average gradients in buckets."""
    rotary = cast("Transformer", whole.model).rotary
    module = BucketedDataParallel(whole.forward)  # broadcasts the rotary positions while they are whole
    mesh = init_device_mesh(next(whole.model.parameters()).device.type, (ranks.ranks,))
    entered = contextlib.ExitStack()
    within = False

    def enter(*_: Any) -> None:
        nonlocal within
        if not within:
            within = True
            entered.enter_context(
                context_parallel(mesh, buffers=[rotary.cos_SD, rotary.sin_SD], buffer_seq_dims=[0, 0])
            )

    def finish() -> None:
        nonlocal within
        module.finish_gradient_synchronization()
        entered.close()
        within = False

    module.register_forward_pre_hook(enter)
    return replicated(whole, module, finish=finish, local=module.no_sync)
