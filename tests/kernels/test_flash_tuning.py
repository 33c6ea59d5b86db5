"""Tuning the FlashAttention kernels, with hand-made times: what is chosen, kept, read again and ignored."""

import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from triton.runtime.errors import OutOfResources

from stepscope.core.errors import InputError
from stepscope.kernels.flash import tune as flash_tune
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    HopperBackward,
    HopperForward,
    Problem,
    default_backward,
    default_forward,
    tiles,
    uncapped,
)
from stepscope.kernels.flash.launch import hopper_takes
from stepscope.kernels.flash.tune import (
    MOST,
    Candidate,
    Part,
    Trial,
    backward_candidates,
    forward_candidates,
    part_candidates,
    search,
    tune,
)
from stepscope.recording.precision import matmul_precision
from tests.conftest import in_the_interpreter_at_length

pytestmark = pytest.mark.slow

HOPPER = Problem(capability=(9, 0), head_dim=128, bytes_per_element=2, causal=True, log2_queries=14)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    # As on a Hopper: the interpreter's own configurations are not tuned.
    monkeypatch.setattr(tuning_cache, "_capability", lambda device: (9, 0))
    tuning_cache.forget()
    yield
    monkeypatch.undo()
    tuning_cache.forget()


def times(of: Callable[[Candidate], float], wrong: Callable[[Candidate], bool] = lambda _: False):
    """A measure that runs nothing."""
    return lambda candidate: Trial(ms=of(candidate), of_allowed=1.5 if wrong(candidate) else 0.5)


def call(head_dim: int = 128, queries: int = 64) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, queries, head_dim, dtype=torch.bfloat16) for _ in range(3)]


def test_the_fastest_correct_one_wins():
    fastest, second = ForwardConfiguration(tiles=tiles(128, 64, 8, 3)), ForwardConfiguration(tiles=tiles(64, 128, 4, 1))
    known: dict[Candidate, float] = {fastest: 1.0, second: 2.0}
    choice = search(
        HOPPER,
        times(lambda c: known.get(c, 3.0), wrong=lambda c: c == fastest),
        batch_heads=16,
        seconds=60,
    )
    assert (choice.forward, choice.forward_ms) == (second, 2.0)
    assert choice.default_forward_ms == 3.0
    # Nothing was faster than the default backward pass: a tie is not a reason to leave it.
    assert choice.backward == default_backward(HOPPER)


def test_the_kernels_in_gluon_are_chosen_with_what_is_fastest_beside_them():
    """Forward 1 by one in Gluon, 2 by another's tiles; backward 1 in Gluon, 2 joint; the defaults take 3."""
    gluon = HopperForward(turns=True, late=True, stages=3)
    beside = ForwardConfiguration(tiles=tiles(64, 64, 4, 3))
    seen: list[Candidate] = []

    def of(candidate: Candidate) -> float:
        seen.append(candidate)
        if isinstance(candidate, ForwardConfiguration):
            return 1.0 if candidate.hopper == gluon else 2.0 if candidate == beside else 3.0
        if isinstance(candidate, BackwardConfiguration):
            return 1.0 if candidate.hopper is not None else 2.0 if candidate.way == "joint" else 3.0
        return 3.0

    choice = search(HOPPER, times(of), batch_heads=16, seconds=60)
    assert (choice.forward, choice.forward_ms) == (msgspec.structs.replace(beside, hopper=gluon), 1.0)
    assert (choice.backward.hopper, choice.backward_ms) == (default_backward(HOPPER).hopper, 1.0)
    assert choice.backward.way == "joint"
    # The same without the kernel in Gluon is measured too.
    assert msgspec.structs.replace(default_forward(HOPPER), hopper=None) in seen
    assert msgspec.structs.replace(default_backward(HOPPER), hopper=None) in seen
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_where_the_kernels_in_gluon_are_not_taken_none_is_measured(head_dim: int):
    """It would be another kernel's time. Determinism is the backward one's alone, and says nothing of other calls."""
    problem = msgspec.structs.replace(HOPPER, head_dim=head_dim)
    seen: list[Candidate] = []

    def of(candidate: Candidate) -> float:
        seen.append(candidate)
        return 1.0

    choice = search(problem, times(of), batch_heads=16, seconds=60, hopper=False)
    assert not any(c.hopper for c in seen if not isinstance(c, Part))
    assert choice.forward.hopper is None and choice.backward.hopper is None and choice.default_backward_ms == 1.0
    seen.clear()
    choice = search(problem, times(of), batch_heads=16, seconds=60, deterministic=True)
    assert any(isinstance(c, ForwardConfiguration) and c.hopper for c in seen)
    assert not any(isinstance(c, BackwardConfiguration) and c.hopper for c in seen)
    assert choice.deterministic and choice.backward == default_backward(problem) and choice.backward_ms == 1.0
    measured, left = str(choice).splitlines()[2:]
    assert "backward apart keys" in measured and "1.000 ms" in measured
    assert f"backward is {default_backward(problem).hopper}, not measured" in left


def test_a_backward_pass_is_made_of_the_fastest_kernels():
    """By pointers over keys 64x128 takes 1 and over queries 64x32 takes 2; a joint pass of them, 2.5."""
    keys = Part(kernel="keys", tiles=tiles(64, 128, 8, 2), tma=False)
    queries = Part(kernel="queries", tiles=tiles(64, 32, 4, 2), tma=False)
    seen: list[Candidate] = []

    def of(candidate: Candidate) -> float:
        seen.append(candidate)
        if isinstance(candidate, BackwardConfiguration):
            best = candidate.keys == keys.tiles and candidate.queries == queries.tiles
            return (2.5 if candidate.way == "joint" else 3.0) if best else 4.0
        return {keys: 1.0, queries: 2.0}.get(candidate, 5.0) if isinstance(candidate, Part) else 1.0

    choice = search(HOPPER, times(of), batch_heads=16, seconds=60)
    assert choice.backward == BackwardConfiguration(way="joint", keys=keys.tiles, queries=queries.tiles, tma=False)
    assert (choice.backward_ms, choice.default_backward_ms) == (2.5, 4.0)
    assert len(seen) == len(set(seen)), "nothing is measured twice"


def test_what_fails_to_compile_or_gives_nan_is_passed_over():
    def measure(candidate: Candidate) -> Trial:
        if isinstance(candidate, ForwardConfiguration) and candidate != default_forward(HOPPER):
            raise OutOfResources(300_000, 232_448, "shared memory")
        return Trial(ms=1.0, of_allowed=float("nan") if isinstance(candidate, BackwardConfiguration) else 0.1)

    told: list[str] = []
    choice = search(HOPPER, measure, batch_heads=16, seconds=60, tell=told.append)
    assert (choice.forward, choice.forward_ms) == (default_forward(HOPPER), 1.0)
    assert (choice.backward, choice.backward_ms) == (default_backward(HOPPER), None)
    assert any("OutOfResources" in line for line in told) and any("wrong" in line for line in told)


@pytest.mark.parametrize("seconds", [1, 7, 20, 60])
def test_the_budget_is_kept(seconds: int):
    """Each candidate takes 3 s: none begins after the budget, and the default is measured first."""
    clock = [100.0]
    begun: list[tuple[float, Candidate]] = []

    def measure(candidate: Candidate) -> Trial:
        begun.append((clock[0] - 100, candidate))
        clock[0] += 3
        return Trial(ms=1.0 / len(begun), of_allowed=0.1)

    search(HOPPER, measure, batch_heads=16, seconds=seconds, now=lambda: clock[0])
    assert all(at < seconds for at, _ in begun) and begun[0] == (0, default_forward(HOPPER))
    if seconds >= 7:
        kinds = {type(candidate) for _, candidate in begun}
        assert kinds >= {ForwardConfiguration, BackwardConfiguration}, "the forward pass leaves time for backward"
    if seconds >= 60:
        whole = [c for _, c in begun if isinstance(c, BackwardConfiguration)]
        assert len(whole) > 1, "the kernels' own times leave time for whole passes"


def test_the_lists_are_bounded_and_begin_with_the_default():
    capabilities, widths, head_dims = [(8, 0), (8, 9), (9, 0), (10, 0)], [2, 4], [16, 64, 80, 128, 200, 256]
    for capability, width, head_dim in itertools.product(capabilities, widths, head_dims):
        problem = Problem(
            capability=capability, head_dim=head_dim, bytes_per_element=width, causal=True, log2_queries=12
        )
        forwards, keys, queries = (
            forward_candidates(problem), part_candidates(problem, "keys"), part_candidates(problem, "queries")
        )  # fmt: skip
        assert forwards[0] == default_forward(problem) and keys[0].tiles == default_backward(problem).keys
        whole = backward_candidates(problem)
        assert whole[0] == default_backward(problem)
        # Whole passes of what is measured one by one come to these: apart and joint, by descriptors and by pointers.
        assert max(len(forwards), len(keys), len(queries), len(whole) + 4) <= MOST == 10
        gluon = capability == (9, 0) and width == 2 and head_dim in {64, 80, 128}
        variants = {each.hopper for each in forwards} - {None, default_forward(problem).hopper}
        default = default_forward(problem).hopper
        assert len(variants) == (2 + (default is None) if gluon else 0)
        for listed in (forward_candidates(problem, hopper=False), backward_candidates(problem, hopper=False)):
            assert not any(each.hopper for each in listed)
        assert len(set(forwards)) == len(forwards) and len(set(whole)) == len(whole)
        assert all(capability >= (9, 0) or not each.tma for each in (*forwards, *keys, *queries))


def test_a_choice_is_kept_taken_and_read_again():
    """Calls up to the next power of two take it, others the default; another process reads the file."""
    chosen = ForwardConfiguration(tiles=tiles(128, 64, 8, 3), rows_first=False)
    q, k, v = call(queries=50)
    assert tuning_cache.forward_configuration(q, causal=True) != chosen
    choice = tune(q, k, v, causal=True, measure=times(lambda c: 1.0 if c == chosen else 2.0))
    assert choice.forward == chosen
    for _ in range(2):
        assert tuning_cache.forward_configuration(call(queries=64)[0], causal=True) == chosen
        assert tuning_cache.forward_configuration(call(queries=65)[0], causal=True) != chosen
        assert tuning_cache.forward_configuration(q, causal=False) != chosen
        assert tuning_cache.forward_configuration(call(head_dim=64)[0], causal=True) != chosen
        tuning_cache.forget()  # what a new process knows
    assert "128x64 w8 s3 tma heads-first: 1.000 ms (the default 2.000)" in str(choice)

    tune(q, k, v, causal=False, measure=times(lambda c: 1.0))
    assert set(tuning_cache.kept_choices("cpu")) == {choice.problem, tuning_cache.problem_of(q, causal=False)}
    tune(q, k, v, causal=True, measure=times(lambda c: 1.0))
    assert len(tuning_cache.kept_choices("cpu")) == 2, "tuned again, replaced"
    assert tuning_cache.forward_configuration(q, causal=True) != chosen


def test_dropout_takes_tiles_of_its_own_on_hopper_and_a_kept_choice_without_its_cap(monkeypatch: pytest.MonkeyPatch):
    """Elsewhere, in fp32 and above 64 columns the default is the one without; a cap was chosen without dropout, too."""
    problem = Problem(capability=(9, 0), head_dim=64, bytes_per_element=2, causal=True, log2_queries=10)
    forward, backward = default_forward(problem, dropout=True), default_backward(problem, dropout=True)
    assert str(forward) == "64x64 w4 s2 r128 tma heads-first"
    assert str(backward) == "apart keys 64x64 w4 s2 r168 queries 64x64 w4 s2 r128 tma heads-first draw-first"
    others: tuple[dict[str, Any], ...] = ({"capability": (8, 0)}, {"bytes_per_element": 4}, {"head_dim": 128})
    for other in others:
        elsewhere = msgspec.structs.replace(problem, **other)
        assert default_forward(elsewhere, dropout=True) == default_forward(elsewhere)
        assert default_backward(elsewhere, dropout=True) == default_backward(elsewhere)
    q, _, _ = call()
    monkeypatch.setattr(tuning_cache, "_capability", lambda _: (9, 0))
    q = q.bfloat16()
    for dropout in (False, True):
        expected = default_backward(tuning_cache.problem_of(q, causal=True), dropout=dropout)
        assert tuning_cache.backward_configuration(q, causal=True, dropout=dropout) == expected
        scored = tuning_cache.forward_configuration(q, causal=True, dropout=dropout, scored=True)
        assert scored == default_forward(tuning_cache.problem_of(q, causal=True))
    scored = tuning_cache.backward_configuration(q, causal=True, dropout=True, scored=True)
    assert scored == uncapped(default_backward(tuning_cache.problem_of(q, causal=True)))
    with tuning_cache.forced(backward=backward):
        free = tuning_cache.backward_configuration(q, causal=True, dropout=True)
        assert str(free) == "apart keys 64x64 w4 s2 queries 64x64 w4 s2 tma heads-first draw-first"
        assert tuning_cache.backward_configuration(q, causal=True) == backward
    tuning_cache.forget()  # what this device is not


def test_a_choice_for_the_kernels_in_gluon_is_kept_and_one_from_before_them_is_read():
    forward = ForwardConfiguration(tiles=tiles(64, 64, 4, 3), hopper=HopperForward(consumers=3, max_registers=128))
    backward = msgspec.structs.replace(default_backward(HOPPER), hopper=HopperBackward(v_in_registers=True))
    choice = tuning_cache.Choice(problem=HOPPER, batch_heads=2, forward=forward, backward=backward, deterministic=True)
    assert tuning_cache.keep("cpu", choice) is not None
    tuning_cache.forget()
    assert tuning_cache.kept_choices("cpu") == {HOPPER: choice}

    path = tuning_cache.kept_path("cpu")
    assert path is not None
    stored = json.loads(path.read_text())
    before = stored["choices"][0]
    del before["forward"]["hopper"], before["backward"]["hopper"], before["deterministic"]
    path.write_text(json.dumps(stored))
    tuning_cache.forget()
    read = tuning_cache.kept_choices("cpu")[HOPPER]
    assert read.forward == msgspec.structs.replace(forward, hopper=None)
    assert read.backward == msgspec.structs.replace(backward, hopper=None) and not read.deterministic


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"device_name": "cpu", "triton_version": "3", "choices": [{"problem": 1}]}',
     '{"choices": 3, "more": 4}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_one_clear_warning_and_ignored(content: str):
    path = tuning_cache.kept_path("cpu")
    assert path is not None
    path.write_text(content)
    q, _, _ = call()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for causal in (True, False, True):
            problem = tuning_cache.problem_of(q, causal=causal)
            assert tuning_cache.forward_configuration(q, causal=causal) == default_forward(problem)
            assert tuning_cache.backward_configuration(q, causal=causal) == default_backward(problem)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(path) in message and "tune again" in message and "\n" not in message


def test_tiles_that_no_kernel_takes_are_damage():
    q, k, v = call()
    tune(q, k, v, causal=True, measure=times(lambda c: 1.0))
    path = tuning_cache.kept_path("cpu")
    assert path is not None
    path.write_text(path.read_text().replace('"block_m": 64', '"block_m": 48'))
    tuning_cache.forget()
    with pytest.warns(UserWarning, match="power of two"):
        assert tuning_cache.forward_configuration(q, causal=True).tiles.block_m == 64


def test_without_a_place_to_keep_it_the_choice_is_still_returned(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "under"))
    q, k, v = call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tune(q, k, v, causal=True, measure=times(lambda c: 1.0)).forward_ms == 1.0


def test_wrong_input_to_tuning_is_one_clear_error():
    q, k, v = call()
    with pytest.raises(InputError, match="NVIDIA GPU"):
        tune(q, k, v, causal=True)
    with pytest.raises(InputError, match="budget above zero"):
        tune(q, k, v, causal=True, seconds=0)


@pytest.mark.parametrize("dtype", [torch.float32, *in_the_interpreter_at_length(torch.bfloat16)])
def test_candidates_are_run_into_poison_and_compared(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Everything but the clock, with grouped heads: right by far, and wrong where the truth is another."""
    monkeypatch.setattr(tuning_cache, "_capability", lambda device: (0, 0))
    monkeypatch.setattr(flash_tune, "median_call_s", lambda run, device, settings: 0.001)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 2, 40, 16, device=device).to(dtype)
    k, v = (torch.randn(1, 1, 40, 16, device=device).to(dtype) for _ in range(2))
    problem = tuning_cache.problem_of(q, causal=True)
    measure = flash_tune.OnDevice(q, k, v, causal=True, problem=problem)
    with pytest.raises(RuntimeError, match="nothing to go by"):
        measure(default_backward(problem))
    joint = BackwardConfiguration(way="joint", keys=tiles(16, 32, 4, 1), queries=tiles(32, 16, 4, 1), tma=False)
    parts = [Part(kernel=kernel, tiles=tiles(16, 16, 4, 1), tma=False) for kernel in ("keys", "queries")]
    candidates: list[Candidate] = [default_forward(problem), default_backward(problem), joint, *parts]
    elsewhere: list[Candidate] = [
        msgspec.structs.replace(default_forward(problem), hopper=HopperForward()),
        msgspec.structs.replace(default_backward(problem), hopper=HopperBackward()),
    ]
    for candidate in candidates:
        trial = measure(candidate)
        assert trial.ms == 1.0 and 0 < trial.of_allowed < 1, candidate
    for candidate in elsewhere:
        with pytest.raises(ValueError, match="kernel for Hopper does not take this call"):
            measure(candidate)
    for true in measure.truth.values():
        true.add_(0.5)
    assert all(measure(candidate).of_allowed > 1 for candidate in candidates)


def test_where_the_truth_is_zero_all_else_is_wrong(monkeypatch: pytest.MonkeyPatch):
    """Values of zero: so are the output and the gradients of queries and keys."""
    monkeypatch.setattr(tuning_cache, "_capability", lambda device: (0, 0))
    monkeypatch.setattr(flash_tune, "median_call_s", lambda run, device, settings: 0.001)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (torch.randn(1, 2, 20, 16, device=device) for _ in range(2))
    problem = tuning_cache.problem_of(q, causal=True)
    measure = flash_tune.OnDevice(q, k, torch.zeros_like(k), causal=True, problem=problem)
    assert measure.allowed["out"] == measure.allowed["dk"] == 0 < measure.allowed["dv"]
    for candidate in (default_forward(problem), default_backward(problem)):
        assert measure(candidate).of_allowed < 1
    measure.truth["dk"].fill_(1e-9)
    assert measure(default_backward(problem)).of_allowed > 1


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_hopper_the_kernels_in_gluon_are_measured_and_right(head_dim: int):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    q, k, v = (torch.randn(1, 2, 2000, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if not hopper_takes(q, k, v, limited=False):
        pytest.skip("Gluon of this Triton is not known to the kernels")
    problem = tuning_cache.problem_of(q, causal=True)
    measure = flash_tune.OnDevice(q, k, v, causal=True, problem=problem)
    forwards = [each for each in forward_candidates(problem) if each.hopper is not None]
    backwards = [each for each in backward_candidates(problem) if each.hopper is not None]
    assert len(forwards) >= 3 and backwards
    for candidate in (*forwards, *backwards):
        trial = measure(candidate)
        assert trial.of_allowed < 1 and 0 < trial.ms < 100, candidate
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="does not take this call"):
            measure(backwards[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_fp32_is_three_products_of_tf32_only_where_that_was_found_exact_enough(monkeypatch: pytest.MonkeyPatch):
    def precision(head_dim: int, dtype: torch.dtype = torch.float32) -> str:
        return tuning_cache.precision_for(torch.zeros(1, 1, 16, head_dim, dtype=dtype))

    assert (precision(64), precision(128), precision(256)) == ("tf32x3", "bf16x6", "ieee")
    assert precision(64, torch.bfloat16) == "ieee"
    monkeypatch.setattr(tuning_cache, "_capability", lambda device: (8, 0))
    assert precision(64) == "ieee"
    with matmul_precision("tf32"):
        assert precision(64) == "tf32"


@pytest.mark.parametrize("whose", [torch.backends, torch.backends.cuda.matmul], ids=["all", "matmul"])
def test_tf32_may_be_allowed_in_either_of_pytorchs_ways(whose: Any):
    q = torch.zeros(1, 1, 16, 64)
    torch.backends.cuda.matmul.fp32_precision = "none"  # as all
    whose.fp32_precision = "tf32"
    try:
        assert tuning_cache.precision_for(q) == "tf32"
    finally:
        whose.fp32_precision = "none"
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert (tuning_cache.precision_for(q) == "tf32") is allowed
