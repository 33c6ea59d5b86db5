"""What our operators share: when a call must be an operator, checks and casts of its tensors, and their compiler."""

import functools
import inspect
import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload
from torch.fx.node import map_arg

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
    return followed(*tensors) or _profiler_enabled()


def followed(*tensors: Tensor) -> bool:
    """Whether the call must be an operator for another reason than a profiler."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > (HERE.watcher is not None)
        or torch._C._are_functorch_transforms_active()
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
_defined: list[str] = []
"""The names of our operators."""


def define(schema: str, function: Any, fake: Any) -> None:
    """Define an operator without autograd: an autograd.Function calls it, which a compiler can follow."""
    name = schema.partition("(")[0]
    _defined.append(name)
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
# Where the residual stream is a LayerNorm's output, as in BERT, that of its gradients is before the norm's backward:
#
#     dy = da + db;  dx = norm_backward(dy, s, ...)          dx = norm_backward(da, s, ..., db)
#
# What follows changes the graph of forward and backward so, before the compiler cuts it in two.

_NORMS = ("rms_norm", "layer_norm")
_FORWARD = {f"stepscope::{norm}_forward" for norm in _NORMS}
"""Operators of x, a branch or none, and more; they return the norm, x + branch, and more."""
_BACKWARD = {f"stepscope::{norm}_backward" for norm in _NORMS}
"""Operators of the norm's gradient, that of x + branch or none, and more; they return the gradient of x, and more."""
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
"""What the kernels add in fp32, as PyTorch does."""
_HALVES = {torch.bfloat16, torch.float16}
CASTS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_COPIES = {torch.ops.aten.clone.default, *CASTS}
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default}
"""Views of a tensor that another dtype does not change."""
OF_RESULTS = {"val", "tensor_meta", "eager_input_vals"}
"""What a node's meta says of its arguments and results."""


def use_graph_passes() -> None:
    """Let torch.compile hand sums to the norms beside them, draw dropouts together, and copy no gradients of attention
    that lie as they should, in this thread from now on.

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

    class GraphPasses(CustomGraphPass):
        def __init__(self, earlier: tuple[Any, ...]) -> None:
            self.earlier = earlier

        def __call__(self, graph: torch.fx.Graph) -> None:
            for run in (*self.earlier, *PASSES):
                run(graph)
            _tell_the_compiler()

        def uuid(self) -> Any:
            """What the keys of graphs on disk take for the passes; None where they have no such name."""
            known = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.earlier]
            files = sorted({inspect.getfile(run) for run in PASSES})
            return (get_hash_for_files(tuple(files)), *known) if all(known) else None

    return GraphPasses


def _tell_the_compiler() -> None:
    """Let Inductor know our operators before it meets them.

    Of one that it does not know PyTorch 2.11 spells out the arguments, with what they were made of: of operators that
    follow one another in time that doubles with each.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint  # noqa: PLC0415  (a second)
    from torch._library.utils import get_layout_constraint_tag  # noqa: PLC0415  (beside it)

    for name in _defined:
        target = getattr(torch.ops.stepscope, name).default
        if target not in lowerings:
            usual: Any = get_layout_constraint_tag(target, with_default=True)
            make_fallback(target, tag_to_layout_constraint(usual))


def sums_into_norms(graph: torch.fx.Graph) -> None:
    """Let the norms of a graph make the sums before them, their backward those of its gradient, and both the casts
    beside them."""
    named = [(node, node.target.name()) for node in graph.nodes if isinstance(node.target, OpOverload)]
    norms = [(node, name in _FORWARD) for node, name in named if name in _FORWARD | _BACKWARD and not node.kwargs]
    order = {node: i for i, node in enumerate(graph.nodes)} if norms else {}
    for node, is_forward in norms:
        if node.args[1] is None:
            (_sum_before if is_forward else _sum_of_gradients)(node, order)
    for node, is_forward in norms:
        _casts_beside(node, is_forward)
    for node, is_forward in norms:
        if not is_forward and "more" in _names(node):
            _sum_before_backward(node)  # of dtypes that no cast changes any more
            _sum_over_rows(node)


def _sum_before(norm: torch.fx.Node, order: dict[torch.fx.Node, int]) -> None:
    added = norm.args[0]
    if not _is_sum(added) or any(result.args[1] == 1 for result in norm.users):
        return
    terms = _terms(added)
    dtypes = {term.meta["val"].dtype for term, _ in terms}
    # A checkpoint saves its output. A norm of the next one, which runs again, must not be what makes it.
    if not _together(added, norm) or not (dtypes <= _FLOATS or dtypes == {torch.float64}):
        return
    if not all(_written(term, reader) for term, reader in terms):
        return
    if all(order[each] < order[added] for each in norm.all_input_nodes if each is not added):
        added.prepend(norm)
        order[norm] = order[added]
    elif any(order[user] < order[norm] for user in added.users):
        return
    for place, (term, _) in enumerate(terms):
        give(norm, place, term)
    with norm.graph.inserting_after(norm):
        total = norm.graph.call_function(operator.getitem, (norm, 1))
    total.meta, order[total] = dict(added.meta), order[norm]
    added.replace_all_uses_with(total)
    _erase(added)


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
    give(norm, 1, other)
    added.replace_all_uses_with(dx)
    norm.graph.erase_node(added)


def _sum_before_backward(norm: torch.fx.Node) -> None:
    """Let a norm's backward add the two gradients of its output, where nothing else reads their sum."""
    arguments: Any = norm.args
    value, x = arguments[0], arguments[2].meta["val"]
    added = value
    while added.target in VIEWS and len(added.users) == 1:
        added = added.args[0]
    # What is the gradient of x + branch, too, is written anyway.
    if not _is_sum(added) or len(added.users) > 1 or value in arguments[1:]:
        return
    of, terms = added.meta["val"], _terms(added)
    if terms[0][0].meta["val"].dtype != of.dtype:
        terms.reverse()  # the kernel rounds to the first one's dtype
    values = [term.meta["val"] for term, _ in terms]
    fits = values[0].dtype == of.dtype and _same(of.shape[-1:], x.shape[-1:])
    if not fits or not all(each.dtype in _FLOATS and each.is_contiguous() for each in values):
        return
    if all(_written(term, reader) for term, reader in terms):
        give(norm, 0, terms[0][0])
        give(norm, "more", terms[1][0])
        for node in dict.fromkeys((value, added)):
            _erase(node)


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


def _terms(added: torch.fx.Node) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """What a sum adds, each with its reader: behind copies that the sum alone reads, as a dropout of p = 0 leaves them,
    and behind such casts to fp32, unless the sum would have 16 bits."""
    terms: list[Any] = [(term, added) for term in added.args]
    for place, (value, reader) in enumerate(terms):
        widens = terms[1 - place][0].meta["val"].dtype == added.meta["val"].dtype
        while [*value.users] == [reader]:
            copies = value.target is torch.ops.aten.clone.default and value.args[0].meta["val"].is_contiguous()
            if not copies and not (widens and _cast(value, _HALVES, {torch.float32}) is not None):
                break
            value, reader = value.args[0], value  # noqa: PLW2901  (towards what is added)
        terms[place] = value, reader
    return terms


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


def _together(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether two nodes belong to the same checkpoint, or to none."""
    return all(one.meta.get(key) == other.meta.get(key) for key in ("recompute", "ac_graph_id"))


def give(norm: torch.fx.Node, place: int | str, given: torch.fx.Node | torch.dtype | bool) -> None:
    """Change an argument of an operator, how a compiler lays it out, and what the operator returns then. Optional ones
    before it get their defaults."""
    assert isinstance(norm.target, OpOverload)
    place = _names(norm).index(place) if isinstance(place, str) else place
    defaults = [argument.default_value for argument in norm.target._schema.arguments[len(norm.args) : place + 1]]
    norm.args = (*norm.args, *defaults)
    norm.update_arg(place, given)
    if "eager_input_vals" in norm.meta:
        values, named = norm.meta["eager_input_vals"]
        value = given.meta["val"] if isinstance(given, torch.fx.Node) else given
        norm.meta["eager_input_vals"] = (*(*values, *defaults)[:place], value, *values[place + 1 :]), named
    norm.meta["val"] = norm.target(*map_arg(norm.args, lambda node: node.meta["val"]))
    for result in norm.users:
        which = result.args[1]
        assert isinstance(which, int)
        _set_value(result, norm.meta["val"][which])


def _names(call: torch.fx.Node) -> list[str]:
    """The names of an operator's arguments."""
    assert isinstance(call.target, OpOverload)
    return [argument.name for argument in call.target._schema.arguments]


def _erase(node: torch.fx.Node) -> None:
    """Erase a node that nothing reads, and the views and copies that were made for it."""
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if not source.users and (source.target in _COPIES or _is_column(source)):
            _erase(source)


# A linear layer whose result is added to the residual stream has for its bias the sum of the stream's gradient over all
# rows. LayerNorm's backward, which adds up the rows of its own bias, makes that, too:
#
#     dx, sums = norm_backward(dy, ...);  db = dx.sum(0)     dx, (*sums, db) = norm_backward(dy, ..., of_rows=True)


def _sum_over_rows(norm: torch.fx.Node) -> None:
    """Let LayerNorm's backward add up the rows of the gradient that it makes, where something does."""
    results = {result.args[1]: result for result in norm.users}
    splits = [*results[1].users] if 1 in results else []
    total = _rows_summed(results[0]) if 0 in results else None
    # Behind the gradients of its weight and its bias there is room for another: what splits them gives one more.
    apart = len(splits) == 1 and splits[0].target is torch.ops.aten.split.Tensor
    takes = "of_rows" in _names(norm)[len(norm.args) :]
    if total is None or not apart or not takes or not _together(total, norm):
        return
    width, value, sums = splits[0].args[1], total.meta["val"], results[1].meta["val"]
    # What the kernel returns has the dtype of the norm's weight, which may be coarser than the sum's.
    exact = value.is_floating_point() and torch.promote_types(value.dtype, sums.dtype) == sums.dtype
    if not isinstance(width, int) or value.numel() != width or not exact:
        return
    give(norm, "of_rows", True)
    splits[0].meta["val"] = results[1].meta["val"].split(width)
    aten, made = torch.ops.aten, norm
    for target, *args in (
        (operator.getitem, 1),
        (aten.slice.Tensor, 0, 2 * width, 3 * width),
        (aten.view.default, [*value.shape]),
        (torch.ops.prims.convert_element_type.default, value.dtype),
    ):
        with norm.graph.inserting_after(made):
            made = norm.graph.call_function(target, (made, *args))
        source: Any = made.args[0]
        made.meta = {key: each for key, each in total.meta.items() if key not in OF_RESULTS}
        made.meta["val"] = target(source.meta["val"], *args)
    total.replace_all_uses_with(made)
    norm.graph.erase_node(total)


def _rows_summed(value: torch.fx.Node) -> torch.fx.Node | None:
    """The sum of a value over all but its last dimension, perhaps behind views. Autocast on a GPU makes it in fp32."""
    rows = [*range(value.meta["val"].dim() - 1)]
    for user in value.users:
        if user.target is torch.ops.aten.sum.dim_IntList and user.args[1] == rows:
            return user
        if user.target in VIEWS and (total := _rows_summed(user)) is not None:
            return total
    return None


# Under autocast a norm writes fp32, which each product casts, and in backward its gradient is cast to fp32 first. The
# kernels load any dtype, compute in fp32 and round where they store: the same bits without the casts.
#
#     y = norm(x, fp32);  y.bfloat16()                       y = norm(x, bf16)
#     dx = norm_backward(dy.float(), ...)                    dx = norm_backward(dy, ...)


def _casts_beside(norm: torch.fx.Node, is_forward: bool) -> None:
    """Let a norm do the casts of what it reads and writes, where it computes in fp32."""
    if not all(read.meta["val"].dtype in _FLOATS for read in norm.all_input_nodes):
        return
    for place in (0, 1) if is_forward else (0, 1, 2):
        value, other = norm.args[place], norm.args[1 - place] if is_forward else None
        # x + branch has fp32 as long as one of them has.
        stays = not isinstance(other, torch.fx.Node) or other.meta["val"].dtype == torch.float32
        narrow = _narrow(value) if isinstance(value, torch.fx.Node) and stays and _together(value, norm) else None
        if isinstance(value, torch.fx.Node) and narrow is not None:
            give(norm, place, narrow)
            if not value.users:
                _erase(value)
    result = next((result for result in norm.users if result.args[1] == 0), None)
    if result is not None:
        _write_narrow(norm, result)


def _write_narrow(norm: torch.fx.Node, result: torch.fx.Node) -> None:
    """Let a norm write in 16 bits what all its readers cast to them. Where others read a gradient in fp32, RMSNorm's
    backward writes that of the branch beside it."""
    casts, alone = _casts_of(result)
    dtypes = {cast.meta["val"].dtype for cast in casts}
    names = _names(norm)
    branch = names.index("branch_dtype") if "branch_dtype" in names else None
    of_a_branch = branch is not None and norm.args[branch] is not None
    if len(dtypes) != 1 or of_a_branch or not all(_together(cast, result) for cast in casts):
        return
    narrow = result
    if alone:
        give(norm, "dtype", *dtypes)
    elif branch is not None and all(each.args[1] != 1 for each in norm.users):
        give(norm, "branch_dtype", *dtypes)
        with norm.graph.inserting_after(norm):
            narrow = norm.graph.call_function(operator.getitem, (norm, 1))
        narrow.meta = dict(casts[0].meta)
    else:
        return
    for cast in casts:
        source = cast.args[0]
        assert isinstance(source, torch.fx.Node)
        cast.replace_all_uses_with(_viewed(source, result, narrow))
        _erase(cast)


def _set_value(node: torch.fx.Node, value: Tensor) -> None:
    node.meta["val"] = value
    if "tensor_meta" in node.meta:
        node.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(dtype=value.dtype, shape=value.shape)


def _casts_of(value: torch.fx.Node) -> tuple[list[torch.fx.Node], bool]:
    """The casts of a value to 16 bits, perhaps behind views, and whether nothing else reads it."""
    casts, alone = [], True
    for user in value.users:
        if user.target in VIEWS:
            behind, only = _casts_of(user)
            casts, alone = casts + behind, alone and only
        elif _cast(user, {torch.float32}, _HALVES) is not None:
            casts.append(user)
        else:
            alone = False
    return casts, alone


def _narrow(value: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor of 16 bits that a value holds in fp32, behind the same views; None where it holds another."""
    cast = value
    while cast.target in VIEWS:
        assert isinstance(cast.args[0], torch.fx.Node)
        cast = cast.args[0]
    source = _cast(cast, _HALVES, {torch.float32})
    return None if source is None else _viewed(value, cast, source)


def _viewed(value: torch.fx.Node, base: torch.fx.Node, other: torch.fx.Node) -> torch.fx.Node:
    """The views that make a value of a base, made of another tensor, which differs from it in dtype."""
    if value is base:
        return other
    assert isinstance(value.args[0], torch.fx.Node) and callable(value.target)
    source = _viewed(value.args[0], base, other)
    with value.graph.inserting_before(value):
        view = value.graph.call_function(value.target, (source, *value.args[1:]), value.kwargs)
    view.meta = dict(value.meta)
    _set_value(view, value.meta["val"].to(other.meta["val"].dtype))
    return view


def _cast(node: torch.fx.Node, of: set[torch.dtype], to: set[torch.dtype]) -> torch.fx.Node | None:
    """What a node casts from one of these dtypes to one of those, and does no more to; None if it is no such cast."""
    source = node.args[0] if node.target in CASTS else None
    if not isinstance(source, torch.fx.Node):
        return None
    before, after = source.meta["val"], node.meta["val"]
    as_it_lies = before.device == after.device and before.is_contiguous() and after.is_contiguous()
    return source if before.dtype in of and after.dtype in to and as_it_lies else None


# Where one layer makes query, key and value side by side, attention's backward returns rows whose columns their
# gradients are (flash/attention.py). Autograd puts the layer's gradient together from these, which a compiler copies:
#
#     dq, dk, dv = columns(rows);  dy = cat(dq, dk, dv)      dy = rows

_ATTENTION_BACKWARD = "stepscope::flash_attention_backward"
_COLUMNS = {torch.ops.aten.permute.default, torch.ops.aten.split_with_sizes.default, *VIEWS}
"""Views that columns of rows, and heads of these, are made by."""


def columns_as_rows(graph: torch.fx.Graph) -> None:
    """Replace a gradient that is put together from columns of rows by the rows, which attention's backward returns,
    where these are the same numbers in the same order, and nothing else reads a column."""
    for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        rows = _rows_behind(cat)
        whole = None if rows is None else _equal_to(rows, cat)
        if rows is None or whole is None:
            continue
        _set_value(rows, whole.meta["val"])  # whose memory, for a compiler, is that of the views behind it
        whole.replace_all_uses_with(rows)
        _erase(whole)
        if whole is not cat:
            _erase(cat)


def _rows_behind(cat: torch.fx.Node) -> torch.fx.Node | None:
    """The rows of attention's backward of which a concatenation takes views, if nothing else reads them or a view."""
    passed, ends = {cat}, set[torch.fx.Node]()
    for term in cat.all_input_nodes:
        node = term
        while _is_column(node):
            passed.add(node)
            node = node.all_input_nodes[0]
        ends.add(node)
    rows = ends.pop()
    source = rows.args[0] if rows.target is operator.getitem and rows.args[1] == 0 else None
    if ends or not isinstance(source, torch.fx.Node) or not isinstance(source.target, OpOverload):
        return None
    alone = all(user in passed for node in (rows, *passed - {cat}) for user in node.users)
    return rows if alone and source.target.name() == _ATTENTION_BACKWARD else None


def _is_column(node: torch.fx.Node) -> bool:
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    return of.target in _COLUMNS


def _equal_to(rows: torch.fx.Node, cat: torch.fx.Node) -> torch.fx.Node | None:
    """The node that is equal to rows, from a concatenation of views of them on; None where there is none."""
    node, value = _as_view(cat)
    while node is not None and not value.is_contiguous():
        node = _only_reader(node, {torch.ops.aten.permute.default})
        value = value if node is None else value.permute(node.args[1])
    # From here on the numbers lie in the order of the rows, and views and copies leave them so.
    while node is not None and not _same(node.meta["val"].shape, rows.meta["val"].shape):
        node = _only_reader(node, {torch.ops.aten.clone.default, *VIEWS})
    alike = node is not None and node.meta["val"].is_contiguous() and rows.meta["val"].is_contiguous()
    return node if alike else None


def _as_view(cat: torch.fx.Node) -> tuple[torch.fx.Node | None, Any]:
    """A concatenation of views of one tensor, or the stack that is made of it, and a view of that tensor which is equal
    to it; no node where there is no such view."""
    given: Any = (*cat.args, 0)
    values = [term.meta["val"] for term in given[0]]
    first, shape, strides = values[0], tuple(cat.meta["val"].shape), values[0].stride()
    alike = all(_same(each.stride(), strides) for each in values)
    if not alike or not _same([first.storage_offset()], [0]) or cat.kwargs:
        return None, None
    dim = given[1] % len(shape)
    steps = [after.storage_offset() - each.storage_offset() for each, after in itertools.pairwise(values)]
    if _same(steps, [each.shape[dim] * strides[dim] for each in values[:-1]]):
        return cat, first.as_strided(shape, strides)
    stack = _only_reader(cat, {torch.ops.aten.view.default})
    shape = (*first.shape[:dim], len(values), *first.shape[dim:])
    if stack is None or not _same(tuple(stack.meta["val"].shape), shape) or not _same(steps, steps[:1] * len(steps)):
        return None, None
    return stack, first.as_strided(shape, (*strides[:dim], steps[0], *strides[dim:]))


def _only_reader(node: torch.fx.Node, of: set[Any]) -> torch.fx.Node | None:
    """What alone reads a node, if it is one of these; else None."""
    readers = [*node.users]
    return readers[0] if len(readers) == 1 and readers[0].target in of else None


def _same(one: Any, other: Any) -> bool:
    """Whether shapes, or lists of numbers, are known to be equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq  # noqa: PLC0415  (sympy)

    return len(one) == len(other) and statically_known_true(sym_eq(one, other))


# Each attention with a dropout draws two seeds (flash/attention.py), and a compiler launches a kernel for each.

SEEDS = 2
"""Seeds of a call; as many bytes as the widest load has."""
SEEDS_END = 2**63 - 1
"""What all seeds are below."""


def seeds_together(graph: torch.fx.Graph) -> None:
    """Draw the seeds of all attention of a graph at once. What a checkpoint draws stays, since it draws it twice."""
    from torch._inductor import config  # noqa: PLC0415  (as above)

    alike: dict[torch.device, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.randint.low):
        if node.args == (0, SEEDS_END, [SEEDS]) and node.meta.get("recompute") is None and not config.fallback_random:
            alike.setdefault(node.meta["val"].device, []).append(node)
    for drawn in alike.values():
        first, size = drawn[0], [SEEDS * len(drawn)]
        with graph.inserting_before(first):
            every = graph.call_function(torch.ops.aten.randint.low, (0, SEEDS_END, size), first.kwargs)
        every.meta = {key: value for key, value in first.meta.items() if key not in OF_RESULTS}
        every.meta["val"] = first.meta["val"].new_empty(size)
        for which, node in enumerate(drawn):
            with graph.inserting_before(node):
                place = SEEDS * which, SEEDS * (which + 1)
                part = graph.call_function(torch.ops.aten.slice.Tensor, (every, 0, *place))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


PASSES: list[Callable[[torch.fx.Graph], None]] = [sums_into_norms, columns_as_rows, seeds_together]
"""What changes a graph. The module that has an operator adds the pass that needs it."""
