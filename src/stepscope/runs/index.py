"""The index of a folder of runs: what lists, tables and histories read of many runs, without decoding each again.

It is a hidden file in the folder, made from the runs and thrown away at will. A run.json counts as known while its
size, times and inode are those that the index has; any other is read. So the index is never trusted over the
files: without it, or with one that is old, damaged or another version's, the answers are the same and take longer.

Workloads, environments and the like recur in many runs. Each different one is stored and decoded once.
"""

import contextlib
import functools
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepscope import __version__
from stepscope.core import samples
from stepscope.core import samples as known_samples
from stepscope.core.answer import Finding
from stepscope.core.device_spec import Ceilings, DeviceSpec
from stepscope.core.environment import Environment, GpuSamples
from stepscope.core.errors import InputError
from stepscope.core.evidence import CompileReport, Energy, Evidence, PhaseMemory, ProfiledStep
from stepscope.core.formulas import Work
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD
from stepscope.core.run import SCHEMA_VERSION, Repeat, Run, Settings, Status
from stepscope.core.run_directory import INDEX_FILE, RUN_FILE, exists, load_run, write_atomically
from stepscope.core.samples import KnownSamples, known
from stepscope.core.workloads import Workload

INDEX_VERSION = 2
FEWEST_RUNS = 100
"""A folder with fewer runs has no index: they are read in a moment, and the folder stays as it was."""
_STALE_SHARE = 0.02
"""The index is written again when more than this share of the runs was not in it."""

Told = Callable[[int, int], None]
"""Told how many run.json of how many are done."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The runs of some places, oldest first, without what needs their samples one by one or their evidence whole."""

    runs: list[Run]
    faults: list[str]
    """A line for each run that cannot be read."""
    notes: list[str]
    """What a person should know of the index."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A run.json as it was when it was read. The numbers are places in the lists of _Index."""

    path: str
    """Relative to the folder of the index."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Its last change of any kind: a time of modification can be set back, this one cannot."""
    inode: int
    id: str
    created: str
    tag: str | None
    sweep: str | None
    repeat: Repeat | None
    beside: str | None
    status: Status
    workload: int
    settings: int
    environment: int | None
    device_spec: int | None
    ceilings: int | None
    work: int
    findings: int
    during: GpuSamples | None
    samples: dict[str, KnownSamples]
    summary: dict[str, float | None]
    memory: PhaseMemory | None
    profile: ProfiledStep | None
    compilation: CompileReport | None
    energy: Energy | None


class _Index(msgspec.Struct, array_like=True):
    made_by: str
    workloads: list[Workload] = []
    settings: list[Settings] = []
    environments: list[Environment] = []
    specs: list[DeviceSpec] = []
    ceilings: list[Ceilings] = []
    works: list[dict[str, Work]] = []
    findings: list[tuple[Finding, ...]] = []
    entries: list[_Entry] = []


def list_runs(places: list[Path], told: Told | None = None, *, fewest: int = FEWEST_RUNS) -> Listing:
    """Every readable run under the given places, as `load_runs` finds them, by the index where there is one.

    Raises InputError when a place does not exist.
    """
    runs: list[Run] = []
    faults: list[str] = []
    notes: list[str] = []
    seen: set[str] = set()
    for place in places:
        if not exists(place):
            raise InputError(f"no runs at {place}: it does not exist")
        folder = _Folder(place, fewest)
        found, wrong = folder.read(seen, told)
        runs += found
        faults += wrong
        notes += folder.notes
    runs.sort(key=lambda run: (run.instant, run.id))
    return Listing(runs=runs, faults=faults, notes=notes)


@dataclass
class _Folder:
    """One place while it is read."""

    place: Path
    fewest: int
    notes: list[str] = field(default_factory=list[str])

    def read(self, seen: set[str], told: Told | None) -> tuple[list[Run], list[str]]:
        """The runs here that were not seen yet, and a line for each that cannot be read."""
        if self.place.is_file() or (self.place / RUN_FILE).is_file():
            files, indexed = [str(self.place if self.place.is_file() else self.place / RUN_FILE)], False
            links = set(files)
        else:
            files, links = _find(str(self.place))
            indexed = len(files) >= self.fewest
        index = self._load() if indexed else {}
        root, start = os.path.realpath(self.place), len(f"{self.place}{os.sep}")
        kept: list[tuple[tuple[str, os.stat_result], Run]] = []
        faults: list[str] = []
        fresh = 0
        for number, file in enumerate(files):
            relative = file[start:]
            real = os.path.realpath(file) if file in links else f"{root}/{relative}"
            if real in seen:
                continue
            seen.add(real)
            try:
                state = os.stat(file)  # noqa: PTH116  (a Path for each of ten thousand takes a second)
            except OSError:
                state = None
            at = index.get(relative)
            if (
                at is not None
                and state is not None
                and stat.S_ISREG(state.st_mode)
                and (at[0].size, at[0].mtime_ns, at[0].ctime_ns, at[0].inode)
                == (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
            ):
                kept.append(((relative, state), at[1]()))
                continue
            try:
                run = _slim(load_run(Path(file)))
            except InputError as error:
                if os.path.lexists(file):  # else it has vanished since it was found
                    faults.append(str(error))
                continue
            if state is not None:
                # Stated before it was read: what is changed meanwhile has another time, and is read again.
                kept.append(((relative, state), run))
                fresh += 1
            if told is not None:
                told(number + 1, len(files))
        runs = [run for _, run in kept]
        gone = len(index) - (len(kept) - fresh)
        if indexed and max(fresh, gone) > _STALE_SHARE * len(files):
            self._write(kept)
        return runs, faults

    def _load(self) -> dict[str, tuple[_Entry, Callable[[], Run]]]:
        """The runs that the index holds, by their paths; none where it cannot be read."""
        target = self.place / INDEX_FILE
        try:
            if not stat.S_ISREG(target.stat().st_mode):
                raise ValueError("no file")
            data = target.read_bytes()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            self.notes.append(f"{target} cannot be read: the runs themselves were read")
            return {}
        try:
            payload = memoryview(data)[8:]
            if data[:8] != _checksum(payload):
                raise ValueError("checksum")
            if _head_decoder().decode(payload).made_by != _made_by():
                return {}
            index = _decoder().decode(payload)
            if not all(_is_whole(entry, index) for entry in index.entries):
                raise ValueError("places")
            return {entry.path: (entry, functools.partial(_run_of, entry, index)) for entry in index.entries}
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, InputError, RecursionError):
            self.notes.append(f"{target} was damaged: the runs themselves were read")
            return {}

    def _write(self, kept: Iterable[tuple[tuple[str, os.stat_result], Run]]) -> None:
        target = self.place / INDEX_FILE
        payload = msgspec.msgpack.encode(_index_of(kept))
        try:
            write_atomically(_checksum(payload) + payload, target)
        except OSError as error:
            reason = error.strerror or error
            self.notes.append(f"cannot write {target}: {reason}; without it, runs are read one by one each time")


class _Head(msgspec.Struct, array_like=True):
    made_by: str


@functools.cache
def _decoder() -> "msgspec.msgpack.Decoder[_Index]":
    return msgspec.msgpack.Decoder(_Index)


@functools.cache
def _head_decoder() -> "msgspec.msgpack.Decoder[_Head]":
    return msgspec.msgpack.Decoder(_Head)


def _checksum(payload: bytes | memoryview) -> bytes:
    """Eight characters that tell a damaged index."""
    return b"%08x" % zlib.crc32(payload)


@functools.cache
def _made_by() -> str:
    """What an index must have been made by: the versions, and the code of the statistics that it keeps."""
    code = 0
    for file in (samples.__file__, known_samples.__file__, __file__):
        try:
            code = zlib.crc32(Path(file).read_bytes(), code)
        except OSError:  # a package in an archive: its version says enough
            continue
    return f"{INDEX_VERSION} {SCHEMA_VERSION} {__version__} {code:08x}"


def _find(place: str) -> tuple[list[str], set[str]]:
    """The run.json of a tree of directories, oldest first by name, and those among them that are links.

    As find_run_files does, but without a Path a file: ten thousand of them take a second.
    """
    found: list[tuple[str, str]] = []
    links: set[str] = set()
    waiting = [place]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:  # gone, or closed to us
            continue
        for entry in inside:
            if entry.name == RUN_FILE:
                found.append((folder.rpartition(os.sep)[2], entry.path))
                if entry.is_symlink():
                    links.add(entry.path)
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
            except OSError:
                continue
    return [path for _, path in sorted(found)], links


def _slim(run: Run) -> Run:
    """The run with statistics in place of samples, and the evidence that lists and tables read."""
    evidence, environment = run.evidence, run.environment
    kept = {name: known(found) for name, found in run.samples.items()}
    forward, backward = run.samples.get(FORWARD), run.samples.get(BACKWARD)
    if forward is not None and backward is not None and FORWARD_BACKWARD not in kept:
        with contextlib.suppress(ValueError):  # other steps, or another clock: whoever asks for the sum is told so
            kept[FORWARD_BACKWARD] = known(forward.plus(backward))
    profile = evidence.profile and msgspec.structs.replace(evidence.profile, kernels=())
    compilation = evidence.compilation and msgspec.structs.replace(
        evidence.compilation, graph_break_reasons=(), recompile_reasons=()
    )
    return msgspec.structs.replace(
        run,
        failure=None,
        environment=environment and msgspec.structs.replace(environment, before=None, after=None, host=None),
        samples=kept,
        evidence=Evidence(memory=evidence.memory, profile=profile, compilation=compilation, energy=evidence.energy),
        artifacts={},
        findings=tuple(Finding(kind=one.kind, severity=one.severity, sentence="") for one in run.findings),
    )


def _is_whole(entry: _Entry, index: _Index) -> bool:
    """Whether every place that an entry names is there."""
    needed = (
        (entry.workload, index.workloads),
        (entry.settings, index.settings),
        (entry.environment, index.environments),
        (entry.device_spec, index.specs),
        (entry.ceilings, index.ceilings),
        (entry.work, index.works),
        (entry.findings, index.findings),
    )
    return all(place is None or 0 <= place < len(there) for place, there in needed)


def _run_of(entry: _Entry, index: _Index) -> Run:
    """The run of an entry."""
    environment = None if entry.environment is None else index.environments[entry.environment]
    if environment is not None and entry.during is not None:
        environment = msgspec.structs.replace(environment, during=entry.during)
    return Run(
        id=entry.id,
        created=entry.created,
        tag=entry.tag,
        sweep=entry.sweep,
        repeat=entry.repeat,
        beside=entry.beside,
        status=entry.status,
        workload=index.workloads[entry.workload],
        settings=index.settings[entry.settings],
        environment=environment,
        device_spec=None if entry.device_spec is None else index.specs[entry.device_spec],
        ceilings=None if entry.ceilings is None else index.ceilings[entry.ceilings],
        samples=entry.samples,  # type: ignore[arg-type]  # KnownSamples are Samples; nobody writes into them
        work=index.works[entry.work],
        summary=entry.summary,
        evidence=Evidence(
            memory=entry.memory, profile=entry.profile, compilation=entry.compilation, energy=entry.energy
        ),
        findings=index.findings[entry.findings],
    )


def _index_of(kept: Iterable[tuple[tuple[str, os.stat_result], Run]]) -> _Index:
    index = _Index(made_by=_made_by())
    workloads, settings, environments = (
        _Distinct(index.workloads),
        _Distinct(index.settings),
        _Distinct(index.environments),
    )
    specs, ceilings = _Distinct(index.specs), _Distinct(index.ceilings)
    works, findings = _Distinct(index.works), _Distinct(index.findings)
    for (path, state), run in kept:
        where = run.environment
        index.entries.append(
            _Entry(
                path=path,
                size=state.st_size,
                mtime_ns=state.st_mtime_ns,
                ctime_ns=state.st_ctime_ns,
                inode=state.st_ino,
                id=run.id,
                created=run.created,
                tag=run.tag,
                sweep=run.sweep,
                repeat=run.repeat,
                beside=run.beside,
                status=run.status,
                workload=workloads.place(run.workload),
                settings=settings.place(run.settings),
                environment=None
                if where is None
                else environments.place(msgspec.structs.replace(where, during=None) if where.during else where),
                device_spec=None if run.device_spec is None else specs.place(run.device_spec),
                ceilings=None if run.ceilings is None else ceilings.place(run.ceilings),
                work=works.place(run.work),
                findings=findings.place(run.findings),
                during=where.during if where else None,
                samples={name: known(found) for name, found in run.samples.items()},
                summary=run.summary,
                memory=run.evidence.memory,
                profile=run.evidence.profile,
                compilation=run.evidence.compilation,
                energy=run.evidence.energy,
            )
        )
    return index


class _Distinct:
    """A list of different values, and their places in it."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._places: dict[bytes, int] = {}
        self._seen: dict[int, tuple[int, object]] = {}

    def place(self, value: object) -> int:
        """The place of this value in the list, which gets it where it is new."""
        seen = self._seen.get(id(value))
        if seen is not None:
            return seen[0]
        place = self._places.setdefault(msgspec.msgpack.encode(value), len(self._values))
        if place == len(self._values):
            self._values.append(value)
        self._seen[id(value)] = (place, value)  # the value is kept, so that its id stays its own
        return place
