"""What a new attention costs: its function, its record, and these cases."""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from stepscope.allocations.prediction.estimate import estimate
from stepscope.core.attention_call import AttentionCell, GateReport, decode_timings, saved_by_formula
from stepscope.core.attention_support import attention_of, is_predicted, predicted_attention, resolve_attention
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence
from stepscope.core.files import json_document
from stepscope.core.parts import ATTENTIONS, AttentionCall, AttentionRecord, attention_names
from stepscope.core.run import Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.questions.attention import grid_groups, measure_grid
from stepscope.questions.attention_answer import answer_attention
from stepscope.questions.attention_gate import decode_matrix, implementations_of
from stepscope.runs.checks import check_run
from stepscope.training.attention.gate import check_attention_implementation, few_shapes
from stepscope.training.attention.inputs import attend
from stepscope.training.attention.written_out import for_all_heads
from tests.conftest import mini
from tests.textbook import textbook

CPU = torch.device("cpu")


def toy(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    late: int = 0,
) -> Tensor:  # fmt: skip
    """Attention of one head after another. late: a causal query sees so many keys after its own."""
    k, v = for_all_heads(q, k, v)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    outs: list[Tensor] = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].mT * factor
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(late)
            scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(scores.softmax(dim=-1) @ v[:, head])
    return torch.stack(outs, dim=1)


wrong_toy: Callable[..., Tensor] = functools.partial(toy, late=1)

RECORD = AttentionRecord(
    function=f"{__name__}:toy", device_types=("cpu",), trains_on=("cpu",), window=False, scores="pieces",
    rounds_scores=True, calls_softmax=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ATTENTIONS, "toy", RECORD)


def test_it_is_offered():
    assert attention_names()[-2:] == ("toy", "auto")
    assert "toy" in TextbookWorkload(model=mini().model, attention="toy").key
    with pytest.raises(InputError, match="flash, toy, auto"):
        mini(attention="tay")
    assert implementations_of(["toy"]) == ("toy",)
    call = AttentionCall(device_type="cpu", dtype="fp64", head_dim=8)
    with pytest.raises(InputError, match=r"choose one of .*flash-tiled, toy$"):
        resolve_attention("flash", call)


def test_it_is_refused_where_it_does_not_run():
    with pytest.raises(InputError, match="attention toy does not run on cuda"):
        attention_of(mini(attention="toy"), "cuda")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(InputError, match="attention toy takes no sliding window: choose one of reference"):
        attend("toy", q, q, q, causal=True, window=2)
    assert not is_predicted(mini(attention="toy"))
    ATTENTIONS["toy"] = msgspec.structs.replace(RECORD, device_types=("cpu", "cuda"), trains_on=("cpu", "cuda"))
    with pytest.raises(InputError, match="memory of a step with attention toy is not predicted"):
        predicted_attention(mini(attention="toy"), "cuda")


def test_its_memory_is_predicted_by_the_formulas_that_its_record_names():
    for memory, alike in (("scores", "reference"), ("fused", "sdpa-flash")):
        ATTENTIONS["toy"] = msgspec.structs.replace(
            ATTENTIONS[alike], memory=memory, function=RECORD.function, predicted="always"
        )
        sizes = {"dtype": "bf16", "d_model": 64, "seq_len": 128}
        assert estimate(mini(attention="toy", **sizes)) == estimate(mini(attention=alike, **sizes))
        cells = [AttentionCell(implementation=n, dtype="bf16", shape=few_shapes()[0]) for n in ("toy", alike)]
        assert saved_by_formula(cells[0], "cpu") == saved_by_formula(cells[1], "cpu") is not None


def judge() -> GateReport:
    return check_attention_implementation("toy", device=CPU, dtypes=("fp32", "bf16"), shapes=few_shapes())


def test_the_gate_judges_it():
    report = judge()
    assert report.passed
    outcomes = {verdict.outcome for verdict in report.verdicts if verdict.shape.window is None}
    assert outcomes == {"passed"}
    windows = [verdict for verdict in report.verdicts if verdict.shape.window is not None]
    assert windows and all(verdict.reason == "takes no sliding window" for verdict in windows)


def test_the_gate_sees_that_it_is_wrong():
    ATTENTIONS["toy"] = msgspec.structs.replace(RECORD, function=f"{__name__}:wrong_toy")
    failed = [verdict for verdict in judge().verdicts if verdict.outcome == "failed"]
    assert {verdict.dtype for verdict in failed} == {"fp32", "bf16"}
    assert all(verdict.shape.causal for verdict in failed)


def test_its_calls_are_measured():
    groups = grid_groups(
        seq_lens=[64], head_dims=[16], implementations=["reference", "toy"], dtypes=["fp32"], batch_size=1, heads=2,
        key_heads=None, causal=True, compiles=("none",),
    )  # fmt: skip
    timings, _ = measure_grid(
        groups, device="cpu", seconds=0, steps=5, launches="shown", budget_s=None, workers=0, ceilings=False
    )
    assert [row.outcome for row in timings.timings] == ["measured", "measured"]
    assert decode_timings(json_document(timings).encode(), "a file") == timings
    assert saved_by_formula(timings.timings[1].cell, "cpu") is None
    assert any("toy" in str(cell) for table in answer_attention(timings).tables for row in table.rows for cell in row)


@pytest.mark.slow
def test_its_step_is_measured_and_known_for_what_it_is(tmp_path: Path):
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0)
    request = StepRequest(workload=mini(attention="toy"), device="cpu", settings=settings, out=str(tmp_path))
    run, directory = measure_step(request)
    assert run.status == "done" and textbook(load_run(directory)).attention == "toy"
    assert "attention-mismatch" not in {finding.kind for finding in check_run(run)}
    asked = msgspec.structs.replace(run, workload=mini(attention="reference"))
    (finding,) = [finding for finding in check_run(asked) if finding.kind == "attention-mismatch"]
    assert finding.sentence == "Attention reference was asked for, but chunked or toy ran."


def test_a_name_that_nobody_registered_is_refused_in_what_was_stored():
    with pytest.raises(InputError, match="unknown attention 'tay'"):
        AttentionCell(implementation="tay", dtype="fp32", shape=few_shapes()[0])
    with pytest.raises(InputError, match="unknown attention 'tay'"):
        Evidence(attention="tay")
    report = b'{"implementation": "%s", "device": "cpu", "seed": 0, "verdicts": []}'
    matrix = b'{"device": "cpu", "calls": 1, "reports": [' + report + b"]}"
    assert decode_matrix(matrix % b"toy", "matrix.json").reports[0].implementation == "toy"
    with pytest.raises(InputError, match=r"matrix\.json holds no verdicts of the gate: unknown attention 'tay'"):
        decode_matrix(matrix % b"tay", "matrix.json")
