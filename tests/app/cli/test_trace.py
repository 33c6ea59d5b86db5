"""`stepscope trace`: its contract in JSON, its text, and one clear line for what it cannot read."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.core.run_directory import save_run
from tests.captures import (
    ELEMENTWISE,
    GEMM,
    Capture,
    kineto_trace,
    nsys_tables,
    training_steps,
    write_kineto,
    write_parquetdir,
    write_sqlite,
)
from tests.command import stepscope
from tests.conftest import at_length, make_run
from tests.shown import check_golden
from tests.textbook import textbook

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "trace.txt"


def spoken(path: Path, *options: str) -> dict:
    done = stepscope("trace", path, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def spell(capture: Capture, folder: Path, spelling: str) -> Path:
    if spelling == "kineto":
        return write_kineto(capture, folder / "t.json.gz")
    if spelling == "parquetdir":
        return write_parquetdir(nsys_tables(capture), folder / "t")
    return write_sqlite(nsys_tables(capture), folder / "t.sqlite")


@pytest.mark.parametrize("spelling", ["kineto", "sqlite", "parquetdir"])
def test_the_contract(tmp_path: Path, spelling: str):
    """Two steps of two layers of two modules: each module a GEMM of 400 ns and an elementwise kernel of 50 ns."""
    said = spoken(spell(training_steps(), tmp_path, spelling))
    assert list(said)[:6] == ["kernels", "busy_ns", "union_ns", "unattributed_ns", "ranges", "findings"]
    forward = 2 * 4 * (400 + 50)
    backward = 2 * 8 * 300
    optimizer = 2 * 70
    assert said["kernels"] == 2 * (8 + 8 + 1)
    assert said["busy_ns"] == forward + backward + optimizer
    assert said["union_ns"] <= said["busy_ns"]
    assert (said["copies"], said["copies_ns"]) == (2, 40)
    assert said["unattributed_ns"] == 0
    assert set(said["ranges"]) == {
        "ProfilerStep#0", "ProfilerStep#1", "forward", "backward", "optimizer",
        *(f"layers.{layer}{part}" for layer in (0, 1) for part in ("", ".attention", ".mlp")),
    }  # fmt: skip
    assert said["ranges"]["forward"] == {
        "instances": 2,
        "kernels": 16,
        "busy_ns": forward,
        "gemm_fraction": 400 / 450,
        "top_kernels": [
            {"name": GEMM, "calls": 8, "busy_ns": 3200, "family": "matrix multiplication"},
            {"name": ELEMENTWISE, "calls": 8, "busy_ns": 400, "family": "activation/elementwise"},
        ],
    }
    assert said["ranges"]["backward"]["kernels"] == 16
    assert said["ranges"]["backward"]["gemm_fraction"] == 0.5
    assert said["ranges"]["layers.0.attention"]["kernels"] == 4  # by its range: forward alone
    for finding in said["findings"]:
        assert {"kind", "severity", "sentence", "evidence"} <= set(finding)


def test_module_of_backward(tmp_path: Path):
    """Through the forward operator of the same sequence number."""
    said = spoken(write_kineto(training_steps(), tmp_path / "t.json"))
    backward = {row["module"]: row for row in said["modules"] if row["phase"] == "backward"}
    assert {name: row["busy_ns"] for name, row in backward.items()} == {
        "layers.*.attention": 4 * 300,
        "layers.*.mlp": 4 * 300,
    }


def test_text(tmp_path: Path):
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    path = write_kineto(training_steps(), tmp_path / "t.json")
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "trace", path.name],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    check_golden(done.stdout, GOLDEN)


def test_tables_that_are_asked_for(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json")
    for only, head in (
        ("kernel durations", "kernel durations, us"),
        ("tree", "operator tree, a step"),
        ("queue", "queue"),
    ):
        done = stepscope("trace", path, "--only", only, "--top", "3")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f" {head} ")
    by_calls = stepscope("trace", path, "--only", "operators", "--sort", "calls", "--style", "csv").stdout.splitlines()
    assert by_calls[1].startswith("aten::mm 2x3 3x4,8")
    said = spoken(path, "--top", "3")
    assert len(said["operator_tree"]) == 3
    assert {"operators", "kernel_times", "host_calls", "copies_by_direction", "queues"} <= set(spoken(path))
    assert spoken(path, "--stream", "7", "--module", "layers.0")["part"]["module"] == "layers.0"
    nothing = stepscope("trace", path, "--only", "graph replays")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "nothing for such a table" in nothing.stderr


def test_a_cut_is_a_capture(tmp_path: Path):
    path, cut = write_kineto(training_steps(), tmp_path / "t.json"), tmp_path / "cut.json.gz"
    done = stepscope("trace", path, "--step", "1", "--cut", cut)
    assert done.returncode == 0, done.stderr
    assert "rows of work in" in done.stderr
    one, other = spoken(path, "--step", "1"), spoken(cut)
    for key in ("kernels", "busy_ns", "union_ns", "copies", "phases", "modules", "families"):
        assert one[key] == other[key], key
    assert stepscope("trace", path, "--cut", path).returncode == 2
    assert stepscope("trace", path, "--against", path, "--cut", cut).returncode == 2


def test_hostile_names_move_no_cursor(tmp_path: Path):
    capture = Capture()
    hostile = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>\r\n" + "x" * 5000
    capture.range("forward", 0, 10_000)
    capture.range(hostile, 100, 5_000)
    capture.kernel(200, 300, name=hostile)
    for path in (spell(capture, tmp_path, "kineto"), spell(capture, tmp_path, "sqlite")):
        done = stepscope("trace", path)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout and "\r" not in done.stdout
        assert hostile in spoken(path)["ranges"]


def test_names_that_mean_something_to_a_terminal_are_shown_as_text(tmp_path: Path):
    names = ["[bold]x[/bold]", "\x1b[2Jevil", "\u202eevil", "a\nb", "a b", ""]
    capture = Capture()
    capture.range("forward", 0, 100_000)
    for number, name in enumerate(names):
        capture.range(f"[red]m{name}", 1000 * number + 100, 1000 * number + 600)
        capture.kernel(1000 * number + 200, 50, name=name)
    for path in (write_kineto(capture, tmp_path / "t.json"), write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite")):
        done = stepscope("trace", path)
        rows = {line.strip().partition("   ")[0] for line in done.stdout.splitlines()}
        told = {"[bold]x[/bold]", "\\u001b[2Jevil", "\\u202eevil", "a b (1)", "a b (2)", "(no name)"}
        assert len(told & rows) == 5  # as many kernels as the table shows
        assert {"[red]m[bold]x[/bold]", "[red]m\\u001b[2Jevil", "[red]ma b", "[red]ma b (2)", "[red]m"} <= rows


def test_a_run_beside_the_capture_gives_the_unprofiled_times(tmp_path: Path):
    run = make_run(forward=[0.001, 0.002, 0.003])
    save_run(run, tmp_path)
    write_kineto(training_steps(), tmp_path / "trace.kineto.json.gz")
    said = spoken(tmp_path)
    assert said["phases"][0]["phase"] == "forward"
    assert said["phases"][0]["unprofiled_s"] == 0.002
    assert said["phases"][0]["expected_products"] == textbook(run).model.layers * 9 + 1


def test_an_incomplete_capture_fails_the_check(tmp_path: Path):
    capture = Capture()
    capture.range("forward", 0, 200_000)
    for number in range(100):
        capture.kernel(10 + number * 1000, 500)
    del capture.launched[12:]
    done = stepscope("trace", write_kineto(capture, tmp_path / "t.json"))
    assert done.returncode == 1
    assert "error incomplete-trace: 88 of 100 launches" in done.stdout


def truncated_gzip(folder: Path) -> Path:
    path = write_kineto(training_steps(), folder / "t.json.gz")
    path.write_bytes(path.read_bytes()[:-200])
    return path


def truncated_json(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps(kineto_trace(training_steps()))[:-500])
    return path


def not_a_number(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}')
    return path


def deep(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_text('{"traceEvents": [' + "[" * 5_000_000)
    return path


def no_sqlite_of_nsys(folder: Path) -> Path:
    return write_sqlite({"people": [{"id": 1, "name": "Ada"}]}, folder / "t.sqlite")


def without_cuda(folder: Path) -> Path:
    tables = nsys_tables(training_steps())
    return write_sqlite({name: rows for name, rows in tables.items() if "CUPTI" not in name}, folder / "t.sqlite")


def without_ranges(folder: Path) -> Path:
    tables = nsys_tables(training_steps())
    del tables["NVTX_EVENTS"]
    return write_sqlite(tables, folder / "t.sqlite")


def bomb(folder: Path) -> Path:
    path = folder / "t.json.gz"
    begin, block = (gzip.compress(data, 1) for data in (b'{"traceEvents": [', b" " * (1 << 24)))
    path.write_bytes(begin + 96 * block)  # a file may be several in a row
    return path


def empty(folder: Path) -> Path:
    path = folder / "t.json"
    path.touch()
    return path


def missing(folder: Path) -> Path:
    return folder / "nothing.json"


def a_pointer(folder: Path) -> Path:
    path = folder / "t.json.gz"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    return path


def no_json(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_bytes(bytes(range(256)) * 100)
    return path


@pytest.mark.parametrize(
    "make",
    [truncated_gzip, truncated_json, not_a_number, deep, no_sqlite_of_nsys, without_cuda, empty, missing, no_json,
     a_pointer, *at_length(bomb)],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path: Path, make):
    path = make(tmp_path)
    done = stepscope("trace", path, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stepscope: ") and done.stderr.count("\n") == 1
    assert path.name in done.stderr


def test_kernels_alone_where_there_are_no_ranges(tmp_path: Path):
    path = without_ranges(tmp_path)
    said = spoken(path)
    assert said == spoken(path, "--no-ranges")
    assert [finding["kind"] for finding in said["findings"] if finding["severity"] != "note"] == ["ranges-missing"]
    assert said["kernels"] == 34
    assert said["unattributed_ns"] == said["busy_ns"]
    assert said["ranges"] == {}


def test_no_torch_is_needed(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json")
    code = (
        "import sys; sys.argv = ['stepscope', 'trace', sys.argv[1]]\n"
        "from stepscope.app.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_newest_run_is_traced_by_its_name(tmp_path: Path):
    for name in ("20260101-old", "20260102-new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save_run(make_run(), tmp_path / "runs" / name)
    write_kineto(training_steps(), tmp_path / "runs" / "20260102-new" / "trace.kineto.json.gz")
    for name in ("last", "new"):
        done = stepscope("trace", name, "--json", cwd=tmp_path)
        assert json.loads(done.stdout)["kernels"] == 34, done.stderr
    for name, says in (("old", "holds no trace"), ("2026010", "2 runs in runs match"), ("none", "no such file")):
        done = stepscope("trace", name, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "") and says in done.stderr and done.stderr.count("\n") == 1


def test_links_in_a_circle_are_said_to_be_that(tmp_path: Path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for verb in ("trace", "memory", "show", "ls", "table"):
        done = stepscope(verb, loop)
        assert (done.returncode, done.stdout) == (2, ""), verb
        assert "symbolic links" in done.stderr and done.stderr.count("\n") == 1


def test_parts_that_do_not_meet_are_one_line(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json.gz")
    assert spoken(path, "--range", "forward", "--phase", "forward")["kernels"] == 16
    done = stepscope("trace", path, "--range", "forward", "--phase", "optimizer")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--range forward and --phase optimizer: nothing was launched in all of these" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_was_found_is_printed_where_nothing_can_be_drawn(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json.gz")
    done = stepscope("trace", path, "--save", tmp_path / f"{'x' * 300}.svg")
    assert done.returncode == 2 and "cannot write the plot" in done.stderr
    assert done.stdout == stepscope("trace", path).stdout
