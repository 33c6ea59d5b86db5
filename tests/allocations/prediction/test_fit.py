"""Whether a step fits, and what would make it fit: every plan is applied again and judged anew."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.allocations.prediction.answer import answer_fit, answer_moments
from stepscope.allocations.prediction.estimate import (
    estimate,
    estimate_in_blocks,
    estimate_quickly,
    runs_within,
)
from stepscope.allocations.prediction.fit import (
    GRAPH_SAFETY,
    OUTSIDE_BYTES,
    QUICK_SAFETY,
    SAFETY,
    Plan,
    SymbolicPredictor,
    budget_of_device,
    budget_of_memory,
    fit,
    fit_of_run,
    judge,
    largest_that_fits,
    will_fit,
    will_surely_fit,
)
from stepscope.allocations.prediction.layouts import memory_of_ranks, sharded_peak
from stepscope.core.checkpointing import keeping
from stepscope.core.device_spec import DATASHEET, DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.formulas.transformer import parameter_count, step_flops
from stepscope.core.layout import layout_of
from stepscope.core.model_config import configure
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run, load_run
from stepscope.core.units import GIB, MIB, parse_bytes
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.fit_apart import InBlocks, least_product_s, textbook_in_blocks
from tests.conftest import at_length, mini
from tests.shown import shown
from tests.textbook import textbook

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"


def of(model: str = "small", **changes: Any) -> TextbookWorkload:
    return TextbookWorkload(model=configure(model), **changes)


def applied(plan: Plan, workload: TextbookWorkload) -> TextbookWorkload:
    """The workload with the options that a plan gives."""
    words = plan.options.split()
    fields: dict[str, Any] = {
        option.removeprefix("--"): int(setting) if setting.isdigit() else setting
        for option, setting in zip(words[::2], words[1::2], strict=True)
    }
    return msgspec.structs.replace(workload, **fields)


def cost(plan: Plan) -> float:
    assert plan.extra_flops_fraction is not None
    return plan.extra_flops_fraction


# ---- budgets


def test_a_budget_for_the_allocator_is_all_usable_and_a_devices_is_not():
    assert budget_of_memory(80 * GIB).usable_bytes == budget_of_memory(80 * GIB).total_bytes == 80 * GIB
    h200 = budget_of_device("H200")
    assert h200.total_bytes == DATASHEET["NVIDIA H200"].memory_bytes == 150109880320
    assert h200.usable_bytes == 150109880320 - OUTSIDE_BYTES
    assert "NVIDIA H200" in h200.said and "datasheet" in h200.said


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("h200", "NVIDIA H200"),
        ("a100 sxm4 40gb", "NVIDIA A100-SXM4-40GB"),
        ("4090", "RTX 4090"),
        ("3090", "RTX 3090 ("),
        ("3090 ti", "RTX 3090 Ti ("),
        ("l40", "NVIDIA L40 ("),
        ("b200", "NVIDIA B200"),
    ],
)
def test_devices_are_found_by_words_of_their_name(name: str, full: str):
    assert full in budget_of_device(name).said


@pytest.mark.parametrize("name", ["V100", "a100", "A100 80GB", "GTX 9999", "", "NVIDIA"])
def test_a_device_that_could_be_two_or_none_is_refused_with_those_it_could_be(name: str):
    with pytest.raises(InputError, match=r"^device .* choose one of .*--memory") as refused:
        budget_of_device(name)
    assert "\n" not in str(refused.value)
    assert name != "V100" or ("16GB" in str(refused.value) and "H200" not in str(refused.value))


@pytest.mark.parametrize("text", ["0", "0GiB", "-1GiB", "lots", "1e3"])
def test_a_budget_of_nothing_is_refused(text: str):
    with pytest.raises(InputError):
        parse_bytes(text)


# ---- verdicts


def test_the_verdict_is_that_of_the_allocator_under_the_limit():
    """Where the cache holds more than is alive, it is played through: what it needs is between the two."""
    workload = of(seq_len=1024)
    predicted = estimate(workload)
    assert predicted.reserved_peak is not None and predicted.peak_bytes < predicted.reserved_peak
    roomy, narrow = (int(size / (1 - SAFETY)) + 1 for size in (predicted.reserved_peak, predicted.peak_bytes - MIB))
    assert will_fit(workload, budget_of_memory(roomy)) and not will_fit(workload, budget_of_memory(narrow))
    verdicts = [
        will_fit(workload, budget_of_memory(narrow + (roomy - narrow) * i // 20)) for i in range(21)
    ]  # once it fits, it fits with more
    assert verdicts == sorted(verdicts)


@pytest.mark.parametrize(
    ("seq_len", "share", "phase"),
    [(128, 0.1, "build"), (1024, 0.6, "forward"), (1024, 0.995, "backward"), (128, 0.97, "optimizer")],
)
def test_it_says_in_which_phase_memory_runs_out(seq_len: int, share: float, phase: str):
    """Short sequences end where the first step makes the optimizer's state."""
    workload = of(seq_len=seq_len)
    assert runs_within(workload, int(estimate(workload).peak_bytes * share)) == phase


def test_fit_is_consistent_with_itself():
    workload = of(seq_len=512)
    for gibibytes in (1, 4, 5, 8):
        budget = budget_of_memory(gibibytes * GIB)
        answer = fit(workload, budget)
        assert answer.fits == (answer.fails_in is None) == will_fit(workload, budget)
        assert answer.margin_bytes == gibibytes * GIB - answer.estimate.peak_bytes
        assert sum(answer.categories.values()) == answer.estimate.peak_bytes
        assert not (answer.fits and answer.plans)
        assert answer.fits or not will_surely_fit(workload, budget)


# ---- plans


@pytest.mark.parametrize("share", [0.97, 0.6, *at_length(0.8, 0.4)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "seq_len"), [("tiny", 128), ("tiny", 1024), ("small", 1024), ("medium", 512)])
def test_every_plan_fits_with_the_peak_it_names(model: str, seq_len: int, dtype: str, share: float):
    workload = of(model, seq_len=seq_len, dtype=dtype)
    budget = budget_of_memory(int(estimate(workload).peak_bytes * share))
    answer = fit(workload, budget)
    assert not answer.fits and len({plan.change for plan in answer.plans}) == len(answer.plans)
    here = [plan for plan in answer.plans if plan.gpus == 1]
    for plan in here:
        changed = applied(plan, workload)
        assert changed != workload
        assert estimate_quickly(changed).peak_bytes == plan.peak_bytes <= budget.usable_bytes
        assert will_fit(changed, budget), plan.change
    costs = [cost(plan) for plan in here]
    assert costs == sorted(costs)
    assert [plan.gpus for plan in answer.plans] == sorted(plan.gpus or 0 for plan in answer.plans)
    for plan in answer.plans:
        assert plan.peak_bytes <= budget.usable_bytes


def test_a_plan_whose_cache_would_be_cut_up_is_not_offered():
    """Fused attention alone peaks at 69 of 80 GiB, and its cache needs more than the rest."""
    workload, budget = of("small", seq_len=395_776, phase="forward"), budget_of_memory(80 * GIB)
    assert not will_fit(msgspec.structs.replace(workload, attention="sdpa"), budget)
    plans = fit(workload, budget).plans
    assert plans and all(will_fit(applied(plan, workload), budget) for plan in plans if plan.gpus == 1)


def test_many_micro_batches_peak_as_a_few_do(monkeypatch: pytest.MonkeyPatch):
    workload = msgspec.structs.replace(mini(), batch_size=2 * 17, accumulation=17)
    predicted = estimate(workload), estimate_quickly(workload)
    monkeypatch.setattr("stepscope.allocations.prediction.estimate.MICRO_BATCHES", 17)
    assert (estimate(workload), estimate_quickly(workload)) == predicted


@pytest.mark.parametrize(("batch_size", "seq_len"), [(5040, 512), (2**40, 1)])
def test_a_batch_of_many_divisors_is_answered(batch_size: int, seq_len: int):
    workload = mini(batch_size=batch_size, seq_len=seq_len, layers=1)
    answer = fit(workload, budget_of_memory(GIB))
    assert not answer.fits
    assert all(will_fit(applied(plan, workload), budget_of_memory(GIB)) for plan in answer.plans if plan.gpus == 1)


def test_the_search_for_the_largest_asks_seldom(monkeypatch: pytest.MonkeyPatch):
    """Where the whole verdict is stricter than the quick one, and where it is milder."""
    asked: list[int] = []

    def verdict(most: int, workload: TextbookWorkload) -> bool:
        asked.append(workload.batch_size)
        return workload.batch_size <= most

    for quick, whole in ((9_000, 8_123), (8_000, 8_123), (0, 3), (5, 0), (0, 0)):
        monkeypatch.setattr("stepscope.allocations.prediction.fit.will_surely_fit", lambda w, _, q=quick: verdict(q, w))
        monkeypatch.setattr("stepscope.allocations.prediction.fit.will_fit", lambda w, _, h=whole: verdict(h, w))
        found = largest_that_fits(mini(batch_size=1, seq_len=64), budget_of_memory(GIB))
        assert found.batch_size == whole
    assert len(asked) < 500


def test_steps_of_8_bits_are_proposed_with_rows_that_their_products_take():
    """Sequences of 20 tokens: four of them have a multiple of 16 rows."""
    workload = mini(dtype="fp8", batch_size=16, seq_len=20)
    budget = budget_of_memory(estimate(workload).peak_bytes + 16 * MIB)
    found = largest_that_fits(workload, budget)
    assert found.batch_size % 4 == 0 and found.batch_size >= 16
    larger = msgspec.structs.replace(workload, batch_size=4 * found.batch_size)
    plans = fit(larger, budget).plans
    splits = [applied(plan, larger) for plan in plans if "--accumulation" in plan.options]
    assert splits and all(split.micro_batch_size % 4 == 0 for split in splits)


def test_operands_kept_in_blocks_by_hand():
    """128 tokens: r = 128 x 256, f = 128 x 1024 numbers. In 16 bits a block keeps for its linear layers alone both
    norms' outputs, 2 r, and silu(gate) * up, f (attention keeps its own); in a format 3 r + f: once what query, key and
    value take, once what gate and up take."""
    workload = of(dtype="bf16-master", attention="flash", batch_size=2, seq_len=64)
    sizes: dict[str, Any] = {"d_model": 256, "d_ff": 1024, "layers": 3, "heads": 4, "vocabulary": 512}
    workload = msgspec.structs.replace(workload, model=configure("tiny", **sizes))
    r, f = 128 * 256, 128 * 1024
    assert BLOCK_FORMATS["mxfp8"].bytes_of(256, 128) == r + r // 32
    assert BLOCK_FORMATS["nvfp4"].bytes_of(128, 40) == (128 * 40 * 4 + 128 * 3 * 8) // 8 + 4
    assert BLOCK_FORMATS["fp8-block"].bytes_of(129, 128, weight=True) == 129 * 128 + 2 * 4
    wide = estimate(workload)
    for name, each in (("mxfp8", 1 + 1 / 32), ("mxfp4", 1 / 2 + 1 / 32)):
        few = estimate_in_blocks(workload, BLOCK_FORMATS[name])
        assert wide.saved_for_backward is not None and few.saved_for_backward is not None
        assert wide.saved_for_backward - few.saved_for_backward == 3 * (2 * (2 * r + f) - (3 * r + f) * each)
        assert few.after_parameters == wide.after_parameters, "weights and states stay"


def test_the_least_time_of_products_in_blocks_by_hand():
    """4 sequences of 64 tokens; forward and backward together have three times the FLOPs of forward."""
    workload, b200 = of(dtype="bf16-master", seq_len=64), DATASHEET["NVIDIA B200"]
    sizes: dict[str, Any] = {"d_model": 256, "d_ff": 1024, "layers": 3, "heads": 4, "vocabulary": 512}
    workload = msgspec.structs.replace(workload, model=configure("tiny", **sizes))
    linear = 3 * 2 * 256 * 3 * (4 * 256**2 + 3 * 256 * 1024)
    others = step_flops(workload) - linear

    def least(name: str | None, spec: DeviceSpec) -> float | None:
        return least_product_s(
            InBlocks(BLOCK_FORMATS[name] if name else None, 0, 0, linear, others), workload.dtype, spec
        )

    assert least("nvfp4", b200) == pytest.approx(linear / 9e15 + others / 2.25e15)
    assert least(None, b200) == pytest.approx((linear + others) / 2.25e15)
    h100, amd = DATASHEET["NVIDIA H100 80GB HBM3"], DATASHEET["AMD Instinct MI355X"]
    assert least("mxfp8", h100) is None and least("nvfp4", amd) is None
    assert least("fp8-row", h100) == pytest.approx(linear / 1978.9e12 + others / 989.4e12)
    seconds = textbook_in_blocks(workload, [BLOCK_FORMATS["nvfp4"]], b200, None).tables[0].rows[1][-1]
    assert seconds == pytest.approx(linear / 9e15 + others / 2.25e15)
    said = shown(textbook_in_blocks(workload, [BLOCK_FORMATS["mxfp8"]], h100, h100.memory_bytes))
    assert "does not multiply such blocks" in said and "No run was compared" in said


def test_steps_without_operands_for_blocks_are_refused():
    with pytest.raises(InputError, match="not of fp32's: choose dtype bf16"):
        textbook_in_blocks(mini(dtype="fp32"), [BLOCK_FORMATS["mxfp8"]], None, None)
    with pytest.raises(InputError, match="do not divide 66"):
        textbook_in_blocks(of(dtype="bf16", batch_size=2, seq_len=33), [BLOCK_FORMATS["mxfp4"]], None, None)
    with pytest.raises(InputError, match=r"^100 is no multiple of 16 \(fp8-row\): change the sizes"):
        textbook_in_blocks(of(dtype="bf16", batch_size=1, seq_len=100), [BLOCK_FORMATS["fp8-row"]], None, None)
    three_keys = TextbookWorkload(model=configure("small", kv_heads=3), dtype="bf16", seq_len=512)  # of 64 numbers
    with pytest.raises(InputError, match="blocks of 128 do not divide 192"):
        textbook_in_blocks(three_keys, [BLOCK_FORMATS["fp8-block"]], None, None)


@pytest.mark.long
def test_no_plan_contains_another():
    answer = fit(of("xl", seq_len=1024), budget_of_memory(40 * GIB))
    sets = [set(plan.change.split(", ")) for plan in answer.plans]
    assert len(sets) >= 2
    assert not any(a < b for a in sets for b in sets)


def test_xl_at_1024_in_80_gib():
    """The cell that ran out of memory: each of the levers alone would have saved it."""
    plans = fit(of("xl", seq_len=1024), budget_of_memory(80 * GIB)).plans
    costs = {plan.options: plan.extra_flops_fraction for plan in plans if plan.gpus == 1}
    free = ["--attention sdpa", "--dtype bf16", "--accumulation 2", "--checkpointing selective"]
    assert [costs[options] for options in free] == [0.0] * 4
    # Of a block's forward, all but the last product: 12 d^2 of 16 d^2, and attention's products; of three forwards.
    assert costs["--checkpointing every-1"] == pytest.approx(0.25, abs=0.01)
    assert [plan.gpus for plan in plans] == [1] * 5 + [4]


@pytest.mark.parametrize("room", [0, 4, 29])
def test_of_mixtures_the_one_that_keeps_most_is_offered(room: int):
    """Also between the quarters and below the last of them; where not even one block fits, attention alone is kept."""
    fused = {"seq_len": 4096, "dtype": "bf16", "attention": "flash", "optimizer": "adamw-fused"}

    def peak(last: int) -> int:
        return estimate_quickly(of("xl", checkpointing=keeping(last, 48), **fused)).peak_bytes

    needed = (1 + QUICK_SAFETY) * (peak(room) + peak(room + 1)) / 2
    plans = {plan.options: plan for plan in fit(of("xl", **fused), budget_of_memory(int(needed))).plans}
    kept = keeping(room, 48)
    words = "attention's outputs" if room == 0 else f"matrix products of the last {room} blocks"
    assert plans[f"--checkpointing {kept}"].change == f"checkpointing that keeps {words}"
    assert [options for options in plans if "selective" in options or "attention" in options] == [
        f"--checkpointing {kept}"
    ]
    assert 0 < cost(plans[f"--checkpointing {kept}"]) < cost(plans["--checkpointing every-1"])


def test_what_checkpointing_costs_is_counted_by_hand():
    workload = of("xl", seq_len=1024)
    plans = fit(workload, budget_of_memory(80 * GIB)).plans
    again = next(plan for plan in plans if plan.options == "--checkpointing every-1")
    tokens, d_model, d_ff, layers, vocabulary, seq_len = 4096, 1600, 6400, 48, 10_000, 1024
    projections, gate_and_up, down = 4 * d_model**2, 2 * d_model * d_ff, d_model * d_ff
    attention = seq_len * d_model  # both products, half of the square
    rerun = 2 * tokens * layers * (projections + gate_and_up + attention)
    step = 3 * 2 * tokens * (layers * (projections + gate_and_up + down + attention) + d_model * vocabulary)
    assert step == step_flops(workload)
    assert again.extra_flops_fraction == pytest.approx(rerun / step)


def test_a_change_that_adds_to_the_peak_hides_no_other():
    """Without a graph autocast adds copies of the weights: all changes together do not fit, one of them does."""
    workload = of("large", seq_len=2048, phase="forward")
    budget = budget_of_memory(5 * GIB)
    everything = msgspec.structs.replace(workload, attention="sdpa", dtype="bf16")
    assert not will_surely_fit(everything, budget)
    assert fit(workload, budget).plans[0].options == "--attention sdpa"


def test_of_a_window_the_fused_attention_is_one_that_is_predicted_with_it():
    workload = TextbookWorkload(model=configure("small", window=256), seq_len=2048)
    found = fit(workload, budget_of_memory(14 * GIB))
    fused = next(way for way in found.ways if way.change == "fused attention")
    assert (fused.options, fused.fits) == ("--attention flash", True)
    assert fused.peak_bytes == estimate_quickly(msgspec.structs.replace(workload, attention="flash")).peak_bytes


def test_what_the_step_runs_again_already_is_no_cost_of_a_plan():
    workload = of(seq_len=1024, checkpointing="every-12")
    plans = fit(workload, budget_of_memory(7 * GIB)).plans
    costs = {plan.options: plan.extra_flops_fraction for plan in plans if plan.gpus == 1}
    assert costs["--attention sdpa"] == 0
    # Each group leaves out its last product, and smaller groups are more: eleven more of them here.
    left_out = 11 * 2 * workload.tokens * workload.model.d_model * workload.model.d_ff
    assert costs["--checkpointing every-1"] == pytest.approx(-left_out / step_flops(workload))


def test_more_gpus_stand_beside_no_change_that_suffices_without_them():
    budget = budget_of_memory(7 * GIB)
    workload = of(seq_len=1024, checkpointing="every-12")
    assert any(plan.options == "--attention sdpa" for plan in fit(workload, budget).plans)
    for plan in fit(workload, budget).plans:
        assert plan.gpus == 1 or not will_surely_fit(applied(plan, workload), budget)


def test_of_cuda_graphs_it_says_what_is_not_predicted():
    budget = budget_of_memory(80 * GIB)
    for mode, said in (("default", False), ("reduce-overhead", True), ("max-autotune", True)):
        workload = of(compile=mode)
        assert ("CUDA graphs hold memory" in shown(answer_fit(fit(workload, budget)))) == said


def test_blocks_compiled_one_by_one_are_those_of_an_eager_step_with_more_kept_free():
    """The stored run has fused parts. Its peaks are those predicted; its allocator reserved more."""
    [file] = (RESULTS / "h100-x2" / "parallel").glob("*-compile-blocks-adamw-fused-aade3db3/run.json")
    run = load_run(file)
    predicted, measured = estimate(textbook(run)), run.evidence.memory
    assert measured is not None and measured.reserved_peak is not None and predicted.reserved_peak is not None
    for name in ("after_parameters", "forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak"):
        assert getattr(predicted, name) == pytest.approx(getattr(measured, name), abs=512), name
    assert predicted.reserved_peak < measured.reserved_peak < predicted.reserved_peak * 1.1
    workload = of(dtype="bf16", attention="flash", checkpointing="every-1", compile="blocks", projections="joint")
    eager = msgspec.structs.replace(workload, compile="eager")
    reserved = estimate(eager).reserved_peak
    assert reserved is not None and estimate(workload) == estimate(eager)
    budgets = [budget_of_memory(int(size)) for size in (1.1 * estimate(eager).peak_bytes, 1.13 * reserved)]
    assert [will_fit(workload, budget) for budget in budgets] == [False, True]
    assert all(will_fit(eager, budget) for budget in budgets)
    judged = fit(workload, budgets[0])
    assert all(token in shown(answer_fit(judged)) for token in ("11 % is kept free", "10 % more of the memory is kept"))
    assert "--projections apart" in next(way.options for way in judged.ways if "--parallel" in way.options)


def test_a_model_that_fits_nowhere_has_no_plan():
    answer = fit(of("10B", seq_len=128, batch_size=1), budget_of_memory(1 * GIB))
    assert not answer.fits and answer.fails_in == "build" and answer.plans == ()


def test_inference_has_no_levers_of_training():
    workload = of("2.7B", phase="forward", seq_len=2048)
    peak = estimate(workload).peak_bytes
    answer = fit(workload, budget_of_memory(int(peak * 0.9)))
    assert answer.plans
    for plan in answer.plans:
        assert not any(word in plan.options for word in ("--optimizer", "--accumulation", "--checkpointing"))
        assert plan.extra_flops_fraction == 0


# ---- sharding


@pytest.mark.parametrize("name", ["xl-b24-s1024-*-fsdp2-x2-*", "2.7B-b32-s1024-*-fsdp2-x2-*"])
def test_what_a_rank_of_fsdp2_took_is_predicted(name: str):
    [file] = (ROOT / "results" / "h100-x2" / "parallel").glob(f"*-{name}/run.json")
    run = load_run(file)
    assert run.workload.sizes is not None and run.shared
    alone = msgspec.structs.replace(
        run.workload, parallel="none", ranks=1, batch_size=run.workload.batch_size // 2
    )  # fmt: skip
    taken = [rank.memory.allocated_peak or 0 for rank in run.shared.ranks if rank.memory]
    assert sharded_peak(alone, 2) == pytest.approx(max(taken), rel=0.02)


def test_more_gpus_need_less_each_and_never_less_than_the_activations():
    workload = of("xl", seq_len=1024)
    alone = estimate_quickly(workload)
    peaks = [sharded_peak(workload, 2**n) for n in range(1, 11)]
    assert peaks == sorted(peaks, reverse=True)
    kept = alone.by_phase["backward"]["saved for backward"]
    assert peaks[-1] > kept


# ---- around the optimizer's step


@pytest.mark.parametrize("folder", ["h100-x2/parallel", "h200-x2/parallel"])
def test_what_a_rank_holds_is_what_stored_ranks_recorded(folder: str):
    """Parameters exactly; states but for AdamW's counts of steps, and zero1's cut at parameters' ends."""
    seen = 0
    for path in sorted((ROOT / "results" / folder).glob("*/run.json")):
        run = load_run(path.parent)
        layout = layout_of(run.workload) if isinstance(run.workload, TextbookWorkload) else None
        if run.shared is None or layout is None or layout.ranks == 1:
            continue
        assert isinstance(run.workload, TextbookWorkload)
        parameters, _, states = memory_of_ranks(run.workload).states(layout)
        for rank in run.shared.ranks:
            assert rank.parameter_bytes == pytest.approx(parameters, rel=1e-4)
            assert rank.optimizer_bytes == pytest.approx(states, rel=1e-4)
            seen += 1
    assert seen


def test_a_sharded_optimizer_halves_its_states_alone_on_two_ranks():
    step = of("large", batch_size=8, dtype="bf16")
    steps = [msgspec.structs.replace(step, parallel="zero1", ranks=2), step]
    whole = parameter_count(step.model) * 4
    rows = [row[2:] for row in answer_moments(steps).tables[0].rows if row[2] is not None]
    assert rows == [
        (whole, 0, 0, whole), (whole, whole, 0, 2 * whole), (whole, whole, whole, 3 * whole),
        (whole, 0, 0, whole), (whole, whole, 0, 2 * whole), (whole, whole, 2 * whole, 4 * whole),
    ]  # fmt: skip
    said = shown(answer_moments(steps))
    assert "969,411,840 x 8 B / 2 ranks = 3.61 GiB" in " ".join(said.split())


def test_a_strategy_without_a_prediction_is_refused():
    with pytest.raises(InputError, match="no prediction is of --parallel pipeline"):
        answer_moments([of("small", parallel="pipeline", ranks=2)])


# ---- from a run that was measured


def stored(folder: str, name: str) -> Run:
    return find_run(name, RESULTS / folder)


def test_a_run_bounds_what_another_batch_of_its_step_needs():
    """Runs of `large` with 4 and with 8 sequences on H200: either is bounded by the other, within 12 %."""
    runs = {4: stored("h200/launcher", "205443.508-large-b4"), 8: stored("h200-x2/parallel", "040207.876-large-b8")}
    for one, other in ((4, 8), (8, 4)):
        bound, measured = fit_of_run(runs[one], other, None), runs[other].evidence.memory
        assert bound.is_bound and measured is not None and measured.allocated_peak is not None
        assert measured.allocated_peak <= bound.peak_bytes <= 1.12 * measured.allocated_peak
        for phase in ("forward_peak", "backward_peak", "optimizer_peak"):  # the cache's remainders differ by 1 %
            assert getattr(bound.estimate.memory, phase) >= 0.985 * getattr(measured, phase)


def test_a_watched_loop_is_judged_on_another_card_and_with_another_batch_by_hand():
    """8 samples in two micro-batches: 81,838,592 bytes before the step, 92,830,720 at its peak, in backward."""
    run = stored("h200/loops", "Llama")
    same = fit_of_run(run, None, budget_of_device("L4"))
    assert (same.peak_bytes, same.fits, same.is_bound) == (92_830_720, True, False)
    twice = fit_of_run(run, 16, budget_of_memory(104 * MIB))
    assert twice.peak_bytes == 81_838_592 + 2 * (92_830_720 - 81_838_592) and twice.is_bound
    assert (twice.workload.batch_size, twice.fits, twice.largest_batch) == (16, True, 16)
    assert not fit_of_run(run, 16, budget_of_memory(103 * MIB)).fits  # 4 % are kept free
    assert fit_of_run(run, 4, None).peak_bytes < 92_830_720
    text = " ".join(shown(answer_fit(twice)).split())
    assert "with a batch of 8 on NVIDIA H200" in text and "so that this is a bound" in text and "at least 16" in text
    for size in (0, 3):
        with pytest.raises(InputError, match=f"--batch-size {size} cannot be: .* has 2 micro-batches"):
            fit_of_run(run, size, None)


def test_a_run_without_measured_peaks_is_refused():
    with pytest.raises(InputError, match="has no measured peaks, as of every CPU: give its model"):
        fit_of_run(stored("cpu/first", "tiny"), None, None)


@pytest.mark.parametrize("name", ["2.7B-b16-s1024*-0856f3a7", "large-b24-s1024*-1170a36e", "xl-b24-s512*-c96fe619"])
def test_a_step_of_cuda_graphs_reserves_a_pool_of_its_own(name: str):
    (file,) = Path("results/h100-x2/parallel").glob(f"*{name}/run.json")
    run = load_run(file)
    assert run.evidence.memory is not None and run.evidence.memory.reserved_peak and run.workload.graph == "step"
    measured = run.evidence.memory.reserved_peak
    assert isinstance(run.workload, TextbookWorkload)
    reserved = estimate(run.workload).reserved_peak
    eager = estimate(msgspec.structs.replace(run.workload, graph="none")).reserved_peak
    assert reserved is not None and eager is not None and eager < reserved
    assert measured * (1 - GRAPH_SAFETY) < reserved <= measured
    small = judge(SymbolicPredictor(run.workload), budget_of_memory(measured // 2))
    assert small.fits is False and small.ways  # no way out holds what a graph does not
    shared = [way.options for way in small.ways if "fsdp2" in way.options]
    assert all(options.endswith("--graph none") for options in shared)
