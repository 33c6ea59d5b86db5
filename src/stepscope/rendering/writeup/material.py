"""What a write-up is made of: the runs and the stored answers under some places."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stepscope.core.answer import Answer, decode_answer
from stepscope.core.attention_timing import decode_timings
from stepscope.core.bounded_file import read_named
from stepscope.core.doubts import doubting_kinds
from stepscope.core.errors import InputError
from stepscope.core.range_names import FORWARD_BACKWARD, STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.core.run_files import RUN_FILE
from stepscope.questions.attention.answer import answer_attention
from stepscope.questions.compare.comparison import same_part
from stepscope.questions.compare.sides import side_named
from stepscope.runs.conditions import matches
from stepscope.runs.disagreement import Disagreement, disagreeing, disagreement
from stepscope.traces.captures.beside import digest_beside
from stepscope.traces.captures.digest import TraceDigest

Found = tuple[Run, Path]
"""A run, and its directory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """Runs and answers, and what could not be read."""

    runs: tuple[Found, ...] = ()
    answers: tuple[tuple[Answer, Path], ...] = ()
    faults: tuple[str, ...] = ()

    def folders(self, **wanted: str) -> list[list[Found]]:
        """The runs whose fields have these values (`fp32,bf16` for either), by folder: a question is answered by one
        sweep and never by a mixture of several.

        Sweeps of the whole device come before those of a part of its memory, then the one with most cells that no
        finding doubts is first, and of equal ones the one with most cells.
        """
        conditions = [(name, tuple(values.split(","))) for name, values in wanted.items()]
        by_folder: dict[Path, list[Found]] = {}
        for run, directory in self.runs:
            if run.textbook is not None and all(matches(run, *condition) for condition in conditions):
                by_folder.setdefault(directory.parent, []).append((run, directory))
        return sorted(by_folder.values(), key=_worth, reverse=True)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Where folders disagree: a question is answered from one of them, and another would answer otherwise."""
        cells: dict[tuple[object, ...], dict[Path, Run]] = {}
        for run, directory in self.runs:
            if run.textbook is not None and run.status == "done":
                for part in (STEP, FORWARD_BACKWARD):
                    cells.setdefault((part, same_part(run, part)), {})[directory.parent] = run
        apart: list[Disagreement | None] = []
        for (part, _), by_folder in cells.items():
            newest, *others = sorted(by_folder.values(), key=lambda run: run.instant, reverse=True)
            apart.append(disagreement(newest, others, str(part)))
        return tuple(finding.sentence for finding in disagreeing(apart))

    @cached_property
    def _digests(self) -> dict[tuple[Path, str], TraceDigest | None]:
        return {}

    def digest(self, run: Run, directory: Path, tool: str) -> TraceDigest | None:
        """What the capture of a run by one tool says, or None; read once, however many questions ask."""
        if (directory, tool) not in self._digests:
            try:
                found = digest_beside(run, directory, tool, say=lambda _: None) if run.status == "done" else None
            except InputError:
                found = None
            self._digests[directory, tool] = found
        return self._digests[directory, tool]


def _worth(found: list[Found]) -> tuple[bool, int, int]:
    """What a folder of runs is sorted by."""
    done = [run for run, _ in found if run.status == "done"]
    limited = any(run.environment is not None and run.environment.memory_limit_bytes is not None for run, _ in found)
    return (
        not limited,
        len({run.workload.key for run in done if not doubting_kinds(run)}),
        len({run.workload.key for run in done}),
    )


def gather(names: Iterable[str], out: Path) -> Material:
    """The material under paths, or of what a name means among the runs of `out`: a sweep, a tag, a set, a run.

    Raises InputError where a name means nothing, or where there is neither a run nor an answer.
    """
    runs: dict[Path, Found] = {}
    answers: dict[Path, Answer] = {}
    faults: list[str] = []
    asked = list(names)
    for name in asked:
        place = Path(name)
        if not place.exists():
            side = side_named(name, out)
            runs.update((directory.resolve(), (run, directory)) for run, directory in side.runs)
            faults += side.faults
            continue
        files = [place] if place.is_file() and place.name != RUN_FILE else []
        if not files:
            _read_runs(place, runs, faults)
            files = sorted(file for file in place.rglob("*.json") if place.is_dir() and _may_answer(file))
        for file in files:
            answer = _answer_in(file, named=file == place)
            if answer is not None:
                answers[file] = answer
    if not runs and not answers:
        reason = f": {faults[0]}" if faults else ": name a folder of runs, a sweep, or answers that --json wrote"
        raise InputError(f"no run and no answer in {', '.join(asked)}{reason}")
    return Material(
        runs=tuple(runs.values()), answers=tuple((answer, file) for file, answer in answers.items()),
        faults=tuple(faults),
    )  # fmt: skip


def _read_runs(place: Path, runs: dict[Path, Found], faults: list[str]) -> None:
    for file in find_run_files(place):
        try:
            runs[file.parent.resolve()] = (load_run(file), file.parent)
        except InputError as error:
            faults.append(str(error))


def _may_answer(file: Path) -> bool:
    return not (file.parent / RUN_FILE).exists()


def _answer_in(file: Path, *, named: bool) -> Answer | None:
    """The answer in a file; None where it is another document. Raises InputError for a file that the user named."""
    try:
        data = read_named(file)
        found = json.loads(data)
        if isinstance(found, dict) and found.get("kind") == "attention-timings":  # pyright: ignore[reportUnknownMemberType]
            return answer_attention(decode_timings(data, str(file)))
        if named or (isinstance(found, dict) and {"study", "question", "version"} <= found.keys()):
            return decode_answer(data, str(file))
    except InputError:
        if named:
            raise
    except (ValueError, RecursionError):
        if named:
            raise InputError(f"{file} is neither a run nor an answer that --json wrote") from None
    return None
