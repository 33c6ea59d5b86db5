"""The index of a folder of runs: what lists, tables and histories read of many runs, without decoding each again.

It is a hidden file in the folder, made from the runs and thrown away at will. A run.json counts as known while its
size, times and inode are those that the index has; any other is read. So the index is never trusted over the
files: without it, or with one that is old, damaged or another version's, the answers are the same and take longer.

Workloads, environments and the like recur in many runs. Each different one is stored and decoded once.
"""

import functools
import operator
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from stepscope import __version__
from stepscope.core import samples
from stepscope.core.answer import Finding
from stepscope.core.device_spec import Ceilings, DeviceSpec
from stepscope.core.environment import Environment, GpuSamples
from stepscope.core.errors import InputError
from stepscope.core.evidence import CompileReport, Energy, Evidence, PhaseMemory, ProfiledStep
from stepscope.core.formulas import Work
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD
from stepscope.core.run import SCHEMA_VERSION, Repeat, Run, Settings, Status
from stepscope.core.run_directory import INDEX_FILE, RUN_FILE, SEARCH_FOLDERS, exists, load_run, write_atomically
from stepscope.core.samples import FEWEST_FOR_PERCENTILE, Figures, Interval, Samples, figures_of
from stepscope.core.workloads import Workload

INDEX_VERSION = 3
FEWEST_RUNS = 100
"""A folder with fewer runs has no index: they are read in a moment, and the folder stays as it was."""
_STALE_SHARE = 0.02
"""The index is written again when more than this share of the runs was not in it."""

Told = Callable[[int, int], None]
"""Told how many run.json of how many are done."""


# Samples of which only the statistics are kept: what lists and tables of many runs read.


class KnownSamples(Samples, frozen=True, kw_only=True):
    """The statistics of samples, without the samples. Nothing that needs each of them can be asked."""

    known: Figures

    def __post_init__(self) -> None:
        """There are no values to check: they were, when the figures were made of them."""

    def percentile_s(self, name: str) -> float | None:
        """The percentile of this name (p95, p99), as it was found."""
        return self.known.percentiles_s[tuple(FEWEST_FOR_PERCENTILE).index(name)]

    def interval(self) -> Interval | None:
        """The confidence interval of the median, as it was found."""
        return self.known.interval


for _name in Figures.__struct_fields__[:-2]:
    setattr(KnownSamples, _name, property(operator.attrgetter(f"known.{_name}")))


def known(samples: Samples) -> KnownSamples:
    """The statistics of these samples."""
    if isinstance(samples, KnownSamples):
        return samples
    return KnownSamples(values_s=(), clock=samples.clock, known=figures_of(samples))


_Packed = dict[str, msgspec.Raw]
_unpacked = msgspec.msgpack.Decoder(KnownSamples).decode


class _Held(Mapping[str, KnownSamples]):
    """The samples of a run in the index, each decoded when it is asked for: of many runs a list reads one."""

    def __init__(self, packed: _Packed) -> None:
        self.packed = packed

    def __getitem__(self, name: str) -> KnownSamples:
        try:
            return _unpacked(self.packed[name])
        except msgspec.DecodeError:  # whole by its checksum: somebody made it so
            raise InputError(f"{INDEX_FILE} is damaged: delete it, and the runs themselves are read") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def __contains__(self, name: object) -> bool:
        return name in self.packed


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The runs of some places, oldest first, without what needs their samples one by one or their evidence whole."""

    runs: list[Run]
    faults: list[str]
    """A line for each run that cannot be read."""
    notes: list[str]
    """What a person should know of the index."""


_Place = Annotated[int, msgspec.Meta(ge=0)]


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
    workload: _Place
    settings: _Place
    environment: _Place | None
    device_spec: _Place | None
    ceilings: _Place | None
    work: _Place
    findings: _Place
    during: GpuSamples | None
    samples: _Packed
    """The run's KnownSamples by name, not decoded yet."""
    summary: msgspec.Raw
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


_LISTS = {
    "workload": "workloads", "settings": "settings", "environment": "environments", "device_spec": "specs",
    "ceilings": "ceilings", "work": "works", "findings": "findings",
}  # fmt: skip
"""The fields of a run that stand once in the index, by the list that an entry's number is a place in."""
_COPIED = ("id", "created", "tag", "sweep", "repeat", "beside", "status")
"""The fields of a run that each entry has of its own."""
_EVIDENCE = ("memory", "profile", "compilation", "energy")
"""The evidence that lists and tables read."""
_placed, _copied, _evidence = (operator.attrgetter(*names) for names in (_LISTS, _COPIED, _EVIDENCE))


def list_runs(
    places: list[Path], tell: Told | None = None, *, summaries: bool = False, fewest: int = FEWEST_RUNS
) -> Listing:
    """Every readable run under the given places, as `load_runs` finds them, by the index where there is one.
    summaries: whether the runs of the index have theirs.

    Raises InputError when a place does not exist.
    """
    runs: list[Run] = []
    faults: list[str] = []
    notes: list[str] = []
    loaded: set[str] = set()
    for place in places:
        if not exists(place):
            raise InputError(f"no runs at {place}: it does not exist")
        folder = _Folder(place, fewest, summaries)
        runs_of_folder, wrong = folder.read(loaded, tell)
        runs += runs_of_folder
        faults += wrong
        notes += folder.notes
    runs.sort(key=lambda run: (run.instant, run.id))
    return Listing(runs=runs, faults=faults, notes=notes)


@dataclass
class _Folder:
    """One place while it is read."""

    place: Path
    fewest: int
    summaries: bool
    notes: list[str] = field(default_factory=list[str])

    def read(self, loaded: set[str], tell: Told | None) -> tuple[list[Run], list[str]]:
        """The runs here that were not seen yet, and a line for each that cannot be read."""
        if self.place.is_file() or (self.place / RUN_FILE).is_file():
            files, indexed = [str(self.place if self.place.is_file() else self.place / RUN_FILE)], False
            links = set(files)
        else:
            files, links = _find(str(self.place))
            indexed = len(files) >= self.fewest
        index = self._load() if indexed else {}
        root, start = os.path.realpath(self.place), len(f"{self.place}{os.sep}")
        kept: list[tuple[str, os.stat_result, Run, _Entry | None]] = []
        faults: list[str] = []
        fresh = 0
        for number, file in enumerate(files):
            relative = file[start:]
            real = os.path.realpath(file) if file in links else f"{root}/{relative}"
            if real in loaded:
                continue
            loaded.add(real)
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
                kept.append((relative, state, at[1], at[0]))
                continue
            try:
                run = _slim(load_run(Path(file)))
            except InputError as error:
                if os.path.lexists(file):  # else it has vanished since it was found
                    faults.append(str(error))
                continue
            if state is not None:
                # Stated before it was read: what is changed meanwhile has another time, and is read again.
                kept.append((relative, state, run, None))
                fresh += 1
            if tell is not None:
                tell(number + 1, len(files))
        runs = [run for _, _, run, _ in kept]
        gone = len(index) - (len(kept) - fresh)
        if indexed and max(fresh, gone) > _STALE_SHARE * len(files):
            self._write(kept)
        return runs, faults

    def _load(self) -> dict[str, tuple[_Entry, Run]]:
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
            if msgspec.msgpack.decode(payload, type=_Head).made_by != _made_by():
                return {}
            index = msgspec.msgpack.decode(payload, type=_Index)
            lists = [getattr(index, name) for name in _LISTS.values()]
            return {entry.path: (entry, _run_of(entry, lists, self.summaries)) for entry in index.entries}
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, IndexError, InputError, RecursionError):
            self.notes.append(f"{target} was damaged: the runs themselves were read")
            return {}

    def _write(self, kept: Iterable[tuple[str, os.stat_result, Run, _Entry | None]]) -> None:
        target = self.place / INDEX_FILE
        index = _Index(made_by=_made_by())
        lists = {name: _Distinct(getattr(index, of)) for name, of in _LISTS.items()}
        for path, state, run, entry in kept:
            where = run.environment
            values = {name: getattr(run, name) for name in _LISTS}
            if where is not None and where.during:
                values["environment"] = msgspec.structs.replace(where, during=None)
            index.entries.append(
                _Entry(
                    path=path,
                    size=state.st_size,
                    mtime_ns=state.st_mtime_ns,
                    ctime_ns=state.st_ctime_ns,
                    inode=state.st_ino,
                    during=where.during if where else None,
                    samples=entry.samples if entry else {name: _packed(known(of)) for name, of in run.samples.items()},
                    summary=entry.summary if entry else _packed(run.summary),
                    **{name: getattr(run, name) for name in _COPIED},
                    **{name: None if value is None else lists[name].place(value) for name, value in values.items()},
                    **{name: getattr(run.evidence, name) for name in _EVIDENCE},
                )
            )
        payload = msgspec.msgpack.encode(index)
        try:
            write_atomically(_checksum(payload) + payload, target)
        except OSError as error:
            reason = error.strerror or error
            self.notes.append(f"cannot write {target}: {reason}; without it, runs are read one by one each time")


def _packed(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


class _Head(msgspec.Struct, array_like=True):
    made_by: str


def _checksum(payload: bytes | memoryview) -> bytes:
    """Eight characters that tell a damaged index."""
    return b"%08x" % zlib.crc32(payload)


@functools.cache
def _made_by() -> str:
    """What an index must have been made by: the versions, and the code of the statistics that it keeps."""
    code = 0
    for file in (samples.__file__, __file__):
        try:
            code = zlib.crc32(Path(file).read_bytes(), code)
        except OSError:  # a package in an archive: its version says enough
            continue
    return f"{INDEX_VERSION} {SCHEMA_VERSION} {__version__} {code:08x}"


def _find(place: str) -> tuple[list[str], set[str]]:
    """The run.json of a tree of directories, oldest first by name, and those among them that are links.

    As find_run_files does, but without a Path a file: ten thousand of them take a second.
    """
    files: list[tuple[str, str]] = []
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
                files.append((folder.rpartition(os.sep)[2], entry.path))
                if entry.is_symlink():
                    links.add(entry.path)
            try:
                if entry.is_dir(follow_symlinks=False) and not SEARCH_FOLDERS.fullmatch(entry.name):
                    waiting.append(entry.path)
            except OSError:
                continue
    return [path for _, path in sorted(files)], links


def _slim(run: Run) -> Run:
    """The run with statistics in place of samples, and the evidence that lists and tables read."""
    evidence, environment = run.evidence, run.environment
    kept = {name: known(sample) for name, sample in run.samples.items()}
    forward, backward = run.samples.get(FORWARD), run.samples.get(BACKWARD)
    if forward is not None and backward is not None and FORWARD_BACKWARD not in kept and forward.adds_to(backward):
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


def _run_of(entry: _Entry, lists: Sequence[list[Any]], summaries: bool) -> Run:
    """The run of an entry, whose numbers are places in these lists."""
    places = zip(_LISTS, lists, _placed(entry), strict=True)
    shared: dict[str, Any] = {name: None if place is None else values[place] for name, values, place in places}
    if shared["environment"] is not None and entry.during is not None:
        shared["environment"] = msgspec.structs.replace(shared["environment"], during=entry.during)
    return Run(
        **dict(zip(_COPIED, _copied(entry), strict=True)),
        **shared,
        samples=cast("dict[str, Samples]", _Held(entry.samples)),  # it is read as a dict is, and never written into
        summary=msgspec.msgpack.decode(entry.summary, type=dict[str, float | None]) if summaries else {},
        evidence=Evidence(**dict(zip(_EVIDENCE, _evidence(entry), strict=True))),
    )


class _Distinct:
    """A list of different values, and their places in it."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._places: dict[bytes, int] = {}
        self._kept: dict[int, tuple[int, object]] = {}

    def place(self, value: object) -> int:
        """The place of this value in the list, which gets it where it is new."""
        kept_before = self._kept.get(id(value))
        if kept_before is not None:
            return kept_before[0]
        place = self._places.setdefault(msgspec.msgpack.encode(value), len(self._values))
        if place == len(self._values):
            self._values.append(value)
        self._kept[id(value)] = (place, value)  # the value is kept, so that its id stays its own
        return place
