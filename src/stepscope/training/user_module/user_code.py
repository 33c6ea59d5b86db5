"""Finds and runs a user's code, handles its batches, and describes its module.

Whatever the code raises becomes one line, and what it prints does not go to our stdout. A batch is one tensor, or
tensors nested in tuples, lists, dicts and objects of the user's own.
"""

import contextlib
import copy
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from stepscope.core.errors import DeviceError, InputError, StepscopeError, named_line, one_line
from stepscope.core.workloads import Input, UserModel
from stepscope.recording.device import is_out_of_memory
from stepscope.recording.held_tensors import tensors_within


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """While open, whatever a user's own code raises becomes an error of one line that begins with `what`."""
    try:
        yield
    except (KeyboardInterrupt, StepscopeError):
        raise
    except BaseException as error:  # The user's own code may raise anything.
        if is_out_of_memory(error):
            raise DeviceError(f"{what}: {one_line(error)}") from error
        raise InputError(f"{what}: {named_line(error)}") from error


def printed_to_stderr() -> contextlib.AbstractContextManager[object]:
    """While open, what Python code prints goes to stderr: stdout is for our result."""
    return contextlib.redirect_stdout(sys.stderr)


# Finds a user's factory, or function, by its name.
#
# `package.module:factory` is imported as `python -m` would, also from the current directory. `path/file.py:factory` is
# loaded from its file, with its folder on the path of imports, under a name of its own: what stands behind
# `if __name__ == "__main__"` does not run.


HOW_TO_NAME = "write package.module:factory or path/file.py:factory"


@dataclass(frozen=True, kw_only=True)
class Factory:
    """The object that `--module` names: a function to call, or a module or a step."""

    spelled: str
    target: Any

    @property
    def is_called(self) -> bool:
        """Whether it is called for its result. A module or a step is taken as it is."""
        return callable(self.target) and not isinstance(self.target, nn.Module)

    @property
    def file(self) -> Path | None:
        """The file that defines it."""
        try:
            return Path(inspect.getsourcefile(self.target) or "").resolve()
        except (TypeError, OSError):
            home = sys.modules.get(str(getattr(type(self.target), "__module__", "")))
            return Path(home.__file__) if home is not None and home.__file__ else None


def find_factory(spelled: str) -> Factory:
    """Import what `--module` names. Raises InputError that says what is missing, with the nearest names."""
    place, _, name = spelled.rpartition(":")
    if not (place and name):
        raise InputError(f"--module {spelled!r}: {HOW_TO_NAME}; a model of Hugging Face is named by its config.json")
    with printed_to_stderr():
        if place.endswith(".py"):
            home = _from_file(Path(place), spelled)
        else:
            _import_also_from(Path.cwd())
            with user_errors(f"--module {spelled} cannot be imported"):
                home = importlib.import_module(place)
    target: Any = home
    for part in name.split("."):
        if not hasattr(target, part):
            home_name = getattr(target, "__name__", "")
            factories = [  # that the file itself defines
                key
                for key, value in getattr(target, "__dict__", {}).items()
                if not key.startswith("_") and callable(value) and getattr(value, "__module__", None) == home_name
            ]
            near = difflib.get_close_matches(part, factories, n=3) or factories[:6]
            raise InputError(f"--module {spelled}: {place} has no {name!r}{_there_is(near)}")
        target = getattr(target, part)
    return Factory(spelled=spelled, target=target)


def _from_file(file: Path, spelled: str) -> ModuleType:
    if not file.is_file():
        there = "is a directory" if file.is_dir() else "is not there"
        near = difflib.get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=3)
        raise InputError(f"--module {spelled}: {file} {there}{_there_is(near)}")
    file = file.resolve()
    _import_also_from(file.parent)
    # Classes and pickles look for their module by its name, so the file gets the one that its neighbours import it by,
    # unless that is another module's.
    name = file.stem if file.stem.isidentifier() and _is_free(file.stem, file) else f"own_{abs(hash(str(file)))}"
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None
    home = importlib.util.module_from_spec(specification)
    sys.modules[name] = home
    try:
        with user_errors(f"--module {spelled} cannot be loaded"):
            specification.loader.exec_module(home)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return home


def _is_free(name: str, file: Path) -> bool:
    """Whether this name is the file's own, and not that of a library or of a module that is loaded already."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None) == str(file)
    specification = importlib.util.find_spec(name)
    return specification is None or specification.origin == str(file)


def _import_also_from(folder: Path) -> None:
    """Import modules from this folder too, from now on, as a script in it would. Forward may import some later."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _there_is(names: Sequence[str]) -> str:
    return f"; there is {', '.join(names)}" if names else ""


# The batches of a user's own model.


MOST_BATCHES = 4
"""Batches that are taken from a loader or another iterator, as many as the textbook's steps rotate through."""


def batches_of(value: Any, name: str) -> list[Any]:
    """The batches that a user gave: one batch, or the batches of a list, an iterator or a DataLoader."""
    if not isinstance(value, (list, Iterator, DataLoader)):
        return [_plain(value)]
    with user_errors(f"the batches of {name} fail"):
        several = value if isinstance(value, list) else itertools.islice(value, MOST_BATCHES)
        batches = [_plain(batch) for batch in several]
    if not batches:
        what = "an empty list" if isinstance(value, list) else f"{type(value).__name__} that gives none"
        raise InputError(f"{name} has no batch: it gave {what}; give one batch, or a list of batches")
    return [tuple(batch) if isinstance(batch, list) else batch for batch in batches]


def moved(batch: Any, device: torch.device, dtype: torch.dtype | None, name: str) -> Any:
    """The batch on the device; where a dtype is given, its floating tensors in that dtype."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    with user_errors(f"the batch of {name} cannot be moved to {device}"):
        there = tree_map(move, batch)
        return there if dtype is None else with_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, there)


def with_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with each of its tensors changed. An object that holds tensors is copied, and the copy holds these; one
    that cannot be copied stays as it is."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        instead = {id(tensor): change(tensor) for _, tensor in tensors_within(leaf)}
        try:
            return copy.deepcopy(leaf, instead) if instead else leaf
        except Exception:  # as of a lock or an open file, and whatever a class of the user's own raises
            return leaf

    return tree_map(changed, batch)


def named_tensors(batch: Any, names: Sequence[str] = ()) -> list[tuple[str, Tensor]]:
    """The tensors of a batch, by the path of keys to each. `names` are those of the items of a tuple, in order."""
    if isinstance(batch, Tensor):
        return [(names[0] if names else "input", batch)]
    return list(_named(batch, names, ""))


def resized(batch: Any, batch_size: int | None) -> Any:
    """The batch with `batch_size` samples. Each tensor with the first tensor's first size is repeated and cut. One that
    the batch has twice, as tokens that are labels, stays one."""
    if batch_size is None:
        return batch
    sizes: list[int] = []
    made: dict[int, Tensor] = {}

    def resize(leaf: Tensor) -> Tensor:
        if leaf.is_nested:
            raise InputError("a batch of nested tensors has no other size: leave out --batch-size and --accumulation")
        if not leaf.dim():
            return leaf
        sizes.append(leaf.shape[0])
        if leaf.shape[0] != sizes[0]:
            return leaf
        if id(leaf) not in made:
            times = -(-batch_size // max(1, sizes[0]))
            made[id(leaf)] = leaf.repeat(times, *[1] * (leaf.dim() - 1))[:batch_size].clone()
        return made[id(leaf)]

    return with_tensors(resize, batch)


def split(batch: Any, parts: int, name: str) -> list[Any]:
    """The batch in `parts` micro-batches of equal size, as views. The first size of its first tensor is the batch size.
    Each tensor with this first size is cut along it; every micro-batch gets the other tensors whole."""
    if parts == 1:
        return [batch]
    tensors = named_tensors(batch)
    size = tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 0
    if not size:
        raise InputError(f"{name} cannot run with accumulation {parts}: its batch has no tensor to split")
    if size % parts:
        near = ", ".join(str(n) for n in range(2, size + 1) if size % n == 0)
        raise InputError(
            f"the batch of {name} has {size} samples, which cannot be split into {parts} equal micro-batches: "
            f"choose accumulation {near or 1}"
        )

    if any(tensor.is_nested for _, tensor in tensors):
        raise InputError(f"the batch of {name} has nested tensors, which are not split: leave out --accumulation")

    def part(tensor: Tensor, index: int) -> Tensor:
        if tensor.dim() and tensor.shape[0] == size:
            return tensor.narrow(0, index * (size // parts), size // parts)
        return tensor

    return [with_tensors(functools.partial(part, index=index), batch) for index in range(parts)]


class Call:
    """How forward is called with a batch.

    for_loss_too: the loss takes the batch as well. Forward then takes the items of a dict that it names, and as many
    items of a tuple as it needs.
    """

    def __init__(self, module: nn.Module, *, for_loss_too: bool) -> None:
        parameters = _signature(module)
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._keywords = frozenset(p.name for p in parameters) if for_loss_too and not takes_any else None
        """The names that forward takes; None for all."""
        needed = max(sum(p.default is p.empty for p in by_place), 1)
        self._needed = needed if for_loss_too and by_place else None
        """The number of positional arguments without a default that forward takes; None for all."""

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward's positional and keyword arguments."""
        if isinstance(batch, dict):
            names = self._keywords
            return (), batch if names is None else {key: batch[key] for key in batch if key in names}
        return (batch[: self._needed] if isinstance(batch, tuple) else (batch,)), {}

    def rest(self, batch: Any) -> Any:
        """The part of the batch that forward does not take: one item alone, or several as a tuple."""
        if isinstance(batch, dict):
            names = self._keywords
            left = () if names is None else tuple(batch[key] for key in batch if key not in names)
        else:
            left = batch[self._needed :] if isinstance(batch, tuple) and self._needed is not None else ()
        return left[0] if len(left) == 1 else left


def input_names(module: nn.Module) -> tuple[str, ...]:
    """The names of forward's positional parameters."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _signature(module) if p.kind in by_place)


def _plain(batch: Any) -> Any:
    """The batch with one of Python's own containers outermost: a BatchEncoding is a mapping, but no dict."""
    if batch is None:
        return ()
    return dict(batch) if isinstance(batch, Mapping) else batch


def _named(value: Any, names: Sequence[str], path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, (), f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            name = names[i] if i < len(names) else str(i)
            yield from _named(item, (), f"{path}.{name}" if path else name)
    else:
        yield from ((f"{path}.{name}".strip("."), tensor) for name, tensor in tensors_within(value))


def _signature(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


# Describes a user's own model, so that an experiment can be named by it: its class, batch, structure and code.


_LIBRARIES = tuple(
    sorted({str(Path(sysconfig.get_path(place)).resolve()) for place in ("stdlib", "platstdlib", "purelib", "platlib")})
)


class WithItsLoss(nn.Module):
    """A module, and its loss that has parameters or buffers of its own: what a step trains together."""

    def __init__(self, module: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.module, self.loss = module, loss


def describe_module(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], files: Iterable[Path | None]
) -> UserModel:
    """The module as it was found. tensors: those of a batch. files: where the factory stands, or its configuration."""
    return UserModel(
        name=type(module.module if isinstance(module, WithItsLoss) else module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        inputs={name: Input(_shape(t), _dtype(t)) for name, t in tensors},
        structure=structure_digest(module),
        source=source_digest(module, files),
    )


def structure_digest(module: nn.Module) -> str:
    """A digest of the classes of all submodules and of the names, shapes and dtypes of parameters and buffers."""
    # The classes of parametrised modules are made as needed, all with one name. The qualified name tells them apart.
    lines = [f"{path} {type(part).__qualname__}" for path, part in module.named_modules(remove_duplicate=False)]
    for kind, tensors in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
        lines += [
            f"{kind} {name} {tuple(t.shape)} {_dtype(t)} {t.requires_grad}"
            for name, t in tensors(remove_duplicate=False)
        ]
    return _digest("\n".join(lines).encode())


def source_digest(module: nn.Module, files: Iterable[Path | None]) -> str:
    """A digest of these files, and of those that define the module's classes outside of libraries."""
    of_classes = {*map(_file_of, {cls for part in module.modules() for cls in type(part).__mro__})}
    paths = {file.resolve() for file in (*files, *of_classes) if file is not None and file.is_file()}
    # Only the content counts: the same code in another folder is the same experiment.
    return _digest(b"".join(sorted(hashlib.sha256(file.read_bytes()).digest() for file in paths)))


def _file_of(cls: type) -> Path | None:
    """The file that defines a class; None where it is a library's, or there is none."""
    home = sys.modules.get(cls.__module__)
    written = getattr(home, "__file__", None) if home is not None else None
    if written is None:
        return None
    file = Path(written).resolve()
    ours = Path(__file__).resolve().parents[2]
    return None if any(file.is_relative_to(place) for place in (*_LIBRARIES, ours)) else file


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; of a jagged one with the longest of its lengths."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    values: Any = tensor
    return (values.shape[0], values._get_max_seqlen(), *values.values().shape[1:])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
