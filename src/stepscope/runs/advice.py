"""Advice on a watched script: what to write in which of its lines, what that should give, and the same as a diff.

What a remedy gives is foretold as an interval, from what the run measured. Lines are found in the script's own text, by
Python's `ast`; where one cannot be found for sure, the advice stands without a diff and says why.
"""

import ast
import difflib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.answer import Answer, Line, table_of
from stepscope.core.errors import InputError, portable_path
from stepscope.core.range_names import BACKWARD, DATA, FORWARD, OPTIMIZER, REST, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_share
from stepscope.runs import metrics

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


def patch(advice: "Sequence[Advice]") -> tuple[str, list[str]]:
    """A unified diff of all that these change, and a sentence for each that has none; paths are from the current
    folder, as `git apply` and `patch -p1` take them there."""
    left = [f"{one.kind}: no diff, since {one.no_patch}" for one in advice if one.no_patch]
    kept: list[Edit] = []
    for one in advice:
        if one.no_patch:
            continue
        try:
            _edited([*kept, *one.edits])
        except Unsure as error:
            left.append(f"{one.kind}: not in this diff, since {error}: apply it, measure, and ask again")
        else:
            kept += one.edits
    texts: list[str] = []
    for source, new in _edited(kept):
        name = os.path.relpath(source.path)
        lines = difflib.unified_diff(
            source.text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        texts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(texts), left


def _edited(edits: Sequence[Edit]) -> list[tuple[Source, str]]:
    sources = {edit.path: Source(edit.path) for edit in edits}
    for edit in edits:
        sources[edit.path].apply(edit)
    return [(source, source.edited()) for source in sources.values()]


# The script as it stands on disk.


def _last_name(node: ast.expr) -> str:
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
        return _last_name(self.call.func)

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
            if isinstance(node, ast.Call) and wanted(_last_name(node.func))
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

    def _evaluates(self, found: Found) -> bool:
        """Whether the call's result is named as one for evaluation."""
        named = (
            _last_name(target).lower()
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


# What a remedy gives.


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to write where, and the share of the step's time that this should save."""

    kind: str
    put: str
    """The text to write there, in the words of what the script uses."""
    where: str = ""
    """File and line; empty where the line is not known."""
    low: float
    high: float
    how: str
    """How the interval was worked out."""
    no_patch: str = ""
    """Why there is no diff; empty where there is one."""
    edits: tuple[Any, ...] = ()

    @property
    def expected(self) -> float:
        """What advice is sorted by: most remedies give less than the middle of what is possible."""
        return self.low + (self.high - self.low) / 3

    @property
    def document(self) -> dict[str, object]:
        """What --json writes of it."""
        named = ("kind", "where", "put", "low", "high", "expected", "how", "no_patch")
        return {name: getattr(self, name) for name in named}

    @property
    def saves(self) -> str:
        low = max(0.0, self.low)
        return (
            f"up to {format_share(self.high)}" if low < 0.005 else f"{format_share(low)} to {format_share(self.high)}"
        )


_Place = Callable[[], tuple[str, tuple[Edit, ...]]]
"""Finds the line, and the edits; raises Unsure."""


@dataclass
class _Adviser:
    run: Run
    script: Script

    @cached_property
    def step_s(self) -> float:
        samples = metrics.samples_of(self.run, STEP)
        return (samples.mean_s if samples else None) or 0.0

    def share(self, *parts: str) -> float:
        """The parts' share of the mean step: what a loop gains is over all its steps."""
        means = [samples.mean_s or 0.0 for part in parts if (samples := metrics.samples_of(self.run, part))]
        return min(1.0, sum(means) / self.step_s) if self.step_s else 0.0

    @cached_property
    def noise(self) -> float:
        """How far two measurements of one step may differ, as a share: both have the interval of this one."""
        samples = metrics.samples_of(self.run, STEP)
        interval = samples.interval() if samples else None
        if interval is None or samples is None or not samples.median_s:
            return 0.1
        return max(0.02, 2 * interval.half_width / samples.median_s)

    @property
    def cuda(self) -> bool:
        return metrics.on_gpu(self.run)

    def by_library(self, plain: _Place, **settings: str) -> tuple[str, _Place]:
        """The text to put and its place: a setting of the library that runs the loop, or the plain loop's."""
        setting = settings.get(self.script.library, "")
        if not setting:
            return "", plain
        values = [each.partition("=")[::2] for each in setting.split(", ")]

        def place() -> tuple[str, tuple[Edit, ...]]:
            found = self.script.arguments()
            return found.where, tuple(found.edit(name, value) for name, value in values)

        of = {"transformers": "TrainingArguments", "lightning": "Trainer", "accelerate": "Accelerator"}
        return f"{of[self.script.library]}({setting})", place

    def make(self, kind: str, put: str, place: _Place, saves: tuple[float, float], how: str) -> Advice:
        high = max(0.0, min(saves[1], 0.99))
        low = min(max(saves[0], 0.0), high)
        where, edits, why = "", (), ""
        try:
            where, edits = place()
            if edits:
                _edited(edits)
        except Unsure as error:
            where, why = where or error.where, str(error)
        noise = f"; {format_share(self.noise)} either way is this measurement's own scatter"
        return Advice(
            kind=kind,
            put=put,
            where=where,
            no_patch=why or ("" if edits else "it is a choice of yours"),
            edits=edits,
            low=low - self.noise * (1 - low),
            high=min(0.99, high + self.noise * (1 - high)),
            how=how + noise,
        )

    # Each of the following gives the advice of one kind, where the run shows the fault.

    def workers(self) -> Iterator[Advice]:
        data_s = self.share(DATA) * self.step_s
        if self.run.finding("waiting-for-data") is None or data_s < _HAND_OVER_S:
            return
        loader = ""
        if self.script.library == "transformers":
            names, loader = ("dataloader_num_workers", "dataloader_persistent_workers"), "TrainingArguments"
        else:
            names, loader = ("num_workers", "persistent_workers"), "DataLoader"
        found: Found | None = None
        why = ""
        try:
            found = (
                self.script.arguments() if loader != "DataLoader" else self.script.only(lambda n: n == loader, loader)
            )
        except Unsure as error:
            why = str(error)
        now = found.constant(names[0]) or 0 if found is not None else 0
        environment = self.run.environment
        cores = environment.cpu_cores if environment else 1
        own = (environment.host.own_cores if environment and environment.host else None) or 1.0
        rest_s = max(self.step_s - data_s, 1e-9)
        work_s = self.step_s * now if now else data_s
        wanted = min(cores, max(2, math.ceil(1.5 * work_s / rest_s)))
        if not isinstance(now, int) or wanted <= now:
            return
        # What the process computes in its waits, by its load: data that is only waited for needs no core.
        computes = (own - (1 - self.share(DATA))) / self.share(DATA)
        free = wanted if computes < 0.2 else min(wanted, int(cores - min(own, cores)))
        best_s = max(rest_s, work_s / wanted)
        worst_s = 1.25 * max(rest_s, work_s / free) + _HAND_OVER_S if free >= 1 and not now else self.step_s
        put = f"{loader}({names[0]}={wanted}, {names[1]}=True)"

        def place() -> tuple[str, tuple[Edit, ...]]:
            if found is None:
                raise Unsure(why)
            edits = (found.edit(names[0], str(wanted)), found.edit(names[1], "True"))
            return found.where, edits

        yield self.make(
            "waiting-for-data",
            put,
            place,
            (1 - worst_s / self.step_s, 1 - best_s / self.step_s),
            f"{format_share(self.share(DATA))} of the time is waiting; {wanted} workers load beside the step, which "
            f"takes the longer of the two at best; at worst as many as {max(free, 0)} run at once, a quarter slower",
        )

    def pinned(self) -> Iterator[Advice]:
        finding = self.run.finding("batch-not-pinned")
        habits = self.run.evidence.habits
        if finding is None or habits is None:
            return

        def plain() -> tuple[str, tuple[Edit, ...]]:
            found = self.script.only(lambda name: name == "DataLoader", "DataLoader")
            edits = [found.edit("pin_memory", "True")]
            lines = {line.where for line in habits.unpinned or ()}
            for call in self.script.calls(lambda name: name in ("to", "cuda")):
                if f"{portable_path(str(call.source.path))}:{call.call.lineno}" in lines:
                    edits.append(call.edit("non_blocking", "True"))
            return found.where, tuple(edits)

        put, place = self.by_library(plain, transformers="dataloader_pin_memory=True")
        put = put or "DataLoader(pin_memory=True), and .to(device, non_blocking=True)"
        high = min(0.5, self.share(DATA, REST) + 0.1)
        yield self.make(
            "batch-not-pinned", put, place, (0.0, high), "copies are part of what is not computing, at most"
        )

    def one_launch(self) -> Iterator[Advice]:
        habits, share = self.run.evidence.habits, self.share(OPTIMIZER)
        loop = self.run.evidence.loop
        if habits is None or loop is None or not set(loop.optimizers) <= _FUSED or not loop.optimizers:
            return
        by_one = habits.optimizer_operators is not None and 10 <= habits.optimizer_tensors <= habits.optimizer_operators
        if share < 0.05 or not by_one:
            return

        def plain() -> tuple[str, tuple[Edit, ...]]:
            found = self.script.optimizer()
            if found.constant("fused"):
                raise Unsure("fused is set already")
            given = next((each for each in found.call.keywords if each.arg == "foreach"), None)
            edits = [found.edit("fused", "True")]
            if given is not None:  # both at once are refused
                edits.append(found.edit("foreach", "None"))
            return found.where, tuple(edits)

        name = loop.optimizers[0]
        adam = {"transformers": 'optim="adamw_torch_fused"'} if name == "AdamW" else {}
        put, place = self.by_library(plain, **adam)
        yield self.make(
            "optimizer-loops",
            put or f"{name}(fused=True)",
            place,
            (0.3 * share, 0.97 * share),
            f"the update takes {format_share(share)} of the time, in {habits.optimizer_operators} operators for "
            f"{habits.optimizer_tensors} tensors; one pass reads and writes less than half as much, and is one launch",
        )

    def set_to_none(self) -> Iterator[Advice]:
        if self.run.finding("gradients-zeroed") is None:
            return

        def place() -> tuple[str, tuple[Edit, ...]]:
            calls = [
                each for each in self.script.calls(lambda n: n == "zero_grad") if each.constant("set_to_none") is False
            ]
            if self.script.why_no_lines or not calls:
                raise Unsure(self.script.why_no_lines or "no zero_grad(set_to_none=False) is in it")
            return calls[0].where, tuple(each.edit("set_to_none", "True") for each in calls)

        high = self.share(REST) + 0.25 * self.share(BACKWARD)
        yield self.make(
            "gradients-zeroed",
            "zero_grad(set_to_none=True)",
            place,
            (0.0, high),
            "filling with zeros is in the rest of the step, and adding to them in backward",
        )

    def products_s(self, dtype: Any) -> float | None:
        """How long the step's products take at least in this dtype, by the datasheet."""
        spec = self.run.device_spec
        peak = spec.peak_for(dtype) if spec is not None and dtype in spec.peak_flops_per_s else None
        flops = sum(work.flops for work in self.run.work.values())
        return flops / (peak * metrics.devices(self.run)) if peak and flops else None

    def faster_products(self) -> Iterator[Advice]:
        """Products in fp32 on a GPU that multiplies bf16 and TF32 several times as fast."""
        full_s, step_s = self.products_s(self.run.workload.dtype), self.step_s
        if not self.cuda or self.run.workload.dtype not in ("fp32", "tf32") or not full_s or full_s < 0.1 * step_s:
            return
        computing, spec = self.share(FORWARD, BACKWARD), self.run.device_spec
        half_s, tf32_s = self.products_s("bf16"), self.products_s("tf32")
        parameters = loop.trainable or 0 if (loop := self.run.evidence.loop) is not None else 0
        casts_s = 9.0 * parameters / ((spec and spec.peak_bytes_per_s) or 1e12)
        if half_s:
            put, place = self.by_library(
                self._autocast,
                transformers="bf16=True",
                lightning='precision="bf16-mixed"',
                accelerate='mixed_precision="bf16"',
            )
            if self.script.library == "torchtitan":
                put = '[training] mixed_precision_param = "bfloat16"'
            yield self.make(
                "products-in-fp32",
                put or _AUTOCAST,
                place,
                ((0.6 * full_s - 4 * half_s - casts_s) / step_s, computing - half_s / step_s),
                f"products take {format_share(full_s / step_s)} of the step at least in {self.run.workload.dtype}, and "
                f"{format_share(half_s / step_s)} at least in bf16, by the datasheet; the loss may differ in rounding",
            )
        if tf32_s and self.run.workload.dtype == "fp32":
            put, place = self.by_library(self._matmul_precision, transformers="tf32=True")
            yield self.make(
                "products-not-tf32",
                put or _TF32,
                place,
                ((0.6 * full_s - 4 * tf32_s) / step_s, computing - tf32_s / step_s),
                f"products take {format_share(full_s / step_s)} of the step at least in fp32, and "
                f"{format_share(tf32_s / step_s)} at least in TF32, by the datasheet; with bf16 it gives little more",
            )

    def _autocast(self) -> tuple[str, tuple[Edit, ...]]:
        """The statements from the model's call to the line before backward, below autocast."""
        if self.script.library:
            raise Unsure(f"{self.script.library} runs the loop")
        model, _ = self._model()
        backward = self.script.only(lambda name: name == "backward", "backward")
        body, at = self.script.statement(backward)
        calls = [
            i
            for i in range(at)
            if any(isinstance(each, ast.Call) and _last_name(each.func) == model for each in ast.walk(body[i]))
        ]
        if not calls:
            raise Unsure(f"{model} is not called before backward in the same block")
        self._imports_torch(backward.source)
        first = body[calls[0]]
        edit = Edit(backward.source.path, first, _AUTOCAST, last=body[at - 1])
        return f"{backward.source.name}:{first.lineno}", (edit,)

    def _model(self) -> tuple[str, Found]:
        """The name of the model, as the optimizer is given its parameters; and the optimizer's call."""
        found = self.script.optimizer()
        for each in ast.walk(found.call):
            if not isinstance(each, ast.Attribute) or each.attr not in ("parameters", "named_parameters"):
                continue
            if isinstance(each.value, ast.Name) and each.value.id != "self":
                return each.value.id, found
        raise Unsure("the optimizer is not given the parameters of one model by its name")

    def _imports_torch(self, source: Source) -> ast.stmt:
        """The first statement after the import of torch at the file's top."""
        body = source.tree.body
        for i, each in enumerate(body):
            if isinstance(each, ast.Import) and any(a.name == "torch" and a.asname is None for a in each.names):
                after = [one for one in body[i:] if not isinstance(one, ast.Import | ast.ImportFrom)]
                if after:
                    return after[0]
        raise Unsure("the file does not import torch by this name at its top")

    def _matmul_precision(self) -> tuple[str, tuple[Edit, ...]]:
        if self.script.why_no_lines:
            raise Unsure(self.script.why_no_lines)
        source = self.script.sources[0]
        first = self._imports_torch(source)
        return f"{source.name}:{first.lineno}", (Edit(source.path, first, _TF32),)

    def compiled(self) -> Iterator[Advice]:
        run, computing = self.run, self.share(FORWARD, BACKWARD)
        report = run.evidence.compilation
        done = run.workload.compile != "eager" or (report is not None and report.frames_compiled)
        if done or computing < 0.5 or run.finding("shapes-change") is not None:
            return
        put, place = self.by_library(
            self._compile, transformers="torch_compile=True", accelerate='dynamo_backend="inductor"'
        )
        if self.script.library == "torchtitan":
            put = "[compile] enable = true"
        least = (self.products_s(run.workload.dtype) or 0.0) / self.step_s
        yield self.make(
            "not-compiled",
            put or "MODEL.compile() before the optimizer is made",
            place,
            (0.0, computing - least),
            f"forward and backward take {format_share(computing)} of the time; what is no product of matrices can be "
            "fused, how much shows only when it is tried, and compiling takes its time at the start",
        )

    def _compile(self) -> tuple[str, tuple[Edit, ...]]:
        if self.script.library == "lightning":
            fit = self.script.only(lambda name: name == "fit", "fit")
            body, at = self.script.statement(fit)
            named = fit.call.args[0] if fit.call.args else None
            if not isinstance(named, ast.Name):
                raise Unsure("fit is not given the model by its name")
            return fit.where, (Edit(fit.source.path, body[at], f"{named.id}.compile()"),)
        model, found = self._model()
        body, at = self.script.statement(found)
        return f"{found.source.name}:{body[at].lineno}", (Edit(found.source.path, body[at], f"{model}.compile()"),)

    def host_waits(self) -> Iterator[Advice]:
        """Reads of values in each step, which a GPU alone makes wait."""
        habits, profile = self.run.evidence.habits, self.run.evidence.profile
        if habits is None or not habits.host_reads or not self.cuda:
            return
        lines = {line.where for line in habits.host_reads}
        busy = profile.busy_s / profile.step_s if profile is not None and profile.step_s else 0.5
        put, place = self.by_library(lambda: self._later(lines), transformers="logging_nan_inf_filter=False")
        yield self.make(
            "host-waits",
            put or "keep loss.detach(), and read it every 100 steps",
            place,
            (0.0, 1 - max(busy, 0.5)),
            "host and GPU take turns where one waits for the other; beside each other they take half as long at best",
        )

    def _later(self, lines: set[str]) -> tuple[str, tuple[Edit, ...]]:
        """The reads in these lines: `.item()` that is added up or kept becomes `.detach()`."""
        if self.script.why_no_lines:
            raise Unsure(self.script.why_no_lines)
        edits: list[Edit] = []
        where, left = "", ""
        for call in self.script.calls(lambda name: name in ("item", "cpu", "tolist", "float", "print")):
            if f"{portable_path(str(call.source.path))}:{call.call.lineno}" not in lines:
                continue
            where = where or call.where
            body, at = self.script.statement(call)
            statement = body[at]
            adds = isinstance(statement, ast.AugAssign) and statement.value is call.call
            appends = (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Call)
                and _last_name(statement.value.func) == "append"
                and statement.value.args == [call.call]
            )
            if call.name == "item" and (adds or appends):
                edits.append(Edit(call.source.path, call.call, "detach"))
            else:
                left = f"what {call.where} reads is used at once"
        if left or not edits:
            raise Unsure(left or "the lines that read are a library's", where)
        return where, tuple(edits)

    def logging(self) -> Iterator[Advice]:
        """Time beside training that the library's own settings govern."""
        rest = self.share(REST)
        if self.run.finding("rest-is-large") is None or self.script.library != "transformers":
            return
        try:
            found = self.script.arguments()
        except Unsure:
            return
        often = found.constant("logging_steps")
        if isinstance(often, int | float) and 0 < often < 10:
            put, place = self.by_library(lambda: ("", ()), transformers="logging_steps=100")
            yield self.make(
                "rest-is-large", put, place, (0.0, rest), "logging is part of the rest of the step, at most"
            )
            return
        batch = found.constant("per_device_train_batch_size") or 8
        yield self.make(
            "rest-is-large",
            f"TrainingArguments(per_device_train_batch_size={2 * batch})",
            lambda: (found.where, ()),
            (0.0, rest / 2),
            "the rest is what Trainer itself does in each step; twice the batch has it half as often for a sample, and "
            "trains otherwise",
        )

    def all(self) -> list[Advice]:
        makers = (
            self.workers,
            self.pinned,
            self.one_launch,
            self.set_to_none,
            self.faster_products,
            self.compiled,
            self.host_waits,
            self.logging,
        )
        return sorted((one for make in makers for one in make()), key=lambda one: -one.expected)


_HAND_OVER_S = 1e-3
"""What it takes to hand a batch over from a worker: waits that are shorter gain nothing by one."""
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers that PyTorch has fused."""
_AUTOCAST = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
_TF32 = 'torch.set_float32_matmul_precision("high")'


def advice_on(run: Run, directory: Path | None) -> tuple[list[Advice], Script]:
    """The advice on a watched run by expected gain, the largest first; and the script. Raises InputError for a run of
    no watched script."""
    if run.evidence.loop is None:
        raise InputError(f"{run.id} is no run of a script of yours: stepscope watch -- train.py makes one")
    script = Script(run, directory)
    return _Adviser(run, script).all() if metrics.median_s(run, STEP) else [], script


def answer_advice(run: Run, advice: Sequence[Advice], script: Script) -> Answer:
    """The advice as a table, and below it how each was worked out."""
    rows = [(one.kind, one.saves, one.where, one.put) for one in advice]
    notes = [Line(f"{one.kind}: {one.how}.", "aside") for one in advice]
    notes += [Line(f"{one.kind}: no diff, since {one.no_patch}.", "care") for one in advice if one.no_patch]
    table = table_of("advice", ("saves of a step", "text"), "line", ("write", "prose"), rows=rows, notes=tuple(notes))
    some = "What to write in the script, and what share of a step's time it should save; gains do not add up."
    lead = [Line(some if advice else "Nothing that was looked for costs this script time.", "strong")]
    lead += [Line(f"{why}: no line of it can be named.", "care") for why in script.changed]
    return Answer(
        study="advise", question="", lead=tuple(lead), tables=(table,) if advice else (), origin=(f"Run {run.id}",)
    )
