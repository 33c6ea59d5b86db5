"""Model configurations, workloads and their keys."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.errors import InputError
from stepscope.core.model_config import EDITIONS, PRESETS, ModelConfig, configure, editions_apart
from stepscope.core.run import Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import grid
from stepscope.engine.sweep_plan import Cell, SweepPlan
from tests.conftest import workload
from tests.textbook import textbook

RESULTS = Path(__file__).parents[2] / "results"


def test_an_overridden_preset_gets_a_name_of_its_own():
    assert configure("small") is PRESETS["small"]
    assert configure("small", d_ff=3072) is PRESETS["small"]
    changed = configure("small", d_ff=4096)
    assert changed.name == "small+d_ff4096"
    assert changed.d_ff == 4096 and changed.d_model == 768


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"heads": 7}, "heads 7 do not divide d_model 768"),
        ({"layers": 0}, "layers is 0"),
        ({"d_model": -5}, "d_model is -5"),
        ({"heads": 256}, "head_dim is 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        configure("small", **sizes)


def test_the_remedy_for_heads_really_divides():
    with pytest.raises(InputError) as caught:
        configure("small", heads=7)
    offered = [int(word) for word in str(caught.value).rpartition("one of ")[2].split(",")]
    assert offered and all(768 % h == 0 and (768 // h) % 2 == 0 for h in offered)


def test_unknown_model_lists_the_known():
    with pytest.raises(InputError, match=r"unknown model 'smal'.*small, medium"):
        configure("smal")


def test_an_editions_name_means_the_preset_of_its_sizes():
    # Table 1 of the handouts, versions 1.0.5 and 26.1.1: d_model, d_ff, layers, heads.
    xl = configure("cs336-2026-xl")
    assert xl is configure("2.7B") and (xl.d_model, xl.d_ff, xl.layers, xl.heads) == (2560, 10240, 32, 32)
    older, ten = configure("cs336-2025-xl"), configure("cs336-2026-10B", layers=2)
    assert (older.d_model, older.d_ff, older.layers, older.heads) == (1600, 6400, 48, 25)
    assert (ten.name, ten.d_model, ten.d_ff, ten.heads) == ("10B+layers2", 4608, 12288, 36)
    with pytest.raises(InputError, match=r"unknown model of cs336-2026 '2\.7B': choose one of small, medium"):
        configure("cs336-2026-2.7B")


def test_a_name_that_editions_use_differently_says_so_and_no_other_does():
    said = {name: editions_apart(name) for names in (*EDITIONS.values(), PRESETS) for name in names}
    assert {name for name, sentence in said.items() if sentence} == {"xl"}
    assert said["xl"].startswith("xl is that of cs336-2025 (cs336-2025-xl), with 1600 x 6400, 48 layers")
    assert said["xl"].endswith("that of cs336-2026 has 2560 x 10240, 32 layers: name it cs336-2026-xl")
    assert editions_apart("cs336-2025-xl") == ""


def test_equal_workloads_share_a_key_and_others_do_not():
    assert workload().key == workload().key
    keys = {w.key for w in grid(model=["tiny", "small"], seq_len=[16, 32], dtype=["fp32", "bf16"], seed=[0, 1])}
    assert len(keys) == 16
    assert workload().key.startswith("tiny-b2-s16-fp32-train-")


def test_the_optimizer_splits_no_cells_without_a_train_phase():
    a, b = (workload(phase="forward", optimizer=name) for name in ("adamw-loop", "adamw-fused"))
    assert a == b and a.key == b.key and a.optimizer is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 0), ("batch_size", -1), ("seq_len", "128"), ("dtype", "fp64"), ("phase", "backward"),
        ("attention", "flash9"), ("compile", "fast"), ("optimizer", "sgd"),
        ("checkpointing", "every-0"), ("checkpointing", "every-02"), ("checkpointing", "every-5"),
        ("checkpointing", "selective-2"), ("checkpointing", 1), ("accumulation", 0), ("accumulation", "2"),
        ("accumulation", 3), ("clip", 0), ("clip", -1.0), ("clip", float("nan")), ("clip", float("inf")),
        ("clip", "1"), ("clip", True),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(field: str, value: object):
    with pytest.raises(InputError):
        workload(**{field: value})


def test_a_workload_survives_json():
    original = workload(dtype="bf16", attention="sdpa", compile="default")
    assert msgspec.json.decode(msgspec.json.encode(original), type=TextbookWorkload) == original


def test_keys_of_stored_results_stay_what_they_were():
    """Results are found by their keys, also those stored before a field existed."""
    assert workload(model="xl", batch_size=4, seq_len=1024).key == "xl-b4-s1024-fp32-train-13ea6701"
    stored = [file.parent for file in RESULTS.glob("**/run.json")]
    assert len(stored) > 100
    assert all(directory.name.endswith(load_run(directory).workload.key) for directory in stored)


def test_the_key_of_a_stored_sweep_stays_what_it_was():
    runs = [load_run(file.parent) for file in (RESULTS / "h200" / "limit-80GiB").glob("*/run.json")]
    plan = SweepPlan(
        cells=tuple(Cell(workload=textbook(run), settings=run.settings) for run in runs),
        tag="limit-80GiB",
        memory_limit_bytes=80 * 2**30,
    )
    assert plan.key == "b77d01cf4bcd"
    assert {run.sweep for run in runs} == {plan.key}


class GrownModel(ModelConfig, frozen=True, kw_only=True):
    experts: int | None = None


class GrownWorkload(TextbookWorkload, frozen=True, kw_only=True):
    context_parallel: int = 1


class GrownSettings(Settings, frozen=True, kw_only=True):
    repeats: int = 1


def test_a_later_field_at_its_default_changes_no_key():
    """Neither in the workload nor in its model nor in the settings of a sweep's cells."""
    now = workload(model="small")
    sizes = {**msgspec.structs.asdict(now.model)}

    def grown(experts: int | None = None, context_parallel: int = 1) -> TextbookWorkload:
        model = GrownModel(**sizes, experts=experts)
        return GrownWorkload(**{**msgspec.structs.asdict(now), "model": model}, context_parallel=context_parallel)

    assert grown().key == now.key
    assert len({now.key, grown(experts=4).key, grown(context_parallel=2).key}) == 3
    plan = SweepPlan(cells=(Cell(workload=now),)).key
    assert SweepPlan(cells=(Cell(workload=grown(), settings=GrownSettings()),)).key == plan
    assert SweepPlan(cells=(Cell(workload=grown(), settings=GrownSettings(repeats=2)),)).key != plan


def test_shared_keys_and_a_tied_head_make_cells_of_their_own_unless_nothing_is_shared():
    small = configure("small")
    assert configure("small", kv_heads=12) == small and workload(model=configure("small", kv_heads=12)).key.startswith(
        "small-"
    )
    shared = configure("small", kv_heads=4)
    assert (shared.name, shared.key_heads, shared.key_width) == ("small+kv_heads4", 4, 256)
    assert workload(model=shared).key != workload(model=small).key
    tied = configure("small", tied=True)
    assert (tied.name, configure("small", tied=False)) == ("small+tied", small)
    for other in (shared, tied):
        assert not workload(model=other).at_most(workload(model=small))
    with pytest.raises(InputError, match=r"kv_heads 5 do not divide heads 12: choose one of 1, 2, 3, 4, 6, 12$"):
        configure("small", kv_heads=5)


def test_checkpointing_and_accumulation_make_cells_of_their_own():
    cells = grid(model=["tiny"], checkpointing=["none", "every-1", "every-2", "selective"], accumulation=[1, 2])
    assert len({cell.key for cell in cells}) == len(cells) == 8
    assert cells[-1].key.startswith("tiny-b4-s512-fp32-train-checkpoint-selective-accumulate-2-")
    plans = {SweepPlan(cells=(Cell(workload=cell),)).key for cell in cells}
    assert len(plans) == 8


def test_the_batch_is_split_into_micro_batches():
    split = workload(batch_size=12, accumulation=3)
    assert (split.micro_batch_size, split.tokens) == (4, 12 * 16)
    with pytest.raises(InputError, match=r"batch_size 12 cannot be split into 5 .*: choose accumulation 4 or 6$"):
        workload(batch_size=12, accumulation=5)
    with pytest.raises(InputError, match=r"choose accumulation 2$"):
        workload(batch_size=2, accumulation=5)


def test_more_blocks_in_a_group_than_there_are_is_refused():
    with pytest.raises(InputError, match="every-5 groups more blocks than tiny has: choose every-1 to every-4"):
        workload(checkpointing="every-5")


def test_a_mixture_needs_blocks_of_both_kinds_and_fused_attention():
    mixed = workload(checkpointing="selective-3", attention="sdpa")
    assert mixed.key.startswith("tiny-b2-s16-fp32-train-sdpa-checkpoint-selective-3-")
    assert [(span.checkpointing, span.blocks) for span in mixed.spans] == [("attention", 1), ("selective", 3)]
    with pytest.raises(InputError, match=r"of tiny that keeps less, .* 4: choose selective-1 to selective-3, or sele"):
        workload(checkpointing="selective-4", attention="sdpa")
    with pytest.raises(InputError, match=r"which has 1: choose selective$"):
        workload(model=configure("tiny", layers=1), checkpointing="selective-1", attention="sdpa")
    with pytest.raises(InputError, match=r"checkpointing selective-1 keeps .* attention reference is no such operator"):
        workload(checkpointing="selective-1")
    with pytest.raises(InputError, match=r"pipeline gives them to stages: choose --checkpointing selective or atten"):
        workload(checkpointing="selective-1", attention="sdpa", parallel="pipeline", ranks=2)
    assert workload(checkpointing="selective-9", phase="forward").checkpointing == "none"


def test_offloading_needs_as_many_blocks_and_operators_that_run_one_by_one():
    assert workload(checkpointing="offload-4").key.startswith("tiny-b2-s16-fp32-train-checkpoint-offload-4-")
    assert workload(checkpointing="offload-9", phase="forward").checkpointing == "none"
    for wrong, said in (
        (
            {"checkpointing": "offload-5"},
            "offload-5 offloads more blocks than tiny has: choose offload-1 to offload-4$",
        ),
        (
            {"checkpointing": "offload"},
            "unknown checkpointing 'offload': choose none, .* attention, every-1, and offload-K",
        ),
        *(
            (
                one,
                "needs operators that run one by one: choose --compile eager and --graph none, or --checkpointing sel",
            )
            for one in ({"compile": "blocks"}, {"compile": "default"}, {"graph": "step"})
        ),
        ({"parallel": "pipeline", "ranks": 2}, "gives them to stages: choose --checkpointing selective or attention$"),
    ):
        with pytest.raises(InputError, match=said):
            workload(**{"checkpointing": "offload-4", **wrong})


def test_a_bound_on_the_norm_makes_a_cell_of_its_own_where_gradients_are_used():
    plain, whole, none = workload(), workload(clip=1), workload(clip="none")
    assert plain == none and plain.key == none.key and plain.clip is None
    assert whole == workload(clip=1.0) and "clip-1" in whole.key.split("-train-")[1]
    assert len({each.key for each in (plain, whole, workload(clip=0.5))}) == 3
    assert msgspec.json.decode(msgspec.json.encode(whole), type=TextbookWorkload) == whole
    assert workload(phase="forward-backward", clip=1.0) == workload(phase="forward-backward")
    assert not whole.at_most(plain) and not plain.at_most(whole)
    with pytest.raises(InputError, match="offload=yes keeps gradients in the host's memory"):
        workload(batch_size=4, clip=1.0, parallel="fsdp2:offload=yes", ranks=2)


def test_inference_has_neither_checkpointing_nor_accumulation():
    plain = workload(phase="forward")
    assert workload(phase="forward", checkpointing="every-9", accumulation=5) == plain
    with pytest.raises(InputError, match="unknown checkpointing"):
        workload(phase="forward", checkpointing="some")


def test_at_most_is_about_sizes_and_equal_choices():
    small, large = workload(seq_len=16), workload(seq_len=32)
    assert small.at_most(large) and small.at_most(small)
    assert not large.at_most(small)
    assert not small.at_most(workload(seq_len=32, dtype="bf16"))
    assert not small.at_most(workload(seq_len=32, checkpointing="every-1"))
    assert not small.at_most(workload(seq_len=32, accumulation=2))
    wide = ModelConfig(name="wide", d_model=256, d_ff=64, layers=4, heads=4)
    assert not small.at_most(workload(model=wide, seq_len=32))  # d_ff is smaller: nothing follows


def test_beside_shared_steps_one_that_nobody_shares_is_one_process():
    """Whatever the numbers of ranks: once, and never refused."""
    shared = grid(model=["tiny"], parallel=["none", "ddp"], ranks=[1, 2, 4])
    assert [(each.parallel, each.ranks) for each in shared] == [("none", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4)]
    with pytest.raises(InputError, match="2 ranks need a way to share the step"):
        grid(model=["tiny"], parallel="none", ranks=2)


def test_a_recipe_that_imports_the_old_name_gets_the_new_one_and_a_warning():
    from stepscope.core import workload

    with pytest.warns(FutureWarning, match=r"core\.workload\.Workload is now .*core\.workloads\.TextbookWorkload"):
        assert workload.Workload is TextbookWorkload
    with pytest.raises(AttributeError, match="no attribute 'Wrokload'"):
        workload.Wrokload  # noqa: B018
