"""Real captures of one cell by both profilers: every kernel accounted for, and the two agree."""

import gzip
import sqlite3
from pathlib import Path

import polars as pl
import pytest

from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary

DATA = Path(__file__).parents[1] / "data"
LAYERS = 12


@pytest.fixture(scope="module")
def kineto() -> Attribution:
    return attribute(read_trace(DATA / "kineto_train.json.gz"))


@pytest.fixture(scope="module")
def nsys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nsys") / "train.sqlite"
    path.write_bytes(gzip.decompress((DATA / "nsys_train.sqlite.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def nsys(nsys_file: Path) -> Attribution:
    return attribute(read_trace(nsys_file))


@pytest.fixture(params=["kineto", "nsys"])
def each(request: pytest.FixtureRequest) -> Attribution:
    return request.getfixturevalue(request.param)


def test_every_kernel_is_attributed(each: Attribution):
    each.self_check()
    assert each.unattributed_ns == 0
    assert each.kernels["phase"].null_count() == 0
    assert each.kernels.height == 1768
    assert each.steps == 1


def test_the_kernels_are_those_of_the_export(nsys: Attribution, nsys_file: Path):
    """Counted and summed by SQL alone."""
    with sqlite3.connect(f"file:{nsys_file}?mode=ro", uri=True) as connection:
        counted, busy = connection.execute(
            'SELECT count(*), sum("end" - start) FROM CUPTI_ACTIVITY_KIND_KERNEL'
        ).fetchone()
    assert (nsys.kernels.height, int(nsys.kernels["duration_ns"].sum())) == (counted, busy)


def test_products_are_those_of_the_model(each: Attribution):
    """Seven linear maps a layer, two products of attention, the head; two of each in backward."""
    phases = {phase.phase: phase for phase in TraceSummary(attribution=each, run=None).phases}
    assert phases["forward"].product_kernels == LAYERS * 9 + 1
    assert phases["backward"].product_kernels == 2 * (LAYERS * 9 + 1)
    assert phases["optimizer"].product_kernels == 0


def test_each_module_has_its_products_in_forward_and_backward(each: Attribution):
    products = each.kernels.filter(pl.col("family") == "matrix multiplication")
    counted = {
        (module, phase): count
        for module, phase, count in products.group_by(pl.col("module", "phase").cast(pl.String)).len().iter_rows()
    }
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        linear = [f"{block}.attention.{name}" for name in ("query", "key", "value", "output")]
        linear += [f"{block}.feed_forward.{name}" for name in ("gate", "up", "down")]
        for module in linear:
            assert counted[module, "forward"] >= 1 and counted[module, "backward"] >= 2
        assert counted[f"{block}.attention", "forward"] == 2
        assert counted[f"{block}.attention", "backward"] == 4
    assert counted["head", "forward"] == 1


def test_the_two_profilers_agree(kineto: Attribution, nsys: Attribution):
    """Another step in another process: counts are equal, times within one per cent."""

    def table(attribution: Attribution, *by: str) -> dict:
        rows = attribution.kernels.group_by(pl.col(*by).cast(pl.String)).agg(
            pl.len(),
            pl.col("duration_ns").sum(),
            pl.col("duration_ns").filter(pl.col("family") == "matrix multiplication").sum().alias("gemm_ns"),
        )
        return {row[: len(by)]: row[len(by) :] for row in rows.iter_rows()}

    ours, theirs = table(kineto, "phase"), table(nsys, "phase")
    assert ours.keys() == theirs.keys() == {("forward",), ("backward",), ("optimizer",)}
    for phase, (count, busy, gemm) in ours.items():
        other_count, other_busy, other_gemm = theirs[phase]
        assert count == other_count
        assert busy == pytest.approx(other_busy, rel=0.01)
        assert gemm / busy == pytest.approx(other_gemm / other_busy, rel=0.01)
    by_module, other_by_module = table(kineto, "phase", "module"), table(nsys, "phase", "module")
    assert {key: row[0] for key, row in by_module.items()} == {key: row[0] for key, row in other_by_module.items()}


def test_softmax_made_of_pointwise_kernels_is_softmax(each: Attribution):
    softmax = each.kernels.filter(pl.col("part").cast(pl.String) == "softmax")
    assert set(softmax["family"].cast(pl.String).unique()) == {"softmax"}
    # maximum, subtraction, exponential, sum, division in each layer of forward
    assert softmax.filter(pl.col("phase") == "forward").height == 5 * LAYERS


def test_sequence_numbers_and_arrows_lead_to_the_same_operators(kineto: Attribution):
    assert kineto.links_checked == kineto.links_agree > 900


def test_findings(each: Attribution):
    kinds = {finding.kind: finding.severity for finding in check_trace(TraceSummary(attribution=each, run=None))}
    assert kinds == {"products-on-cuda-cores": "note", "phases-span-threads": "note"}


def test_inference_in_bf16():
    attribution = attribute(read_trace(DATA / "kineto_inference_bf16.json.gz"))
    attribution.self_check()
    summary = TraceSummary(attribution=attribution, run=None)
    assert [phase.phase for phase in summary.phases] == ["forward"]
    assert summary.phases[0].product_kernels == LAYERS * 9 + 1
    casts = attribution.kernels.filter(pl.col("family").cast(pl.String) == "copy/cast")
    assert casts.height > LAYERS * 7  # autocast copies every weight
