"""What is published: the sdist, the wheel that is built from it, and the command that the wheel installs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from stepscope import __version__
from tests.command import libraries

ROOT = Path(__file__).parents[2]
PACKAGED = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info")
"""An old egg-info would add the files that it lists to the sdist."""


def run_python(*arguments: object, cwd: Path, path: Path | None = None) -> str:
    """Run this Python with `path` before the libraries on its PYTHONPATH, and no other stepscope; return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *libraries()])}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments: object, cwd: Path) -> None:
    """Run pip without any index: nothing is downloaded."""
    run_python("-m", "pip", "--disable-pip-version-check", *arguments, "--no-index", "--no-deps", cwd=cwd)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    tree = place / "tree"
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=NOT_SOURCE)
    for name in PACKAGED:
        shutil.copy(ROOT / name, tree)
    run_python("-c", "from setuptools.build_meta import build_sdist; build_sdist('..')", cwd=tree)
    return place / f"stepscope-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    pip("wheel", "--no-build-isolation", sdist, cwd=sdist.parent)
    return sdist.parent / f"stepscope-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    place = wheel.parent / "installed"
    pip("install", "--no-compile", "--target", place, wheel, cwd=wheel.parent)
    return place


def source_files() -> dict[str, bytes]:
    """Every file of the package, code and data, by its name in the wheel."""
    files = [
        file for file in (ROOT / "src" / "stepscope").rglob("*") if file.is_file() and "__pycache__" not in str(file)
    ]
    return {file.relative_to(ROOT / "src").as_posix(): file.read_bytes() for file in files}


def test_the_sdist_holds_the_package_and_no_tests(sdist: Path):
    """Tests read docs/ and results/, so they belong to a clone."""
    with tarfile.open(sdist) as archive:
        names = {"/".join(PurePosixPath(each.name).parts[1:]) for each in archive.getmembers() if each.isfile()}
    beside = {name for name in names if not name.startswith("src/")}
    assert beside == {*PACKAGED, "PKG-INFO", "setup.cfg"}
    assert {name.removeprefix("src/") for name in names - beside if ".egg-info/" not in name} == set(source_files())


def test_the_wheel_holds_every_file_of_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        notes = f"stepscope-{__version__}.dist-info"
        licence = archive.read(f"{notes}/licenses/LICENSE")
        metadata = archive.read(f"{notes}/METADATA").decode()
    source = source_files()
    assert {"stepscope/py.typed", "stepscope/questions/text/alice.txt.gz"} < set(source)
    assert held == source
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert (ROOT / "README.md").read_text() in metadata


def test_the_installed_command_runs(installed: Path, tmp_path: Path):
    def run(*arguments: object) -> str:
        return run_python(*arguments, cwd=tmp_path, path=installed)

    assert Path(run("-c", "import stepscope; print(stepscope.__file__)").strip()).parent == installed / "stepscope"
    assert run("-m", "stepscope", "--version") == run(installed / "bin" / "stepscope", "--version")
    assert run("-m", "stepscope", "--version") == f"stepscope {__version__}\n"
    assert "backward" in run("-m", "stepscope", "show", ROOT / "results" / "cpu" / "first")


@pytest.mark.slow
def test_the_extra_that_measures_installs_where_nothing_of_it_is(sdist: Path, tmp_path: Path):
    """As workflows write it. pip itself resolves `stepscope[torch]`; what it needs lies beside, and is not fetched."""
    venv.create(tmp_path / "empty", with_pip=False)
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    here = tmp_path / "empty" / "bin" / "python"
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *libraries()}:
        for entry in Path(place).iterdir():
            if "stepscope" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    index = ("--no-index", "--find-links", sdist.parent, "--no-build-isolation", "--no-compile")
    words = ("-m", "pip", "--disable-pip-version-check", "--python", here, "install", *index, "stepscope[torch]")
    said = run_python(*words, cwd=tmp_path)
    assert f"Successfully installed stepscope-{__version__}" in said and "torch" in said
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = "--model tiny --layers 1 --seq-len 8 --device cpu --warmup 1 --steps 5 --no-profile --json"
    command = [here.with_name("stepscope"), "run", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert '"status": "done"' in done.stdout, done.stderr
