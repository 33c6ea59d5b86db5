"""The project's measures as a table: how large, how knotted, and where it says a thing twice.

    python -m tests.measures [--private]

It judges nothing: tests/house/test_architecture.py does. Below the table are the files and names that it counts. Names
with an underscore are many, and are listed with --private. Repeated passages are counted where a program `duplicates`
is on PATH that prints, as its first line, how many pairs it found.
"""

import argparse
import ast
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stepscope"
LONG = 600
"""A file of more lines is listed. One of more than 900 fails tests/house/test_architecture.py."""


def files_imported(source: Path) -> dict[str, set[str]]:
    """Each module under `source`, a package, and those of them that importing it imports, inside functions too. The
    import of a module runs the `__init__` of every package above it first.
    """
    modules = {
        ".".join((source.name, *file.relative_to(source).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in source.glob("**/*.py")
    }
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        parts = [name.split(".") for name in names]
        above = {".".join(each[:length]) for each in parts for length in range(2, len(each) + 1)}
        found[module] = (above & modules.keys()) - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import one another, however long the way round."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    ahead = {module: reached(module) for module in graph}
    groups = {frozenset(o for o in ahead[module] if module in ahead[o]) for module in graph if module in ahead[module]}
    return sorted(map(set, groups), key=sorted)


def file_lengths(source: Path) -> dict[str, int]:
    """The lines of each file under `source`."""
    return {_name(file, source): len(file.read_text().splitlines()) for file in sorted(source.glob("**/*.py"))}


def defined_twice(source: Path) -> dict[str, list[str]]:
    """Classes and functions that stand at the top of two files or more under `source`, with those files."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(source.glob("**/*.py")):
        body = ast.parse(file.read_text()).body
        definitions = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        for name in {definition.name for definition in definitions}:
            found[name].append(_name(file, source))
    return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def repeated_passages(root: Path) -> str:
    """What `duplicates` says of the tree, in one line; or why there is nothing to say."""
    program = shutil.which("duplicates")
    if program is None:
        return "not counted: no program `duplicates` on PATH"
    try:
        done = subprocess.run([program], cwd=root, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not counted: {error}"
    return next(iter(done.stdout.splitlines()), "not counted: `duplicates` printed nothing")


def report(root: Path, source: Path, *, private: bool) -> str:
    """The table, and below it what it counts."""
    lengths, knots, twice = file_lengths(source), circles(files_imported(source)), defined_twice(source)
    long = {name: lines for name, lines in lengths.items() if lines > LONG}
    public = {name: files for name, files in twice.items() if not name.startswith("_")}
    table = {
        "lines of src": f"{sum(lengths.values()):,} in {len(lengths):,} files",
        f"files over {LONG} lines": f"{len(long)}",
        "circles of imports": f"{len(knots)}",
        "public names defined twice": f"{len(public)}",
        "private names defined twice": f"{len(twice) - len(public)}",
        "places that say the same": repeated_passages(root),
    }
    lists = {
        f"files over {LONG} lines": [f"{lines} {name}" for name, lines in sorted(long.items(), key=lambda e: -e[1])],
        "circles of imports": [" ".join(sorted(knot)) for knot in knots],
        "names defined twice": [f"{name}: {' '.join(f)}" for name, f in (twice if private else public).items()],
    }
    rows = [f"{label:<30}{value}" for label, value in table.items()]
    for label, items in lists.items():
        if items:
            rows += ["", label, *(f"  {item}" for item in items)]
    return "\n".join(rows)


def _name(file: Path, source: Path) -> str:
    return file.relative_to(source).as_posix()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.measures", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--private", action="store_true", help="list the names with an underscore too")
    print(report(ROOT, SOURCE, private=parser.parse_args().private))


if __name__ == "__main__":
    main()
