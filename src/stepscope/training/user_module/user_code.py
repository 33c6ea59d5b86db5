"""Runs a user's code: whatever it raises becomes one line, and what it prints does not go to our stdout."""

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from stepscope.core.errors import DeviceError, InputError, StepscopeError, named_line, one_line
from stepscope.core.workloads import Input, UserModel
from stepscope.recording.device import is_out_of_memory


@contextlib.contextmanager
def said_of(what: str) -> Iterator[None]:
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


# Describes a user's own model, so that an experiment can be named by it: its class, batch, structure and code.


_LIBRARIES = tuple(
    sorted({str(Path(sysconfig.get_path(place)).resolve()) for place in ("stdlib", "platstdlib", "purelib", "platlib")})
)


def describe_module(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], files: Iterable[Path | None]
) -> UserModel:
    """The module as it was found. tensors: those of a batch. files: where the factory stands, or its configuration."""
    return UserModel(
        name=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        inputs={name: Input(tuple(t.shape), _dtype(t)) for name, t in tensors},
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
    of_classes = {_file_of(cls) for part in module.modules() for cls in type(part).__mro__}
    found = {file.resolve() for file in (*files, *of_classes) if file is not None and file.is_file()}
    # Only the content counts: the same code in another folder is the same experiment.
    return _digest(b"".join(sorted(hashlib.sha256(file.read_bytes()).digest() for file in found)))


def _file_of(cls: type) -> Path | None:
    """The file that defines a class; None where it is a library's, or there is none."""
    home = sys.modules.get(cls.__module__)
    written = getattr(home, "__file__", None) if home is not None else None
    if written is None:
        return None
    file = Path(written).resolve()
    ours = Path(__file__).resolve().parents[2]
    return None if any(file.is_relative_to(place) for place in (*_LIBRARIES, ours)) else file


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
