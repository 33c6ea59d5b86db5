"""Measures a user's script at several commits of its repository: a worktree each, processes in turns.

Every process is `stepscope watch -- SCRIPT`, or `stepscope run`, in the worktree of its commit, at the folder where the
user stands. What breaks such comparisons is refused, with the remedy: code that is imported from the repository itself,
since its package is installed as editable, and not from the worktree; a worktree that cannot be made; a script that
needs files that git does not track. Caches of what PyTorch and Triton compile lie apart, so that no side finds what the
other compiled.
"""

import contextlib
import importlib.metadata
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.core.errors import InputError, one_line, warn
from stepscope.core.interrupts import awaited
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.core.units import counted
from stepscope.engine.request import Stage, Tell

WORKING_TREE = "."
"""The name of what lies in the folder now, with changes that are not committed."""
_LINES = 3
"""Lines of a script's last words that a message repeats."""
_PATIENCE_S = 10
"""Seconds that a script which is told to end has for it."""
_GUARDED, _FOREIGN = "STEPSCOPE_GUARDED", "STEPSCOPE_FOREIGN"


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One side: a commit in a worktree of its own, or the folder as it is."""

    name: str
    """As the user wrote it."""
    commit: str
    root: Path
    shared: tuple[Path, ...] = ()
    """Paths that git does not track, and that its worktree has links to."""

    @property
    def title(self) -> str:
        """The name, and the commit where that says something else."""
        if self.name == WORKING_TREE:
            return f"the folder as it is (at {self.commit[:10]})"
        return self.name if self.commit.startswith(self.name) else f"{self.name} ({self.commit[:10]})"

    @property
    def folder(self) -> str:
        """The name of the folder that holds its runs: as the user named it, and its commit."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in self.name)
        commit = self.commit[:10]
        return (
            f"working-tree-{commit}" if self.name == WORKING_TREE else commit if commit in name else f"{name}-{commit}"
        )


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The repository in which the user stands."""

    root: Path
    below: Path
    """Where the user stands in it."""

    @classmethod
    def here(cls, folder: Path | None = None) -> "Repository":
        """The repository of this folder. Raises InputError where there is none."""
        folder = (folder or Path.cwd()).resolve()
        root = _git(folder, "rev-parse", "--show-toplevel", what=f"{folder} is in no git repository")
        return cls(root=Path(root).resolve(), below=folder.relative_to(Path(root).resolve()))

    def commit(self, name: str) -> str:
        """The commit that a name means. Raises InputError where it means none."""
        what, verify = f"{name!r} names no commit of {self.root}", ("rev-parse", "--verify", "--quiet")
        try:
            return _git(self.root, *verify, f"{name}^{{commit}}", what=what)
        except InputError as error:
            remedy = ""
            if _git(self.root, "rev-parse", "--is-shallow-repository", what=what) == "true":
                remedy = "; the clone is shallow: git fetch --unshallow --tags (`fetch-depth: 0` in a workflow)"
            with contextlib.suppress(InputError):
                _git(self.root, *verify, f"refs/remotes/origin/{name}", what="")
                remedy = f"; origin/{name} names one"
            raise InputError(f"{error}{remedy}") from None

    @property
    def changed(self) -> list[str]:
        """Tracked files that were changed since the last commit."""
        names = _git(self.root, "diff", "--name-only", "HEAD", what="git diff fails")
        return names.splitlines()


def _git(folder: Path, *arguments: str, what: str) -> str:
    # No hook of the user's runs; and in one of git's own, its variables name another repository and another folder.
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=300, env=_without_git()
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"{what}: {one_line(error)}") from error
    if answer.returncode:
        errors = answer.stderr.strip().splitlines()
        if "safe.directory" in answer.stderr:
            raise InputError(f"git refuses {folder}, which belongs to another user: {errors[-1].strip()}")
        raise InputError(f"{what}{f': {errors[-1]}' if errors else ''}")
    return answer.stdout.strip()


def _without_git() -> dict[str, str]:
    """The environment without what a hook, or `git rebase --exec`, says of its own repository."""
    places = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
    return {name: value for name, value in os.environ.items() if name not in places}


@contextlib.contextmanager
def checkouts(repository: Repository, names: Sequence[str], shared: Sequence[Path] = ()) -> Generator[list[Checkout]]:
    """Worktrees of these commits while open; `.` is the folder as it is.

    shared: paths in the repository that git does not track, such as data: each worktree gets a link to them. Raises
    InputError where a name means no commit, or a worktree cannot be made.
    """
    commits = {name: repository.commit("HEAD" if name == WORKING_TREE else name) for name in names}
    changed = repository.changed
    of_code = {(commit, name == WORKING_TREE and bool(changed)) for name, commit in commits.items()}
    if len(of_code) < len(names):
        raise InputError(f"{' and '.join(names)} are the same code, of commit {next(iter(commits.values()))[:10]}")
    if changed and WORKING_TREE not in names:
        files = f"{changed[0]} was" if len(changed) == 1 else f"{len(changed)} files were"
        warn(f"{files} changed since the last commit, which is not measured: `.` is the folder as it is")
    for path in shared:
        if not (repository.root / repository.below / path).exists():
            raise InputError(f"--share {path}: it is not there")
    place = Path(tempfile.mkdtemp(prefix="stepscope-commits-"))
    created: list[Checkout] = []
    try:
        for number, (name, commit) in enumerate(commits.items()):
            if name == WORKING_TREE:
                created.append(Checkout(name=name, commit=commit, root=repository.root))
                continue
            root = place / f"{number}-{commit[:10]}" / repository.root.name
            _git(
                repository.root, "worktree", "add", "--quiet", "--detach", str(root), commit,
                what=f"no worktree of {name} can be made",
            )  # fmt: skip
            created.append(Checkout(name=name, commit=commit, root=root.resolve(), shared=tuple(shared)))
            if not (root / repository.below).is_dir():
                raise InputError(f"{name} has no folder {repository.below}: stand in one that each commit has")
            if (root / ".gitmodules").exists():
                _git(
                    root, "submodule", "update", "--init", "--recursive", "--quiet",
                    what=f"no submodules of {name} can be had; measure folders that have them, and compare their runs",
                )  # fmt: skip
            _link(repository, root, shared)
        yield created
    finally:
        for checkout in created:
            if checkout.root != repository.root:
                with contextlib.suppress(InputError):
                    _git(repository.root, "worktree", "remove", "--force", str(checkout.root), what="")
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(InputError):
            _git(repository.root, "worktree", "prune", what="")


def _link(repository: Repository, root: Path, shared: Sequence[Path]) -> None:
    for path in shared:
        source = (repository.root / repository.below / path).resolve()
        if not source.is_relative_to(repository.root):
            continue  # a path outside is the same for all
        link = root / source.relative_to(repository.root)
        if link.exists():
            raise InputError(f"--share {path}: git tracks it, so each commit has its own: leave it out")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source)


@dataclass
class Turns:
    """The runs of every side, as they come, each with its folder."""

    runs: dict[str, list[tuple[Run, Path]]] = field(default_factory=dict[str, list[tuple[Run, Path]]])
    interrupted: bool = False


def measure_in_turns(
    repository: Repository,
    commits: Sequence[Checkout],
    words: Sequence[str],
    *,
    out: Path,
    processes: int,
    tell: Tell = lambda _: None,
) -> Turns:
    """Run this command of stepscope at each side, so many times, each side first in every other round.

    words: a verb that stores a run, its options and what follows. out: runs of a side lie in a folder of it there.
    Ctrl-C leaves the runs that are done. Raises InputError, with the script's last lines, where a process ends without
    a run that was measured to the end.
    """
    turns = Turns(runs={side.name: [] for side in commits})
    for word in words:
        lacking = [
            side for side in commits if not Path(side.root, repository.below, _at(side, repository, word)).is_file()
        ]
        if word.endswith(".py") and 0 < len(lacking) < len(commits):
            raise InputError(f"{word} is not there at {lacking[0].title}")
    with tempfile.TemporaryDirectory(prefix="stepscope-caches-") as caches:
        try:
            for number in range(processes):
                for side in commits if number % 2 == 0 else reversed(commits):
                    done, whole = sum(map(len, turns.runs.values())), processes * len(commits)
                    tell(Stage(name=f"process {done + 1} of {whole}", detail=side.title, fraction=done / whole))
                    turns.runs[side.name].append(
                        _one(repository, side, words, out.resolve() / side.folder, Path(caches))
                    )
        except KeyboardInterrupt:
            turns.interrupted = True
        except InputError as error:
            done = sum(map(len, turns.runs.values()))
            kept = (
                f"; {counted(done, 'run')} that {'was' if done == 1 else 'were'} measured before: {out}" if done else ""
            )
            raise InputError(f"{error}{kept}") from None
    return turns


def refresh(repository: Repository, side: Checkout) -> None:
    """Take from a worktree what an earlier process left there: a checkpoint to go on from, a folder that it made."""
    if side.root != repository.root:
        _git(side.root, "reset", "--hard", "--quiet", what=f"the worktree of {side.name} cannot be reset")
        _git(side.root, "clean", "-ffdxq", what=f"the worktree of {side.name} cannot be cleaned")
        _link(repository, side.root, side.shared)


def _one(repository: Repository, side: Checkout, words: Sequence[str], folder: Path, caches: Path) -> tuple[Run, Path]:
    """One process, and its run."""
    refresh(repository, side)
    before = {*find_run_files(folder)} if folder.exists() else set[Path]()
    foreign = caches / "foreign.json"
    foreign.unlink(missing_ok=True)
    verb, *rest = (_at(side, repository, word) for word in words)
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope.engine.commits", verb, "--runs", str(folder), *rest],
        cwd=side.root / repository.below, env=_environment(repository, side, caches, foreign),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        _, output = awaited(process.communicate)
    except BaseException:
        _end(process)
        raise
    if foreign.exists():
        module, file = json.loads(foreign.read_text())
        raise InputError(
            f"at {side.title} the script imports {module} from {file}, which is not of that commit: its package is "
            "installed from there; install it in an environment of its own for each commit, measure each with "
            "`stepscope watch`, and compare their runs"
        )
    new = [file for file in find_run_files(folder) if file not in before] if folder.exists() else []
    runs = [(load_run(file), file.parent) for file in new]
    done = [pair for pair in runs if pair[0].status == "done"]
    if not done:
        last = [line for line in output.splitlines() if line.strip()][-_LINES:]
        what = f"ended with code {process.returncode}" if process.returncode >= 0 else "was killed"
        raise InputError(
            f"at {side.title} the script {what}, and no step was measured to the end: "
            f"{' | '.join(last)}{_missing(output, repository)}"
        )
    return done[-1]


def _at(side: Checkout, repository: Repository, word: str) -> str:
    """A word of the command, at this side: an absolute path of a tracked file in the repository is the worktree's."""
    name, sign, place = word.rpartition("=")
    if not Path(place).is_absolute() or not (inside := Path(os.path.realpath(place))).is_relative_to(repository.root):
        return word
    there = _moved(inside, repository, side)
    tracked = there.exists() or _git(repository.root, "ls-files", "--", str(inside), what="git ls-files fails")
    return f"{name}{sign}{there}" if tracked else word


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and those that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
            return


def _missing(output: str, repository: Repository) -> str:
    """The remedy where a script asks for a file or a module that only the folder itself has."""
    here = repository.root / repository.below
    for line in reversed(output.splitlines()):
        _, sign, name = line.rpartition("No such file or directory:")
        name = name.strip().strip("'\"")
        if sign and name and not Path(name).is_absolute() and (here / name).exists():
            return f"; git does not track {name}: --share {Path(name).parts[0]} gives it to each commit"
        _, sign, name = line.rpartition("No module named ")
        built = sorted(repository.root.rglob(f"{name.strip(chr(39)).rpartition('.')[2]}.*.so")) if sign else []
        if built:
            place = os.path.relpath(built[0], here)
            return (
                f"; git does not track what is compiled: --share {place} gives this build to each commit, where its "
                "source is the same; else build each commit in a folder of its own, and compare their runs"
            )
    return ""


def _environment(repository: Repository, side: Checkout, caches: Path, foreign: Path) -> dict[str, str]:
    """The process's environment: imports come from the worktree, and what is compiled is kept apart."""
    environment = _without_git()
    for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        environment[variable] = str(caches / side.folder / folder)
    if side.root == repository.root:
        return environment
    inside = [Path(place) for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    places = [_moved(place.resolve(), repository, side) for place in (*_editable(repository), *inside)]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, dict.fromkeys(places)))
    environment[_GUARDED] = json.dumps([str(repository.root), str(side.root)])
    environment[_FOREIGN] = str(foreign)
    return environment


def _moved(place: Path, repository: Repository, side: Checkout) -> Path:
    return side.root / place.relative_to(repository.root) if place.is_relative_to(repository.root) else place


def _editable(repository: Repository) -> list[Path]:
    """Folders of the repository from which packages are installed as editable: the project's, and its src."""
    places: list[Path] = []
    for package in importlib.metadata.distributions():
        text = package.read_text("direct_url.json")
        about: Any = json.loads(text) if text else {}
        if not about.get("dir_info", {}).get("editable"):
            continue
        folder = Path(about["url"].removeprefix("file://")).resolve()
        if folder.is_relative_to(repository.root):
            places += [place for place in (folder / "src", folder) if place.is_dir()]
    return places


class _Guard(MetaPathFinder):
    """Refuses what would be imported from the repository itself, in place of the worktree, and notes it."""

    def __init__(self, repository: Path, worktree: Path, foreign: Path) -> None:
        self._repository, self._worktree, self._foreign = repository, worktree, foreign
        self._looked_for: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._looked_for:  # another finder asks all of them, as this one does
            return None
        self._looked_for.add(fullname)
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            specs = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._looked_for.discard(fullname)
        if spec is not None:
            self._check(fullname, spec)
        return spec

    def _check(self, fullname: str, spec: ModuleSpec) -> None:
        if spec.origin is None or not Path(spec.origin).is_absolute():
            return
        file = Path(spec.origin).resolve()
        libraries = {"site-packages", "dist-packages"}
        if file.is_relative_to(self._repository) and not libraries & {*file.parts}:
            self._foreign.write_text(json.dumps([fullname, str(file)]))
            raise ImportError(f"{fullname} comes from {file}, and not from {self._worktree}")


def main() -> None:
    """Run the command line of stepscope in a process whose imports are guarded."""
    guarded, foreign = os.environ.pop(_GUARDED, ""), os.environ.pop(_FOREIGN, "")
    if guarded:
        repository, worktree = map(Path, json.loads(guarded))
        sys.meta_path.insert(0, _Guard(repository, worktree, Path(foreign)))
    runpy.run_module("stepscope", run_name="__main__")


if __name__ == "__main__":
    main()
