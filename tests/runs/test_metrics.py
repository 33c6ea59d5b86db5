"""Figures derived from a run, by hand."""

from pathlib import Path

import msgspec
import pytest

from stepscope.core.device_spec import DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import phase_work
from stepscope.core.run_directory import load_runs
from stepscope.runs import metrics
from tests.conftest import make_run, workload


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_tokens_per_second_are_those_of_the_whole_step(accumulation: int):
    """Micro-batches divide a step's tokens, they do not make them fewer."""
    run = make_run(workload(batch_size=8, seq_len=32, accumulation=accumulation), step=[0.5] * 5)
    assert metrics.tokens_per_s(run) == 8 * 32 / 0.5


@pytest.mark.parametrize("accumulation", [1, 4])
def test_flops_per_second_are_those_of_the_whole_step(accumulation: int):
    of = workload(batch_size=8, accumulation=accumulation)
    run = make_run(of, step=[0.5] * 5)
    whole = phase_work(workload(batch_size=8))
    assert metrics.model_flops(run) == sum(work.flops for work in whole.values())
    assert metrics.model_flops_per_s(run) == sum(work.flops for work in whole.values()) / 0.5


@pytest.mark.parametrize(("dtype", "peak"), [("fp32", 1e12), ("bf16", 8e12)])
def test_utilisation_is_against_the_peak_of_the_dtype_that_ran(dtype: str, peak: float):
    run = make_run(workload(dtype=dtype), step=[0.5] * 5)
    spec = DeviceSpec(name="a device", source="by hand", peak_flops_per_s={"fp32": 1e12, "bf16": 8e12})
    run = msgspec.structs.replace(run, device_spec=spec)
    assert metrics.mfu_datasheet(run) == (metrics.model_flops(run) or 0) / 0.5 / peak


def parsed(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The samples of OpenMetrics, by Prometheus' own reader, which must also take it for the text format that
    node_exporter reads."""
    reason = "needs prometheus-client: pip install 'stepscope[trackers]'"
    open_metrics = pytest.importorskip("prometheus_client.openmetrics.parser", reason=reason)
    older = pytest.importorskip("prometheus_client.parser", reason=reason)
    families = [*open_metrics.text_string_to_metric_families(text)]
    assert len([*older.text_string_to_metric_families(text)]) == len(families)
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in families:
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def test_open_metrics_are_what_prometheus_reads():
    run = make_run(workload(batch_size=8, seq_len=32), forward=[0.2] * 5, backward=[0.3] * 5, tag='a "word" \\ here')
    found = parsed(metrics.open_metrics(run))
    of_all = {("workload", "-".join(run.workload.words())), ("device", "a CPU")}
    assert found["stepscope_tokens_per_second"] == {frozenset(of_all): 8 * 32 / 0.5}
    assert found["stepscope_part_seconds"][frozenset({*of_all, ("part", "forward"), ("stat", "median")})] == 0.2
    assert found["stepscope_run_begun_seconds"] == {frozenset(of_all): 1767225600.0}
    ((info, one),) = found["stepscope_run_info"].items()
    assert one == 1 and {("tag", 'a "word" \\ here'), ("run", run.id), *of_all} < info


def test_every_figure_of_a_summary_is_a_gauge():
    """Figures of GPUs and of ranks have one, too; whoever adds a figure adds its gauge."""
    runs, _ = load_runs([Path("results/h100-x2/parallel"), Path("results/h200/energy")])
    names = {name for run in runs for name in metrics.summarise(run)}
    assert {"power_w", "sent_bytes", "mfu_measured"} <= names
    parts = tuple(f"{part}_" for run in runs for part in run.samples)
    assert {name for name in names - metrics.GAUGES.keys() if not name.startswith(parts)} == set()
    for run in runs[:3]:
        parsed(metrics.open_metrics(run))


def test_a_file_of_somebody_elses_stays(tmp_path: Path):
    file, run = tmp_path / "node.prom", make_run(step=[0.5] * 5)
    metrics.write_metrics([run], file)
    metrics.write_metrics([run], file)
    assert [*tmp_path.iterdir()] == [file] and file.read_text().endswith("\n# EOF\n")
    file.write_text("up 1\n")
    with pytest.raises(InputError, match="was not written by this command"):
        metrics.write_metrics([run], file)
    with pytest.raises(InputError, match="cannot be written: there is no folder"):
        metrics.write_metrics([run], tmp_path / "nowhere" / "node.prom")


def test_figures_of_several_runs_name_their_run():
    runs = [msgspec.structs.replace(make_run(step=[seconds] * 5), id=str(seconds)) for seconds in (0.5, 0.25)]
    steps = parsed(metrics.open_metrics(*runs))["stepscope_part_seconds"]
    medians = {dict(labels)["run"]: value for labels, value in steps.items() if ("stat", "median") in labels}
    assert medians == {"0.5": 0.5, "0.25": 0.25}
