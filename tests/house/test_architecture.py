"""The house: rooms import what is below them, and reading and measuring each do without the other's libraries.

STEPSCOPE_UPDATE_DOCS=1 writes the picture in docs/architecture.md anew.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.measures import SOURCE, circles, files_imported

ROOMS = (
    "core", "recording", "traces", "allocations", "kernels", "runs", "training", "engine", "questions", "rendering",
    "app",
)  # fmt: skip
"""The rooms, lowest first. Imports go down only."""

PUBLIC = {"callbacks", "parallel"}
"""Addresses that users import, above the rooms."""

LIBRARIES = {
    "core": {"msgspec"},
    "recording": {"msgspec", "nvtx", "torch"},
    "traces": {"adbc_driver_sqlite", "msgspec", "numpy", "polars"},
    "allocations": {"msgspec", "numpy", "polars"},
    "kernels": {"msgspec", "torch", "triton"},
    "runs": {"msgspec"},
    "training": {"liger_kernel", "msgspec", "quack", "torch", "transformers"},
    "engine": {"msgspec", "ray", "torch"},
    "questions": {"msgspec", "polars", "torch"},
    "rendering": {"jinja2", "msgspec", "polars", "rich", "vl_convert"},
    "app": {"msgspec", "rich", "torch", "click"},
}

ONE_FILE = {
    "liger_kernel": "training/parts/libraries.py",
    "quack": "training/parts/libraries.py",
    "ray": "engine/courier.py",
}
"""Libraries that one file imports alone."""


@functools.cache
def imports(file: Path) -> set[str]:
    """Every module a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
            if node.module == "stepscope":
                found |= {f"stepscope.{alias.name}" for alias in node.names}
    return found


FILES = [file for room in ROOMS for file in (SOURCE / room).glob("**/*.py")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downward_only(file: Path):
    room = file.relative_to(SOURCE).parts[0]
    below = {*ROOMS[: ROOMS.index(room) + 1], "", "__version__"}
    for name in imports(file):
        top, _, rest = name.partition(".")
        if top == "stepscope":
            assert rest.partition(".")[0] in below, f"{room} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in LIBRARIES[room], f"{room} imports {name}"
            place = str(file.relative_to(SOURCE))
            assert ONE_FILE.get(top, place) == place, f"{place} imports {name}: {ONE_FILE[top]} alone does"


def picture() -> str:
    """The rooms as a table, highest first: each with a mark under every room that it imports."""
    lines = [" " * 12 + "  ".join(ROOMS[:-1])]
    for room in reversed(ROOMS):
        names = {name for file in (SOURCE / room).glob("**/*.py") for name in imports(file)}
        imported = {name.split(".")[1] for name in names if name.startswith("stepscope.")} - {room}
        marks = (("x" if each in imported else "").center(len(each)) for each in ROOMS[:-1])
        lines.append(f"{room:12}{'  '.join(marks)}".rstrip())
    return "\n".join(lines)


def test_the_picture_of_the_rooms_is_made_from_the_imports():
    page = SOURCE.parents[1] / "docs" / "architecture.md"
    text = page.read_text()
    shown = re.compile(r"(?<=made from the imports:\n\n```text\n).*?(?=```)", re.DOTALL)
    renewed = shown.sub(f"{picture()}\n", text)
    if os.environ.get("STEPSCOPE_UPDATE_DOCS"):
        page.write_text(renewed)
        return
    assert renewed == text


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_are_there(page: str):
    root = SOURCE.parents[1]
    names = set(re.findall(r"`([\w./]+\.py|\w+/[\w/]*)`", (root / page).read_text()))
    assert len(names) > 20
    beside = {file.name for file in (*SOURCE.rglob("*.py"), *(root / "tests").rglob("*.py"))}
    there = {name for name in names if any((place / name).exists() for place in (root, SOURCE, SOURCE.parent))}
    assert {name for name in names - there if "/" in name or name not in beside} == set()


def test_no_files_import_one_another():
    assert circles(files_imported(SOURCE)) == []


IN_A_FUNCTION = {"a": "from house.b import x", "b": "import house.c", "c": "def f():\n    from house import a"}
IN_A_PACKAGE = {"room/__init__": "from house.room.a import x", "room/a": "import house.room.b", "room/b": ""}
NONE = {"a": "import house.b", "b": "import house.room", "room/__init__": "import os", "room/a": "import house.a"}


@pytest.mark.parametrize(
    ("files", "found"), [(IN_A_FUNCTION, ["a", "b", "c"]), (IN_A_PACKAGE, ["room", "room.a"]), (NONE, [])]
)
def test_a_circle_of_imports_is_seen(tmp_path: Path, files: dict[str, str], found: list[str]):
    for name, text in files.items():
        file = tmp_path / "house" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    expected = [{f"house.{name}" for name in found}] if found else []
    assert circles(files_imported(tmp_path / "house")) == expected


def test_every_room_is_in_the_plan():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms - PUBLIC == set(ROOMS)


def test_no_room_has_the_name_of_a_public_function():
    """Python would make the room an attribute of the package, in place of the function."""
    import stepscope

    assert not set(stepscope.__all__) & {*ROOMS, *PUBLIC}


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, check=False
    )


def test_reading_needs_no_torch(tmp_path: Path):
    """Every verb that reads, where torch cannot be imported: of runs, captures, snapshots, names and sizes."""
    from stepscope.core.run_directory import create_run_directory, save_run
    from tests.conftest import make_run

    names = []
    for forward in (0.1, 0.11):
        run = make_run(forward=[forward] * 6, backward=[0.2] * 6, optimizer=[0.05] * 6)
        directory = create_run_directory(tmp_path, run.workload)
        save_run(run, directory)
        names.append(str(directory))
    result = run_python(
        """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"torch", "triton"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Missing())
        from stepscope.app.cli.app import app
        out, first, second, data = sys.argv[1:]
        for verb in (["--help"], ["sweep", "--help"], ["models"], ["ls", out], ["show", "last", "--runs", out],
                     ["table", out], ["table", out, "--style", "csv"], ["history", out], ["compare", first, second],
                     ["kernel", "ampere_sgemm_128x64_nn"], ["trace", f"{data}/kineto_train.json.gz"],
                     ["memory", f"{data}/snapshot_train.pickle.gz"], ["fit", "--model", "tiny", "--memory", "1GiB"],
                     ["plan", "--model", "large", "--ranks", "2", "--device", "H100"]):
            app(verb, standalone_mode=False)
        assert "vl_convert" not in sys.modules, "nobody asked for a plot"
        for verb in (["report", first, "-o", f"{out}/page.html"], ["writeup", out, "-o", f"{out}/w.md"]):
            app(verb, standalone_mode=False)
        """,
        str(tmp_path), *names, str(Path(__file__).parents[1] / "data"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "forward" in result.stdout and "110 ms" in result.stdout
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_help_loads_next_to_nothing():
    result = run_python(
        """
        import sys
        from stepscope.app.cli.app import app
        app(["--help"], standalone_mode=False)
        heavy = {"torch", "polars", "numpy", "scipy", "asyncio", "vl_convert"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_acting_wing_runs_on_a_bare_machine(tmp_path: Path):
    """torch, msgspec, rich and click are all that measuring and showing need."""
    result = run_python(
        """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"polars", "scipy", "pynvml", "nvtx", "vl_convert"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Missing())
        from stepscope.app.cli.app import app
        try:
            app(["run", "--runs", sys.argv[1], "--d-model", "32", "--heads", "2", "--seq-len", "16", "--steps", "5",
                 "--warmup", "1", "--no-profile"], standalone_mode=False)
        except SystemExit:
            pass
        """,
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "backward" in result.stdout


def test_no_kernel_returns_none_alone():
    """Triton 3.6 does not compile it, and later releases do."""
    for file in (SOURCE / "kernels").rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "jit" in "".join(map(ast.dump, function.decorator_list)):
                returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                alone = [each for each in returned if isinstance(each, ast.Constant) and each.value is None]
                assert not alone, f"{file.name}: {function.name}"


def test_files_stay_readable():
    long = {str(f.relative_to(SOURCE)): n for f in FILES if (n := len(f.read_text().splitlines())) > 900}
    assert not long


@pytest.mark.parametrize("file", sorted((SOURCE / "kernels").rglob("*.py")), ids=lambda file: file.stem)
def test_no_kernel_returns_none(file: Path):
    """Triton 3.6 makes a tensor of what a function returns, and has none for None; 3.7 and its interpreter have."""
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(each) for each in function.decorator_list
        ):
            given = [
                each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value is not None
            ]
            parts = [part for value in given for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
            assert not any(isinstance(part, ast.Constant) and part.value is None for part in parts), function.name
