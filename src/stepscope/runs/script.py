"""A watched script as text: its calls, found by Python's `ast`, and edits of them that are checked."""

import ast
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.core.errors import portable_path
from stepscope.core.run import Run

# The script's files, and edits of them that are checked: the edited text has to mean what was meant, and nothing else.


class Unsure(Exception):
    """Raised where an edit is not sure to be right; its message says why."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(why)
        self.where = where
        """The line, where that is known."""


@dataclass(frozen=True)
class Edit:
    """One change of a file, at a call or a statement that begins at this line and column."""

    path: Path
    node: ast.expr | ast.stmt
    """A call, for a keyword or another method; a statement, to put a line before it or several below a `with`."""
    text: str
    """The keyword's value; the method's name; the line."""
    keyword: str = ""
    last: ast.stmt | None = None
    """The last of the statements that the line is a `with` of."""


class Source:
    """A file of the script, parsed, to which edits are applied."""

    def __init__(self, path: Path) -> None:
        self.path, self._bytes = path, path.read_bytes()
        self.text = self._bytes.decode()
        self.tree = ast.parse(self._bytes)
        lines = self._bytes.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._newline = "\r\n" if b"\r\n" in self._bytes else "\n"
        self._changes: list[tuple[int, int, str]] = []

    @property
    def name(self) -> str:
        """The file as its user calls it: from the current folder, where it is below that."""
        return str(self.path.relative_to(Path.cwd())) if self.path.is_relative_to(Path.cwd()) else str(self.path)

    def _offset(self, line: int | None, column: int | None) -> int:
        return self._starts[(line or 1) - 1] + (column or 0)

    def _start(self, node: Any) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: Any) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)

    def apply(self, edit: Edit) -> None:
        """Note a change of the text, and make the same one in the tree. Raises Unsure."""
        node = next(
            (
                each
                for each in ast.walk(self.tree)
                if type(each) is type(edit.node)
                and (self._start(each), self._end(each)) == (self._start(edit.node), self._end(edit.node))
            ),
            None,
        )
        if isinstance(node, ast.Call) and edit.keyword:
            self._set_keyword(node, edit.keyword, edit.text)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            self._changes.append((self._end(node.func.value), self._end(node.func), f".{edit.text}"))
            node.func.attr = edit.text
        elif isinstance(node, ast.stmt):
            self._put_before(node, edit)
        else:
            raise Unsure("another change is made there")

    def _set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        if any(each.arg is None for each in call.keywords):
            raise Unsure("the call takes ** of a dictionary, which may set it")
        parsed = ast.parse(value, mode="eval").body
        given = next((each for each in call.keywords if each.arg == name), None)
        if given is not None:
            self._changes.append((self._start(given.value), self._end(given.value), value))
            given.value = parsed
            return
        placed = [each for each in (*call.args, *call.keywords) if hasattr(each, "lineno")]
        last: Any = max(placed, key=self._end, default=None)
        new = f"{name}={value}"
        if last is None:
            at = self._end(call) - 1
            self._changes.append((at, at, f", {new}" if call.keywords else new))
        else:
            at, line = self._end(last), self._starts[last.lineno - 1]
            before = self._bytes[line : self._start(last)]
            alone = not before.strip() and last.lineno != call.lineno
            gap = f",{self._newline}{before.decode()}" if alone else ", "
            self._changes.append((at, at, f"{gap}{new}"))
        call.keywords.append(ast.keyword(arg=name, value=parsed))

    def _put_before(self, first: ast.stmt, edit: Edit) -> None:
        body = next(
            body
            for each in ast.walk(self.tree)
            for body in (getattr(each, "body", None), getattr(each, "orelse", None), getattr(each, "finalbody", None))
            if isinstance(body, list) and first in body
        )
        begin = self._starts[first.lineno - 1]
        indent = self._bytes[begin : self._start(first)].decode()
        if indent.strip():
            raise Unsure("several statements stand in one line there")
        self._changes.append((begin, begin, f"{indent}{edit.text}{self._newline}"))
        at = body.index(first)
        if edit.last is None:
            body[at:at] = ast.parse(edit.text).body
            return
        until = next(
            i
            for i, each in enumerate(body)
            if (each.lineno, each.col_offset) == (edit.last.lineno, edit.last.col_offset)
        )
        deeper = "\t" if "\t" in indent else "    "
        for line in range(first.lineno, (body[until].end_lineno or first.lineno) + 1):
            start = self._starts[line - 1]
            if self._bytes[start : self._starts[line]].strip():
                self._changes.append((start, start, deeper))
        outer: Any = ast.parse(f"{edit.text}\n    pass").body[0]
        outer.body = body[at : until + 1]
        body[at : until + 1] = [outer]

    def edited(self) -> str:
        """The text with all changes. Raises Unsure where it does not mean what the changed tree means."""
        pieces, at = [], 0
        for start, end, text in sorted(self._changes, key=lambda change: change[:2]):
            if start < at:
                raise Unsure("two changes meet in one place")
            pieces += [self._bytes[at:start], text.encode()]
            at = end
        data = b"".join([*pieces, self._bytes[at:]])
        try:
            compile(data, str(self.path), "exec", dont_inherit=True)
            same = ast.dump(ast.parse(data)) == ast.dump(self.tree)
        except (SyntaxError, ValueError) as error:
            raise Unsure(f"the changed file would not compile ({error})") from error
        if not same:
            raise Unsure("the line is written in a way in which the change would mean something else")
        return data.decode()


def edited(edits: Sequence[Edit]) -> list[tuple[Source, str]]:
    sources = {edit.path: Source(edit.path) for edit in edits}
    for edit in edits:
        sources[edit.path].apply(edit)
    return [(source, source.edited()) for source in sources.values()]


# The script as it stands on disk.


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@dataclass
class Found:
    """A call in the script."""

    source: Source
    call: ast.Call

    @property
    def where(self) -> str:
        return f"{self.source.name}:{self.call.lineno}"

    @property
    def name(self) -> str:
        return last_name(self.call.func)

    def constant(self, keyword: str) -> Any:
        """The value of a keyword that is a constant; None of all others."""
        value = next((each.value for each in self.call.keywords if each.arg == keyword), None)
        return value.value if isinstance(value, ast.Constant) else None

    def sets(self, keyword: str) -> bool:
        return any(each.arg == keyword for each in self.call.keywords)

    def edit(self, keyword: str, value: str) -> Edit:
        return Edit(self.source.path, self.call, value, keyword)


_EVALUATES = ("val", "test", "eval", "dev")
_ARGUMENTS = ("SFTConfig", "DPOConfig", "GRPOConfig")


@dataclass
class Script:
    """The files of a run's script, as far as they are the ones that ran."""

    run: Run
    directory: Path | None
    sources: list[Source] = field(default_factory=list[Source])
    changed: list[str] = field(default_factory=list[str])
    """Files that changed since, or are gone, with which of the two."""

    def __post_init__(self) -> None:
        loop = self.run.evidence.loop
        for known in loop.sources if loop is not None and self.directory is not None else ():
            path = Path(os.path.normpath((self.directory or Path()).resolve() / known.path))
            try:
                same = hashlib.sha256(path.read_bytes()).hexdigest() == known.digest
                if same:
                    self.sources.append(Source(path))
                else:
                    self.changed.append(f"{os.path.relpath(path)} has changed since the run")
            except OSError:
                self.changed.append(f"{os.path.relpath(path)} is not there any more")
            except (SyntaxError, ValueError):
                self.changed.append(f"{os.path.relpath(path)} cannot be read as Python in UTF-8")

    @property
    def why_no_lines(self) -> str:
        """Why no line can be named; empty where the script can be read."""
        if self.changed:
            return "; ".join(self.changed)
        return "" if self.sources else "the run does not know its script's files"

    @property
    def library(self) -> str:
        return self.run.evidence.loop.library if self.run.evidence.loop is not None else ""

    def calls(self, wanted: Callable[[str], bool]) -> list[Found]:
        """The calls of functions whose last name is wanted."""
        return [
            Found(source, node)
            for source in self.sources
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and wanted(last_name(node.func))
        ]

    def only(self, wanted: Callable[[str], bool], what: str) -> Found:
        """The only such call. Raises Unsure where there is none, or there are several."""
        if self.why_no_lines:
            raise Unsure(self.why_no_lines)
        found = self.calls(wanted)
        if len(found) > 1:
            found = [one for one in found if not self._evaluates(one)] or found
        if len(found) != 1:
            places = ", ".join(one.where for one in found[:3])
            raise Unsure(
                f"there are {len(found)} calls of {what} ({places})" if found else f"no call of {what} is in it"
            )
        return found[0]

    def line_of(self, where: str) -> str:
        """The line of the script that a run names in this way, which may stand behind a library's; empty where it is
        none of the script's."""
        path, _, line = where.removesuffix(")").rpartition("(from ")[2].rpartition(":")
        names = (source.name for source in self.sources if portable_path(str(source.path)) == path)
        return next((f"{name}:{line}" for name in names), "")

    def batch_call(self, where: str) -> Found | None:
        """The call in this line, as a run names it, whose results are given to another call by the same names: a batch
        that goes to the model."""
        for source in self.sources:
            passed = {
                each.id
                for node in ast.walk(source.tree)
                if isinstance(node, ast.Call)
                for each in node.args
                if isinstance(each, ast.Name)
            }
            for node in ast.walk(source.tree):
                here = isinstance(node, ast.Assign) and f"{portable_path(str(source.path))}:{node.lineno}" == where
                if not here or not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                    continue
                names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                if names and passed.issuperset(names):
                    return Found(source, node.value)
        return None

    def _evaluates(self, found: Found) -> bool:
        """Whether the call's result is named as one for evaluation."""
        named = (
            last_name(target).lower()
            for node in ast.walk(found.source.tree)
            if isinstance(node, ast.Assign) and found.call in ast.walk(node.value)
            for target in node.targets
        )
        return any(word in name for name in named for word in _EVALUATES)

    def arguments(self) -> Found:
        """The call of the library's own settings: TrainingArguments, Lightning's Trainer or the Accelerator."""
        if self.library == "transformers":
            return self.only(lambda name: name.endswith("TrainingArguments") or name in _ARGUMENTS, "TrainingArguments")
        name = "Trainer" if self.library == "lightning" else "Accelerator"
        return self.only(lambda called: called == name, name)

    def optimizer(self) -> Found:
        loop = self.run.evidence.loop
        names = loop.optimizers if loop is not None else ()
        if len(names) != 1:
            raise Unsure("there is not one optimizer alone")
        return self.only(lambda name: name == names[0], names[0])

    def statement(self, found: Found) -> tuple[list[ast.stmt], int]:
        """The block that holds the statement of a call, and the statement's place in it."""
        blocks = [
            (body, i)
            for node in ast.walk(found.source.tree)
            for body in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None))
            if isinstance(body, list)
            for i, each in enumerate(body)
            if isinstance(each, ast.stmt) and any(inside is found.call for inside in ast.walk(each))
        ]
        return max(blocks, key=lambda block: block[0][block[1]].lineno)
