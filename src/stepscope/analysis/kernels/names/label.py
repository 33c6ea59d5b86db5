"""A kernel's name in short: what tells it apart, without namespaces and parameter lists."""

import re

from stepscope.analysis.kernels.names.decoding import decode

_FUNCTORS = re.compile(r"\b\w*(?:Functor\w*|_kernel_cuda\w*|_kernel_impl|_kernel|Ops|_functor)\b")
_PLUMBING = re.compile(r"gpu_kernel_impl\w*|func_wrapper\w*|ReduceOp|elementwise_kernel|vectorized_\w+|unrolled_\w+")
"""Wrappers that every pointwise kernel has; they tell nothing apart."""


def kernel_label(name: str) -> str:
    """What runs, and the functors that it applies: `elementwise_kernel BinaryFunctor MulFunctor`."""
    decoded = decode(name)
    base = decoded.operation or decoded.function
    if decoded.library == "ATen" and decoded.arguments:
        found = dict.fromkeys(token for token in _FUNCTORS.findall(decoded.arguments) if not _PLUMBING.fullmatch(token))
        base = " ".join([base, *list(found)[:2]])
    return base
