"""`stepscope.replace_parts`: let other kernels compute parts of a model of your own, where they compute the same."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.core.errors import InputError
from stepscope.core.parts import MODULE_PARTS, Kernels, named_kernels

if TYPE_CHECKING:
    from torch import nn

    from stepscope.training.parts.replaced import Replaced


def replace_parts(
    model: "nn.Module",
    kernels: str | Mapping[str, str] | None = None,
    *,
    norm: Kernels | None = None,
    mlp: Kernels | None = None,
    loss: Kernels | None = None,
) -> "Replaced":
    """Let other kernels compute norms, SwiGLUs and the loss of a model, in place, where they compute the same.

        replaced = stepscope.replace_parts(model, norm="fused", mlp="fused")
        print(replaced)         # what was replaced, what was left, and why
        replaced.restore()      # the model's own code again

    kernels: compiled, fused, liger or quack (norm and loss alone), for all parts or by part; norm, mlp and loss say it
    of one, also by a function of your own, as in norm="mine.py:fn". A module is held against its replacement first,
    forward and backward, on random numbers, and of those that are alike one for all; what differs is left, and a
    warning says what was asked for and not done. Move the model to its device and dtype before. Parameters and the keys
    of the state dict stay the same.
    The loss is that of a causal language model of Hugging Face's, which gets labels: in training it then returns its
    loss alone, without logits.

    Raises InputError where the kernels do not run on the model's device, and where the model has no module of what was
    asked for; GateFailure where a function of your own is wrong.
    """
    by_part = {part: name for part, name in (("norm", norm), ("mlp", mlp), ("loss", loss)) if name is not None}
    chosen = (named_kernels(kernels) if kernels is not None else {}) | named_kernels(by_part)
    if not chosen:
        raise InputError("replace_parts needs a part: say norm='fused', mlp='fused', loss='fused' or kernels='fused'")
    from stepscope.training.parts.replaced import replace_in

    replaced = replace_in(model, chosen)
    left = [str(each) for each in replaced.left if each.part in MODULE_PARTS]
    if left:
        warnings.warn(
            f"{type(model).__name__} keeps code of its own: {'; '.join(left)}; ask for the other parts alone if that "
            "is right",
            stacklevel=2,
        )
    return replaced
