"""Repeated launches of the FlashAttention kernels, with recorded arguments on other tensors.

Most of a launch's cost on the host is work that the last launch did too: the grid, some forty arguments, how each
argument specialises the kernel, and which compiled kernel that is. A recording keeps all of this except the tensors'
addresses. It is valid while shapes, strides, dtypes, device and every option stay the same (its key holds them), and
while every address is a multiple of 16 bytes, which each call checks.

What is left then is mostly Triton's launcher in Python, which makes every descriptor anew and copies some sixty
arguments one by one. With Triton 3.6, whose launcher is known here, a recording calls the compiled launcher below it,
and keeps the descriptors of the addresses that it has seen: the allocator gives the same ones step after step.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stepscope.kernels import native
from stepscope.kernels.launching import ALIGNMENT_BYTES, Launcher, launch, launches_watched
from stepscope.kernels.native import Described, Forward, Operation, Pass, Place, layout_of

_MOST = 512
"""The most recordings that are kept. There is a limit, since every call may have another sequence length."""

_MOST_DESCRIPTORS = 4096
"""The most descriptors that a recording keeps of one operand: a program without an allocator that caches has new
addresses at each step."""

_Call = Callable[[tuple[Tensor, ...], Launcher], None]
Operand = tuple[int, int, tuple[type[Any], dict[str, Any]] | None]
"""An argument's index, its tensor's index and, for a descriptor, its class and the fields that never change."""


class _Direct:
    """One recorded launch by the compiled launcher that Triton's own launcher ends with."""

    def __init__(
        self,
        launch: Callable[..., object],
        arguments: list[object],
        addresses: list[tuple[int, int]],
        descriptors: list[tuple[int, int, Callable[[Tensor], object]]],
    ) -> None:
        """addresses: where an argument is the address of which tensor. descriptors: the same of descriptors, and what
        makes one of the tensor."""
        self._launch, self._arguments, self._addresses = launch, arguments, addresses
        self._descriptors = [(at, place, make, dict[int, object]()) for at, place, make in descriptors]

    def __call__(self, tensors: tuple[Tensor, ...], addresses: list[int], stream: int) -> None:
        arguments = self._arguments.copy()
        arguments[_STREAM] = stream
        for at, place in self._addresses:
            arguments[at] = addresses[place]
        for at, place, make, known in self._descriptors:
            made_before = known.get(addresses[place])
            if made_before is None:
                if len(known) >= _MOST_DESCRIPTORS:
                    known.clear()
                made_before = known[addresses[place]] = make(tensors[place])
            arguments[at] = made_before
        self._launch(*arguments)


_STREAM = 3
"""Where the compiled launcher takes the stream."""
_KNOWN_LAUNCHER = "3.6."
"""The versions of Triton whose launcher is known here."""


def _direct(
    compiled: Any, grid: tuple[int, ...], template: Sequence[object], operands: Sequence[Operand]
) -> _Direct | None:
    """The launch without Triton's launcher in Python; None where that may do more than is known here."""
    if not triton.__version__.startswith(_KNOWN_LAUNCHER):
        return None
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, of_descriptors, indices = run.launch, None, ()
    if inspect.isfunction(launch):
        known = inspect.getclosurevars(launch)
        launch, indices = known.nonlocals["launcher"], sorted(known.nonlocals["tensordesc_indices"])
        of_descriptors = known.globals["make_tensordesc_arg"]
    metadata = dict(zip(indices, compiled.metadata.tensordesc_meta or (), strict=False)) if indices else {}
    arguments: list[object] = [
        *(*grid, 1, 1)[:3], None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    ]  # fmt: skip
    addresses: list[tuple[int, int]] = []
    descriptors: list[tuple[int, int, Callable[[Tensor], object]]] = []
    by_index = {at: (place, descriptor) for at, place, descriptor in operands}
    for at, argument in enumerate(template):
        place, descriptor = by_index.get(at, (0, None))
        if descriptor is not None:
            if of_descriptors is None or metadata.get(at) is None:
                return None
            kind, same = descriptor
            descriptors.append((len(arguments), place, _maker(of_descriptors, kind, same, metadata[at])))
            arguments += [None, *same["shape"], *same["strides"]]
        else:
            if at in by_index:
                addresses.append((len(arguments), place))
            arguments.append(argument)
    return _Direct(launch, arguments, addresses, descriptors)


def _maker(expanded: Callable[..., list[object]], kind: type[Any], same: dict[str, Any], metadata: object) -> Any:
    def make(tensor: Tensor) -> object:
        return expanded(descriptor(kind, same, tensor), metadata)[0]

    return make


def descriptor(kind: type[Any], same: dict[str, Any], base: Tensor) -> Any:
    """A descriptor of another tensor, alike in all else."""
    described = object.__new__(kind)
    described.__dict__.update(same, base=base)
    return described


class Recording:
    """The launches of one call: `launch` runs and records each kernel, then `repeat` runs them on other tensors."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        """Record a call on these tensors, which are distinct objects even if two tensors are the same."""
        self.tensors = tuple(t.detach() for t in tensors)
        self._place_of = {id(t): place for place, t in enumerate(self.tensors)}
        self._steps: list[tuple[Callable[..., object], list[object], list[Operand]]] = []
        self._direct: list[_Direct | None] = []
        self.launches: list[tuple[Any, tuple[int, ...], list[object], list[Operand]]] = []
        """What ran: the compiled kernel, its grid, its arguments without tensors, and which tensors they were."""
        self._repeatable = True

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> Any:
        """Run a kernel and record its arguments."""
        compiled = kernel[grid](*arguments, **options)
        others = [each for each in arguments if type(each) not in _FIXED]
        known = all(
            hasattr(each, "__dict__") and id(each.base if hasattr(each, "block_shape") else each) in self._place_of
            for each in others
        )
        if compiled is None or not known:
            self._repeatable = False
            return compiled
        operands: list[Operand] = []
        template = list(arguments)
        for at, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                operands.append((at, self._place_of[id(argument)], None))
                template[at] = None
            elif hasattr(argument, "block_shape"):
                same = {name: value for name, value in vars(argument).items() if name != "base"}
                operands.append((at, self._place_of[id(argument.base)], (type(argument), same)))
                template[at] = None
        self._steps.append((compiled[(*grid, 1, 1)[:3]], template, operands))
        self._direct.append(_direct(compiled, grid, template, operands))
        self.launches.append((compiled, grid, template, operands))
        return compiled

    def finish(self) -> bool:
        """Release the tensors. Returns whether the call can be repeated: not if it allocates between launches."""
        self.tensors = ()
        self._place_of = {}
        return self._repeatable

    def repeat(self, tensors: tuple[Tensor, ...], addresses: list[int], stream: int | None) -> None:
        """Repeat the recorded launches on `tensors`, in the order of those recorded, all on one stream."""
        watched = launches_watched()
        for (run, template, operands), direct in zip(self._steps, self._direct, strict=True):
            if direct is not None and stream is not None and not watched:
                direct(tensors, addresses, stream)
                continue
            arguments = template.copy()
            for at, place, made_of in operands:
                if made_of is None:
                    arguments[at] = addresses[place]
                else:
                    arguments[at] = descriptor(*made_of, tensors[place])
            run(*arguments, stream=stream)


_FIXED = {int, float, bool, str, type(None)}
_recordings: dict[Hashable, Recording] = {}


def forget() -> None:
    """Drop all recordings, for example when other configurations are chosen."""
    _recordings.clear()


def run(key: Hashable, tensors: tuple[Tensor, ...], call: _Call) -> None:
    """Repeat the launches recorded under the key, or make `call(tensors, launcher)` if there is no recording.

    The key must hold everything except the tensors' addresses that the launches depend on.
    """
    device = tensors[0].device
    if device.type != "cuda":
        call(tensors, launch)
    elif device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run_here(key, tensors, call)
    else:
        _run_here(key, tensors, call)


def _run_here(key: Hashable, tensors: tuple[Tensor, ...], call: _Call) -> None:
    addresses = [t.data_ptr() for t in tensors]
    for address in addresses:  # a generator costs several times as much
        if address % ALIGNMENT_BYTES:
            call(tensors, launch)
            return
    recording = _recordings.get(key)
    if recording is not None:
        device = tensors[0].device.index
        stream = None if device is None else torch._C._cuda_getCurrentRawStream(device)
        recording.repeat(tensors, addresses, stream)
        return
    recording = Recording(tensors)
    call(recording.tensors, recording.launch)
    if recording.finish():
        if len(_recordings) >= _MOST:
            forget()
        _recordings[key] = recording


# ---- what the launcher in C++ (kernels/native.py) learns of recordings

ATTENTION = Operation("FlashAttentionBackward0")
_OUT, _LOGSUMEXP = 3, 4
"""Their numbers in forward, after q, k and v."""


class Backward(NamedTuple):
    """What backward takes beside forward: the key of its recording, the gradient, its results and its buffers."""

    key: Hashable
    gradient: Tensor
    rows: Tensor | None
    """What has the results as its columns, if anything has."""
    gradients: tuple[Tensor, Tensor, Tensor]
    statistics: Tensor
    shares: tuple[Tensor, ...]
    sums: Tensor | None


def call_native(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, configuration: int) -> Tensor | None:
    """The output of a call in C++; None where its launches are not known."""
    outputs = ATTENTION.call((q, k, v), _options(causal, scale, configuration))
    return None if outputs is None else outputs[0]


def _options(causal: bool, scale: float, configuration: int) -> tuple[int, ...]:
    return int(causal), native.bits(scale), configuration


def teach_native(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *, causal: bool, scale: float, configuration: int,
    key: Hashable, by_python: Callable[..., Sequence[Tensor]], backward: Backward | None = None,
) -> None:  # fmt: skip
    """Teach the launcher a call whose launches are recorded under the keys: forward alone, or both passes.

    by_python: makes the gradients of the output's gradient and what was saved.
    """
    of_call = ATTENTION.key((q, k, v), _options(causal, scale, configuration))
    if not native.may_learn(of_call + (b"both" if backward else b"forward")):
        return
    ran = _pass(key, [layout_of(out), layout_of(logsumexp)], [*map(Place, range(5))], {_OUT: out})
    of_backward = None if backward is None else _backward_pass(backward)
    if ran is None or (backward is not None and of_backward is None):
        return
    forward = Forward(
        operation=ATTENTION,
        key=of_call,
        inputs=[layout_of(each) for each in (q, k, v)],
        ran=ran,
        saved=[0, 1, 2, _OUT, _LOGSUMEXP],
    )
    native.teach(
        forward,
        by_python,
        backward=of_backward,
        any_order=backward is not None and backward.sums is not None,
        gradients=[] if backward is None else [layout_of(backward.gradient)],
    )


def _backward_pass(backward: Backward) -> Pass | None:
    buffers = [backward.statistics, *backward.shares, *([] if backward.sums is None else [backward.sums])]
    # Before what backward makes come the gradient and what forward saved: q, k, v, out, logsumexp.
    places, made = [*map(Place, range(6))], [*backward.gradients]
    if backward.rows is None:
        places += map(Place, range(6, 9))
    else:
        places += (Place(6, int(each.storage_offset()) * each.element_size()) for each in backward.gradients)
        made = [backward.rows]
    places += map(Place, range(6 + len(made), 6 + len(made) + len(buffers)))
    results = dict(enumerate(backward.gradients, 6))
    return _pass(backward.key, [layout_of(each) for each in (*made, *buffers)], places, results)


def _pass(key: Hashable, made: list[native.Layout], places: list[Place], results: dict[int, Tensor]) -> Pass | None:
    """A recorded pass; None where there is no recording, or its launches are of a kind that is not known.

    places: where the tensors of the recording lie, in those that the pass is given and makes. results: by such number.
    """
    recording = _recordings.get(key)
    if recording is None:
        return None
    launches = [
        native.launch_of(compiled, grid, _placed(template, operands, places))
        for compiled, grid, template, operands in recording.launches
    ]
    if any(each is None for each in launches):
        return None
    return Pass(
        made=made,
        launches=[each for each in launches if each is not None],
        results=[
            (places[number].tensor, places[number].offset // each.element_size(), layout_of(each))
            for number, each in results.items()
        ],
    )


def _placed(template: list[object], operands: list[Operand], places: list[Place]) -> list[Any]:
    """The arguments of a recorded launch, with the tensors' places for them."""
    arguments = list(template)
    for at, number, descriptor in operands:
        place = places[number]
        if descriptor is None:
            arguments[at] = place
        elif not place.offset:  # else there is no argument, and the launch is none that is known
            arguments[at] = Described(place.tensor, *descriptor)
    return arguments
