"""Where a process runs: machine and software with their state, and its place among the ranks of a job."""

import contextlib
import gc
import os
import re
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.units import counted, format_bytes

COMMITS = ("git_commit", "git_dirty", "own_commit", "own_dirty")
"""The fields of an environment that say which code ran."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's state at one moment, by NVML; a value is None where the driver does not give it."""

    read_at_s: float | None = None
    """When the GPU was read, in seconds on the host's monotonic clock: only differences mean anything."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    slowdown_reasons: tuple[str, ...] = ()
    power_limited_s: float | None = None
    """Total time so far, since the driver was loaded, that the power cap held the clocks down."""
    thermal_limited_s: float | None = None
    other_processes: int | None = None
    """Compute processes on this GPU besides this one."""
    memory_used_bytes: int | None = None


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest, the median and the highest of several readings."""

    lowest: float
    median: float
    highest: float


class GpuSamples(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU while steps ran, read again and again by another process. What the driver does not give is None."""

    count: int
    period_s: float
    """Time from one reading to the next, as it was asked for."""
    sm_clock_mhz: Extent | None = None
    power_w: Extent | None = None
    """The whole GPU's; None under MIG. GPUs since Ampere, but for the A100, give the mean of the last second."""
    temperature_c: Extent | None = None


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the host was between two moments, in cores; None where the system does not tell."""

    own_cores: float | None = None
    other_cores: float | None = None
    """Cores kept busy by other processes, the hypervisor's steal included."""


NATIVE_LAUNCHER = "STEPSCOPE_NATIVE"
"""The environment variable that has eager calls of our operations launched from Python where it is 0, and from C++
otherwise."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything beside the workload that a figure depends on."""

    device_type: str
    """Type of the device: cpu or cuda."""
    device_name: str
    device_index: int | None = None
    node: str | None = None
    """The name of the cluster's node, where the run was measured for a sweep on another machine."""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """A limit the user set below the device's own memory, to stand for a smaller card."""
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    cpu_name: str
    cpu_cores: int
    threads: int | None = None
    system: str
    versions: dict[str, str]
    """python, torch, cuda, cudnn, triton, stepscope: those that are there. And launcher: Python, where our kernels
    were not launched from C++."""
    allocator: str | None = None
    """Settings of PyTorch's caching allocator that the environment names; None where it names none, or on a CPU."""
    git_commit: str | None = None
    """Commit of the checkout that stepscope ran from."""
    git_dirty: bool | None = None
    """Whether stepscope's files had been changed since."""
    own_commit: str | None = None
    """Commit of the checkout that a user's model or loop was started in; None for the textbook's model."""
    own_dirty: bool | None = None
    """Whether tracked files of that checkout had been changed since."""
    before: GpuReading | None = None
    """The GPU's state when the measured steps begin, after warm-up; `after` is its state when they end."""
    after: GpuReading | None = None
    during: GpuSamples | None = None
    """The GPU while the measured steps ran."""
    host: HostReading | None = None

    @property
    def code(self) -> tuple[str | None, bool | None]:
        """The commit of the code that was measured, and whether files had been changed since: the user's where the
        model or the loop is a user's, and else stepscope's."""
        return (self.own_commit, self.own_dirty) if self.own_commit else (self.git_commit, self.git_dirty)

    @property
    def limited_device(self) -> str:
        """The device, with the limit of its memory where the user set one."""
        limit = f", limited to {format_bytes(self.memory_limit_bytes)}" if self.memory_limit_bytes else ""
        return f"{self.device_name}{limit}"

    @property
    def described(self) -> str:
        """Device and versions, on one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        threads = f", {counted(self.threads or 0, 'thread')}" if self.device_type == "cpu" else ""
        limit = f", limited to {format_bytes(self.memory_limit_bytes)}" if self.memory_limit_bytes else ""
        return f"{self.device_name}{threads}{limit}; {versions}"

    def differences(self, other: "Environment") -> dict[str, tuple[object, object]]:
        """Fields that differ and may move a figure; readings of clocks and load are left out, they always differ."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        differing: dict[str, tuple[object, object]] = {}
        for field in mine:
            if field in ("before", "after", "during", "host", "device_index", "node"):
                continue
            if field == "versions":
                for package in sorted(mine[field].keys() | theirs[field].keys()):
                    a, b = mine[field].get(package), theirs[field].get(package)
                    if a != b:
                        differing[package] = (a, b)
            elif mine[field] != theirs[field]:
                differing[field] = (mine[field], theirs[field])
        return differing


# How the allocator of polars treats memory that is no longer used.


def give_pages_back() -> None:
    """Have polars give back pages that it no longer uses: a sixth less at the peak. Half a second spares those in use.

    Its allocator reads this when polars is loaded, so it has to be said before.
    """
    os.environ.setdefault("_RJEM_MALLOC_CONF", "narenas:1,oversize_threshold:0,dirty_decay_ms:500,muzzy_decay_ms:0")


# How much memory this process has and may have, and how Python manages it.


_STATM = Path("/proc/self/statm")


def memory_held() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextlib.contextmanager
def bounded_memory(growth: int) -> Generator[None]:
    """Inside, this process may grow by so many bytes, where the system can say so: a few bytes of a hostile pickle
    can ask for a table of 64 GiB."""
    try:
        import resource  # noqa: PLC0415 - not on every system

        held = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    limits = [limit for limit in (soft, hard, held + growth) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_set_aside_by_us = False
"""Whether nobody but this package has set objects aside in this process. To count them takes as long as a search."""


def set_aside() -> None:
    """Spare the collector what a process of our own has imported, and turn it on."""
    global _set_aside_by_us  # noqa: PLW0603
    _set_aside_by_us = True
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def without_collector() -> Generator[None]:
    """A million new containers would have the collector search them again and again: half of the time of reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if _set_aside_by_us:
                # What was made counts as old from here on: the next object would have the collector search all of it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


# The place of this process among those that share a step.


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the processes that share a step this one is, and where they meet."""

    rank: int
    ranks: int
    local_rank: int
    """Its number among the ranks of its host: the number of its GPU."""
    meeting: str
    """Where the ranks find each other, as torch.distributed's init_method: `file:///...`, or `env://` in a job that
    somebody else started."""
    local_ranks: int = 1
    """How many ranks share its host."""
    began_s: float | None = None
    """When the ranks were started, in seconds since 1970; None in a job that somebody else started."""


def place_in_job(environment: Mapping[str, str]) -> RankPlace | None:
    """This process's place in a job that torchrun or srun started; None where there is no such job.

    Raises InputError where the job does not say where its ranks meet.
    """
    names = next((names for names in _JOBS if names[0] in environment and names[1] in environment), None)
    if names is None:
        return None
    rank, ranks, local_rank, local_ranks = names
    try:
        place = RankPlace(
            rank=int(environment[rank]),
            ranks=int(environment[ranks]),
            local_rank=int(environment.get(local_rank, 0)),
            local_ranks=int(re.split(r"\D", environment.get(local_ranks, "1"))[0] or 1),
            meeting="env://",
        )
    except ValueError:
        raise InputError(f"{rank} and {ranks} in the environment are no numbers: who started this job?") from None
    if place.ranks < 2 and rank != "RANK":
        return None  # srun of one task is no job of ranks
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise InputError(
            f"this is rank {place.rank} of {place.ranks}, and the environment has no {' and no '.join(missing)}: start "
            "the ranks with torchrun, or export them before srun"
        )
    return place


def check_processes(ranks: int) -> None:
    """Raise InputError for more ranks than this machine has memory for processes that have imported torch."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _PROCESS_BYTES
    if ranks > max(room, 2):
        raise InputError(
            f"--ranks {ranks} are as many processes, and this machine has memory for {room:,} at most: ask for fewer"
        )


_PROCESS_BYTES = 128 << 20
"""Less than a process takes that has imported torch, of pages that it shares with no other."""


def refuse_several(environment: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise InputError where torchrun started several processes, of which each would do this by itself.

    A batch script of Slurm is one process, though its environment counts the tasks that srun would start.
    """
    number = environment.get("WORLD_SIZE", "")
    if "RANK" in environment and number.isdecimal() and int(number) > 1:
        raise InputError(f"torchrun started {number} processes, and each would {what}: {remedy}")


_JOBS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""The variables in which torchrun, and srun, say which rank a process is."""
