"""Looks at some steps of a loop, or of a driven step, and finds the habits that checks judge."""

import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from stepscope.core.evidence import CodeLine, Habits
from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER
from stepscope.recording.changes import Changes
from stepscope.recording.habits.host_reads import HostReads
from stepscope.recording.habits.operators import OperatorHabits
from stepscope.recording.habits.training import Training, nearest_with_parameters
from stepscope.recording.step import Recorder
from stepscope.recording.weakly import weakly, weakly_each

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
                self._rest()

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
        self._zeroed: list[torch.Size] = []
        self._zeroed_bytes = 0
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
            if name == FORWARD:
                self._look_at_inputs()
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

    def phase_failed(self, name: str) -> None:
        self._rest()

    @_safely
    def step_ends(self) -> None:
        self._close()
        self._steps += 1
        self._reads_of_steps.append(_taken(self._reads.lines))
        self._copies_of_steps.append(_taken(self._operators.unpinned))
        self._calls_of_optimizer.append(self._operators.in_optimizer)
        self._operators.in_optimizer = 0
        self._micro_batches.append(self._synchronising)

    def close(self) -> None:
        """Take everything off. Nothing of PyTorch may be running: a mode cannot be taken off inside its own call."""
        self._rest()
        self._close()
        self._trains.end()

    def habits(self) -> Habits | None:
        """What the steps did; None where too few were seen to tell what each does."""
        if self.failure is not None or self._steps < STEPS:
            return None
        gc.collect()  # The loop no longer holds a graph that only a circle of objects keeps alive.
        sharded = _is_sharded(self._model)
        without = [] if sharded else self._trains.without_gradient()
        in_eval = [name for name in self._in_eval if self._trains.is_called(name)]
        unchanged = None if sharded else self._trains.unchanged(NAMED)
        unseen = self._compiled or not self._saw_modes
        half, fp32, share = self._products()
        shapes, forwards = self._changing_shapes()
        earlier = [flag for flags in self._micro_batches for flag in flags[:-1]]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return Habits(
            steps=self._steps,
            host_reads=_in_each(self._reads_of_steps) if self._saw_modes else None,
            zeroed_gradients=len(self._zeroed) // self._steps,
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
            unpinned=_in_each(self._copies_of_steps) if self._device.type == "cuda" and self._saw_modes else None,
            micro_batches=len(self._micro_batches[-1]) if self._parallel is not None else None,
            synchronised=sum(earlier) // self._steps,
            optimizer_tensors=sum(p.requires_grad for group in groups for p in group["params"]),
            optimizer_operators=None if unseen or self._operators.many_at_once else min(self._calls_of_optimizer),
            optimizer_loops=any(group.get("foreach") is False and not group.get("fused") for group in groups),
            input_shapes=shapes,
            forwards=forwards,
        )

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

    def _rest(self) -> None:
        """Look at nothing more. The modes stay on until they can be taken off."""
        self._reads.counting = self._operators.looking = False

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

    def _look_at_inputs(self) -> None:
        given = self._inputs()
        if given is None:
            return
        tensors = [(path, leaf) for path, leaf in tree_flatten_with_path(given)[0] if isinstance(leaf, torch.Tensor)]
        self._reads.follow((), [leaf for _, leaf in tensors], always=True)
        self._shapes.append({_named(path): " x ".join(map(str, leaf.shape)) for path, leaf in tensors})

    def _look_before_backward(self) -> None:
        roots = [root for root in tree_leaves(self._roots()) if isinstance(root, torch.Tensor)]
        self._reads.follow((), roots, always=True)
        if len(self._graphs) == self._steps:
            token = _Token()
            self._graphs.append(weakref.ref(token))
            _mark(roots, token, f"{_MARK} {self._steps}")
        if not self._backwards:
            self._look_at_gradients()
            self._in_eval = list(_in_eval_mode(self._model))

    def _look_at_gradients(self) -> None:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None and not p.grad.is_sparse]
        if any(bool(gradient.any()) for gradient in gradients):
            return
        self._zeroed += [gradient.shape for gradient in gradients]
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

    def _changing_shapes(self) -> tuple[tuple[str, ...], int]:
        """The shapes of the first input that has several, and the number of calls that were looked at."""
        for name in self._shapes[0] if self._shapes else ():
            shapes = tuple(dict.fromkeys(call[name] for call in self._shapes if name in call))
            if len(shapes) > 1:
                return shapes, len(self._shapes)
        return (), len(self._shapes)


def _taken(counter: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
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
    seen: set[int] = set()
    nodes: list[Any] = []  # The nodes are kept, so that no two of them have the same id.
    while waiting and len(nodes) < _MOST_NODES:
        node = waiting.pop()
        if id(node) in seen or hasattr(node, "variable"):
            continue
        seen.add(id(node))
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


def _is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds only parts of the parameters. Some of them then never have a gradient on it."""
    return any(type(module).__name__.startswith(("FullyShardedDataParallel", "FSDP")) for module in model.modules())


def _named(path: Sequence[Any]) -> str:
    """The name or place of an input, from its path in (args, kwargs)."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
