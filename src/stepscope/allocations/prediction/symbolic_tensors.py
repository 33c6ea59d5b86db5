"""Symbolic tensors: sizes without values, freed with the last reference, as PyTorch's tensors are.

A step written in these tensors (`symbolic_model.py`) allocates, saves for backward and frees in PyTorch's order. So
its peaks can be counted on a machine without a GPU. Python's reference counts decide when a tensor dies: a local
variable lives as long here as in the model.
"""

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from stepscope.allocations.prediction.caching_allocator import NO_BLOCK, Allocator
from stepscope.core.evidence import CATEGORIES

_INDEX = {category: i for i, category in enumerate(CATEGORIES)}
_SAVED, _TEMPORARY, _GRADIENT = _INDEX["saved for backward"], _INDEX["temporaries"], _INDEX["gradients"]
_ROUNDING = _INDEX["rounding"]

PRODUCTS = frozenset({"Mm", "Bmm", "ScaledMm", "JointMm"})
ATTENTION = frozenset({"Attention"})
KEPT_OPERATORS = {"selective": PRODUCTS | ATTENTION, "attention": ATTENTION}
"""Operators whose outputs a checkpointing keeps, by its name."""


@dataclass(eq=False)
class RoundingAllocator:
    """An allocator that only rounds sizes up to a multiple of `unit` bytes."""

    unit: int = 512

    def allocate(self, size: int) -> tuple[int, int]:
        return NO_BLOCK, -(-size // self.unit) * self.unit

    def free(self, block: int) -> None:
        pass


class Ledger:
    """Live bytes by category, now and at the peak since the last `begin`."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self.allocator = allocator or RoundingAllocator()
        self.allocate, self.free = self.allocator.allocate, self.allocator.free
        self.live = [0] * len(CATEGORIES)
        self.total = 0
        self.peak = 0
        self._at_peak: list[int] | None = None
        self.at_peak_now = True

    def storage(self, size: int, category: int = _TEMPORARY) -> "Storage":
        """Memory of `size` bytes. Raises the allocator's exception when there is no more."""
        block, block_bytes = self.allocate(size)
        return Storage(self, size, category, block, block_bytes)

    def together(self, sizes: Sequence[int], category: int = _TEMPORARY) -> "list[Storage]":
        """Memory of so many bytes each, which comes and goes together: one storage where the allocator only rounds."""
        if not sizes or not isinstance(self.allocator, RoundingAllocator):
            return [self.storage(size, category) for size in sizes]
        unit = self.allocator.unit
        block_bytes = unit * sum(-(-size // unit) for size in sizes)
        return [Storage(self, sum(sizes), category, NO_BLOCK, block_bytes)]

    def begin(self) -> None:
        """Begin a phase by forgetting the peak so far."""
        self.peak, self._at_peak, self.at_peak_now = self.total, None, True

    @property
    def at_peak(self) -> list[int]:
        """Bytes by category at the peak."""
        self.leave_peak()
        assert self._at_peak is not None
        return self._at_peak

    def leave_peak(self) -> None:
        """Copy the live bytes when a peak ends, not at each step up to it."""
        if self.at_peak_now:
            self._at_peak, self.at_peak_now = self.live.copy(), False


class Storage:
    """Memory of one tensor, in bytes. It is freed with the last reference."""

    __slots__ = ("__weakref__", "_block_bytes", "_ledger", "_saves", "block", "bytes", "category")

    def __init__(self, ledger: Ledger, size: int, category: int, block: int, block_bytes: int) -> None:
        self._ledger, self.bytes, self.category, self._saves = ledger, size, category, 0
        self.block, self._block_bytes = block, block_bytes
        # What the ledger counts is written out here and below: of a step there are a hundred thousand storages.
        total = ledger.total = ledger.total + block_bytes
        if total > ledger.peak:
            ledger.peak, ledger.at_peak_now = total, True
        elif ledger.at_peak_now:
            ledger.leave_peak()
        live = ledger.live
        live[category] += size
        live[_ROUNDING] += block_bytes - size

    def __del__(self) -> None:
        ledger = self._ledger
        if ledger.at_peak_now:
            ledger.leave_peak()
        live, block_bytes = ledger.live, self._block_bytes
        live[self.category] -= self.bytes
        live[_ROUNDING] -= block_bytes - self.bytes
        ledger.total -= block_bytes
        if self.block != NO_BLOCK:
            ledger.free(self.block)

    def become(self, category: int) -> None:
        self._ledger.live[self.category] -= self.bytes
        self._ledger.live[category] += self.bytes
        self.category = category

    def save(self) -> None:
        """Note that autograd keeps this storage for backward; a temporary becomes `saved for backward`."""
        self._saves += 1
        if self.category == _TEMPORARY:
            self.become(_SAVED)

    def release(self) -> None:
        self._saves -= 1
        if self._saves == 0 and self.category == _SAVED:
            self.become(_TEMPORARY)


class Parameter:
    """A leaf of the graph, which keeps its gradient."""

    __slots__ = ("_first_is_view", "_waiting", "elements", "gradient", "itemsize", "name", "uses")

    def __init__(self, name: str, elements: int, itemsize: int) -> None:
        self.name, self.elements, self.itemsize = name, elements, itemsize
        self.uses = 1
        """The number of operations that use the parameter. Each gives it a gradient."""
        self.gradient: Storage | None = None
        self._waiting: list[Storage] = []
        self._first_is_view = False

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def accumulate(self, tape: "Tape", gradient: Storage, is_view: bool) -> None:
        """Add one use's gradient. Autograd waits for all uses, and sums into the first gradient unless it is a view."""
        self._waiting.append(gradient)
        self._first_is_view = is_view if len(self._waiting) == 1 else self._first_is_view
        if len(self._waiting) < self.uses:
            return
        summed = tape.storage(self.bytes) if self._first_is_view and self.uses > 1 else self._waiting[0]
        self._waiting = []
        if self.gradient is None:
            summed.become(_GRADIENT)
            self.gradient = summed  # later gradients are added in place


Backward = Callable[["Tape", Storage], Sequence["Storage | None"]]
"""A function from the gradient of an operation's output to the gradient of each input, or None."""


class Node:
    """One operation in the graph that backward walks."""

    __slots__ = ("backward", "gives_views", "inputs", "number", "operator", "saved", "saving", "segment")

    def __init__(
        self,
        number: int,
        operator: str,
        inputs: "Sequence[Node | Parameter | None]",
        saved: Sequence[Storage],
        backward: Backward,
    ) -> None:
        self.number, self.operator, self.inputs, self.backward = number, operator, inputs, backward
        self.gives_views = False
        self.saving = False
        """Whether the node's backward needs tensors that the first run of a checkpoint did not keep."""
        self.saved: Sequence[Storage] = saved
        self.segment: Segment | None = None
        for storage in saved:
            storage.save()

    def release(self) -> None:
        for storage in self.saved:
            storage.release()
        self.saved = ()


@dataclass(slots=True, eq=False)
class Tensor:
    """A storage, its number and size of elements, and the node or parameter that made it."""

    storage: Storage
    elements: int
    itemsize: int
    node: "Node | Parameter | None"


class Segment:
    """A part of forward that backward runs again from its input (activation checkpointing); its nodes keep nothing.

    The outputs of the operators in `keeps` are kept, not computed again. A segment inside another has its input only
    from when that one runs again until it does so itself.
    """

    def __init__(self, run: "Callable[[Tape, Tensor], Tensor]", x: Tensor, keeps: Set[str]) -> None:
        self.run, self.keeps = run, keeps
        self.input: Tensor | None = x
        self.nodes: list[Node] = []
        self.saving = 0
        """The number of nodes that save something, and of segments inside. Backward runs the segment again up to the
        last of them."""
        self.kept: deque[Storage] = deque()
        self.outer: Segment | None = None
        """The segment that this one is part of."""
        self.inside: deque[Segment] = deque()
        """The segments that are part of this one, until they have their inputs."""
        self._saved: Storage | None = None

    def keep(self, x: Tensor) -> None:
        """Keep the input for the second run."""
        self.input, self._saved = Tensor(x.storage, x.elements, x.itemsize, None), x.storage
        x.storage.save()

    def take(self) -> Tensor:
        """The input, which a segment inside another lets go of."""
        x = self.input
        assert x is not None
        if self.outer is not None:
            self._let_go()
            self.input = None
        return x

    def _let_go(self) -> None:
        if self._saved is not None:
            self._saved.release()
            self._saved = None

    def __del__(self) -> None:
        self._let_go()


class Offloaded:
    """What a block keeps for backward in the host's memory (`training/checkpointing.py`, whose copies hold the device's
    until they are made): all that its segment keeps but the last, which backward does not ask for."""

    def __init__(self, segment: Segment) -> None:
        segment.kept.pop().release()
        self._kept = segment.kept
        self._away: list[int] = []

    def leave(self) -> None:
        """The copies are made: the device has the memory again."""
        self._away += [storage.bytes for storage in self._kept]
        for storage in self._kept:
            storage.release()
        self._kept.clear()

    def fetch(self, tape: "Tape") -> None:
        self._kept.extend(tape.storage(size) for size in self._away)
        for storage in self._kept:
            storage.save()
        self._away.clear()


class _AllIsSaved(Exception):
    """Raised when a segment that is run again has made the last tensor that backward needs."""


class Tape:
    """An allocator of tensors, which also builds the graph for backward while `recording`."""

    def __init__(self, ledger: Ledger, recording: bool) -> None:
        self.ledger, self.recording = ledger, recording
        self.storage = ledger.storage
        self.workspaces: list[Storage] = []
        """Workspaces of the library of matrix products: one for forward's thread, one for backward's."""
        self.workspace_bytes = 0
        """Size in bytes of the workspace that the next matrix product allocates; 0 if none is due."""
        self.after_rerun: Callable[[], None] = lambda: None
        self.offloaded = 0  # bytes that blocks sent to the host's memory
        self._number = 0
        self._segment: Segment | None = None
        self._rerun: Segment | None = None
        self._applying: Node | None = None
        self._views: set[Node] = set()
        """Nodes whose gradient so far is a view. Autograd does not add to a view in place."""

    @property
    def runs_again(self) -> bool:
        """Whether this is the second run of a checkpoint, for its backward."""
        return self._rerun is not None

    def has_kept(self, operator: str) -> bool:
        """Whether the operator is not run: a checkpoint runs again, and kept what it returned."""
        return self._rerun is not None and operator in self._rerun.keeps and bool(self._rerun.kept)

    def output(self, operator: str, size: int) -> Storage:
        """Memory for an operator's output. If checkpointing keeps it, forward gets the same memory when rerun."""
        if self._rerun is not None and self.has_kept(operator):
            kept = self._rerun.kept.popleft()
            kept.release()
            return kept
        output = self.storage(size)
        self.take_workspace(operator)
        if self._segment is not None and operator in self._segment.keeps:
            self._segment.kept.append(output)
            output.save()
        return output

    def op(
        self,
        operator: str,
        elements: int,
        itemsize: int,
        inputs: "Sequence[Tensor | Parameter]",
        *,
        saves: Sequence[Tensor] = (),
        saves_output: bool = False,
        also_saves: Sequence[Storage] = (),
        backward: Backward | None = None,
        gives_views: bool = False,
        beside: int = 0,
        saves_late: bool = False,
    ) -> Tensor:
        """An operation with a new output. Without `backward`, each input's gradient has that input's size.

        beside: bytes of a second output that only backward uses.
        gives_views: the gradients are views, to which autograd does not add in place.
        saves_late: autograd keeps what it saves only when the output is made, as for a torch.autograd.Function.
        """
        node = None
        if self.recording:
            saved = [t.storage for t in saves] + list(also_saves)
            node = self._node(operator, inputs, saved, backward or _like(operator, inputs), saves_output or saves_late)
            if node is not None:
                node.gives_views = gives_views
        output = self.output(operator, elements * itemsize)
        outputs = [output] if not beside else [self.output(operator, beside), output]
        if node is not None and saves_output and self._segment is None:
            node.saved = [*node.saved, *outputs]
            for storage in outputs:
                storage.save()
        if saves_late and self._rerun is not None and self._rerun.saving == 0:
            raise _AllIsSaved
        return Tensor(output, elements, itemsize, node)

    def alias(
        self,
        operator: str,
        x: Tensor,
        backward: Backward,
        parameters: Sequence[Parameter] = (),
        saved: Sequence[Storage] = (),
    ) -> Tensor:
        """A view that has its own node, since its backward does something; it shares the storage of x."""
        node = self._node(operator, [x, *parameters], saved, backward, False) if self.recording else None
        return Tensor(x.storage, x.elements, x.itemsize, node)

    def second_result(self, result: Tensor, gradients: list[Storage]) -> Tensor:
        """Another result of the operation whose node it has. Its gradient waits in the list for the first one's."""

        def keep(_tape: "Tape", gradient: Storage) -> Sequence[None]:
            gradients.append(gradient)
            return (None,)

        return self.alias("Result", result, keep)

    def hidden_keys(self, pairs: int, *, windowed: bool) -> Storage:
        """The mask of so many pairs of query and key, as `hidden_keys` of training/attention/written_out.py makes it:
        a bool each, with a window the or of two, one of them from distances in int64."""
        if not windowed:
            return self.storage(pairs)
        distances = self.storage(pairs * 8)
        outside = self.storage(pairs)
        del distances
        later, mask = self.storage(pairs), self.storage(pairs)
        del outside, later
        return mask

    def cast(self, x: Tensor, itemsize: int) -> Tensor:
        """x.to(dtype): a copy, or x itself when it has that dtype."""
        return x if x.itemsize == itemsize else self.op("ToCopy", x.elements, itemsize, [x])

    def run(self, segment: Segment) -> Tensor:
        """What the segment returns. It keeps for backward only its input and what its operators in `keeps` return."""
        x, outer = segment.input, self._segment
        assert x is not None
        if outer is None and self._rerun is None:
            segment.keep(x)
        else:
            self._begin_inside(segment, x, outer)
        self._segment = segment
        output = segment.run(self, x)
        self._segment = outer
        if outer is not None or self._rerun is not None:
            segment.input = None
        return output

    def _begin_inside(self, segment: Segment, x: Tensor, outer: Segment | None) -> None:
        """Note a segment inside another; where that one runs again, give the first run's segment its input."""
        if self._rerun is None:
            if outer is not None and self.recording:
                outer.inside.append(segment)
                outer.saving += 1
                segment.outer = outer
        elif outer is None:
            self._rerun.saving -= 1
            self._rerun.inside.popleft().keep(x)
            if self._rerun.saving == 0:
                raise _AllIsSaved

    def backward(self, root: Tensor) -> None:
        """Run backward from a tensor, the newest node first, as autograd's queue does."""
        assert isinstance(root.node, Node)
        ones = self.storage(root.elements * root.itemsize)  # held by the call until backward has ended
        pending: dict[Node, Storage] = {root.node: ones}
        queue = [(-root.node.number, root.node)]
        root.node = None
        while queue:
            self._run(heapq.heappop(queue)[1], pending, queue)

    def take_workspace(self, operator: str) -> None:
        """Allocate the library's workspace if one is due. Call this after allocating the product's output."""
        if self.workspace_bytes and operator in PRODUCTS:
            self.workspaces.append(self.ledger.storage(self.workspace_bytes, _INDEX["workspaces"]))
            self.workspace_bytes = 0

    def _node(
        self,
        operator: str,
        inputs: "Sequence[Tensor | Parameter]",
        saved: Sequence[Storage],
        backward: Backward,
        after_output: bool,
    ) -> Node | None:
        """The operation's node. after_output: it saves something when its output is made, that output for one."""
        above = [i if isinstance(i, Parameter) else i.node for i in inputs]
        if not any(above):
            return None
        self._number += 1
        saving = bool(saved) or after_output
        if self._segment is not None:
            node = Node(self._number, operator, above, (), backward)
            if self._rerun is not None:
                return node  # of a segment inside the one that runs again, which keeps nothing of this run
            node.saving = saving
            if saving:  # only what was saved refers to the checkpoint, which ends with the last of it
                node.segment = self._segment
            self._segment.nodes.append(node)
            self._segment.saving += saving
            return node
        if self._rerun is not None:
            self._rerun.saving -= saving
            node = Node(self._number, operator, above, saved, backward)
            self._rerun.nodes.append(node)
            if self._rerun.saving == 0 and not after_output:
                raise _AllIsSaved
            return node
        return Node(self._number, operator, above, saved, backward)

    def _run(self, node: Node, pending: dict[Node, Storage], queue: list[tuple[int, Node]]) -> None:
        if node.saving and node.segment is not None and node.segment.nodes:
            self._run_again(node.segment)
        gradients = self._apply(node, pending)
        node.segment = None
        for above, gradient in zip(node.inputs, gradients, strict=True):
            if gradient is None or above is None:
                continue
            if isinstance(above, Parameter):
                # A linear map takes its weight transposed, so the gradient is a view.
                above.accumulate(self, gradient, is_view=node.operator == "Mm")
            elif above not in pending:
                pending[above] = gradient
                heapq.heappush(queue, (-above.number, above))
                if node.gives_views:
                    self._views.add(above)
            elif above in self._views:
                # A view shares its base's memory, so the sum needs new memory (torch/csrc/autograd/input_buffer.cpp,
                # `can_accumulate_inplace`).
                pending[above] = self.storage(gradient.bytes)
                self._views.remove(above)
            # Otherwise the gradient is added in place.

    def _apply(self, node: Node, pending: dict[Node, Storage]) -> "Sequence[Storage | None]":
        """The gradients of a node's inputs.

        A node frees its saved tensors after the gradient that it received. If it got them from a checkpoint, they are
        its own variables, and it frees them before the gradient.
        """
        if not node.saving:
            gradients = node.backward(self, pending.pop(node))
            node.release()
            return gradients
        self._applying, gradient = node, pending.pop(node)
        gradients = node.backward(self, gradient)
        self.end_formula()
        return gradients

    def end_formula(self) -> None:
        """Release the node's saved tensors. A backward calls this between its formula and its broadcast sums."""
        if self._applying is not None:
            self._applying.release()
            self._applying = None

    def _run_again(self, segment: Segment) -> None:
        """Run a segment's forward again with nodes that save, and hand the saved tensors to the first run's nodes."""
        if segment.input is None and segment.outer is not None:
            self._run_again(segment.outer)
        first, segment.nodes = segment.nodes, []
        again = type(self)(self.ledger, recording=True)
        again._rerun, x = segment, segment.take()
        with contextlib.suppress(_AllIsSaved):
            segment.run(again, Tensor(x.storage, x.elements, x.itemsize, _LEAF))
        for node, other in zip(first, segment.nodes, strict=False):
            # A node gets tensors from a checkpoint as its own variables. C++ destroys the last of them first.
            node.saved, other.saved = list(reversed(other.saved)), ()
        segment.nodes = []
        self.after_rerun()


def _like(operator: str, inputs: "Sequence[Tensor | Parameter]") -> Backward:
    """A backward that makes a gradient of the same size for each input."""
    sizes = [i.elements * i.itemsize for i in inputs]

    def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
        gradients: list[Storage] = []
        for size in sizes:
            gradients.append(tape.storage(size))
            tape.take_workspace(operator)
        return gradients

    return backward


def passes(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
    """The backward of a view or a copy, which passes the gradient on."""
    return (gradient,)


def passes_twice(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
    """The backward of a sum of two inputs, which passes the gradient to both."""
    return (gradient, gradient)


_LEAF = Parameter("input of a checkpoint", 0, 0)
"""A stand-in for the graph above a segment's input while the segment runs again, so that its nodes are recorded."""
