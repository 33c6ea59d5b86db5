"""Who reads traces in benchmarks/trace.py: each with its command, what it computes, and what it needs installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

RUNNERS = Path(__file__).parent / "peers"
NSYS_STATS = "with_nsys_stats.py"
FAILURE = "not-installed.txt"


class PeerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual environment for one peer, so that no peer's needs hold another back."""

    requirements: tuple[str, ...]
    module: str
    distribution: str
    prepare: str = ""
    """Python to run once in it after installing."""


ENVIRONMENTS = {
    "hta": PeerEnvironment(
        requirements=("HolisticTraceAnalysis>=0.5,<0.6",), module="hta", distribution="HolisticTraceAnalysis"
    ),
    # The package index has another project under this name.
    "tracelens": PeerEnvironment(
        requirements=("git+https://github.com/AMD-AGI/TraceLens.git",),
        module="TraceLens.TreePerf",
        distribution="TraceLens",
    ),
    "tensorboard": PeerEnvironment(
        requirements=("torch-tb-profiler>=0.4.3",), module="torch_tb_profiler", distribution="torch-tb-profiler"
    ),
    "orjson": PeerEnvironment(requirements=("orjson",), module="orjson", distribution="orjson"),
    # nsys-ai has DuckDB download its SQLite extension when first used; here it is installed beforehand, so that the
    # benchmark times no download. This is the newest DuckDB the index has that extension for.
    "nsys-ai": PeerEnvironment(
        requirements=("nsys-ai>=0.3,<0.4", "duckdb==1.5.5", "duckdb-extension-sqlite-scanner==1.5.5"),
        module="nsys_ai",
        distribution="nsys-ai",
        prepare=(
            "import duckdb, duckdb_extension_sqlite_scanner as package; from pathlib import Path\n"
            "file, = Path(package.__file__).parent.glob('extensions/*/sqlite_scanner.duckdb_extension')\n"
            "duckdb.execute(f\"INSTALL '{file}'\")"
        ),
    ),
}


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One way from a trace's file to its tables."""

    name: str
    reads: str
    """kineto or nsys."""
    computes: str
    runner: str = ""
    """A script in peers/, run with the trace's path. Without one it is stepscope."""
    environment: str = ""
    """A key of ENVIRONMENTS; without one it runs in this interpreter's."""


CONTESTANTS = (
    Contestant(
        name="stepscope",
        reads="kineto",
        computes="everything `stepscope trace --json` prints",
    ),
    Contestant(
        name="HolisticTraceAnalysis",
        reads="kineto",
        runner="with_hta.py",
        environment="hta",
        computes="kernels by type and name; busy, idle and non-compute time; idle time by cause",
    ),
    Contestant(
        name="TraceLens",
        reads="kineto",
        runner="with_tracelens.py",
        environment="tracelens",
        computes="op tree; device time line; ops that launch kernels and their summary",
    ),
    Contestant(
        name="TraceLens report",
        reads="kineto",
        runner="with_tracelens_report.py",
        environment="tracelens",
        computes="its whole report: the above, unique arguments, roofline by op class, short kernels",
    ),
    Contestant(
        name="TensorBoard plugin",
        reads="kineto",
        runner="with_tensorboard.py",
        environment="tensorboard",
        computes="op tree; overview, operator, kernel and trace views",
    ),
    Contestant(name="json.loads", reads="kineto", runner="with_json.py", computes="floor: events parsed and counted"),
    Contestant(
        name="orjson.loads",
        reads="kineto",
        runner="with_orjson.py",
        environment="orjson",
        computes="floor: events parsed and counted",
    ),
    Contestant(
        name="stepscope",
        reads="nsys",
        computes="everything `stepscope trace --json` prints",
    ),
    Contestant(
        name="nsys-ai",
        reads="nsys",
        runner="with_nsys_ai.py",
        environment="nsys-ai",
        computes="builds its Parquet cache; device time by range path, kernels, idle gaps",
    ),
    Contestant(
        name="nsys-ai on sqlite3",
        reads="nsys",
        runner="with_nsys_ai_sqlite.py",
        environment="nsys-ai",
        computes="device time by range path, kernels, idle gaps, without DuckDB",
    ),
    Contestant(
        name="plain sqlite3",
        reads="nsys",
        runner="with_sqlite3.py",
        computes="device time by innermost range name and by kernel name",
    ),
    Contestant(
        name="nsys stats",
        reads="nsys",
        runner=NSYS_STATS,
        computes="cuda_gpu_kern_sum and nvtx_kern_sum",
    ),
)


class Peers:
    """The peers' environments in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def python(self, environment: str) -> str:
        return str(self.folder / environment / "bin" / "python") if environment else sys.executable

    def command(self, contestant: Contestant, file: Path) -> list[str]:
        """The command that reads this file."""
        if not contestant.runner:
            return [sys.executable, "-m", "stepscope", "trace", str(file), "--json"]
        return [self.python(contestant.environment), str(RUNNERS / contestant.runner), str(file)]

    def variables(self, contestant: Contestant) -> Mapping[str, str]:
        """A peer keeps its caches in a home of its own, kept from run to run."""
        if not contestant.environment:
            return os.environ
        return {**os.environ, "HOME": str(self.folder / contestant.environment / "home")}

    def install(self, name: str) -> None:
        """Make a peer's environment. What fails is kept as the reason it does not take part."""
        environment, place = ENVIRONMENTS[name], self.folder / name
        home = place / "home"
        shutil.rmtree(place, ignore_errors=True)
        steps = [
            [sys.executable, "-m", "venv", str(place)],
            [self.python(name), "-m", "pip", "install", "--quiet", *environment.requirements],
            [self.python(name), "-c", environment.prepare],
        ]
        for step in steps:
            home.mkdir(parents=True, exist_ok=True)
            # pip has the user's own home, where its settings are; what it installs does not.
            variables = {**os.environ, "HOME": str(home)} if step is steps[-1] else os.environ
            done = subprocess.run(step, capture_output=True, text=True, check=False, env=variables)
            if done.returncode:
                sys.stderr.write(done.stderr)
                (place / FAILURE).write_text(f"could not install {' '.join(environment.requirements)}")
                return

    def missing(self, contestant: Contestant) -> str | None:
        """Why a contestant cannot run here, or None."""
        name = contestant.environment
        failure = self.folder / name / FAILURE
        if name and failure.exists():
            return failure.read_text()
        if contestant.runner == NSYS_STATS and not shutil.which(nsys()):
            return "not installed: no nsys on the path, nor named by STEPSCOPE_NSYS"
        if name and not Path(self.python(name)).exists():
            return "not installed: run with --peers"
        if name and self._ask(name, f"import {ENVIRONMENTS[name].module}") is None:
            return f"not installed: no module {ENVIRONMENTS[name].module}"
        return None

    def version(self, contestant: Contestant) -> str:
        """The version of what runs."""
        if contestant.runner == NSYS_STATS:
            said = subprocess.run([nsys(), "--version"], capture_output=True, text=True, check=False).stdout
            return said.strip().rpartition(" ")[2].partition("-")[0]
        if contestant.runner and not contestant.environment:
            return f"Python {sys.version.partition(' ')[0]}"
        distribution = ENVIRONMENTS[contestant.environment].distribution if contestant.environment else "stepscope"
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        return self._ask(contestant.environment, code) or ""

    def _ask(self, environment: str, code: str) -> str | None:
        """What a piece of Python prints there; None when it fails."""
        done = subprocess.run(
            [self.python(environment), "-c", code], capture_output=True, text=True, check=False, cwd=self.folder
        )
        return None if done.returncode else done.stdout.strip()


def nsys() -> str:
    """Nsight Systems' command line."""
    return os.environ.get("STEPSCOPE_NSYS") or "nsys"


def last_line(text: str) -> str:
    """The line of an error output that says what went wrong, near enough."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    return (errors or lines or ["no message"])[-1][:200]
