"""`stepscope study attention`: saved bytes by formula, powers and crossovers by hand, what gets no time, its text."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepscope.app.cli.app import app
from stepscope.core.answer import Table, decode_answer, encode_answer
from stepscope.core.attention_call import (
    AttentionCell,
    AttentionShape,
    AttentionTiming,
    AttentionTimings,
    CallMemory,
    call_flops,
    decode_timings,
    saved_by_formula,
)
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.files import json_document
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype
from stepscope.core.samples import Interval, Samples
from stepscope.questions.attention import (
    PRESETS,
    grid_groups,
    measure_grid,
    sizes_for,
)
from stepscope.questions.attention_answer import (
    BOTH,
    CELLS,
    COMPILED,
    HELD,
    MISSING,
    PEAK,
    SAVED,
    SCORES,
    SLOPES,
    Contest,
    answer_attention,
    arrange,
    fit_slope,
)
from stepscope.questions.attention_calls import draw_call
from stepscope.questions.attention_gate import GateMatrix, decode_matrix, judge_matrix
from stepscope.questions.attention_workers import WorkerAnswer, WorkerTask, work_through
from stepscope.questions.function_calls import CallPass, FunctionCalls, settings_for
from stepscope.training.attention import implementation
from stepscope.training.attention.inputs import attend, check_inputs
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import reference
from tests.shown import check_golden, shown

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden" / "study-attention.txt"
MIB = 2**20


def square(seq: int, **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "heads": 2, "key_heads": 2, "queries": seq, "keys": seq, "head_dim": 16, "causal": True}
    return msgspec.convert({**sizes, **changes}, AttentionShape)


def measure(groups: Sequence[Sequence[AttentionCell]], **options: Any) -> tuple[AttentionTimings, bool]:
    defaults: dict[str, Any] = {
        "device": "cpu", "seconds": 0, "steps": 5, "launches": "hidden", "budget_s": None, "workers": 0,
        "ceilings": False,
    }  # fmt: skip
    return measure_grid(groups, **{**defaults, **options})


def groups_of(*implementations: str, seq: Sequence[int] = (32,), **changes: Any) -> list[list[AttentionCell]]:
    choices: dict[str, Any] = {
        "head_dims": [16], "dtypes": ["fp32"], "batch_size": 1, "heads": 2, "key_heads": None, "causal": True,
        "compiles": ("none",),
    }  # fmt: skip
    return grid_groups(seq_lens=seq, implementations=implementations, **{**choices, **changes})


# ---- formulas


@pytest.mark.parametrize(
    "name", [n for n, r in ATTENTIONS.items() if r.memory and r.compiler is None and "cpu" in r.device_types]
)
def test_what_autograd_saves_is_what_the_formula_says(name: Attention):
    dtypes: tuple[TensorDtype, ...] = ("fp64", "fp32", "bf16", "fp16")
    for dtype, causal, key_heads, head_dim in itertools.product(dtypes, (True, False), (4, 2), (16, 20)):
        shape = square(70, batch=2, heads=4, key_heads=key_heads, keys=70, head_dim=head_dim, causal=causal)
        call, gradient = draw_call(shape, dtype, CPU)
        memory = FunctionCalls(CPU, settings_for(0), hidden=False).memory(
            CallPass(implementation(name), call, [gradient])
        )
        formula = saved_by_formula(AttentionCell(implementation=name, dtype=dtype, shape=shape), "cpu")
        assert formula is not None
        assert sum(memory.saved.values()) == formula.bytes, (dtype, shape)


def test_formula_by_hand():
    """B 2, H 3, S 8: scores 384 numbers, rows 48. fp32, causal: two of the scores, the sums, the mask."""
    cell = AttentionCell(implementation="reference", dtype="fp32", shape=square(8, batch=2, heads=3, key_heads=3))
    formula = saved_by_formula(cell, "cpu")
    assert formula is not None and formula.bytes == 2 * 384 * 4 + 48 * 4 + 64
    efficient = saved_by_formula(msgspec.structs.replace(cell, implementation="sdpa-efficient"), "cuda")
    assert efficient is not None and efficient.bytes == 48 * 16 * 4 + 6 * 32 * 4  # rows filled from 8 to 32
    assert saved_by_formula(msgspec.structs.replace(cell, compile="default"), "cpu") is None
    assert saved_by_formula(msgspec.structs.replace(cell, implementation="sdpa"), "cuda") is None


def test_flops_are_counted_half_where_causal():
    full = square(100, causal=False)
    assert call_flops(full) == 4 * 2 * 100 * 100 * 16
    assert call_flops(full, backward=True) == 2.5 * call_flops(full)
    assert call_flops(square(100)) * 2 == call_flops(full)


# ---- powers and crossovers


@given(st.floats(0.1, 3), st.floats(1e-9, 1e9))
def test_slope_of_a_power_is_the_power(power: float, factor: float):
    found = fit_slope([(seq, factor * seq**power) for seq in (256, 1024, 4096)])
    assert found is not None and found.power == pytest.approx(power, abs=1e-9)


def test_slope_is_of_the_longest_and_by_least_squares():
    """log2 of y at log2 of x 10, 11, 12 is 0, 3, 4: the slope is (-1 * 0 + 0 * 3 + 1 * 4) / 2 = 2."""
    found = fit_slope([(1, 1e9), (2**10, 1), (2**11, 8), (2**12, 16)])
    assert found is not None and found.power == pytest.approx(2) and found.sequences == (2**10, 2**11, 2**12)
    assert fit_slope([(4, 1.0)]) is None and fit_slope([(4, 0.0), (8, 1.0)]) is None and fit_slope([]) is None


def timing(
    name: Attention, seq: int, forward_ms: float = 0, backward_ms: float = 0,
    *, saved: int = 0, peak: int | None = None, **changes: Any,
) -> AttentionTiming:  # fmt: skip
    """Measured in no time at all, five passes each a little longer."""
    fields = {key: changes.pop(key) for key in ("compile", "dtype") if key in changes}
    shape = square(seq, heads=16, key_heads=16, head_dim=changes.pop("head_dim", 64))
    cell = msgspec.convert({"implementation": name, "dtype": "bf16", **fields, "shape": shape}, AttentionCell)
    if "outcome" in changes:
        return AttentionTiming(cell=cell, **changes)

    def samples(middle_ms: float) -> Samples:
        return Samples(values_s=tuple(middle_ms * 1e-3 * (1 + 0.001 * i) for i in (0, -2, 1, -1, 2)), clock="by hand")

    memory = CallMemory(saved_bytes=saved, before_backward_bytes=cell.input_bytes + saved, peak_bytes=peak)
    return AttentionTiming(
        cell=cell, outcome="measured", checked=2, forward=samples(forward_ms), backward=samples(backward_ms),
        host=samples(0.1), launches="hidden", memory=memory, **changes,
    )  # fmt: skip


def timings_by_hand(*rows: AttentionTiming) -> AttentionTimings:
    environment = Environment(
        device_type="cuda", device_name="a GPU", memory_bytes=80 * 2**30, l2_bytes=50 * MIB, cpu_name="a CPU",
        cpu_cores=8, system="Linux x86_64", versions={"torch": "2.11.0"},
    )  # fmt: skip
    return AttentionTimings(
        created="2026-01-01T00:00:00+00:00", environment=environment, seconds=0.3, launches="hidden",
        ceilings={"bf16": 700e12}, timings=rows,
    )  # fmt: skip


def fused_saved(seq: int) -> int:
    return 16 * seq * (64 * 2 + 4)


def naive_saved(seq: int) -> int:
    return 16 * seq * (2 * seq + 1) * 2 + seq * seq


STORY = timings_by_hand(
    *(
        timing("reference", seq, f, b, saved=naive_saved(seq), peak=3 * naive_saved(seq))
        for seq, f, b in ((1024, 0.05, 0.1), (4096, 0.8, 1.6), (16384, 12.8, 25.6))
    ),
    timing("reference", 65536, outcome="out of memory", reason="in a first pass: CUDA out of memory"),
    *(
        timing("flash", seq, f, b, saved=fused_saved(seq), peak=3 * fused_saved(seq))
        for seq, f, b in ((1024, 0.06, 0.12), (4096, 0.1, 0.2), (16384, 1.6, 3.2), (65536, 25.6, 51.2))
    ),
    timing("reference", 1024, 0.04, 0.08, saved=naive_saved(1024), compile="default"),
    timing("reference", 4096, 0.4, 0.8, saved=naive_saved(4096), compile="default"),
    timing("sdpa-math", 1024, outcome="wrong", reason="the gate: (1, 16, 203, 64, causal) in bf16: dq is not finite"),
    timing("sdpa-cudnn", 1024, outcome="failed", reason="in a first pass: RuntimeError: no engine"),
    timing("sdpa-flash", 1024, outcome="not reached"),
)


def table(title: str, timings: AttentionTimings = STORY) -> Table:
    return answer_attention(timings).table(title)


def test_times_by_sequence_and_implementation():
    found = table(BOTH)
    lines = ("reference", "flash", "reference, compiled", "sdpa-math", "sdpa-cudnn")  # sdpa-flash was not reached
    assert found.columns == ("dtype", "head_dim", "seq", *lines)
    assert found.rows[0] == ("bf16", 64, 1024, 0.15, 0.18, 0.12, "WRONG", "failed")
    assert found.rows[3] == ("bf16", 64, 65536, "OOM", 76.8, None, None, None)
    inputs_mib = 4 * 16 * 4096 * 64 * 2 / MIB
    held = table(HELD).rows[1]
    assert held[3] == pytest.approx(inputs_mib + naive_saved(4096) / MIB, rel=1e-3)
    assert held[4] == pytest.approx(inputs_mib + fused_saved(4096) / MIB, rel=1e-3)


def test_powers_crossovers_and_ratios_by_hand():
    study = arrange(STORY)
    naive, flash = study.curves[0], study.curves[1]
    assert [slope and round(slope.power, 2) for slope in naive.slopes.values()] == [2.0, 1.96, 2.0]
    assert [slope and round(slope.power, 2) for slope in flash.slopes.values()] == [2.0, 1.0, 1.0]
    contest = Contest(base=naive, other=flash)
    assert {seq: round(ratio.value, 3) for seq, ratio in contest.ratios.items()} == {
        1024: 0.833, 4096: 8.0, 16384: 8.0,
    }  # fmt: skip
    assert contest.crossover == (1024, 4096)
    assert naive.out_of_memory_at == 65536 and flash.out_of_memory_at is None
    assert Contest(base=flash, other=flash).crossover is None
    row = table(CELLS).rows[0]
    flops = 3.5 * 4 * 16 * 1024**2 * 64 / 2
    assert row[15] == pytest.approx(flops / 0.15e-3 / 1e12, rel=1e-3)
    assert row[16] == pytest.approx(100 * flops / 0.15e-3 / 700e12, abs=0.06)
    assert table(SLOPES).rows[0][3:] == (2.0, 1.96, 2.0, "1,024, 4,096, 16,384")


def test_every_sentence_follows_from_its_figures():
    found = {finding.kind: finding for finding in answer_attention(STORY).findings}
    assert found["refused"].severity == found["failed"].severity == "error"
    assert "runs out of memory of 80.00 GiB at sequence 65,536" in found["out of memory"].sentence
    faster = found["faster"].sentence
    assert "flash is 8" in faster and "slower up to 1,024 and faster from 4,096 on" in faster
    assert "Compiled, reference is 2.00 times as fast at sequence 4,096" in found["compiled"].sentence
    assert "in 7 of 7 cells" in found["saved bytes"].sentence
    off = msgspec.structs.replace(STORY, timings=(timing("flash", 1024, 1, 1, saved=2 * fused_saved(1024)),))
    sentence = next(f.sentence for f in answer_attention(off).findings if f.kind == "saved bytes")
    assert "in 0 of 1 cells" in sentence and "100.0 %" in sentence


def test_times_of_the_interpreter_are_said_to_be_no_kernels():
    on_gpu = timings_by_hand(timing("flash", 64, 1, 2), timing("reference", 64, 1, 2))
    assert not on_gpu.interpreted
    of_cpu = msgspec.structs.replace(on_gpu.environment, device_type="cpu")
    on_cpu = msgspec.structs.replace(on_gpu, environment=of_cpu)
    assert on_cpu.interpreted == ("flash",)
    found = {finding.kind: finding.sentence for finding in answer_attention(on_cpu).findings}
    assert "Triton's interpreter ran flash on this CPU" in found["interpreted"]


def test_no_crossover_is_read_from_noise_or_from_an_order_that_changes_twice():
    def crossover(*milliseconds: tuple[int, float], passes: int = 5) -> tuple[int, int] | None:
        rows = [timing("flash", seq, ms / 3, 2 * ms / 3, saved=1) for seq, ms in milliseconds]
        rows += [timing("reference", seq, 1, 2, saved=1) for seq, _ in milliseconds]

        def first(samples: Samples | None) -> Samples | None:
            return samples and msgspec.structs.replace(samples, values_s=samples.values_s[:passes])

        cut = [msgspec.structs.replace(row, forward=first(row.forward), backward=first(row.backward)) for row in rows]
        flash, naive = arrange(timings_by_hand(*cut)).curves
        return Contest(base=naive, other=flash).crossover

    assert crossover((64, 4), (128, 4), (256, 2), (512, 2)) == (128, 256)
    assert crossover((64, 4), (128, 3), (256, 2)) == (64, 256)  # 128 is neither
    assert crossover((64, 2), (128, 4), (256, 2)) is None
    assert crossover((64, 4), (128, 2), (256, 3)) is None
    assert crossover((64, 4), (128, 2), passes=3) == (64, 128)  # no intervals, and far apart all the same
    assert crossover((64, 3.01), (128, 2.99), passes=3) is None
    assert crossover((64, 4), (128, 2), passes=2) is None


def test_where_memory_runs_out_and_where_it_still_fits_is_of_one_head_dim():
    rows = (
        timing("reference", 1024, 1, 2, saved=1, head_dim=64, peak=MIB),
        timing("reference", 4096, outcome="out of memory", reason="", head_dim=64),
        timing("reference", 4096, 1, 2, saved=1, head_dim=16, peak=2 * MIB),
        timing("reference", 16384, outcome="out of memory", reason="", head_dim=16),
    )
    (sentence,) = (f.sentence for f in answer_attention(timings_by_hand(*rows)).findings if f.kind == "out of memory")
    assert "at sequence 4,096 (bf16, head_dim 64); at 1,024 it still fits, with 1.00 MiB at its peak" in sentence


def test_what_was_not_reached_or_is_not_supported_is_said_once():
    rows = (
        timing("reference", 64, 1, 2, saved=1),
        timing("reference", 128, outcome="not reached", reason="the time was over"),
        timing("reference", 256, outcome="out of memory", reason=""),
        timing("sdpa-cudnn", 64, outcome="not supported", reason="does not run on cpu"),
        timing("reference", 64, outcome="not reached", reason="the time was over", compile="default"),
    )
    answer = answer_attention(timings_by_hand(*rows))
    assert answer.table(BOTH).columns[3:] == ("reference",)
    assert [row[2:] for row in answer.table(BOTH).rows] == [(64, 3.0), (256, "OOM")]
    assert [row[0] for row in answer.table(MISSING).rows] == [
        "reference", "reference", "sdpa-cudnn", "reference, compiled",
    ]  # fmt: skip
    assert COMPILED in {table.title for table in answer.tables}
    eager = answer_attention(timings_by_hand(timing("reference", 64, 1, 2, saved=1, peak=None), rows[-1]))
    assert [row[2] for row in eager.table(COMPILED).rows] == [64] and PEAK not in {t.title for t in eager.tables}
    assert "peak memory" not in answer.table(CELLS).columns and "of the ceiling %" in answer.table(CELLS).columns


def test_more_lines_than_a_plot_can_tell_apart_are_several_plots():
    from stepscope.rendering.picture import draw_answer

    eager: list[Attention] = ["reference", "sdpa", "sdpa-math", "chunked", "flash", "flash-tiled"]
    rows = [timing(name, seq, 1, seq / 32, saved=seq) for name in eager for seq in (64, 128)]
    assert len(answer_attention(timings_by_hand(*rows)).panels) == 2
    rows += [timing(name, seq, 1, seq / 64, saved=seq, compile="default") for name in eager for seq in (64, 128)]
    answer = answer_attention(timings_by_hand(*rows))
    assert [panel.x_title.rpartition("64, ")[2] for panel in answer.panels] == ["1 of 2)"] * 2 + ["2 of 2)"] * 2
    assert all(len({point.line for point in panel.points}) == 6 for panel in answer.panels)
    assert all("compiled" in point.line for panel in answer.panels[2:] for point in panel.points)
    draw_answer(answer)


def test_times_that_overlap_are_not_told_apart():
    rows = [timing("reference", 64, 1, 2, saved=1), timing("flash", 64, 1.001, 2, saved=1)]
    (found,) = (f for f in answer_attention(timings_by_hand(*rows)).findings if "times as fast" in f.sentence)
    assert found.kind == "not distinguishable"
    assert found.sentence.endswith("at sequence 64 (bf16), which is not distinguishable from as fast.")
    rows += [timing("reference", 64, 1, 2, saved=1, head_dim=128), timing("flash", 64, 1, 1, saved=1, head_dim=128)]
    (found,) = (f for f in answer_attention(timings_by_hand(*rows)).findings if "times as fast" in f.sentence)
    assert found.sentence.endswith("(bf16), which is not distinguishable from as fast with head_dim 64.")


def test_calls_of_several_batches_or_masks_are_no_curve():
    """What a benchmark keeps: each call stands for itself."""
    other = timing("flash", 1024, 1, 2, saved=1)
    shape = msgspec.structs.replace(other.cell.shape, batch=4)
    other = msgspec.structs.replace(other, cell=msgspec.structs.replace(other.cell, shape=shape))
    rows = [timing(name, seq, 1, 2, saved=1) for name in ("reference", "flash") for seq in (256, 512)]
    answer = answer_attention(timings_by_hand(*rows, other))
    assert {table.title for table in answer.tables} == {SAVED, SCORES, CELLS} and not answer.panels
    assert len(answer.table(CELLS).rows) == 5 and "batch" not in answer.settings
    assert not {"faster", "grows", "out of memory"} & {finding.kind for finding in answer.findings}


def test_the_saved_matrix_of_scores_by_hand():
    """8 x 1 x 16384^2 numbers of 4 bytes are 8 GiB: the exponentials and the softmax are all but each row's sum."""
    stored = Path(__file__).parents[2] / "results" / "h200" / "attention" / "seeds.json"
    answer = answer_attention(msgspec.json.decode(stored.read_bytes(), type=AttentionTimings))
    found = next(finding for finding in answer.findings if finding.kind == "saved scores")
    assert found.evidence == {"matrix": 8 * 2**30, "kept": 2, "measured": 2 * 8 * 2**30 + 8 * 16384 * 4}
    assert "8 x 1 x 16384 x 16384 x 4 B = 8.00 GiB" in found.sentence
    one_matrix = [row[2] for row in answer.table(SCORES).rows]
    assert one_matrix[0] == "B x H x S x T = 8 x 1 x 256 x 256 x 4 B = 2.00 MiB" and len(one_matrix) == 5


def test_a_peak_that_nobody_counted_is_not_said():
    rows = (
        timing("reference", 1024, 1, 2, saved=1, peak=None),
        timing("reference", 4096, outcome="out of memory", reason=""),
    )
    (sentence,) = (f.sentence for f in answer_attention(timings_by_hand(*rows)).findings if f.kind == "out of memory")
    assert "at 1,024 it still fits, with " in sentence and "at its peak" not in sentence
    assert sentence.endswith("held before backward (no allocator counts the peak).")


def test_text_of_the_answer():
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    text = "\n".join(line.rstrip() for line in shown(answer_attention(STORY), 400).splitlines()) + "\n"
    check_golden(text, GOLDEN)


def test_timings_and_answer_travel_as_json(tmp_path: Path):
    assert decode_timings(json_document(STORY).encode(), "here") == STORY
    answer = answer_attention(STORY)
    assert decode_answer(encode_answer(answer).encode(), "here").tables == answer.tables
    for decode in (decode_timings, decode_answer):
        with pytest.raises(
            InputError, match=r"empty\.json is empty: the command that was writing it ended before.* again"
        ):
            decode(b"", "empty.json")
    with pytest.raises(InputError, match=r"nothing\.json holds no timings of attention"):
        decode_timings(b'{"kind": 3}', "nothing.json")
    newer = json_document(msgspec.structs.replace(STORY, version=99)).encode()
    with pytest.raises(InputError, match="version 99"):
        decode_timings(newer, "newer.json")


# ---- measuring


def test_a_wrong_implementation_gets_no_time_and_the_others_do():
    def late(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = reference(q, k, v, **options)
        return torch.cat([out[:, :, :-1], torch.zeros_like(out[:, :, -1:])], dim=2)  # the last query is left out

    found, interrupted = measure(groups_of("sdpa", "chunked"), functions={"chunked": late})
    right, wrong = found.timings
    assert not interrupted
    assert right.outcome == "measured" and right.both is not None and right.both.count == 5 and right.checked == 5
    assert wrong.outcome == "wrong" and wrong.both is None and wrong.memory is None
    assert wrong.reason.startswith("the gate: (2, 2, 203, 16, causal) in fp32: ")
    answer = answer_attention(found)
    assert answer.table(BOTH).rows[0][-1] == "WRONG" and answer.table(MISSING).rows[0][:3] == ("chunked", "wrong", 1)
    assert any(finding.kind == "refused" for finding in answer.findings)


def test_memory_that_runs_out_is_a_row_and_the_rest_goes_on():
    """Scores of 2**23 queries are 2**48 bytes, which no process's addresses reach."""
    groups = groups_of("reference", "flash-tiled", seq=(32, 1 << 23), head_dims=[4], heads=1)
    del groups[1][1]  # which would do it, in weeks
    found, _ = measure([groups[0], groups[1], groups_of("sdpa")[0]])
    outcomes = [(row.cell.implementation, row.outcome) for row in found.timings]
    assert outcomes == [
        ("reference", "measured"), ("flash-tiled", "measured"), ("reference", "out of memory"), ("sdpa", "measured"),
    ]  # fmt: skip
    assert "in a first pass" in found.timings[2].reason
    assert answer_attention(found).table(MISSING).rows[0][1] == "out of memory"


def test_one_that_fails_when_timed_does_not_lose_the_others():
    calls: list[int] = []

    def tires(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("enough")
        return sdpa(q, k, v, **options)

    found, _ = measure(groups_of("reference", "chunked"), functions={"chunked": tires})
    right, failed = found.timings
    assert right.both is not None and failed.outcome == "failed" and "RuntimeError: enough" in failed.reason


def test_what_is_measured_before_an_interruption_stays():
    kept: list[AttentionTimings] = []

    def interrupts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.shape[-2] == 48:
            raise KeyboardInterrupt
        return sdpa(q, k, v, **options)

    groups = groups_of("reference", "sdpa", seq=(32, 48, 64))
    found, interrupted = measure(groups, functions={"sdpa": interrupts}, on_rows=kept.append)
    assert interrupted and kept[0].timings == found.timings[:2]
    assert [row.outcome for row in found.timings] == ["measured"] * 2 + ["interrupted"] * 4
    assert any(finding.kind == "unfinished" for finding in answer_attention(found).findings)


def test_a_budget_that_is_over_leaves_the_rest():
    found, interrupted = measure(groups_of("sdpa", seq=(32, 64)), budget_s=0)
    assert not interrupted and {row.outcome for row in found.timings} == {"not reached"}


@pytest.mark.long
def test_eager_beside_compiled_is_one_row(tmp_path: Path):
    found, _ = measure(groups_of("reference", compiles=("none", "default")))
    (row,) = answer_attention(found).table(COMPILED).rows
    assert row[:4] == ("reference", "fp32", 32, 16)
    assert all(isinstance(cell, float) and cell > 0 for cell in row[4:])
    assert [timing.checked for timing in found.timings] == [5, 1]


def test_attention_that_subtracts_no_maximum_gets_no_time_but_where_that_is_stated():
    """Scores of the size 1 do not show it; `unsafe` is not asked for larger ones, compiled neither."""
    found, _ = measure(groups_of("sdpa", "unsafe"), functions={"sdpa": implementation("unsafe")})
    wrong, stated = found.timings
    assert wrong.outcome == "wrong" and "scores offset) in fp32: out is not finite" in wrong.reason
    assert stated.outcome == "measured" and stated.checked == 4


def test_the_grid_of_2025_is_that_of_the_write_ups():
    sizes = sizes_for("cuda", "cs336-2025")
    assert sizes == PRESETS["cs336-2025"] == sizes_for("cpu", "cs336-2025")
    assert (sizes.batch_size, sizes.heads, sizes.dtypes, sizes.compiles) == (8, 1, ("fp32",), ("none", "default"))
    assert sizes.head_dims == (16, 32, 64, 128) and not sizes.causal
    assert sizes.seq_lens == (256, 1024, 4096, 8192, 16384)


def test_on_a_cpu_held_memory_is_counted_and_no_peak_is_made_up():
    found, _ = measure(groups_of("sdpa", "chunked"))
    fused, chunked = found.timings
    out_bytes = 2 * 32 * 16 * 4
    assert fused.memory is not None and chunked.memory is not None
    assert fused.memory.before_backward_bytes == fused.cell.input_bytes + out_bytes + 2 * 32 * 4
    assert chunked.memory.before_backward_bytes == chunked.cell.input_bytes + out_bytes
    assert fused.memory.peak_bytes is None
    assert PEAK not in [table.title for table in answer_attention(found).tables]
    assert answer_attention(found).table(SAVED).rows[0][-1] == 0.0
    assert fused.launches == "shown" and found.launches == "shown"


# ---- the command line


def run(*words: str) -> None:
    app(["study", "attention", "--device", "cpu", *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seq-len", "0"], "--seq-len is 0, which is an empty tensor"),
        (["--head-dim", "100000"], "--head-dim is 100000: it must be 1 to 4,096"),
        (["--heads", "3", "--kv-heads", "2"], "--kv-heads 2 does not divide --heads 3"),
        (["--attention", "sdpa-cudnn"], "sdpa-cudnn does not run on cpu: choose one of reference, sdpa"),
        (["--attention", "quick"], "unknown attention 'quick': choose one of reference"),
        (["--dtype", "fp64"], "cannot judge fp64"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "cuda:99"], "no GPU for --device cuda:99"),
        (["--compile", "max"], "unknown compile 'max': choose one of none, default"),
        (["--launches", "gone"], "unknown launches 'gone'"),
        (["--preset", "mine"], "unknown preset 'mine': choose one of cs336-2025"),
        (["--from", "a.json", "--seq-len", "8", "--heads", "2"], "--seq-len, --heads says nothing with --from"),
        (["--from", "a.json", "--keep-digests"], "--keep-digests says nothing with a file"),
        (["--keep-digests"], "--keep-digests says nothing without --from"),
        (["--only", "nothing"], "--only 'nothing' names no table: there are 'Forward and backward, ms'"),
        (["--model", "tiny", "--only", "nothing"], "--only 'nothing' names no table: there are 'The step: medians"),
        (["--seq-len", ""], "--seq-len is empty: name at least one"),
        (["--attention", ""], "--attention"),
        (["--budget", "0"], "none of the 16 cells was reached in --budget 0: give it more seconds"),
        (["--model", "tiny", "--attention", "quick"], "unknown attention 'quick'"),
        (["--from", "/nowhere/at-all.json"], "cannot read /nowhere/at-all.json"),
        (["--figures", "/proc/nowhere/at-all.json"], "choose another --figures"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], said: str):
    with pytest.raises(InputError) as raised:
        run(*words)
    assert said in str(raised.value) and "\n" not in str(raised.value) and raised.value.exit_code == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_named(bad: float):
    q = torch.zeros(1, 1, 2, 16)
    q[0, 0, 1, 3] = bad
    with pytest.raises(InputError, match="attention sdpa: 1 of the 32 numbers of the queries are not finite"):
        check_inputs("sdpa", q, torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16), finite=True)
    with pytest.raises(InputError, match="are not finite"):
        attend("sdpa", q, torch.zeros_like(q), torch.zeros_like(q), causal=True, finite=True)


def test_an_answer_is_kept_read_again_and_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    kept, answered, drawn = tmp_path / "kept.json", tmp_path / "answer.json", tmp_path / "curves.svg"
    sizes = ["--seq-len", "32,64", "--head-dim", "8", "--attention", "reference,sdpa", "--steps", "5"]
    run(*sizes, "--seconds", "0", "--budget", "60", "--figures", str(kept), "--json")
    first = capfd.readouterr().out
    answered.write_text(first)
    assert decode_timings(kept.read_bytes(), "kept").timings
    run("--from", str(kept), "--json", "--save", str(drawn))
    assert json.loads(capfd.readouterr().out)["tables"] == json.loads(first)["tables"]
    assert drawn.read_text().startswith("<svg") and "memory S^" in drawn.read_text()
    run("--from", str(answered), "--only", "Powers")
    assert capfd.readouterr().out.startswith(SLOPES)
    (tmp_path / "empty.json").touch()
    with pytest.raises(InputError, match=r"empty\.json is empty: .* before it was done; write it again with --json"):
        run("--from", str(tmp_path / "empty.json"))
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\xff{")
    with pytest.raises(InputError, match=r"garbage\.json holds no answer"):
        run("--from", str(garbage))


# ---- the gate's matrix


def test_the_matrix_is_whole_and_says_who_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    kept = tmp_path / "gate.json"
    gate = ["study", "attention-gate", "--attention", "sdpa,sdpa-cudnn", "--dtype", "fp32,bf16", "--workers", "1"]
    app([*gate, "--device", "cpu", "--figures", str(kept)], standalone_mode=False)
    text = capfd.readouterr().out
    assert "32 of 64 calls were judged, and 32 are not supported" in text
    matrix = decode_matrix(kept.read_bytes(), "gate")
    assert [(r.implementation, r.passed, len(r.verdicts)) for r in matrix.reports] == [
        ("sdpa", True, 32), ("sdpa-cudnn", False, 32),
    ]  # fmt: skip
    assert all(verdict.repeats for verdict in matrix.reports[0].verdicts)
    assert decode_matrix(json_document(matrix).encode(), "again") == matrix
    app(["study", "attention-gate", "--from", str(kept)], standalone_mode=False)
    assert capfd.readouterr().out == text
    run("--from", str(kept))
    assert capfd.readouterr().out == text
    with pytest.raises(InputError, match="--only says nothing with the gate's matrix"):
        run("--from", str(kept), "--only", "findings")


def test_a_worker_that_dies_costs_one_task_and_time_that_is_over_leaves_the_rest():
    alike = WorkerTask(kind="judge", names=("sdpa",), dtype="fp32", shape=square(8), device="cpu")
    deadly: Any = "a dtype that no worker can read"
    tasks = [msgspec.structs.replace(alike, dtype=deadly), alike]
    answers: list[tuple[WorkerTask, WorkerAnswer]] = []
    work_through(tasks, workers=1, deadline_s=math.inf, on_answer=lambda task, answer: answers.append((task, answer)))
    (dead, lost), (alive, found) = answers
    assert dead is tasks[0] and "ended with code 1" in lost.error
    assert alive is tasks[1] and found.reports[0].passed
    none = judge_matrix(("sdpa",), dtypes=("fp32",), shapes=(square(8),), device="cpu", workers=1, seconds=0)
    assert none == GateMatrix(device="cpu", calls=1) and none.reached == 0


def test_no_two_columns_of_a_table_share_a_head():
    for table in answer_attention(STORY).tables:
        assert len(set(table.columns)) == len(table.columns), table.title


def busy(name: Attention, seq: int, *both_ms: float) -> AttentionTiming:
    """A timing whose passes took these times in all, a third of each forward."""
    row = timing(name, seq, 1, 2, saved=1)
    forward, backward = (Samples(values_s=tuple(ms * 1e-3 * k / 3 for ms in both_ms), clock="by hand") for k in (1, 2))
    return msgspec.structs.replace(row, forward=forward, backward=backward)


def test_no_conclusion_is_drawn_through_noise():
    """From 12.6 to 514 ms at 128, beside 10 ms at 64, is a busy host: no sentence and no power is made of it."""
    rows = [
        busy("flash", 64, 9, 10, 11, 9.5, 10.5), busy("flash", 128, 12.6, 514, 20, 40, 13),
        busy("flash", 256, 7, 70, 9, 30, 8),
        *(timing("reference", seq, seq, 2 * seq, saved=1) for seq in (64, 128, 256)),
    ]  # fmt: skip
    study = arrange(timings_by_hand(*rows))
    assert {cell.shape.queries for cell in study.unsure} == {128, 256}
    answer = answer_attention(study.timings)
    assert [(row[2], row[-1]) for row in answer.table(BOTH).rows] == [(64, None), (128, "flash"), (256, "flash")]
    assert answer.table(SLOPES).rows[0][3:5] == (None, 1.0)
    found = {finding.kind: finding.sentence for finding in answer.findings}
    assert "In 2 cells the interval" in found["noise"] and "12.6 to" in found["noise"]
    assert "The times of flash vary too much for a power" in found["noise"]
    assert "flash" not in next(f.sentence for f in answer.findings if f.sentence.startswith("Time grows"))
    assert "at sequence 64 " in found["rate"]
    assert any(point.doubted for panel in answer.panels for point in panel.points)


def test_a_single_pass_of_each_cell_shows_no_power():
    rows = [busy("flash", seq, float(seq)) for seq in (64, 128)]
    (found,) = (f for f in answer_attention(timings_by_hand(*rows)).findings if f.kind == "noise")
    assert "fewer than three passes" in found.sentence


@given(st.floats(0.2, 3), st.floats(0.001, 0.2))
def test_the_reach_of_a_power_is_that_of_its_ends(power: float, half: float):
    """Two points: the power moves by the root of the two reaches squared, over the distance of their logarithms."""
    points = [(64, 64**power), (256, 256**power)]
    ends = [Interval(low=y * math.exp(-half), high=y * math.exp(half)) for _, y in points]
    found = fit_slope(points, ends)
    assert found is not None and found.reach == pytest.approx(math.sqrt(2) * half / math.log(4), rel=1e-6)
    assert (fit_slope(points, [ends[0], None]) or found).reach == math.inf
