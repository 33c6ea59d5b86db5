"""AdamW by one kernel: all parameters in one launch, after backward or under it."""

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import aligned_numbers, moment_blocks
from stepscope.kernels.adamw import BLOCK, Clipping, Moving, Updated, UpdateOfMany, lower_bits, master_of
from stepscope.training.optimizer import Updating, updated_by, when_ready

_UNDER_BACKWARD_BYTES = 32 * 2**20
"""Gradients that are ready are updated together once they have so many bytes: a launch is then worth its while."""

_UNDER_BACKWARD_LAUNCHES = 4
"""Updates that a small model, whose gradients have fewer bytes in all, begins under backward."""

_UNDER_BACKWARD_PROGRAMS = 132
"""Programs of an update under backward: one for each multiprocessor of an H200. With 48, updates of `large` took longer
than its whole backward."""


class AdamWOneLaunch(Updating):
    """AdamW (kernels/adamw) of parameters in fp32, or in bf16 with a master weight in fp32 of which the state keeps the
    lower 16 bits: the weight has the others. `state_dict` has the masters whole.

    The first update makes the moments of all its parameters, as parts of few blocks of memory (`moments_beside`).

    The arithmetic is fp32. Every update is one launch for each group, however many parameters it has, and nothing waits
    for the device, so a CUDA graph can hold it; a learning rate that is a tensor is read at each replay, and the other
    numbers of a group are those of the capture. The count of updates is the group's: a parameter that got no gradient
    in some steps takes part in its bias correction. Deterministic. With max_norm it clips gradients as
    torch.nn.utils.clip_grad_norm_ does, by the norm over all groups: two launches more find norm and coefficient, and
    the update multiplies by it. Gradients stay as they were.
    """

    counts_updates = True
    moment_dtype = torch.float32
    """uint8 for codes (kernels/adamw), whose scales the state keeps beside them."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, masters: Mapping[Tensor, Tensor] | None = None,
        max_norm: float | None = None,
    ) -> None:  # fmt: skip
        """masters: the first values of parameters in bf16, in fp32 and dense; without one, the parameter's own.
        max_norm: the bound on the gradients' global norm; None for none."""
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moving: dict[int, Moving] = {}
        self._updates: dict[tuple[int, ...], UpdateOfMany] = {}
        self.max_norm = max_norm
        self._clipping: Clipping | None = None
        # Made before moments and gradients are there, masters that nobody else holds leave their memory to these.
        with torch.no_grad():
            self._lower = {weight: lower_bits(weight, master) for weight, master in (masters or {}).items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """PyTorch's. Raises an InputError for parameters of another dtype than fp32 and bf16."""
        super().add_param_group(param_group)
        strange = {each.dtype for each in self.param_groups[-1]["params"]} - {torch.float32, torch.bfloat16}
        if strange:
            del self.param_groups[-1]
            raise InputError(f"AdamW in one launch takes parameters in fp32 or bf16, and one is {strange.pop()}")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: no addresses of this one's parameters."""
        return {**super().__getstate__(), "max_norm": self.max_norm, "_lower": self._lower}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_lower"):
            self._lower = {}
        self._moving, self._updates, self._clipping = {}, {}, None

    def _update_all(self) -> None:
        ready: dict[int, list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            if updated := [parameter for parameter in group["params"] if parameter.grad is not None]:
                ready[number] = updated
                self._begin(number)
        updates = [
            (number, self._update_of(number, parameters), _gradients(parameters))
            for number, parameters in ready.items()
        ]
        if self.max_norm is not None and updates:
            self._clipping = self._clipping or Clipping(self.max_norm, updates[0][2][0].device)
            self.gradient_norm = self._clipping.values[0]
            self._clipping.measure([(update, gradients) for _, update, gradients in updates])
        clip = None if self._clipping is None else self._clipping.values
        for number, update, gradients in updates:
            update.run(gradients, self._moving[number], clip=clip)

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's, with the masters in fp32 in place of their lower bits."""
        saved = super().state_dict()
        for number, parameter in enumerate(updated_by(self)):
            if _LOWER in saved["state"].get(number, {}):
                kept = dict(saved["state"][number])
                saved["state"][number] = kept
                kept["master"] = master_of(parameter, kept.pop(_LOWER))
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave: weights in bf16 become the roundings of their masters. Moments stay as they are,
        whatever dtype the parameters have.

        Raises an InputError for moments of another kind than this optimizer's, or of another shape than its
        parameters'.
        """
        for moments in state_dict["state"].values():
            kind = moments["exp_avg"].dtype if "exp_avg" in moments else self.moment_dtype
            if (kind == torch.uint8) != (self.moment_dtype == torch.uint8):
                raise InputError(
                    f"this state has moments in {kind}, and {type(self).__name__} keeps them in {self.moment_dtype}: "
                    "load it into the optimizer that saved it"
                )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, updated_by(self), strict=False):  # PyTorch says if there are others
            _require_alike(state_dict["state"].get(number, {}), parameter)
        super().load_state_dict(state_dict)
        for number, parameter in zip(numbers, updated_by(self), strict=True):
            moments = state_dict["state"].get(number, {})
            kept = self.state[parameter]
            for name in ("exp_avg", "exp_avg_sq", *_SCALES):
                if name in moments:
                    dtype = self.moment_dtype if name in ("exp_avg", "exp_avg_sq") else torch.float32
                    kept[name] = moments[name].detach().to(parameter.device, dtype, copy=True)
            if kept.pop("master", None) is not None and parameter.dtype == torch.bfloat16:
                kept[_LOWER] = lower_bits(parameter, moments["master"].to(parameter.device, torch.float32))

    def _begin(self, number: int) -> None:
        """Count another update of a group."""
        group = self.param_groups[number]
        if number not in self._moving:
            counts = [int(self.state[p]["step"]) for p in group["params"] if "step" in self.state.get(p, {})]
            device = group["params"][0].device
            moving = self._moving[number] = Moving(group["betas"], device, max(counts, default=0))
            for parameter in group["params"]:
                if "step" in self.state.get(parameter, {}):
                    self.state[parameter]["step"] = moving.values[3]
        self._moving[number].advance(group["lr"], group["betas"])

    def _update_of(self, number: int, parameters: list[Tensor]) -> UpdateOfMany:
        """The update of these parameters of a group, made once."""
        numbers = {name: self.param_groups[number][name] for name in ("betas", "eps", "weight_decay")}
        key = tuple(map(id, parameters))
        if key in self._updates and not self._updates[key].has_moved():
            self._updates[key].set_numbers(**numbers)
            return self._updates[key]
        new = [parameter for parameter in parameters if "exp_avg" not in self.state[parameter]]
        strange = next((each for each in new if torch.empty_like(each).stride() != each.stride()), None)
        if strange is not None:
            raise InputError(f"AdamW in one launch takes dense parameters, not strides {strange.stride()}")
        step, device = self._moving[number].values[3], parameters[0].device
        for parameter, (exp_avg, exp_avg_sq) in zip(new, moments_beside(new, self.moment_dtype), strict=True):
            self.state[parameter] |= {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if self.moment_dtype == torch.uint8:
            of_blocks = [torch.empty(-(-each.numel() // BLOCK.value), device="meta") for each in new]
            for parameter, pair in zip(new, moments_beside(of_blocks, device=device), strict=True):
                self.state[parameter] |= dict(zip(_SCALES, pair, strict=True))
        updated: list[Updated] = []
        for parameter in parameters:
            state = self.state[parameter]
            _lay_as(state, parameter)
            if parameter.dtype != torch.float32 and _LOWER not in state:
                lower = self._lower.pop(parameter, None)
                state[_LOWER] = lower_bits(parameter) if lower is None else lower
            moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
            if self.moment_dtype == torch.uint8:
                moments["scales"] = tuple(state[name] for name in _SCALES)
            updated.append(Updated(parameter=parameter, lower=state.get(_LOWER), **moments))
        self._updates[key] = UpdateOfMany(updated, **numbers)
        return self._updates[key]


class AdamW8Bit(AdamWOneLaunch):
    """AdamWOneLaunch with both moments in 8 bits, and a scale for each 256 of them: 2 bytes a parameter, not 8.

    A coarse code moves a parameter no further than AdamW could (kernels/adamw). Beside a gradient in its block that is
    more than 2^16 times as large, one moves less than it would. Rounding is random, and the same again for the same
    count of updates, so it is deterministic, too.
    """

    moment_dtype = torch.uint8


class AdamWUnderBackward(AdamWOneLaunch):
    """AdamWOneLaunch with each parameter's update begun as soon as its gradient is ready, on a stream of its own.

    It moves bytes while backward multiplies matrices: a step then takes little more than the longer of the two. The
    updates have a small grid, which leaves backward most of the GPU. `step` waits for them and does what is left. On a
    CPU, where there are no streams, `step` does it all. So it does with max_norm: the norm of all gradients is known
    only when backward has ended. Gradients stay until `step`, so that nothing else takes their memory while an update
    reads it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, **options)
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_waits" not in vars(self):  # a copy, and no state that is loaded
            self._watch()

    def _watch(self) -> None:
        self._waits = False
        self._begun: set[int] = set()
        self._done: set[Tensor] = set()
        self._group_of: dict[Tensor, int] = {}
        self._ready: dict[int, list[Tensor]] = {}
        self._ready_bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._to_join = False
        all_bytes = sum(parameter.nbytes for parameter in updated_by(self))
        self._worthwhile_bytes = min(_UNDER_BACKWARD_BYTES, all_bytes / _UNDER_BACKWARD_LAUNCHES)
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.device.type == "cuda" and self.max_norm is None:
                    self._stream = self._stream or torch.cuda.Stream(parameter.device)
                    self._group_of[parameter] = number
                    when_ready(parameter, self._now_ready)

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Leave gradients alone in a backward after which others add to them, as those of micro-batches do."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _update_all(self) -> None:
        """Update what is not updated yet, and wait, on the device, for what is."""
        if self._stream is None:
            super()._update_all()
            return
        for number, group in enumerate(self.param_groups):
            left = [p for p in group["params"] if p.grad is not None and p not in self._done]
            if left:
                self._start(number)
                self._update_of(number, left).run(_gradients(left), self._moving[number])
        self.join()
        self._begun.clear()
        self._done.clear()
        self._ready.clear()
        self._ready_bytes = 0

    def join(self) -> None:
        """Let what comes next on the device wait for the updates that have begun."""
        # A capture can wait only for a stream that it began itself, so nothing waits twice, or for nothing.
        if self._stream is not None and self._to_join:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._to_join = False

    def _now_ready(self, parameter: Tensor) -> None:
        if self._waits or parameter.grad is None:
            return
        self._ready.setdefault(self._group_of[parameter], []).append(parameter)
        self._ready_bytes += parameter.grad.nbytes
        if self._ready_bytes >= self._worthwhile_bytes:
            self._update_ready()

    @torch.no_grad()
    def _update_ready(self) -> None:
        """Begin the updates of the gradients that are ready, beside backward."""
        assert self._stream is not None
        for number, parameters in self._ready.items():
            self._start(number)
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                update = self._update_of(number, parameters)
                update.run(_gradients(parameters), self._moving[number], _UNDER_BACKWARD_PROGRAMS)
            self._to_join = True
            self._done.update(parameters)
        self._ready.clear()
        self._ready_bytes = 0

    def _start(self, number: int) -> None:
        """Count the update of a group, once in each step."""
        if number not in self._begun:
            self._begun.add(number)
            self._begin(number)


BY_NAME: dict[str, type[AdamWOneLaunch]] = {
    "adamw-one-launch": AdamWOneLaunch,
    "adamw-under-backward": AdamWUnderBackward,
    "adamw-8bit": AdamW8Bit,
}

_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_LOWER = "master_lower"
"""The state's lower bits of a master weight."""


def moments_beside(
    parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Both moments of each parameter, zeros laid out as the parameter is, side by side in a few blocks. device: where
    they lie; None for the parameters'.

    Tensor by tensor, PyTorch's allocator gives each the rest of its block, up to 1 MiB, and leaves the end of each
    segment of 20 MiB free. They would also lie among what the first step left in its cache, and what is left there a
    CUDA graph's pool cannot take.
    """
    # Twice as many numbers for each parameter, each moment on an address of its own block's alignment.
    sizes = [2 * aligned_numbers(parameter.numel()) for parameter in parameters]
    pairs: list[tuple[Tensor, Tensor]] = []
    for places in moment_blocks(sizes):
        numbers, place = sum(sizes[i] for i in places), device or parameters[places[0]].device
        block = torch.zeros(numbers, dtype=dtype, device=place)
        first = 0
        for i in places:
            size, stride = parameters[i].size(), parameters[i].stride()
            starts = (first, first + sizes[i] // 2)
            average, square = (block.as_strided(size, stride, start) for start in starts)
            pairs.append((average, square))
            first += sizes[i]
    return pairs


def _require_alike(state: Mapping[str, Any], parameter: Tensor) -> None:
    """Raise an InputError for a saved state whose moments have another shape than the parameter, or codes of 8 bits in
    another order, whose scales are those of numbers that lie together."""
    for moment in (state[name] for name in ("exp_avg", "exp_avg_sq", "master") if name in state):
        moved = moment.dtype == torch.uint8 and _order(moment) != _order(parameter)
        if moment.shape != parameter.shape or moved:
            raise InputError(
                f"this state is of a parameter {list(moment.shape)} of strides {moment.stride()}, and here it is "
                f"{list(parameter.shape)} of strides {parameter.stride()}: load it into the model that saved it"
            )


def _order(tensor: Tensor) -> list[int]:
    """What tells in which order a dense tensor's elements lie."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _lay_as(state: dict[str, Any], parameter: Tensor) -> None:
    """Let the elements of a parameter's state lie in the order of its own, which may be another one by now."""
    _require_alike(state, parameter)
    for name in ("exp_avg", "exp_avg_sq", _LOWER):
        if name in state and _order(state[name]) != _order(parameter):
            state[name] = torch.empty_like(parameter, dtype=state[name].dtype).copy_(state[name])


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters that have one, as the kernel reads them."""
    return [_like(parameter.grad, parameter) for parameter in parameters if parameter.grad is not None]


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor with its elements where the parameter has them, in its dtype where it is a gradient's."""
    if tensor.stride() == parameter.stride() and tensor.dtype in (parameter.dtype, torch.float32):
        return tensor
    if tensor.layout != torch.strided:
        raise InputError("AdamW in one launch takes dense gradients, and one is sparse: say sparse=False of embeddings")
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
