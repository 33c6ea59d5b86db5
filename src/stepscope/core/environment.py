"""The machine and the software a measurement ran on, and their state before and after it."""

import msgspec

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
        found: dict[str, tuple[object, object]] = {}
        for field in mine:
            if field in ("before", "after", "during", "host", "device_index", "node"):
                continue
            if field == "versions":
                for package in sorted(mine[field].keys() | theirs[field].keys()):
                    a, b = mine[field].get(package), theirs[field].get(package)
                    if a != b:
                        found[package] = (a, b)
            elif mine[field] != theirs[field]:
                found[field] = (mine[field], theirs[field])
        return found
