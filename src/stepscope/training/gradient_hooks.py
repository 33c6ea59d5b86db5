"""Hooks on the gradients of parameters that do not keep alive whoever asked for them.

PyTorch keeps a hook where Python's collector does not look. A hook that holds the owner of the parameter, as a bound
method does, makes a circle that nothing frees: the owner, its parameters and their gradients stay for good.
"""

import weakref
from collections.abc import Callable

from torch import Tensor


def when_ready(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call this bound method with the parameter whenever a backward has accumulated its gradient."""
    of_owner = weakref.WeakMethod(method)

    def ready(parameter: Tensor) -> None:
        call = of_owner()
        if call is not None:
            call(parameter)

    parameter.register_post_accumulate_grad_hook(ready)


def before_more(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call this bound method with the parameter before a backward adds to its gradient."""
    of_owner, of_parameter = weakref.WeakMethod(method), weakref.ref(parameter)

    def before(_: Tensor) -> None:
        call, reached = of_owner(), of_parameter()
        if call is not None and reached is not None:
            call(reached)

    parameter.register_hook(before)
