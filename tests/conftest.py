"""What several tests share: skips with a reason, a fake clock and device, runs made by hand."""

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from _pytest.runner import pytest_runtest_protocol as run_test
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings

import stepscope
from stepscope.core.environment import Environment
from stepscope.core.formulas.transformer import phase_work
from stepscope.core.model_config import MODEL_OPTIONS, configure
from stepscope.core.profilers import find_nsys
from stepscope.core.run import Run, Settings
from stepscope.core.samples import Samples
from stepscope.core.workloads import TextbookWorkload
from tests.frames import with_room
from tests.interpreter import quicken

if TYPE_CHECKING:
    from stepscope.training.training_step import AssembledStep

_SOURCE = Path(stepscope.__file__).parent.as_posix()

if not Path("/dev/nvidiactl").exists():
    # Without a GPU Triton's kernels run in its interpreter. Triton reads this when imported, which PyTorch may do.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where a CPU multiplies in fp16 itself, oneDNN packs copies of operands, which are no tensors of the step: on such a
# machine alone a step in fp16 takes more memory than is predicted. Read when torch is imported; for children too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before it compiles, Inductor builds a library with each of the CPU's vector instructions, and loads it in a process of
# its own. What the CPU says of itself is enough. Read when Inductor is imported; for children too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A property sees some examples here, and many with --long. On a busy machine examples are slow to come, and slow to
# run: no fault of what is tested.
hypothesis_settings.register_profile(
    "busy", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30
)
# Where it is enough to know that there is a counterexample, minutes are saved by not looking for the smallest.
hypothesis_settings.register_profile(
    "any-counterexample",
    parent=hypothesis_settings.get_profile("busy"),
    max_examples=100,
    phases=[Phase.explicit, Phase.generate, Phase.target],
)
hypothesis_settings.load_profile("busy")


# Where tests run side by side, each has a core: PyTorch's threads wait by spinning, ten times slower when they compete,
# and those of polars cost more than they bring to small frames.
# Set before anything imports either; the processes that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("POLARS_MAX_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="tests marked long, and random cases in their full number: see `make hostile`",
    )


def at_length(*cases: Any, long: bool = True) -> list[Any]:
    """Cases of a parametrised test that --long alone runs, beside others that say whether it works. A tuple is the
    values of several names."""
    marks = [pytest.mark.long] if long else []
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def in_the_interpreter_at_length(*cases: Any) -> list[Any]:
    """Such cases of a kernel's test: where there is a GPU they take little, and are always run."""
    return at_length(*cases, long=not Path("/dev/nvidiactl").exists())


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    """Which share of a campaign's cases to run: a part that says whether it works, or with --long all of them."""
    return 1.0 if request.config.getoption("--long") else 0.15


@pytest.fixture
def quickly_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` by Dynamo and autograd for real, without a C++ compiler's time. With --long by Inductor too."""
    if not request.config.getoption("--long"):
        import torch

        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


_MODULES_SET_ASIDE = 0
"""How many modules were loaded when the collector last set aside what there was."""
_MANY_MODULES = 50
_MANY_OBJECTS = 200_000
"""More than a file of tests makes and keeps: what was set aside has been taken back."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects nothing of what is collected: what imports and rewritten assertions make is kept, and to look through it
    again and again takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    quicken()
    _set_aside()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    # Fixtures and the test, as pytest itself runs them.
    return with_room(lambda: run_test(item, nextitem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A mode that a test leaves on, as a default device, changes what every later test of its process does."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "_C") and (left := torch._C._len_torch_function_stack()):
        modes = [torch._C._pop_torch_function_stack() for _ in range(left)]
        pytest.fail(f"the test left modes of PyTorch's functions on: {modes}")


def pytest_runtest_logfinish() -> None:
    # A test may be the first to load a large library, as torch's compiler is.
    if len(sys.modules) >= _MODULES_SET_ASIDE + _MANY_MODULES:
        _set_aside()


@pytest.fixture(autouse=True, scope="module")
def _what_is_set_aside_stays_so() -> None:
    """With gc.unfreeze() a test makes every later collection of its process take thirty times as long."""
    if len(gc.get_objects(generation=2)) > _MANY_OBJECTS:
        _set_aside()


def _set_aside() -> None:
    """What is loaded by now stays: looking through it for garbage is time lost in every test."""
    global _MODULES_SET_ASIDE  # noqa: PLW0603
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        # For a figure in its log Dynamo empties the CPU's caches after each compilation: 19 ms, which nobody reads.
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
    gc.collect()
    gc.freeze()
    _MODULES_SET_ASIDE = len(sys.modules)


class _NamesFailures:
    """Says which test failed, and where, as soon as it has: of a run that is cut short nothing else would."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            where = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line("")
            terminal.write_line(f"failed: {report.nodeid}: {where.message.splitlines()[0] if where else ''}")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_NamesFailures(config))
    if config.getoption("--long"):
        hypothesis_settings.register_profile("long", parent=hypothesis_settings.get_profile("busy"), max_examples=200)
        hypothesis_settings.load_profile("long")
    # Started in the background of a script, this process ignores Ctrl-C, and so would every process it tests with it.
    # Under nohup the same is true of SIGHUP: pytest itself stays with that, the workers that run the tests do not.
    if "PYTEST_XDIST_WORKER" in os.environ and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A worker takes the next file when it is done with one. Those that take longest come first: the workers that they
    # leave free share the rest, and all are busy to the end.
    seconds = _seconds_of_files()
    for item in items:
        seconds.setdefault(_file_of(item.nodeid), _NEW_AND_SLOW_S if item.get_closest_marker("slow") else 0.0)
    items.sort(key=lambda item: -seconds[_file_of(item.nodeid)])
    marked = {mark.name for item in items for mark in item.iter_markers()}
    gpus = _gpu_count() if marked & {"gpu", "multigpu"} else 0
    reasons = {
        "gpu": None if gpus else "no NVIDIA GPU on this machine",
        "long": None if config.getoption("--long") else "takes long: run with --long, as make hostile does",
        "multigpu": None if gpus > 1 else f"{gpus} NVIDIA GPUs on this machine",
        "nsys": None if find_nsys() else "no nsys on this machine: scripts/install-nsys gets one",
        "browser": None if shutil.which("chromium") else "no chromium on the PATH",
    }
    for item in items:
        for mark in list(item.iter_markers()):
            if reasons.get(mark.name):
                item.add_marker(pytest.mark.skip(reason=str(reasons[mark.name])))


_SECONDS = Path(__file__).with_name("seconds.txt")
"""How long each file of tests takes, the longest first. `STEPSCOPE_UPDATE_SECONDS=1 make tests` writes it anew."""
_NEW_AND_SLOW_S = 10.0
"""What a file counts that `seconds.txt` does not name, and that has tests marked slow."""
_WORTH_A_LINE_S = 1.0
_TAKEN_S: dict[str, float] = {}


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _seconds_of_files() -> dict[str, float]:
    rows = (line.split() for line in _SECONDS.read_text().splitlines())
    return {file: float(seconds) for seconds, file in rows}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = _file_of(report.nodeid)
    _TAKEN_S[file] = _TAKEN_S.get(file, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    if os.environ.get("STEPSCOPE_UPDATE_SECONDS") and "PYTEST_XDIST_WORKER" not in os.environ:
        known = {file: seconds for file, seconds in _seconds_of_files().items() if Path(file).exists()} | _TAKEN_S
        rows = sorted(((seconds, file) for file, seconds in known.items() if seconds >= _WORTH_A_LINE_S), reverse=True)
        _SECONDS.write_text("".join(f"{seconds:.0f} {file}\n" for seconds, file in rows))


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ceilings are stored for later runs: one store for all tests, apart from the user's."""
    monkeypatch.setenv("STEPSCOPE_CACHE", str(cache_of_tests(tmp_path_factory)))


def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of all tests, also of those that run side by side: to measure a device's ceilings takes seconds."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"


@pytest.fixture(autouse=True)
def _no_dispatch_mode_is_left() -> Iterator[None]:
    """A mode that a test leaves behind counts or hides the operators of every test after it, far from its cause."""
    yield
    modes = sys.modules.get("torch.utils._python_dispatch")
    assert modes is None or not modes.is_in_torch_dispatch_mode(), "a dispatch mode was left behind"


@pytest.fixture(autouse=True)
def _where_modules_are_looked_for_is_put_back() -> Iterator[None]:
    """A user's factory leaves its folder in `sys.path`, which every process inherits that a later test starts."""
    places = list(sys.path)
    yield
    sys.path[:] = places


@pytest.fixture(autouse=True)
def _what_dynamo_skips_is_put_back() -> Iterator[None]:
    """A loop that is watched tells Dynamo to leave the measuring code alone, until its process ends. A later test may
    compile what lies beside that code."""
    yield
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        others = [place for place in rules.SKIP_DIRS if not place.startswith(_SOURCE)]
        if len(others) < len(rules.SKIP_DIRS):
            rules.SKIP_DIRS[:] = others
            rules._recompile_re()


MakeRun = Callable[..., Run]


def workload(**changes: Any) -> TextbookWorkload:
    """A small workload; sizes of the model by their names, everything else as Workload has it."""
    sizes: Any = {option.name: changes.pop(option.name) for option in MODEL_OPTIONS if option.name in changes}
    model = changes.pop("model", None) or configure("tiny", **sizes)
    defaults: dict[str, Any] = {"seq_len": 16, "batch_size": 2}
    return TextbookWorkload(model=configure(model) if isinstance(model, str) else model, **{**defaults, **changes})


def mini(**changes: Any) -> TextbookWorkload:
    """The smallest workload that has everything: two layers of width 32."""
    sizes = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2, "vocabulary": 101}
    return workload(**{**sizes, **changes})


def run_steps(step: "AssembledStep", times: int = 1) -> float | None:
    """Run the step so often; its last loss, where it has one."""
    for _ in range(times):
        step.prepare()
        for phase in step.phases:
            phase.run()
    return None if step.loss is None else float(step.loss)


def make_run(
    of: TextbookWorkload | None = None,
    *,
    forward: list[float] | None = None,
    backward: list[float] | None = None,
    optimizer: list[float] | None = None,
    step: list[float] | None = None,
    warmup: list[float] | None = None,
    **changes: Any,
) -> Run:
    """A run as the study would have written it, with the given samples (seconds) and fields."""
    of = of or workload()
    phases = {"forward": forward, "backward": backward, "optimizer": optimizer}
    given = {name: values for name, values in phases.items() if values}
    if step is None and given:
        step = [sum(values) for values in zip(*given.values(), strict=True)]
    samples = {
        name: Samples(values_s=tuple(values), warmup_s=tuple(warmup or ()), clock="perf_counter_ns")
        for name, values in {**given, **({"step": step} if step else {})}.items()
    }
    environment = Environment(
        device_type="cpu", device_name="a CPU", cpu_name="a CPU", cpu_cores=8, threads=8, system="Linux x86_64",
        versions={"stepscope": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
    )  # fmt: skip
    run = Run(
        id=f"20260101T000000.000-{of.key}",
        created="2026-01-01T00:00:00.000+00:00",
        status="done",
        workload=of,
        settings=Settings(),
        environment=environment,
        samples=samples,
        warmup_steady=True,
        work=phase_work(of),
    )
    return msgspec.structs.replace(run, **changes)


class FakeClock:
    """A clock that moves only when told."""

    name = "fake clock"

    def __init__(self) -> None:
        self.ns = 1_000_000

    def now_ns(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


class FakeDevice:
    """A device with a queue: work is given at once and finished later, as on a GPU."""

    clock_name = "fake events"

    def __init__(self, clock: FakeClock, *, synchronizes: bool = True) -> None:
        self.clock, self.synchronizes = clock, synchronizes
        self.free_at_ns = clock.ns
        self.synchronisations = 0
        self.marked_at_ns = 0

    def give(self, seconds: float) -> None:
        """Queue work that keeps the device busy for this long."""
        self.free_at_ns = max(self.free_at_ns, self.clock.ns) + round(seconds * 1e9)

    def synchronize(self) -> None:
        self.synchronisations += 1
        if self.synchronizes:
            self.clock.ns = max(self.clock.ns, self.free_at_ns)
        self.marked_at_ns = 0

    def mark(self) -> int:
        self.marked_at_ns = max(self.free_at_ns, self.clock.ns)
        return self.marked_at_ns

    def elapsed_s(self, start: int, end: int) -> float:
        assert self.marked_at_ns == 0, "read before the device was waited for: a GPU raises here"
        return (end - start) * 1e-9


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A place for runs."""
    return tmp_path / "runs"
