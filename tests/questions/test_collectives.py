"""The answer about collectives, of times that are made up."""

import pytest

from stepscope.core.environment import Environment
from stepscope.core.samples import Samples
from stepscope.core.study_results import CollectiveTime, keep_fits, kept_fits
from stepscope.questions.collectives import answer_collectives, fits_of
from stepscope.rendering.picture import draw_svg


def time(
    message_bytes: int, seconds: float, kind: str = "all-reduce", backend: str = "nccl", ranks: int = 4
) -> CollectiveTime:  # fmt: skip
    return CollectiveTime(
        kind=kind, backend=backend, ranks=ranks, message_bytes=message_bytes,
        samples=Samples(values_s=(seconds,) * 5, clock="made up"),
    )  # fmt: skip


def place(device: str) -> Environment:
    return Environment(
        device_type="cuda", device_name=device, memory_bytes=1, cpu_name="a CPU", cpu_cores=2, threads=1,
        system="Linux", versions={"torch": "2.13"},
    )  # fmt: skip


TIMES = [time(10**6, 0.020e-3), time(10**9, 10.01e-3)]


def test_bandwidths_and_their_share_of_the_peak():
    answer = answer_collectives(TIMES, place("NVIDIA H200"), "2026-11-23")
    row = answer.table("Times").rows[1]
    assert row[4:8] == (pytest.approx(10.01e-3), pytest.approx(99.9e9, rel=1e-3), pytest.approx(149.85e9, rel=1e-3),
                        pytest.approx(149.85 / 450, rel=1e-3))  # fmt: skip
    assert "33.3 % of the link's peak: all-reduce of 953.67 MiB" in answer.findings[0].sentence
    fit = answer.table("Latency and bandwidth").rows[0]
    assert fit[3:5] == (pytest.approx(10e-6, rel=1e-2), pytest.approx(1e11, rel=1e-3))
    assert [point.y for point in answer.panels[0].points] == [pytest.approx(75), pytest.approx(149.85, rel=1e-3)]


def test_each_number_of_ranks_has_a_panel():
    """Six kinds over 2, 4 and 8 ranks would be eighteen lines of one, more than a plot can tell apart."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send and receive")
    found = [time(size, 1e-3, kind, ranks=ranks) for ranks in (2, 4, 8) for kind in kinds for size in (10**6, 10**7)]
    answer = answer_collectives(found, place("NVIDIA H200"), "2026-11-23")
    assert [panel.y_title.partition(", ")[2] for panel in answer.panels] == [
        f"{ranks} ranks over nccl" for ranks in (2, 4, 8)
    ]
    assert "<svg" in draw_svg(answer)


def test_gloo_has_no_peak_and_what_failed_no_time():
    lost = CollectiveTime(kind="all-to-all", backend="gloo", ranks=2, message_bytes=1024, failure="not here")
    answer = answer_collectives([time(1024, 1e-3, backend="gloo"), lost], place("NVIDIA H200"), "2026-11-23")
    assert [row[7] for row in answer.table("Times").rows] == [None, None]
    assert answer.table("Times").rows[1][4] == "not here"
    assert answer.findings[-1].sentence == "all-to-all over gloo of 1.00 KiB has no time: not here."


def test_fits_are_kept_beside_those_of_other_kinds(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    here = place("a GPU of ours")
    assert kept_fits("a GPU of ours", "2.13") is None
    keep_fits(here, "2026-11-22", fits_of(TIMES))
    keep_fits(here, "2026-11-23", fits_of([time(1000, 1.0, "broadcast"), time(2000, 1.5, "broadcast")]))
    keep_fits(here, "2026-11-24", fits_of([time(10**6, 1.0), time(10**9, 2.0)]))
    kept = kept_fits("a GPU of ours", "2.13")
    assert kept is not None and kept.measured_at == "2026-11-24" and len(kept.fits) == 2
    reduced = kept.fit("all-reduce", "nccl", 4)
    assert reduced is not None and reduced.seconds(10**9) == pytest.approx(2.0)
    assert kept.fit("broadcast", "nccl", 4) is not None and kept.fit("broadcast", "nccl", 8) is None
    next(tmp_path.iterdir()).write_text("{")
    assert kept_fits("a GPU of ours", "2.13") is None
