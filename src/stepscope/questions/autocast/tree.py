"""The dtypes of a model as a tree: modules and parameters, indented by depth, and the loss below them."""

from collections.abc import Iterator

from torch import Tensor, nn

from stepscope.core.answer import Cell, Table
from stepscope.questions.autocast.model_with_loss import ModelWithLoss
from stepscope.questions.autocast.operators import dtype_name
from stepscope.questions.autocast.recording import AutocastRecord, Seen

Row = tuple[Cell, ...]
COLUMNS = ("what", "kind", "calls", "dtype", "input", "output", "gradient")
"""The columns of the table. `gradient` is that of the parameter, or of the module's output."""


def tree_table(model: ModelWithLoss, recording: AutocastRecord, title: str) -> Table:
    """A table of dtypes, a row per module or parameter; neighbours named by a number share rows that are alike."""
    whole = model.module
    rows = list(_Tree(whole, recording).rows(type(whole).__name__, whole, path="", depth=0))
    rows.append(("loss", model.loss_name, None, None, ", ".join(recording.output), recording.loss, None))
    return Table(title=title, columns=COLUMNS, rows=tuple(rows))


class _Tree:
    """The rows of one model, made from the top down."""

    def __init__(self, whole: nn.Module, recording: AutocastRecord) -> None:
        self._recording = recording
        self._names = {id(parameter): name for name, parameter in whole.named_parameters()}
        self._shown: dict[int, str] = {}
        """The path of each module that has rows already, by its id. A module that is met again is only named."""

    def rows(self, label: str, module: nn.Module, *, path: str, depth: int) -> Iterator[Row]:
        """Rows of a module, its parameters, and the modules in it."""
        indent = "  " * depth
        if id(module) in self._shown:
            yield (indent + label, f"the same as {self._shown[id(module)]}", None, None, None, None, None)
            return
        self._shown[id(module)] = path or "the whole"
        # A module that forward itself makes has no hooks.
        seen = self._recording.seen.get(id(module), Seen())
        yield (
            indent + label, type(module).__name__, seen.calls or None, None,
            ", ".join(seen.inputs), ", ".join(seen.outputs), ", ".join(seen.gradients),
        )  # fmt: skip
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = self._names[id(parameter)]
            kind = "parameter" if full == _join(path, name) else f"the same as {full}"
            gradient = self._recording.gradients[full] or "none"
            dtype = self._recording.inside[full]
            yield (f"{indent}  {name}", f"{kind} {_shape(parameter)}", None, dtype, "", "", gradient)
        for name, buffer in module.named_buffers(recurse=False):
            yield (f"{indent}  {name}", f"buffer {_shape(buffer)}", None, dtype_name(buffer.dtype), "", "", "")
        yield from self._children(module, path, depth + 1)

    def _children(self, module: nn.Module, path: str, depth: int) -> Iterator[Row]:
        groups: list[tuple[list[str], list[Row]]] = []
        for name, child in module.named_children():
            rows = list(self.rows(name, child, path=_join(path, name), depth=depth))
            if groups and name.isdigit() and groups[-1][0][-1].isdigit() and _alike(groups[-1][1], rows):
                groups[-1][0].append(name)
            else:
                groups.append(([name], rows))
        for members, rows in groups:
            if len(members) > 1:
                rows[0] = (f"{'  ' * depth}{members[0]} to {members[-1]}, each", *rows[0][1:])
            yield from rows


def _alike(one: list[Row], other: list[Row]) -> bool:
    """Whether the rows are the same, apart from the label of the first one."""
    return [one[0][1:], *one[1:]] == [other[0][1:], *other[1:]]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"
