"""Finds the lines at which the host waits for the device, or on a CPU, at which it would wait for a GPU.

On a GPU PyTorch itself says where it synchronises. On a CPU nothing waits. There a call counts if it reads a value of a
tensor that the model computed. Tensors that a program keeps on the host anyway, such as random indices, do not count.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.recording.habits.code_lines import users_line

_SAID = "called a synchronizing CUDA operation"
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
            warnings.filterwarnings("always", message=_SAID)
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.showwarning = self._shown(show)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self.counting and not self._on_gpu and name in _READS:
            with contextlib.suppress(Exception):  # This runs inside the loop, which an error of ours must not end.
                if args and self._is_of_the_model(args[0]):
                    self._note(_READS[name])
        outside = self._function, self.in_attention_of_half
        self._function = name
        self.in_attention_of_half = name == _ATTENTION and self._in_half((*args, *(kwargs or {}).values()))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._function, self.in_attention_of_half = outside

    def _in_half(self, operands: Iterable[Any]) -> bool:
        dtypes = {each.dtype for each in operands if isinstance(each, torch.Tensor)}
        return bool(dtypes & {torch.bfloat16, torch.float16}) or torch.is_autocast_enabled(self._device.type)

    def _is_of_the_model(self, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and (thing.requires_grad or thing in self.from_the_model)

    def _shown(self, show: Callable[..., None]) -> Callable[..., None]:
        def shown(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
            if not str(message).startswith(_SAID):
                show(message, category, filename, *rest)
            elif self.counting and not filename.endswith(_OF_SCALERS):
                self._note(_READS.get(self._function, ""))

        return shown

    def _note(self, call: str) -> None:
        line = users_line()
        if line is not None:
            # Some functions of PyTorch read a value themselves, such as clipping. The user knows the outer function.
            inside = line.function if line.function and not line.function.startswith("__") else ""
            self.lines[line.where, inside or call] += 1
