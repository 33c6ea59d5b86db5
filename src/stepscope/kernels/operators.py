"""What our operators share: when a call must be an operator, checks and casts of its tensors, and their compiler."""

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload

from stepscope.core.errors import InputError

_SHAPES = 1024
"""How many shapes dynamo compiles a function for before it gives up (its default is 8). After that the function runs
uncompiled, and is another implementation."""

_PLAIN = (Tensor, torch.nn.Parameter)


class _Here(threading.local):
    """Who learns the launches of this thread's call (native.py): it gets what was compiled, the grid and the arguments.
    It follows operators, too, by a mode of its own, for which nothing need be one."""

    watcher: Callable[[Any, tuple[int, ...], tuple[object, ...]], None] | None = None


HERE = _Here()


def watched(*tensors: Tensor) -> bool:
    """Whether the call must be an operator.

    A compiler, a mode (fake tensors, a counter, checkpointing's policy), a transformation, a profiler, a subclass and
    tensors without data need one. Any other call skips the operator's layers in Python, which take several times as
    long as a launch.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > (HERE.watcher is not None)
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
        or tensors[0].is_meta
    ):
        return True
    for tensor in tensors:  # noqa: SIM110  (a generator costs as much as the rest)
        if type(tensor) not in _PLAIN:
            return True
    return False


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward that is itself differentiated. A compiler traces backward once, whatever is enabled."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} has no second derivative: choose the reference")


def check_part(part: str, *tensors: Tensor) -> None:
    """Raise an InputError, one line, for tensors of a dtype that the fused part does not compute, and inside a
    transformation of torch.func."""
    name = f"{part} fused"
    refuse_transforms(name, f"{part} reference")
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InputError(f"{name} takes fp32, bf16, fp16 or fp64, not {str(tensor.dtype).removeprefix('torch.')}")


_library = torch.library.Library("stepscope", "FRAGMENT")


def define(schema: str, function: Any, fake: Any) -> None:
    """Define an operator without autograd: an autograd.Function calls it, which a compiler can follow."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stepscope::{name}", fake, lib=_library)


def transformed_by_func() -> bool:
    """Whether a transformation of torch.func (`grad`, `vmap`, `jvp`) is active; a compiler handles that by itself.

    torch.func transforms only Functions that set their context apart from their forward.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_transforms(name: str, instead: str) -> None:
    """Raise an InputError, one line, inside a transformation of torch.func."""
    if transformed_by_func():
        raise InputError(f"{name} cannot be transformed by torch.func (grad, vjp, vmap, jvp): take {instead}")


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts the arguments of PyTorch's scaled_dot_product_attention; casts are differentiable.

    That function is on autocast's list for the lower precision, on CUDA and on a CPU: under autocast every floating
    tensor of the device but fp64 is cast to autocast's dtype first, so that its output has that dtype too. A custom
    function is on no list: called with fp32 it would stay in fp32, while the products of `reference` go to 16 bits.
    """
    device_type = q.device.type
    # A device without autocast raises here. A compiler cannot follow any other way to ask.
    if device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        tensor.to(dtype)
        if tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
        else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product after x would cast it to: autocast's, or that of x where autocast is off."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int = -100) -> None:
    """Check that each target (...) is a token, from 0 to vocabulary - 1, or `ignore_index`.

    PyTorch's own cross-entropy makes this check, and the losses of others make none. On a CPU it raises PyTorch's
    IndexError, which names the first that is not. On a GPU, and in what is compiled, the device asserts it, and nobody
    waits: the error comes at the next call that does.
    """
    fits = (targets >= 0) & (targets < vocabulary) | (targets == ignore_index)
    if targets.is_cuda or torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(fits.all(), "Target is out of bounds: it is neither a token nor ignore_index")
    elif not fits.all():
        raise IndexError(f"Target {int(targets[~fits][0])} is out of bounds.")


def compile_for_each_shape(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, compiled anew for each shape, so that a kernel for this very shape is judged. Raises where it would
    run uncompiled."""
    compiled: Any = torch.compile(function, dynamic=False, fullgraph=True)
    from torch._dynamo import config  # noqa: PLC0415  (which torch.compile loads)

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        if config.recompile_limit >= _SHAPES:
            return compiled(*tensors, **options)
        with config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES):
            return compiled(*tensors, **options)

    return call


# A compiler leaves an operator as it is, so that the residual sum before a norm, and the sum of the gradients behind
# it, are passes over memory of their own. The norms' kernels can make both sums as they go:
#
#     s = x + branch;  y = norm(s)                           y, s = norm(x, branch)
#     dx = norm_backward(dy, s, ...);  ds = dx + dother      ds = norm_backward(dy, s, ..., dother)
#
# What follows changes the graph of forward and backward so, before the compiler cuts it in two.

_NORMS = ("rms_norm", "layer_norm")
_FORWARD = {f"stepscope::{norm}_forward" for norm in _NORMS}
"""Operators of x, a branch or none, and more; they return the norm, x + branch, and more."""
_BACKWARD = {f"stepscope::{norm}_backward" for norm in _NORMS}
"""Operators of the norm's gradient, that of x + branch or none, and more; they return the gradient of x, and more."""
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
"""What the kernels add in fp32, as PyTorch does."""


def sum_in_norms() -> None:
    """Let torch.compile hand sums to the norms beside them, in this thread from now on.

    Passes that were set before run first. Graphs are kept on disk wherever those let them.
    """
    from torch._inductor import config  # noqa: PLC0415  (its import takes a second)

    earlier: Any = config.joint_custom_pre_pass or ()
    if not isinstance(earlier, _pass_class()):
        passes = tuple(earlier) if isinstance(earlier, (list, tuple)) else (earlier,)
        config.joint_custom_pre_pass = _pass_class()(passes)


@functools.cache
def _pass_class() -> type[Any]:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # noqa: PLC0415  (as above)

    class SumsInNorms(CustomGraphPass):
        def __init__(self, earlier: tuple[Any, ...]) -> None:
            self.earlier = earlier

        def __call__(self, graph: torch.fx.Graph) -> None:
            for run in (*self.earlier, sums_into_norms):
                run(graph)

        def uuid(self) -> Any:
            """What the keys of graphs on disk take for the passes; None where they have no such name."""
            known = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.earlier]
            return (get_hash_for_files((__file__,)), *known) if all(known) else None

    return SumsInNorms


def sums_into_norms(graph: torch.fx.Graph) -> None:
    """Let the norms of a graph make the sums before them, and their backward those of its gradient."""
    named = [(node, node.target.name()) for node in graph.nodes if isinstance(node.target, OpOverload)]
    norms = [(node, name in _FORWARD) for node, name in named if name in _FORWARD | _BACKWARD and not node.kwargs]
    order = {node: i for i, node in enumerate(graph.nodes)} if norms else {}
    for node, is_forward in norms:
        if node.args[1] is None:
            (_sum_before if is_forward else _sum_of_gradients)(node, order)


def _sum_before(norm: torch.fx.Node, order: dict[torch.fx.Node, int]) -> None:
    added = norm.args[0]
    if not _is_sum(added) or any(result.args[1] == 1 for result in norm.users):
        return
    terms: Any = added.args
    dtypes = {term.meta["val"].dtype for term in terms}
    # A checkpoint saves its output. A norm of the next one, which runs again, must not be what makes it.
    apart = any(added.meta.get(key) != norm.meta.get(key) for key in ("recompute", "ac_graph_id"))
    if apart or not (dtypes <= _FLOATS or dtypes == {torch.float64}) or not all(_written(one, added) for one in terms):
        return
    if all(order[each] < order[added] for each in norm.all_input_nodes if each is not added):
        added.prepend(norm)
        order[norm] = order[added]
    elif any(order[user] < order[norm] for user in added.users):
        return
    for place, term in enumerate(terms):
        _give(norm, place, term)
    with norm.graph.inserting_after(norm):
        total = norm.graph.call_function(operator.getitem, (norm, 1))
    total.meta, order[total] = dict(added.meta), order[norm]
    y, _, *others = norm.meta["val"]
    norm.meta["val"] = (y, total.meta["val"], *others)
    added.replace_all_uses_with(total)
    norm.graph.erase_node(added)


def _sum_of_gradients(norm: torch.fx.Node, order: dict[torch.fx.Node, int]) -> None:
    dx = next((result for result in norm.users if result.args[1] == 0), None)
    added = next(iter(dx.users)) if dx is not None and len(dx.users) == 1 else None
    if dx is None or not _is_sum(added):
        return
    terms: Any = added.args
    other = terms[terms[0] is dx]
    if other is dx or any(term.meta["val"].dtype != added.meta["val"].dtype for term in terms):
        return
    if order[other] > order[norm]:
        results = [*norm.users]
        if any(order[user] < order[added] for result in results for user in result.users):
            return
        for node in (norm, *results):
            added.prepend(node)
            order[node] = order[added]
    _give(norm, 1, other)
    added.replace_all_uses_with(dx)
    norm.graph.erase_node(added)


def _is_sum(node: Any) -> TypeGuard[torch.fx.Node]:
    """Whether a node adds two tensors of its shape, and its result lies in memory as a kernel's does."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq  # noqa: PLC0415  (sympy)

    if not isinstance(node, torch.fx.Node) or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    result = node.meta["val"]
    values = [term.meta.get("val") if isinstance(term, torch.fx.Node) else None for term in node.args]
    return result.is_contiguous() and all(
        isinstance(value, Tensor) and statically_known_true(sym_eq(value.shape, result.shape)) for value in values
    )


def _written(value: torch.fx.Node, reader: torch.fx.Node) -> bool:
    """Whether a term lies in memory anyway. One that only the sum reads, as of a dropout, is made by the sum's kernel:
    a norm that adds would have it written first."""
    aten = torch.ops.aten
    while isinstance(value.target, OpOverload) and [*value.users] == [reader]:
        if torch.Tag.pointwise in value.target.tags or value.target is aten.embedding.default:
            return False
        if not (value.target.is_view or value.target is aten._unsafe_view.default):
            return True
        assert isinstance(value.args[0], torch.fx.Node)
        value, reader = value.args[0], value
    return True


def _give(norm: torch.fx.Node, place: int, tensor: torch.fx.Node) -> None:
    """Change an argument of an operator, and how a compiler lays it out."""
    norm.update_arg(place, tensor)
    if "eager_input_vals" in norm.meta:
        values, named = norm.meta["eager_input_vals"]
        norm.meta["eager_input_vals"] = (*values[:place], tensor.meta["val"], *values[place + 1 :]), named
