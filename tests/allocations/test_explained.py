"""A step made by hand, explained: what each byte was there for, when most was there, and where it came from."""

import math
from typing import Any

import polars as pl
import pytest
from benchmarks.recording_allocator import MIB, RecordingAllocator

from stepscope.allocations.answer import alike, answer_memory, memory_document, saved_by_block
from stepscope.allocations.at_moment import category_timeline, moment_at, phase_peaks
from stepscope.allocations.explain import Explained, Place, explain, place_of, shapes_by_size
from stepscope.allocations.replay import replay, rounded
from stepscope.allocations.snapshot import Settings, snapshot_from
from stepscope.core.errors import InputError
from tests.conftest import workload
from tests.handmade_snapshot import AUTOCAST, ENGINE, SCRIPT, START_US, USER, handmade

RESIDENT = {"parameters": 4 * MIB, "optimizer state": 8 * MIB, "inputs": 4096}
EXP = 5 * MIB - 100


def explained(**choices: bool) -> Explained:
    found = explain(snapshot_from(handmade().content(**choices), "s"))
    found.self_check()
    return found


def held(moment: Any) -> dict[str, int]:
    return {category: count for category, count in moment.categories.items() if count}


def test_the_peak_to_the_byte():
    """In the forward of the second block: both results are there, and the second's scratch."""
    found = explained()
    step = handmade()
    peak = moment_at(found)
    assert found.peak_bytes == step.allocator.peak == peak.allocated_bytes == 12 * MIB + 4096 + 13 * MIB
    assert (peak.time_us, found.peak_event) == (50, found.allocations["alloc_event"].drop_nulls().sort()[3])
    assert held(peak) == {**RESIDENT, "saved for backward": 2 * EXP, "temporaries": 3 * MIB, "rounding": 200}
    assert peak.reserved is not None
    assert peak.reserved.cached_bytes == 0
    assert peak.reserved.reserved_bytes == 2 * 20 * MIB + 2 * MIB
    assert peak.reserved.fragmented_bytes == 42 * MIB - found.peak_bytes
    assert found.exact_at(found.peak_event) and found.notes == ()


def test_the_same_by_evidence():
    """Without notes: phases by annotations, lifetimes, stacks, and sizes for what was there throughout."""
    found = explained(notes=False)
    peak = moment_at(found)
    # Two of three residents of a gradient's size are Adam's; the tokens are nobody's.
    expected = {
        **RESIDENT,
        "there before": 4096,
        "saved for backward": 2 * EXP,
        "temporaries": 3 * MIB,
        "rounding": 200,
    }
    del expected["inputs"]
    assert held(peak) == expected
    assert any("by evidence" in note for note in found.notes)
    gradients = found.allocations.filter(pl.col("category") == "gradients")
    assert gradients["requested"].to_list() == [2 * MIB, 2 * MIB]


def test_a_phase_whose_name_is_no_text():
    content = handmade().content(notes=False)
    content["external_annotations"] = [each | {"name": "\ud800"} for each in content["external_annotations"]]
    found = explain(snapshot_from(content, "handmade"))
    assert {span.name for span in found.phases} <= {r"\ud800"}


def test_how_sure_the_categories_are():
    """By category, which sums to what is allocated less the rounding; what was noted needs none."""
    found = explained(notes=False)
    peak = moment_at(found)
    said = memory_document(found, peak)
    assert said["certainty"] == {
        "parameters": {"size": 4 * MIB},
        "optimizer state": {"size": 8 * MIB},
        "saved for backward": {"lifetime": 2 * EXP},
        "temporaries": {"lifetime": 3 * MIB},
        "there before": {"guess": 4096},
    }
    assert sum(sum(by.values()) for by in said["certainty"].values()) == said["peak_bytes"] - 200
    assert {one["certainty"] for one in said["largest"]} == {"size", "lifetime", "guess"}
    (shown,) = answer_memory(found, peak).part("category").tables
    assert shown.columns[-1] == "known by" and shown.rows[0][-1] == "size"
    assert "certainty" not in memory_document(explained(), moment_at(explained()))


def test_the_same_by_stacks_alone():
    """No annotations either: a stack without Python is autograd's, one in torch.optim the optimizer's."""
    found = explained(notes=False, annotations=False)
    peak = moment_at(found)
    assert held(peak)["optimizer state"] == 8 * MIB and held(peak)["parameters"] == 4 * MIB
    assert (found.allocations["category"] == "gradients").sum() == 2
    assert any("phases" in note for note in found.notes)


def test_without_the_layout_of_the_start():
    found = explained(before=False)
    assert moment_at(found).categories == moment_at(explained()).categories
    assert any("worked out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("at", "time_us", "temporaries", "saved"),
    [
        ("0us", 0, 3 * MIB, 0),
        ("0.01 ms", 10, 3 * MIB, EXP),
        ("15us", 10, 3 * MIB, EXP),
        ("20us", 20, 0, EXP),
        ("end", 420, 0, 0),
        ("start", 0, 0, 0),
        ("backward", 200, 0, 2 * EXP),
        ("optimizer", 400, 700, 0),
    ],
)
def test_at_a_moment(at: str, time_us: int, temporaries: int, saved: int):
    """Times are after the first event, which is 10 us after the start of forward."""
    moment = moment_at(explained(), at)
    assert moment.categories["temporaries"] == temporaries and moment.categories["saved for backward"] == saved
    assert moment.time_us == time_us


@pytest.mark.parametrize("at", ["", "12", "ms", "-1ms", "12 parsecs", "recomputation", "1e3us", "\x1b[2J"])
def test_what_is_no_moment(at: str):
    with pytest.raises(
        InputError, match=r"cannot tell which moment .*: write a time, .*, forward, backward, optimizer"
    ):
        moment_at(explained(), at)
    with pytest.raises(InputError, match="after the history, which ends at"):
        moment_at(explained(), "2s")


def test_peaks_of_phases():
    peaks = {peak.phase: peak for peak in phase_peaks(explained())}
    assert list(peaks) == ["forward", "backward", "optimizer"]
    resident = 12 * MIB + 4096
    assert peaks["forward"].peak_bytes == resident + 13 * MIB
    # The first gradient asks for 2 MiB and gets all of the scratch's 3: a rest of 1 MiB is not split off.
    assert peaks["backward"].peak_bytes == resident + 10 * MIB + 3 * MIB
    assert peaks["optimizer"].peak_bytes == resident + 2 * MIB + 3 * MIB + 1024


def test_what_blocks_save():
    blocks = saved_by_block(explained())
    assert [(b.block, b.saved_bytes, b.saved_tensors, b.gradient_bytes) for b in blocks] == [
        ("blocks.0", EXP, 1, 2 * MIB),
        ("blocks.1", EXP, 1, 2 * MIB),
    ]
    largest = blocks[0].largest[0]
    assert (largest.operator, largest.name, largest.shape, largest.bytes) == ("Exp", "result", (5, 7), EXP)
    assert largest.module == "softmax" and largest.site == "me/model.py:12 forward"
    (one,) = alike(blocks)
    assert one.block == "blocks.0" and one.alike == ("blocks.1",)


def test_blocks_in_their_order():
    found = explain(snapshot_from(handmade(layers=11).content(), "s"))
    assert [block.block for block in saved_by_block(found)] == [f"blocks.{i}" for i in range(11)]


def test_sites_and_tensors():
    rows = {
        row["alloc_us"]: row for row in explained().allocations.iter_rows(named=True) if row["alloc_us"] is not None
    }
    assert rows[0]["site"] == "me/model.py:12 forward"
    assert rows[10]["part"] == "softmax" and rows[10]["module"] == "blocks.0"
    assert rows[200]["site"] == "autograd, of Mul in blocks.1" and rows[200]["name"] == "blocks.1.weight"
    assert rows[400]["site"] == "me/train.py:40 <module>"
    before = explained().allocations.filter(pl.col("alloc_us").is_null())
    assert set(before["site"]) == {"before the history"}


def test_timeline_sums_to_the_curve():
    found = explained()
    timeline = category_timeline(found)
    total = timeline.select(pl.sum_horizontal(pl.exclude("time_us"))).to_series()
    assert total.to_list() == found.curve["allocated"].to_list()
    assert timeline["time_us"].dtype == pl.Int64 and timeline["time_us"].is_sorted() and timeline["time_us"][0] == 0
    assert [phase.start_us for phase in found.phases] == [-10, 190, 390]


def test_a_tensor_is_what_lives_at_its_address_at_its_moment():
    """One address, three lives within a microsecond of each other: the note is of the second."""
    step = handmade()
    allocator = step.allocator
    step.at(600)
    allocator.free(allocator.malloc(3 * MIB))
    step.at(601)
    address = allocator.malloc(3 * MIB)
    step.note(address, bytes=3 * MIB, category="inputs", name="second", shape=(1,))
    step.at(602)
    allocator.free(address)
    step.at(603)
    assert allocator.malloc(3 * MIB) == address
    table = explain(snapshot_from(step.content(), "s")).allocations.filter(pl.col("address") == address)
    named = table.filter(pl.col("alloc_us") >= 590).select("alloc_us", "category", "name").rows()
    assert named == [(590, "temporaries", ""), (591, "inputs", "second"), (593, "workspaces", "")]


def test_a_note_of_nothing_is_counted():
    step = handmade()
    step.note(0x1234, bytes=5, category="inputs", shape=(5,))
    assert explain(snapshot_from(step.content(), "s")).notes == (
        "1 noted tensors lie in no allocation of this history.",
    )


def test_a_parameter_that_an_operator_saves_is_a_parameter():
    step = handmade()
    step.note(step.weights["blocks.0"], bytes=2 * MIB, category="saved for backward", shape=(1,), operator="Mm")
    assert moment_at(explain(snapshot_from(step.content(), "s"))).categories["parameters"] == 4 * MIB


def test_cast_copies_and_the_engine_by_stacks():
    allocator = RecordingAllocator(time_us=START_US)
    allocator.about = {"frames": [USER, SCRIPT]}
    copy = allocator.malloc(2 * MIB)
    kept = allocator.malloc(4 * MIB)
    allocator.about = {"frames": [AUTOCAST, SCRIPT]}
    allocator.free(copy)
    allocator.about = {"frames": [ENGINE]}
    allocator.free(kept)
    table = explain(snapshot_from(allocator.snapshot(), "s")).allocations
    assert table["category"].to_list() == ["cast copies", "saved for backward"]


def test_a_free_with_the_stack_of_its_allocation_says_nothing():
    """A history recorded with context="alloc"."""
    allocator = RecordingAllocator(time_us=START_US)
    allocator.about = {"frames": [USER, SCRIPT]}
    allocator.free(allocator.malloc(4 * MIB))
    assert explain(snapshot_from(allocator.snapshot(), "s")).allocations["category"].to_list() == ["temporaries"]


def test_a_gap_of_a_megabyte_belongs_to_the_block_before_it():
    """A large block keeps a remainder of up to 1 MiB: that much is allocated, though nothing asked for it."""
    allocator = RecordingAllocator(recording=False, time_us=START_US)
    first = allocator.malloc(20 * MIB - 700 * 1024)
    allocator.start()
    allocator.malloc(5 * MIB)
    allocator.free(first)
    replayed = replay(snapshot_from(allocator.snapshot(), "s"))
    assert replayed.exact and not replayed.start_known
    assert replayed.allocations[0].block == 20 * MIB and replayed.allocations[0].requested == 20 * MIB - 700 * 1024


def test_a_remainder_that_an_allocation_shows():
    """After a block of the start lies a free one whose beginning is not known until something takes it."""
    allocator = RecordingAllocator(recording=False, time_us=START_US)
    blocks = [allocator.malloc(size) for size in (6 * MIB, 6 * MIB, 7 * MIB)]
    allocator.free(blocks[0])
    first = allocator.malloc(6 * MIB - 300 * 1024)  # keeps the block's rest
    allocator.free(blocks[1])
    allocator.start()
    allocator.malloc(5 * MIB)
    allocator.free(first)
    replayed = replay(snapshot_from(allocator.snapshot(), "s"))
    assert replayed.exact and replayed.allocations[0].block == 6 * MIB


def test_a_remainder_that_nothing_shows_is_said():
    allocator = RecordingAllocator(recording=False, time_us=START_US)
    blocks = [allocator.malloc(size) for size in (6 * MIB, 6 * MIB, 7 * MIB)]
    allocator.free(blocks[0])
    first = allocator.malloc(6 * MIB - 300 * 1024)
    allocator.free(blocks[1])
    allocator.start()
    allocator.free(first)
    found = explain(snapshot_from(allocator.snapshot(), "s"))
    assert found.unsure_at(-1) == 1 and not found.exact_at(-1) and found.exact_at(len(found.snapshot.events) - 1)
    assert allocator.peak - found.peak_bytes == 300 * 1024


def test_a_history_that_contradicts_itself_is_said():
    content = handmade().content()
    trace = content["device_traces"][0]
    content["device_traces"] = [[event for event in trace if event["addr"] != trace[2]["addr"] or event["size"] == 0]]
    content["device_traces"][0].append({**trace[0], "action": "alloc", "addr": 77, "size": 5, "time_us": 2 * START_US})
    found = explain(snapshot_from(content, "s"))
    found.self_check()
    assert not found.exact_at(found.peak_event)
    assert any("failed" in note for note in found.notes)


def test_running_out_of_memory_is_told():
    content = handmade().content()
    last = content["device_traces"][0][-1]["time_us"]
    content["device_traces"][0].append(
        {"action": "oom", "device_free": 5 * MIB, "size": 9 * MIB, "stream": 0, "time_us": last, "frames": []}
    )
    (note,) = explain(snapshot_from(content, "s")).notes
    assert note.startswith("Out of memory: 9,437,184 bytes were asked for when the driver had 5,242,880 left; a limit")


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ("", Place()),
        ("forward", Place("forward")),
        ("forward|blocks.3.attention|softmax", Place("forward", "blocks.3.attention", "softmax")),
        ("backward|blocks.3.feed_forward", Place("backward", "blocks.3.feed_forward")),
        ("backward|blocks.3|recomputation|blocks.3.attention", Place("backward", "blocks.3.attention")),
        ("ProfilerStep#3|optimizer", Place("optimizer")),
        ("backward|gradient accumulation", Place("backward")),
        ("a stranger's own words", Place()),
    ],
)
def test_ranges(metadata: str, place: Place):
    assert place_of(metadata) == place


@pytest.mark.parametrize(
    ("size", "divisions", "expected"),
    [
        (1, 0, 512), (512, 0, 512), (513, 0, 1024), (5 * MIB - 100, 0, 5 * MIB),
        # PyTorch's own example: 1200 MiB with 4 divisions lies between 1024 and 1280.
        (1200 * MIB, 4, 1280 * MIB), (1024 * MIB, 4, 1024 * MIB), (1025, 4, 1536), (1500, 4, 1536), (2000, 4, 2048),
    ],
)  # fmt: skip
def test_rounding(size: int, divisions: int, expected: int):
    every = {str(1 << power): divisions for power in range(16)}
    assert rounded(size, Settings(roundup_power2_divisions=every)) == expected


def test_shapes_by_size():
    """Batch 2, 24 positions, model 96, feed-forward 448, 3 heads, 10,000 words."""
    sizes = {"seq_len": 24, "d_model": 96, "d_ff": 448, "heads": 3}
    shapes = shapes_by_size(workload(**sizes))
    for shape in ((2, 24, 10_000), (2, 24, 448), (2, 24, 96), (2, 3, 24, 24), (96, 96), (448, 96)):
        assert shapes[4 * math.prod(shape)] == shape
    # In 16 bits the feed-forward's tensor has the bytes of the model's in 32, if it is twice as wide: two, so none.
    both = shapes_by_size(workload(dtype="bf16", **{**sizes, "d_ff": 192}))
    assert 4 * 2 * 24 * 96 not in both and both[2 * 2 * 24 * 10_000] == (2, 24, 10_000)


def test_a_micro_batch_is_what_a_tensor_has():
    assert shapes_by_size(workload(accumulation=2))[16 * 10_000 * 4] == (1, 16, 10_000)
