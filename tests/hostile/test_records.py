"""Records of operators' arguments, changed in every way: the short form of `python -m tests.hostile.records`, and whole
traces whose records are all changed."""

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from stepscope.traces.captures.answer import answer_trace
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.roofline import roofline_as_json
from tests.hostile.captures import public
from tests.hostile.records import DATA, FIELDS, campaign, changed, examples, records
from tests.public import public_capture


def test_no_formula_fails_on_a_changed_example():
    tried, faults = campaign(list(examples()), 40, 0)
    assert tried > 5_000 and not faults


def test_no_formula_fails_on_a_changed_record_of_our_captures():
    originals = list(records(sorted(DATA.glob("*.json.gz"))))
    tried, faults = campaign(originals, 5, 0)
    assert tried > 500 and not faults


def test_no_formula_fails_on_a_changed_record_of_others_captures():
    public_capture("tracelens_h100_qwen.json.gz")
    originals = list(records(public("*.json.gz")))
    tried, faults = campaign(originals, 2, 0)
    assert tried > 5_000 and not faults


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_whose_records_are_all_changed_is_read(tmp_path: Path, seed: int):
    """Times stay what they are. What a record no longer says is missing, and the rest is shown."""
    dice = Random(seed)
    trace = json.loads(gzip.decompress((DATA / "kineto_inference_bf16.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        arguments = event.get("args")
        if isinstance(arguments, dict) and FIELDS[0] in arguments:
            kept = {field: arguments.pop(field) for field in FIELDS if field in arguments}
            arguments.update(changed(kept, dice))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    summary = TraceSummary(attribution=attribute(read_trace(path)), run=None)
    plain = TraceSummary(attribution=attribute(read_trace(DATA / "kineto_inference_bf16.json.gz")), run=None)
    assert answer_trace(summary, (), str(path)).tables
    assert summary.roofline is not None and plain.roofline is not None
    assert summary.roofline.busy_ns == plain.roofline.busy_ns
    assert summary.roofline.covered_ns < plain.roofline.covered_ns
    json.dumps(roofline_as_json(summary.roofline))
