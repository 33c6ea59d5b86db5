"""What a step does beside what was asked for: waits of the host, products in 32 bits, parameters without a gradient."""

import contextlib
import functools
import gc
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.core.errors import install_places, portable_path
from stepscope.core.evidence import CodeLine, Habits, RestLine, Unchanged
from stepscope.core.formulas.operator_formulas import Unknown
from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER
from stepscope.recording.device import host_memory
from stepscope.recording.flops import product_flops
from stepscope.recording.held_tensors import local_part
from stepscope.recording.step import Recorder
from stepscope.recording.updates import Changes, held_by, most_updates
from stepscope.recording.watch.loop import weakly, weakly_each

# Looks at what trains: which parameters get a gradient, and which of those do not change.


_NEGLIGIBLE = 1e-6
"""A gradient is no more than rounding whose root mean square is such a share of the largest: that of a bias before a
norm, for instance, is zero by design."""


class Training:
    """The parameters that some steps train: of the model, those that an optimizer holds; all, where it holds none.

    An average of the weights, a teacher or a frozen part is held by no optimizer, and is judged by nothing here.
    Nothing of the loop is kept alive.
    """

    _model: nn.Module = weakly()
    _optimizers: Sequence[torch.optim.Optimizer] = weakly_each()

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], changes: Changes | None = None
    ) -> None:
        self._held = held_by(optimizers)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        held = [(name, p) for name, p in named if id(p) in self._held]
        self._parameters: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary(held or named)
        self._model, self._optimizers, self._changes = model, optimizers, changes
        self._before: dict[int, torch.Tensor | None] = {}
        """The norms of the gradients before the update that runs, by the ids of their parameters; None where one is
        sparse."""
        self._norms: dict[int, torch.Tensor] = {}
        """The norm of the gradient that each parameter's last update took."""
        self._with_gradient: set[int] = set()
        self._steps = self._called = 0
        self._infinite: list[torch.Tensor] = []
        """What a scaler gives a fused optimizer's step: above 0 where a gradient was not finite."""
        self._counted: int | None = None
        self.hooks = contextlib.ExitStack()
        """The hooks on the optimizers; close it to take them off."""

    def begin(self) -> None:
        """Begin to look, before the first of the steps; later calls count the steps."""
        self._steps += 1
        if self._steps > 1:
            return
        if self._changes is None:
            self._changes = Changes(self._parameters.values(), self._optimizers)
        self._counted = self._count()
        for optimizer in self._optimizers:
            hook = optimizer.register_step_post_hook(self._count_update)
            # A hook that takes others off, as one that ends a step does, must be the last: PyTorch walks through them.
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(hook.id, last=False)
            self.hooks.callback(hook.remove)

    def look_at_gradients(self) -> None:
        """Look at the gradients that an update is about to take. What other models' losses left beside them counts
        nothing: a critic gets gradients from its generator's loss too, which its own update never takes."""
        self._before = {id(p): _norm(p.grad) for p in self._parameters.values() if p.grad is not None}

    def without_gradient(self) -> list[str]:
        """The parameters that had no gradient before any update; all of them, where every gradient holds zeros. Empty
        where no update was seen, or where gradients are gone once they have been used."""
        if not self._updates or (not self._with_gradient and not self._nothing_changed()):
            return []
        if self._with_gradient and not any(self._sizes().values()) and self._nothing_changed():
            return list(self._parameters)
        return [name for name, p in self._parameters.items() if id(p) not in self._with_gradient]

    @property
    def has_gradients(self) -> bool:
        """Whether every parameter had a gradient, be it of zeros."""
        return all(id(p) in self._with_gradient for p in self._parameters.values())

    def is_called(self, module: str) -> bool:
        """Whether the step calls this module, as gradients in it, or round it, show."""
        near = self._model.get_submodule(module)
        if next(near.parameters(), None) is None:
            near = self._model.get_submodule(nearest_with_parameters(self._model, module))
        return not self._with_gradient or any(id(p) in self._with_gradient for p in near.parameters())

    def unchanged(self, named: int) -> Unchanged | None:
        """The parameters that get gradients and did not change, the first few by name; None where every one changed, no
        update was made, or it cannot be told."""
        count = self._count()
        if self._changes is None or not self._updates or (count is not None and count == self._counted):
            return None
        same = self._changes.unchanged(p for p in self._parameters.values() if not self._has_a_master(p))
        same -= self._changes.warming_up(self._optimizers)
        sizes = self._sizes()
        enough = _NEGLIGIBLE * max((size for size in sizes.values() if size < float("inf")), default=0.0)
        judged = {
            name: p
            for name, p in self._parameters.items()
            if id(p) in same and id(p) in self._with_gradient and sizes.get(id(p), 1.0) > enough
        }
        if not judged:
            return None
        at_zero = self._changes.at_rate_zero(self._optimizers)
        dtypes = {str(p.dtype).removeprefix("torch.") for p in judged.values()}
        return Unchanged(
            parameters=len(self._parameters),
            count=len(judged),
            names=tuple(judged)[:named],
            at_rate_zero=sum(id(p) in at_zero for p in judged.values()),
            dtypes=tuple(sorted(dtypes)),
            held=not self._optimizers or any(id(p) in self._held for p in judged.values()),
        )

    def _has_a_master(self, parameter: torch.Tensor) -> bool:
        """Whether an optimizer updates a copy of this parameter, and writes the copy's rounding into it."""
        states: list[Any] = [optimizer.state.get(parameter) for optimizer in self._optimizers]
        return any("master" in str(name) for state in states if isinstance(state, dict) for name in state)

    def _nothing_changed(self) -> bool:
        same = self._changes.unchanged(self._parameters.values()) if self._changes is not None else set()
        return len(same) == len(self._parameters) > 0

    def _sizes(self) -> dict[int, float]:
        """The root mean square of each gradient."""
        numbers = {id(p): p.numel() for p in self._parameters.values()}
        return {key: float(norm) / max(1, numbers[key]) ** 0.5 for key, norm in self._norms.items()}

    def _count(self) -> int | None:
        """Updates that the optimizers themselves count; None where one of them keeps no count."""
        counts = [most_updates(optimizer) for optimizer in self._optimizers]
        return sum(count or 0 for count in counts) if counts and None not in counts else None

    @property
    def _updates(self) -> int:
        """Calls of the optimizers' steps that were updates. A scaler that leaves one out does not call the step; that
        of a fused optimizer, which then does nothing, it calls all the same."""
        infinite = int(torch.stack(self._infinite).count_nonzero()) if self._infinite else 0
        return self._called - infinite

    def _count_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._called += 1
        if isinstance(found := getattr(optimizer, "found_inf", None), torch.Tensor):
            self._infinite.append(found.reshape(()))
        held = held_by([optimizer])
        for key, norm in self._before.items():
            if key in held or key not in self._held:
                self._with_gradient.add(key)
                if norm is not None:
                    self._norms[key] = norm


def _norm(gradient: torch.Tensor) -> torch.Tensor | None:
    """The norm of a gradient, or of this rank's part of it; None where it is sparse."""
    if gradient.is_sparse:
        return None
    numbers = local_part(gradient.detach())
    return torch.linalg.vector_norm(numbers, dtype=torch.promote_types(numbers.dtype, torch.float32))


def nearest_with_parameters(model: nn.Module, name: str) -> str:
    """The path of the nearest module round this one that has parameters."""
    while name:
        name = name.rpartition(".")[0]
        if next(model.get_submodule(name).parameters(), None) is not None:
            return name
    return name


# The line of the user's code that is running, found from the stack.


_TORCH = str(Path(torch.__file__).parent) + "/"
_WRAPPERS = ("wrapper", "wrapped", "decorate", "__torch_", "handle_torch", "_fn", "inner", "profile_hook")
"""Parts of the names of functions that only call another one."""


class Line(NamedTuple):
    """A line of code, and the function of PyTorch that it called, if that is one written in Python."""

    where: str
    function: str


def users_line() -> Line | None:
    """The innermost line of the user's code, outside of PyTorch, of packages and of this tool; None without one.

    Where packages lie in between, as a trainer does, their innermost line stands first.
    """
    function = package = ""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        owner = _owner(file)
        here = f"{_portable_path(file)}:{line}"
        if owner == "user":
            return Line(f"{package} (from {here})" if package else here, function)
        if owner == "torch" and not package and not any(part in name for part in _WRAPPERS):
            function = name
        elif owner == "package" and not package:
            package = here
    return Line(package, function) if package else None


@functools.cache
def _owner(file: str) -> str:
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith("<frozen"):
        return "python"
    path = portable_path(file)
    if not any(file.startswith(place) for place in install_places()):
        return "user"
    if path.startswith("stepscope/"):
        return "stepscope"
    return "package" if "-packages/" in file else "python"


_portable_path = functools.cache(portable_path)


# Finds the lines at which the host waits for the device, or on a CPU, at which it would wait for a GPU.
#
# On a GPU PyTorch itself says where it synchronises. On a CPU nothing waits. There a call counts if it reads a value of
# a tensor that the model computed. Tensors that a program keeps on the host anyway, such as random indices, do not
# count.


_SYNCHRONIZES = "called a synchronizing CUDA operation"
_READS = {
    "item": ".item()",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "int()",
    "__bool__": "if",
    "is_nonzero": "if",
    "__repr__": "print",
    "__format__": "print",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": ".numpy()",
    "cpu": ".cpu()",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "equal",
    "allclose": "allclose",
}
"""Functions of tensors that give the host a value, and how a program writes them. `to` is left out: on a CPU, a program
that moves everything to its device calls it as well."""
_ATTENTION = "scaled_dot_product_attention"
_OF_SCALERS = "amp/grad_scaler.py"


class HostReads(TorchFunctionMode):
    """A mode that finds lines at which the host reads a value, while `counting` is true. `lines` counts (where,
    call)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counting = False
        self.lines: Counter[tuple[str, str]] = Counter()
        self.from_the_model: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Tensors on a CPU that the program would hold on a GPU. Tensors that require a gradient count as well."""
        self.in_attention_of_half = False
        """Whether PyTorch's attention runs, on operands of 16 bits or under autocast. Its math kernel multiplies in
        fp32 by design."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self._function = ""

    def follow(self, inputs: Iterable[Any], outputs: Iterable[Any], *, always: bool = False) -> None:
        """Note which outputs the model computed: those that have an input of the model's."""
        if always or any(self._is_of_the_model(each) for each in inputs):
            for output in outputs:
                if isinstance(output, torch.Tensor):
                    self.from_the_model[output] = True

    @contextlib.contextmanager
    def synchronisations(self) -> Iterator[None]:
        """A context in which PyTorch says where it waits for a GPU. Other warnings are shown as before."""
        if not self._on_gpu:
            yield
            return
        mode, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_SYNCHRONIZES)
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.showwarning = functools.partial(self._show_warning, show)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.counting and not self._on_gpu and name in _READS:
            with contextlib.suppress(Exception):  # This runs inside the loop, which an error of ours must not end.
                if args and self._is_of_the_model(args[0]):
                    self._note(_READS[name])
        outside = self._function, self.in_attention_of_half
        self._function, self.in_attention_of_half = name, False
        if name == _ATTENTION:
            operands = (*args, *(kwargs or {}).values())
            dtypes = {each.dtype for each in operands if isinstance(each, torch.Tensor)}
            half = bool(dtypes & {torch.bfloat16, torch.float16})
            self.in_attention_of_half = half or torch.is_autocast_enabled(self._device.type)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._function, self.in_attention_of_half = outside

    def _is_of_the_model(self, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and (thing.requires_grad or thing in self.from_the_model)

    def _show_warning(
        self, show: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *rest: Any
    ) -> None:
        if not str(message).startswith(_SYNCHRONIZES):
            show(message, category, filename, *rest)
        elif self.counting and not filename.endswith(_OF_SCALERS):
            self._note(_READS.get(self._function, ""))

    def _note(self, call: str) -> None:
        line = users_line()
        if line is not None:
            # Some functions of PyTorch read a value themselves, such as clipping. The user knows the outer function.
            inside = line.function if line.function and not line.function.startswith("__") else ""
            self.lines[line.where, inside or call] += 1


# Finds the lines in which the rest of a watched loop's steps passes.


_LOOKS_EVERY_S = 0.001
_FEWEST_LOOKS = 12
"""With fewer looks nothing is said of where the rest passes."""
_OF_MODES, _OF_PHASES = ("__torch_dispatch__", "__torch_function__"), "watch/phases.py"
"""What of this tool calls the loop's own code and operators."""


class RestLines(Recorder):
    """Looks from a thread of its own, many times in a step, at which line the loop is while no other part is open.

    A line is one of the loop itself, where that is the user's; below a library's loop the user's line that it calls, as
    a callback's, or the library's own."""

    def __init__(self) -> None:
        self._lines: Counter[tuple[str, str]] = Counter()
        self._loop: set[Any] = set()
        """The code of the functions that were running when a step ended, the loop among them."""
        self._thread, self._in_rest, self._over = 0, False, threading.Event()

    def step_begins(self) -> None:
        if not self._thread:
            self._loop = {frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())}
            self._thread = threading.get_ident()
            with contextlib.suppress(RuntimeError):  # no more threads are allowed
                threading.Thread(target=self._look, name="stepscope-rest", daemon=True).start()
        self._in_rest = True

    def phase_begins(self, name: str) -> None:
        self._in_rest = False

    def phase_ends(self, name: str) -> None:
        self._in_rest = True

    def step_ends(self) -> None:
        self._in_rest = False

    evaluation_begins, evaluation_ends = step_ends, step_begins

    def lines(self) -> tuple[RestLine, ...]:
        """End looking. Returns the lines with most of the rest; none of a rest that was hardly seen."""
        self._over.set()
        looks = self._lines.total()
        most = self._lines.most_common(NAMED) if looks >= _FEWEST_LOOKS else []
        return tuple(RestLine(where=where, call=call, share=count / looks) for (where, call), count in most)

    def _look(self) -> None:
        while not self._over.wait(_LOOKS_EVERY_S):
            if self._in_rest:
                # No frame is kept from one look to the next: it would keep what the loop's functions hold.
                with contextlib.suppress(Exception):  # The loop goes on meanwhile.
                    line = self._line(sys._current_frames()[self._thread])
                    self._lines.update([line] if line is not None else [])

    def _line(self, innermost: Any) -> tuple[str, str] | None:
        """The line, and the function that it calls; None while the loop waits for a recorder."""
        inside = ""
        found, users = ("", ""), False
        for frame, line in traceback.walk_stack(innermost):
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            owner, in_loop = _owner(file), frame.f_code in self._loop
            if owner == "stepscope" and not (name in _OF_MODES or file.endswith(_OF_PHASES)):
                return None  # it is the looking itself that takes this time
            if owner == "user" or (in_loop and owner == "package" and not users):
                found, users = (f"{_portable_path(file)}:{line}", inside), owner == "user"
            if in_loop and owner in ("user", "package"):
                break
            if owner in ("user", "package") or (owner == "torch" and not any(part in name for part in _WRAPPERS)):
                inside = name
        return found


# Looks at the operators of a step: products in 32 bits beside others in 16, copies from memory that is not pinned, and
# what checkpointing runs again.


_MANY_AT_ONCE = ("_foreach_", "_fused_", "_amp_foreach_")
"""The first parts of the names of operators that update many tensors at once."""
_SMALL_BYTES = 4096
"""A copy of less than a page costs no time that pinning could save."""


class OperatorHabits(TorchDispatchMode):
    """A mode below autograd and autocast. It looks at each operator, and tells HostReads its inputs and outputs.

    Its errors do not reach the user's loop: after the first one it looks at nothing more.
    """

    supports_higher_order_operators = True

    def __init__(self, reads: HostReads, modules: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self.phase = ""
        self.looking = True
        """False while the tool itself calls operators."""
        self.in_optimizer = 0
        """Operators that the optimizer has called."""
        self.many_at_once = False
        """Whether one of the optimizer's operators takes many tensors."""
        self.product_flops: Counter[str] = Counter()
        """FLOPs of forward's products by the dtype of their operands, without those that attention takes in fp32 by
        design."""
        self.fp32_modules: Counter[str] = Counter()
        self.unpinned: Counter[tuple[str, str]] = Counter()
        self.products_s = self.operators_s = 0.0
        """Seconds in which the host called products, and all operators, of forward and backward; on a CPU, in which
        they ran."""
        self.again_flops = self.again_bytes = 0
        self._reads, self._modules = reads, modules
        self._on_gpu = device.type == "cuda"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began_s = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if self.looking:
            took_s = time.perf_counter() - began_s
            try:
                self._look(func, args, kwargs or {}, out, took_s)
            except Exception:  # This runs inside the loop, which an error of ours must not end.
                self.looking = False
        return out

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, took_s: float) -> None:
        packet = getattr(func, "_overloadpacket", func)  # an operator of higher order, as flex attention, has none
        if self.phase == OPTIMIZER:
            self.in_optimizer += 1
            self.many_at_once = self.many_at_once or packet.__name__.startswith(_MANY_AT_ONCE)
        elif self.phase in (FORWARD, BACKWARD):
            self._look_at_product(func, args, kwargs, out, took_s)
        if not self._on_gpu:
            self._reads.follow(tree_leaves((args, kwargs)), tree_leaves(out), always=self.phase == BACKWARD)
        elif packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self._look_at_copy(args, out)

    def _look_at_product(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, took_s: float
    ) -> None:
        try:
            flops = product_flops(func, args, kwargs, out)
        except Unknown:
            flops = None
        self.operators_s += took_s
        self.products_s += took_s if flops else 0.0
        # Backward itself runs with gradients off, unless it makes a graph of its own.
        if self.phase == BACKWARD and torch.is_grad_enabled() and _checkpointing():
            self.again_flops += flops or 0
            self.again_bytes += _new_bytes((args, kwargs), out)
        if not flops or self.phase != FORWARD:
            return
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()}
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        if dtype is None or (dtype is torch.float32 and self._reads.in_attention_of_half):
            return
        self.product_flops[str(dtype).removeprefix("torch.")] += flops
        if dtype is torch.float32:
            running = (
                self._modules.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_stack(sys._getframe())
            )
            innermost = next((name for name in running if name is not None), "")
            self.fp32_modules[innermost] += flops

    def _look_at_copy(self, args: tuple[Any, ...], out: Any) -> None:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        source = tensors[-1]  # The first argument of copy_ is the destination.
        if not isinstance(out, torch.Tensor) or out.device.type != "cuda" or source.device.type != "cpu":
            return
        if source.nbytes < _SMALL_BYTES or source.is_pinned():
            return
        line = users_line()
        if line is not None:
            self.unpinned[line.where, line.function] += 1


_CHECKPOINT = str(Path(_TORCH, "utils", "checkpoint.py"))


def _checkpointing() -> bool:
    """Whether torch.utils.checkpoint is calling."""
    return any(frame.f_code.co_filename == _CHECKPOINT for frame, _ in traceback.walk_stack(sys._getframe()))


def _new_bytes(inputs: Any, out: Any) -> int:
    """Bytes of an operator's outputs that share no memory with its inputs."""
    shared = {each.untyped_storage()._cdata for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)}
    made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in made if each.untyped_storage()._cdata not in shared)


STEPS = 3
"""Steps that are looked at. A graph stays if it is an earlier step's and is alive when the last step has ended."""
NAMED = 3
_MOST_NODES = 50_000
_MARK = "stepscope"

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class _Token:
    """An object that lives as long as the graph that holds it."""

    __slots__ = ("__weakref__",)


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """A method whose error does not reach the loop, and that does nothing once one of them has failed."""

    @functools.wraps(method)
    def call(self: "HabitsRecorder", *args: str) -> None:
        if self.failure is None:
            try:
                method(self, *args)
            except Exception as error:  # This runs inside the loop, which an error of ours must not end.
                self.failure = error
                self.phase_failed()

    return call


class HabitsRecorder(Recorder):
    """A recorder of some steps, which then knows their Habits. It keeps nothing of the loop alive."""

    _model: nn.Module = weakly()
    _optimizers: Sequence[torch.optim.Optimizer] = weakly_each()
    _parallel: DistributedDataParallel | None = weakly()

    def __init__(
        self,
        model: nn.Module,
        forward_module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        *,
        roots: Callable[[], Any],
        inputs: Callable[[], Inputs | None] = lambda: None,
        compiled: bool = False,
        changes: Changes | None = None,
    ) -> None:
        """roots, inputs: the tensors that backward begins at, and what the model's forward was called with. changes:
        the model's parameters some steps ago; None to compare with those before the first step.

        compiled: whether the model's code is compiled. Its operators are then not seen, and no mode may be on while it
        runs.
        """
        self.failure: Exception | None = None
        """The error that ended the looking; the loop never sees it."""
        self._model, self._optimizers, self._device = model, optimizers, device
        self._trains = Training(model, optimizers, changes)
        self._parallel = next((m for m in forward_module.modules() if isinstance(m, DistributedDataParallel)), None)
        self._roots, self._inputs, self._compiled = roots, inputs, compiled
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._open = contextlib.ExitStack()
        self._reads = HostReads(device)
        self._operators = OperatorHabits(self._reads, self._names, device)
        self._steps = self._backwards = 0
        self._reads_of_steps: list[Counter[tuple[str, str]]] = []
        self._copies_of_steps: list[Counter[tuple[str, str]]] = []
        self._calls_of_optimizer: list[int] = []
        self._zeroed = self._zeroed_bytes = 0
        self._in_eval: list[str] = []
        self._synchronising: list[bool] = []
        self._micro_batches: list[list[bool]] = []
        self._shapes: list[dict[str, str]] = []
        self._graphs: list[weakref.ref[_Token]] = []
        # A mode of ours above one of the loop's own could not be taken off.
        self._saw_modes = not is_in_torch_dispatch_mode()
        self._modes: list[OperatorHabits | HostReads] = []
        """The modes that are on."""

    @_safely
    def step_begins(self) -> None:
        self._backwards = 0
        self._synchronising = []
        self._trains.begin()
        if self._saw_modes:
            self._open.enter_context(self._reads.synchronisations())
            self._reads.counting = True
            self._between()

    @_safely
    def phase_begins(self, name: str) -> None:
        self._enter(name)
        with self._unseen():
            if name == FORWARD and (inputs := self._inputs()) is not None:
                paths = tree_flatten_with_path(inputs)[0]
                tensors = {_named(path): leaf for path, leaf in paths if isinstance(leaf, torch.Tensor)}
                self._reads.follow((), tensors.values(), always=True)
                self._shapes.append({name: " x ".join(map(str, leaf.shape)) for name, leaf in tensors.items()})
            elif name == BACKWARD:
                self._look_before_backward()
                self._backwards += 1
            elif name == OPTIMIZER and self._backwards:
                self._trains.look_at_gradients()

    @_safely
    def phase_ends(self, name: str) -> None:
        if name == FORWARD and self._parallel is not None:
            self._synchronising.append(self._parallel.require_backward_grad_sync)
        if name == BACKWARD:
            self._reads.follow((), [p.grad for p in self._model.parameters()], always=True)
        self._between()

    @_safely
    def evaluation_begins(self) -> None:
        self._enter(EVALUATION)

    @_safely
    def evaluation_ends(self) -> None:
        self._between()

    def phase_failed(self, name: str = "") -> None:
        """Look at nothing more. The modes stay on until they can be taken off."""
        self._reads.counting = self._operators.looking = False

    @_safely
    def step_ends(self) -> None:
        self._close()
        self._steps += 1
        self._reads_of_steps.append(_drained(self._reads.lines))
        self._copies_of_steps.append(_drained(self._operators.unpinned))
        self._calls_of_optimizer.append(self._operators.in_optimizer)
        self._operators.in_optimizer = 0
        self._micro_batches.append(self._synchronising)

    def close(self) -> None:
        """Take everything off. Nothing of PyTorch may be running: a mode cannot be taken off inside its own call."""
        self.phase_failed()
        self._close()
        self._trains.hooks.close()

    def habits(self) -> Habits | None:
        """What the steps did; None where too few were seen to tell what each does."""
        if self.failure is not None or self._steps < STEPS:
            return None
        gc.collect()  # The loop no longer holds a graph that only a circle of objects keeps alive.
        # A rank holds only parts of the parameters then. Some of them never have a gradient on it.
        sharded = any(type(m).__name__.startswith(("FullyShardedDataParallel", "FSDP")) for m in self._model.modules())
        without = [] if sharded else self._trains.without_gradient()
        in_eval = [name for name in self._in_eval if self._trains.is_called(name)]
        unchanged = None if sharded else self._trains.unchanged(NAMED)
        unseen, on_gpu = self._compiled or not self._saw_modes, self._device.type == "cuda"
        half, fp32, share = self._products()
        # The shapes of the first input that has several.
        shapes: tuple[str, ...] = ()
        for name in self._shapes[0] if self._shapes else ():
            shapes_of_calls = tuple(dict.fromkeys(call[name] for call in self._shapes if name in call))
            shapes = shapes or (shapes_of_calls if len(shapes_of_calls) > 1 else ())
        earlier = [flag for flags in self._micro_batches for flag in flags[:-1]]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return Habits(
            steps=self._steps,
            host_reads=_in_each(self._reads_of_steps) if self._saw_modes else None,
            zeroed_gradients=self._zeroed // self._steps,
            zeroed_bytes=self._zeroed_bytes // self._steps,
            without_gradient=tuple(without[:NAMED]),
            without_gradient_count=len(without),
            gradients_hold_zeros=bool(without) and self._trains.has_gradients,
            graphs_alive=sum(graph() is not None for graph in self._graphs[: self._steps - 1])
            if self._graphs
            else None,
            in_eval_mode=tuple(in_eval[:NAMED]),
            in_eval_mode_count=len(in_eval),
            unchanged=unchanged,
            half_products=half,
            fp32_products=fp32,
            fp32_share=share,
            unpinned=_in_each(self._copies_of_steps) if on_gpu and self._saw_modes else None,
            micro_batches=len(self._micro_batches[-1]) if self._parallel is not None else None,
            synchronised=sum(earlier) // self._steps,
            optimizer_tensors=sum(p.requires_grad for group in groups for p in group["params"]),
            optimizer_operators=None if unseen or self._operators.many_at_once else min(self._calls_of_optimizer),
            optimizer_loops=any(group.get("foreach") is False and not group.get("fused") for group in groups),
            input_shapes=shapes,
            forwards=len(self._shapes),
            products_s=None if unseen or on_gpu else self._operators.products_s / self._steps,
            operators_s=None if unseen or on_gpu else self._operators.operators_s / self._steps,
            again_flops=self._operators.again_flops // self._steps,
            again_bytes=self._operators.again_bytes // self._steps,
            free_bytes=self._free_bytes() if self._operators.again_flops else None,
        )

    def _free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else host_memory()[1]

    def _enter(self, name: str) -> None:
        self._operators.phase = name
        # An operator on the host's own tensors does not wait for a device. On a GPU PyTorch tells the two apart.
        self._reads.counting = self._device.type == "cuda" or name not in (DATA, OPTIMIZER)
        if self._compiled and name in (FORWARD, BACKWARD, OPTIMIZER, EVALUATION):
            self._take_modes_off(but_reads=name == BACKWARD)

    def _between(self) -> None:
        """Turn the modes on: for a compiled step between its phases, for any other step everywhere. PyTorch itself
        takes the mode of functions off where backward is called, so that mode must then be left alone."""
        self._operators.phase = ""
        self._reads.counting = self._operators.looking = True
        if not self._saw_modes:
            return
        for mode in (self._operators, self._reads):
            if mode not in self._modes:
                mode.__enter__()
                self._modes.append(mode)

    def _close(self) -> None:
        self._take_modes_off()
        self._open.close()

    def _take_modes_off(self, *, but_reads: bool = False) -> None:
        if self._reads in self._modes and not but_reads and self._reads in _get_current_function_mode_stack():
            self._modes.remove(self._reads)
            self._reads.__exit__(None, None, None)
        if self._operators in self._modes:
            self._modes.remove(self._operators)
            self._operators.__exit__(None, None, None)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """A context in which the tool's own operators and reads are not counted."""
        counting, self._reads.counting, self._operators.looking = self._reads.counting, False, False
        try:
            yield
        finally:
            self._reads.counting, self._operators.looking = counting, True

    def _look_before_backward(self) -> None:
        roots = [root for root in tree_leaves(self._roots()) if isinstance(root, torch.Tensor)]
        self._reads.follow((), roots, always=True)
        if len(self._graphs) == self._steps:
            token = _Token()
            self._graphs.append(weakref.ref(token))
            _mark(roots, token, f"{_MARK} {self._steps}")
        if not self._backwards:
            self._in_eval = list(_in_eval_mode(self._model))
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None and not p.grad.is_sparse]
            if not any(bool(gradient.any()) for gradient in gradients):
                self._zeroed += len(gradients)
                self._zeroed_bytes += sum(gradient.nbytes for gradient in gradients)

    def _products(self) -> tuple[str | None, tuple[str, ...], float | None]:
        """The dtype of 16 bits that most products had, the modules with products in fp32, and the share of FLOPs in
        fp32."""
        flops = self._operators.product_flops
        half = max(("bfloat16", "float16"), key=lambda dtype: flops[dtype])
        if not flops[half]:
            return None, (), None
        modules = [name for name, _ in self._operators.fp32_modules.most_common(NAMED)]
        return half, tuple(modules), flops["float32"] / sum(flops.values())


def _drained(counter: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """A copy of the counter, which is empty afterwards."""
    copy = Counter(counter)
    counter.clear()
    return copy


def _in_each(steps: Sequence[Counter[tuple[str, str]]]) -> tuple[CodeLine, ...]:
    """The lines that every step has."""
    common = functools.reduce(lambda a, b: a & b, steps)
    return tuple(CodeLine(where=where, call=call, calls=calls) for (where, call), calls in common.items())


def _mark(roots: Iterable[torch.Tensor], token: _Token, key: str) -> None:
    """Let each node of the graph below these tensors hold the token, except for nodes that live as long as a
    parameter."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited: set[int] = set()
    nodes: list[Any] = []  # The nodes are kept, so that no two of them have the same id.
    while waiting and len(nodes) < _MOST_NODES:
        node = waiting.pop()
        if id(node) in visited or hasattr(node, "variable"):
            continue
        visited.add(id(node))
        nodes.append(node)
        node.metadata[key] = token
        waiting += [following for following, _ in node.next_functions if following is not None]


def _in_eval_mode(model: nn.Module) -> Iterator[str]:
    """Dropouts and batch norms in eval mode inside modules that train. In a module whose parameters are all frozen,
    eval mode is intended."""
    trains = {name for name, module in model.named_modules() if any(p.requires_grad for p in module.parameters())}
    for name, module in model.named_modules():
        if module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            if nearest_with_parameters(model, name) in trains:
                yield name
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats and name in trains:
            yield name


def _named(path: Sequence[Any]) -> str:
    """The name or place of an input, from its path in (args, kwargs)."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
