"""Advice on a watched script: what to write in which of its lines, what that should give, and the same as a diff.

What a remedy gives is foretold as an interval, from what the run measured. Where a line cannot be found for sure in the
script's own text, the advice stands without a diff and says why.
"""

import ast
import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.answer import Answer, Line, table_of
from stepscope.core.errors import InputError, portable_path
from stepscope.core.range_names import BACKWARD, DATA, FORWARD, OPTIMIZER, REST, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes, format_seconds, format_share
from stepscope.runs import metrics
from stepscope.runs.checks.loops import run_again
from stepscope.runs.script import Edit, Found, Script, Source, Unsure, edited, last_name

# What a remedy gives.


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to write where, and the share of the step's time that this should save."""

    kind: str
    put: str
    """The text to write there, in the words of what the script uses."""
    where: str = ""
    """File and line; empty where the line is not known."""
    least: float
    most: float
    """What the remedy itself should save."""
    likely: float = 1 / 3
    """How far from the least to the most a gain is expected."""
    noise: float
    """How far two measurements like the run's may differ, as a share."""
    how: str
    """How the interval was worked out."""
    no_patch: str = ""
    """Why there is no diff; empty where there is one."""
    edits: tuple[Any, ...] = ()

    @property
    def low(self) -> float:
        """The smallest gain that a second measurement should show, by what the remedy saves and by scatter."""
        return self.least - self.noise * (1 - self.least)

    @property
    def high(self) -> float:
        return min(0.99, self.most + self.noise * (1 - self.most))

    @property
    def expected(self) -> float:
        """What advice is sorted by: most remedies give less than the middle of what is possible."""
        least = max(0.0, self.least)
        return least + (self.most - least) * self.likely

    @property
    def document(self) -> dict[str, object]:
        """What --json writes of it."""
        named = ("kind", "where", "put", "low", "high", "least", "most", "expected", "how", "no_patch")
        return {name: getattr(self, name) for name in named}

    @property
    def saves(self) -> str:
        most = format_share(self.most)
        if self.least >= 0.005:
            return f"{format_share(self.least)} to {most}"
        return f"up to {most}" + (f", or costs {format_share(-self.least)}" if self.least <= -0.005 else "")


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
        """How far two measurements of one step may differ, as a share: both have the interval of this one, and on a
        busy host the other one may be given another share of the cores."""
        samples, environment = metrics.samples_of(self.run, STEP), self.run.environment
        interval = samples.interval() if samples else None
        if interval is None or samples is None or not samples.median_s:
            noise = max(0.1, (samples.spread if samples else None) or 0.0)
        else:
            noise = max(0.02, 2 * interval.half_width / samples.median_s)
        busy = self.run.finding("host-busy")
        if busy is not None and environment is not None and isinstance(others := busy.evidence["other_cores"], float):
            noise = max(noise, others / environment.cpu_cores)
        return noise

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
            arguments = self.script.arguments()
            return arguments.where, tuple(arguments.edit(name, value) for name, value in values)

        of = {"transformers": "TrainingArguments", "lightning": "Trainer", "accelerate": "Accelerator"}
        return f"{of[self.script.library]}({setting})", place

    def make(
        self, kind: str, put: str, place: _Place, saves: tuple[float, float], how: str, *, likely: float = 1 / 3
    ) -> Advice:
        high = max(0.0, min(saves[1], 0.99))
        low = min(saves[0], high)
        where, edits, why = "", (), ""
        try:
            where, edits = place()
            if edits:
                edited(edits)
        except Unsure as error:
            where, why = where or error.where, str(error)
        return Advice(
            kind=kind,
            put=put,
            where=where,
            no_patch=why or ("" if edits else "it is a choice of yours"),
            edits=edits,
            least=low,
            most=high,
            likely=likely,
            noise=self.noise,
            how=how,
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
        if not isinstance(now, int) or (beside := self.beside(data_s, now)) is None:
            return
        wanted, saves, how = beside
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
            saves,
            f"{format_share(self.share(DATA))} of the time is waiting; {how}",
        )

    def beside(self, data_s: float, now: int = 0) -> tuple[int, tuple[float, float], str] | None:
        """How many workers should make the batches that take so long in a step, what they save, and how that was
        worked out; None where so many are there now."""
        environment, step_s = self.run.environment, self.step_s
        cores = environment.cpu_cores if environment else 1
        host = environment.host if environment else None
        own, others = (host and host.own_cores) or 1.0, (host and host.other_cores) or 0.0
        rest_s, share = max(step_s - data_s, 1e-9), data_s / step_s
        work_s = step_s * now if now else data_s
        wanted = min(cores, max(2, math.ceil(1.5 * work_s / rest_s)))
        if wanted <= now:
            return None
        # What the process computes in its waits, by its load: data that is only waited for needs no core. On a busy
        # host the process may have waited for a core.
        computes = (own - (1 - share)) / share if own + others < cores - 0.25 else 1.0
        free = wanted if computes < 0.2 else min(wanted, int(cores - min(own, cores) - others + 0.5))
        best_s = max(rest_s, work_s / wanted)
        worst_s, worst = 1.25 * step_s, "no core is free for them, and all takes a quarter longer"
        if free >= 1:
            worst_s = step_s if now else min(step_s, 1.25 * max(rest_s, work_s / free) + _HAND_OVER_S)
            worst = f"{free} of them run at once, a quarter slower"
        how = f"{wanted} workers load beside the step, which takes the longer of the two at best; at worst {worst}"
        return wanted, (1 - worst_s / step_s, 1 - best_s / step_s), how

    def batches_by_hand(self) -> Iterator[Advice]:
        """Batches that the loop makes itself, between the parts of its step."""
        habits = self.run.evidence.habits
        lines = habits.rest_lines if habits is not None and not self.script.library else ()
        for line in lines:
            made_s = line.share * self.share(REST) * self.step_s
            call = self.script.batch_call(line.where)
            if (
                call is None
                or made_s < max(_HAND_OVER_S, 0.03 * self.step_s)
                or (beside := self.beside(made_s)) is None
            ):
                continue
            wanted, saves, how = beside
            text = ast.unparse(call.call)
            yield self.make(
                "batches-made-in-the-loop",
                f"next(batches), with batches = iter(DataLoader(D(), batch_size=None, num_workers={wanted})) before "
                f"the loop, and D an IterableDataset that yields {text}",
                lambda call=call: self._by_hand(call),
                saves,
                f"{call.name} takes {format_share(made_s / self.step_s)} of the time; {how}",
            )

    def pinned(self) -> Iterator[Advice]:
        finding = self.run.finding("batch-not-pinned")
        habits = self.run.evidence.habits
        if finding is None or habits is None:
            return

        def plain() -> tuple[str, tuple[Edit, ...]]:
            loader = self.script.only(lambda name: name == "DataLoader", "DataLoader")
            edits = [loader.edit("pin_memory", "True")]
            lines = {line.where for line in habits.unpinned or ()}
            for call in self.script.calls(lambda name: name in ("to", "cuda")):
                if f"{portable_path(str(call.source.path))}:{call.call.lineno}" in lines:
                    edits.append(call.edit("non_blocking", "True"))
            return loader.where, tuple(edits)

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
        if share < 0.02 or not by_one:
            return

        def plain() -> tuple[str, tuple[Edit, ...]]:
            optimizer = self.script.optimizer()
            if optimizer.constant("fused"):
                raise Unsure("fused is set already")
            keyword = next((each for each in optimizer.call.keywords if each.arg == "foreach"), None)
            edits = [optimizer.edit("fused", "True")]
            if keyword is not None:  # both at once are refused
                edits.append(optimizer.edit("foreach", "None"))
            return optimizer.where, tuple(edits)

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

        # Zeros are written, and backward reads them and the gradient, and writes the sum.
        spec, habits = self.run.device_spec, self.run.evidence.habits
        rate = (spec.peak_bytes_per_s / 4 if spec is not None and spec.peak_bytes_per_s else None) or _SLOW_MEMORY
        zeroed, count = (habits.zeroed_bytes, habits.zeroed_gradients) if habits is not None else (0, 0)
        most_s = 4 * zeroed / rate + 2 * count * _CALL_S
        yield self.make(
            "gradients-zeroed",
            "zero_grad(set_to_none=True)",
            place,
            (0.0, min(most_s / self.step_s, self.share(REST) + 0.25 * self.share(BACKWARD))),
            f"{format_bytes(zeroed)} are filled with zeros, read, added to and written, at {format_bytes(rate)} a "
            "second at least",
        )

    @staticmethod
    def _by_hand(call: Found) -> tuple[str, tuple[Edit, ...]]:
        raise Unsure("it takes more than a line", call.where)

    def checkpointing(self) -> Iterator[Advice]:
        """Blocks that backward runs again, where memory is free for what they make."""
        if self.run.finding("checkpointing-not-needed") is None:
            return
        share = run_again(self.run)
        again = share * self.share(FORWARD)
        setting, arguments = "gradient_checkpointing", None
        if self.script.library == "transformers":
            with contextlib.suppress(Unsure):
                arguments = self.script.arguments()
                if arguments.sets("activation_checkpointing"):  # as later versions call it
                    setting = "activation_checkpointing"
        puts = {
            "transformers": f"TrainingArguments({setting}=False)",
            "torchtitan": '[activation_checkpoint] mode = "none"',
        }
        put = puts.get(self.script.library, "call the blocks without checkpointing")
        enabled = [
            (each, f"{ast.unparse(each.call.func.value)}.gradient_checkpointing_disable()")
            for each in self.script.calls(lambda name: name == "gradient_checkpointing_enable")
            if isinstance(each.call.func, ast.Attribute)
        ]

        def place() -> tuple[str, tuple[Edit, ...]]:
            if enabled:
                edits = [Edit(each.source.path, each.call, "gradient_checkpointing_disable") for each, _ in enabled]
                if any(each.call.args or each.call.keywords for each, _ in enabled):
                    raise Unsure("it is called with arguments", enabled[0][0].where)
                return enabled[0][0].where, tuple(edits)
            if arguments is not None and arguments.constant(setting) is True:
                return arguments.where, (arguments.edit(setting, "False"),)
            own = self.script.calls(lambda name: name in _CHECKPOINTS)
            raise Unsure(self.script.why_no_lines or "it takes more than a line", own[0].where if own else "")

        yield self.make(
            "checkpointing-not-needed",
            enabled[0][1] if enabled else put,
            place,
            (0.5 * again, min(1.2 * again, self.share(BACKWARD))),
            f"backward runs {format_share(share)} of forward's products again, and forward "
            f"takes {format_share(self.share(FORWARD))} of the time",
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
                (max(0.0, (0.6 * full_s - 4 * half_s - casts_s) / step_s), computing - half_s / step_s),
                f"products take {format_share(full_s / step_s)} of the step at least in {self.run.workload.dtype}, and "
                f"{format_share(half_s / step_s)} at least in bf16, by the datasheet; the loss may differ in rounding",
            )
        if tf32_s and self.run.workload.dtype == "fp32":
            put, place = self.by_library(self._matmul_precision, transformers="tf32=True")
            yield self.make(
                "products-not-tf32",
                put or _TF32,
                place,
                (max(0.0, (0.6 * full_s - 4 * tf32_s) / step_s), computing - tf32_s / step_s),
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
            if any(isinstance(each, ast.Call) and last_name(each.func) == model for each in ast.walk(body[i]))
        ]
        if not calls:
            raise Unsure(f"{model} is not called before backward in the same block")
        self._imports_torch(backward.source)
        first = body[calls[0]]
        edit = Edit(backward.source.path, first, _AUTOCAST, last=body[at - 1])
        return f"{backward.source.name}:{first.lineno}", (edit,)

    def _model(self) -> tuple[str, Found]:
        """The name of the model, as the optimizer is given its parameters; and the optimizer's call."""
        optimizer = self.script.optimizer()
        for each in ast.walk(optimizer.call):
            if not isinstance(each, ast.Attribute) or each.attr not in ("parameters", "named_parameters"):
                continue
            if isinstance(each.value, ast.Name) and each.value.id != "self":
                return each.value.id, optimizer
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
        habits = run.evidence.habits
        if habits is not None and habits.products_s and habits.operators_s:
            # The steps that were looked at were slower, by the looking and perhaps by others' work.
            of_operators = computing * habits.products_s / habits.operators_s
            least = max(least, min(habits.products_s / self.step_s, of_operators))
        if not least:  # Then nothing bounds what it gives.
            return
        yield self.make(
            "not-compiled",
            put or f"{self._model_name()}.compile()",
            place,
            (0.0, computing - least),
            f"forward and backward take {format_share(computing)} of the time, products of matrices "
            f"{format_share(least)} at least; the others can be fused, how much that gives shows only when it is "
            "tried, and compiling takes its time at the start",
            likely=1 / 5,  # nothing was found that is wrong, so what was found to cost as much comes first
        )

    def _model_name(self) -> str:
        """The name of the model in the script; MODEL where it is not known."""
        try:
            if self.script.library == "lightning":
                named = self.script.only(lambda name: name == "fit", "fit").call.args[:1]
                return named[0].id if named and isinstance(named[0], ast.Name) else "MODEL"
            return self._made()[0]
        except Unsure:
            return "MODEL"

    def _made(self) -> tuple[str, Found]:
        """The model's name, and the call after whose statement nothing is done to it any more: the optimizer's, which
        is given its parameters, or that of its class."""
        try:
            return self._model()
        except Unsure:
            name = self.run.workload.model.name
            made = self.script.only(lambda called: called == name, name)
            body, at = self.script.statement(made)
            match body[at]:
                case ast.Assign(targets=[ast.Name(id=named)]):
                    return named, made
                case _:
                    raise

    def _compile(self) -> tuple[str, tuple[Edit, ...]]:
        if self.script.library == "lightning":
            made = self.script.only(lambda name: name == "fit", "fit")
            name = self._model_name()
            if name == "MODEL":
                raise Unsure("fit is not given the model by its name", made.where)
        else:
            name, made = self._made()
        body, at = self.script.statement(made)
        if made.name == self.run.workload.model.name:
            at += 1
            if at == len(body):
                raise Unsure("nothing follows in the block in which the model is made", made.where)
        return f"{made.source.name}:{body[at].lineno}", (Edit(made.source.path, body[at], f"{name}.compile()"),)

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
                and last_name(statement.value.func) == "append"
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
            arguments = self.script.arguments()
        except Unsure:
            return
        often = arguments.constant("logging_steps")
        if isinstance(often, int | float) and 0 < often < 10:
            put, place = self.by_library(lambda: ("", ()), transformers="logging_steps=100")
            yield self.make(
                "rest-is-large", put, place, (0.0, rest), "logging is part of the rest of the step, at most"
            )
            return
        batch = arguments.constant("per_device_train_batch_size") or 8
        yield self.make(
            "rest-is-large",
            f"TrainingArguments(per_device_train_batch_size={2 * batch})",
            lambda: (arguments.where, ()),
            (0.0, rest / 2),
            "the rest is what Trainer itself does in each step; twice the batch has it half as often for a sample, and "
            "trains otherwise",
        )

    def saving(self) -> Iterator[Advice]:
        """Checkpoints that are written so often that the steps between them show it."""
        loop, rest = self.run.evidence.loop, metrics.samples_of(self.run, REST)
        saved = loop.saved if loop is not None else None
        if saved is None or rest is None or not rest.count:
            return
        # What a library writes beside torch.save, as safetensors, is in the rest of the same steps.
        beyond = sorted((value - (rest.median_s or 0.0) for value in rest.values_s), reverse=True)[: saved.steps]
        known_s, all_s = saved.steps * saved.median_s, rest.count * self.step_s
        most = 0.9 * max(known_s, sum(beyond)) / all_s
        if most < 0.02:
            return
        library = self.script.library
        setting, of = {
            "transformers": ("save_steps", "TrainingArguments"),
            "lightning": ("every_n_train_steps", "ModelCheckpoint"),
        }.get(library, ("", ""))
        found, why = None, ""
        try:
            if setting:
                found = self.script.arguments() if library == "transformers" else self.script.only(of.__eq__, of)
        except Unsure as error:
            why = str(error)
        usual = found.constant(setting) if found is not None else None
        put = f"{of}({setting}={10 * usual})" if isinstance(usual, int) else "save a tenth as often"

        def place() -> tuple[str, tuple[Edit, ...]]:
            if found is None or not isinstance(usual, int):
                where = found.where if found is not None else self.script.line_of(saved.where)
                raise Unsure(why or "where the script decides that is not known", where)
            return found.where, (found.edit(setting, str(10 * usual)),)

        yield self.make(
            "saves-often",
            put,
            place,
            (0.8 * known_s / all_s, most),
            f"{saved}; they take {format_seconds(sum(beyond) / len(beyond))} more than the others, and a tenth of them "
            "would be left",
        )

    def all(self) -> list[Advice]:
        makers = (
            self.workers,
            self.batches_by_hand,
            self.checkpointing,
            self.pinned,
            self.one_launch,
            self.set_to_none,
            self.faster_products,
            self.compiled,
            self.host_waits,
            self.logging,
            self.saving,
        )
        return sorted((one for make in makers for one in make()), key=lambda one: -one.expected)


_HAND_OVER_S = 1e-3
"""What it takes to hand a batch over from a worker: waits that are shorter gain nothing by one."""
_SLOW_MEMORY, _CALL_S = 2e9, 20e-6
"""Bytes a second of a host's memory, and seconds of an operator's call, that are worse than any that are met."""
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers that PyTorch has fused."""
_CHECKPOINTS = ("checkpoint", "checkpoint_sequential", "checkpoint_wrapper")
_AUTOCAST = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
_TF32 = 'torch.set_float32_matmul_precision("high")'


def patch(advice: Sequence[Advice]) -> tuple[str, list[str]]:
    """A unified diff of all that these change, and a sentence for each that has none. Paths are from the current
    folder, as `git apply` and `patch -p1` take them there; neither takes one that leads out of it."""
    left = [f"{one.kind}: no diff, since {one.no_patch}" for one in advice if one.no_patch]
    kept: list[Edit] = []
    for one in advice:
        if one.no_patch:
            continue
        try:
            edited([*kept, *one.edits])
        except Unsure as error:
            left.append(f"{one.kind}: not in this diff, since {error}: apply it, measure, and ask again")
        else:
            kept += one.edits
    texts: list[str] = []
    changed = edited(kept)
    folder = Path.cwd()
    if outside := [source.path.parent for source, _ in changed if not source.path.is_relative_to(folder)]:
        folder = Path(os.path.commonpath([source.path.parent for source, _ in changed]))
        left.append(f"{outside[0]} is not in this folder: apply the diff in {folder}")
    for source, new in changed:
        name = os.path.relpath(source.path, folder)
        lines = difflib.unified_diff(
            source.text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        texts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(texts), left


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
    if advice:
        scatter = (
            f"Two measurements like this one differ by up to {format_share(advice[0].noise)} of a step by themselves."
        )
        lead.append(Line(scatter, "care" if advice[0].noise > 0.1 else "aside"))
    lead += [Line(f"{why}: no line of it can be named.", "care") for why in script.changed]
    return Answer(
        study="advise", question="", lead=tuple(lead), tables=(table,) if advice else (), origin=(f"Run {run.id}",)
    )
