"""The kernels for Hopper: compiled here, without a GPU; on one, against float64. What surrounds them runs anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import triton

from stepscope.kernels.flash import launch as flash_launch
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    HopperBackward,
    HopperForward,
    Problem,
    default_backward,
    default_forward,
    tiles,
)
from stepscope.kernels.launching import Sharing, shared_tiles
from tests.conftest import at_length

GLUON = triton.__version__.startswith(flash_launch._GLUON_KNOWN)
needs_gluon = pytest.mark.skipif(not GLUON, reason=f"Gluon of Triton {triton.__version__} is not known to the kernels")
on_hopper = [
    pytest.mark.gpu,
    needs_gluon,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]
HEADS = HopperForward(consumers=4, block_n=64, stages=10, heads=True)
FORWARDS = (
    HopperForward(turns=True, late=True),
    HopperForward(consumers=1, late=True, max_registers=128),
    HopperForward(consumers=3),
    HopperForward(block_n=64, stages=3),
    HEADS,
)
BACKWARDS = {
    64: (
        HopperBackward(v_in_registers=True),
        HopperBackward(spread=True, share=True),
        HopperBackward(v_in_registers=True, spread=True, share=True, ahead=True),
        HopperBackward(ahead=True),
        HopperBackward(heads=True),
    ),
    128: (HopperBackward(), HopperBackward(spread=True, share=True)),
}
"""By the columns of their tiles."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    found = tmp_path_factory.mktemp("hopper") / "compiled.json"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_hopper.py")
    long = request.config.getoption("--long")
    arguments = "window,documents,capped" if long else "", "64", "128", *(["80"] if long else [])
    subprocess.run([sys.executable, str(script), str(found), *arguments], check=True, env=environment, timeout=300)
    return json.loads(found.read_text())


@needs_gluon
@pytest.mark.slow  # a GPU's compiler for every case: twenty seconds
@pytest.mark.parametrize("head_dim", [64, 128, *at_length(80)])  # of 80 the kernels are those of 128, but for a bound
@pytest.mark.parametrize(
    "mask", ["causal", "full", *at_length("causal window", "causal documents", "causal capped", "heads")]
)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_compiled_products_run_ahead_of_one_another_and_fit(
    compiled: dict[str, Any], kernel: str, mask: str, head_dim: int
):
    """Where ptxas puts a wait behind every product the kernels are right, and three times as slow."""
    found = compiled[f"{kernel} heads" if mask == "heads" else f"{kernel} {head_dim} {mask}"]
    assert not found["serialised"]
    assert found["spill_store_bytes"] <= (32 if mask in ("causal", "full") else 80)
    assert found["shared_bytes"] <= 227 * 1024
    # Each product of 64 rows a warp group, 16 of the summed dimension at a time: all five, or both, are there.
    assert found["products"] >= (20 if kernel == "backward" else 16)


@needs_gluon
@given(*[st.integers(0, 9)] * 4)
@settings(max_examples=300, deadline=None)
def test_no_bounds_make_consumers_wait_for_a_tile_that_never_comes(first: int, left: int, masked: int, end: int):
    """The producer loads tiles - first of them; consumers take one, then those that they compare, then the rest."""
    from stepscope.kernels.hopper import forward

    in_python: Any = forward.visits_of  # Triton's functions keep Python's as `fn`
    tiles, masked_end = in_python.fn(first, left, masked, end)
    assert 1 <= masked_end <= tiles - first
    if first <= masked <= end and first < end:  # as right bounds have them: what needs a comparison gets one
        assert tiles == end
        visited = [turn + masked - (tiles - first if turn + masked >= tiles else 0) for turn in range(tiles - first)]
        assert sorted(visited) == [*range(first, tiles)]
        compared = {*range(first, min(left, masked)), *range(masked, tiles)}
        assert compared <= {*visited[:masked_end]}


@pytest.mark.parametrize("head_dim", [64, 72, 96, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_defaults_on_hopper_say_what_is_taken_where_the_kernel_is_not(head_dim: int, causal: bool):
    problem = Problem(capability=(9, 0), head_dim=head_dim, bytes_per_element=2, causal=causal, log2_queries=13)
    forward, backward = default_forward(problem), default_backward(problem)
    assert forward.hopper is not None and backward.hopper is not None
    assert str(forward) == str(forward.hopper) and not backward.deterministic
    without = msgspec.structs.replace(backward, hopper=None)
    assert without.deterministic and without.queries is not None
    for other in (
        msgspec.structs.replace(problem, capability=(8, 0)),
        msgspec.structs.replace(problem, bytes_per_element=4, precision="tf32x3"),
        msgspec.structs.replace(problem, head_dim=256),
        *(msgspec.structs.replace(problem, head_dim=head_dim) for head_dim in (16, 56, 65, 84, 127, 136)),
    ):
        assert default_forward(other).hopper is None and default_backward(other).hopper is None


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: HopperForward(consumers=4), "1 to 3 consumers, not 4"),
        (lambda: HopperForward(heads=True), "3 to 4 consumers, not 2"),
        (lambda: HopperForward(block_n=48), "power of two of 16 to 256 keys"),
        (lambda: HopperForward(stages=1), "in 2 to 10 stages"),
        (lambda: HopperForward(max_registers=300), "24 to 255 registers, not 300"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, what: str):
    with pytest.raises(ValueError, match=what):
        make()


def test_elsewhere_a_call_goes_to_the_other_kernels():
    """On a CPU, in the interpreter, though the configuration names the kernel in Gluon."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU there is no interpreter")
    q, k, v = (torch.randn(1, 2, 70, 64, requires_grad=True) for _ in range(3))
    forward = ForwardConfiguration(tiles=tiles(32, 16, 4, 1), tma=False, hopper=FORWARDS[0])
    backward = BackwardConfiguration(
        keys=tiles(16, 32, 4, 1), queries=tiles(32, 16, 4, 1), tma=False, hopper=BACKWARDS[64][0]
    )
    with tuning_cache.forced(forward=forward, backward=backward):
        out = flash_attention(q, k, v, causal=True)
        out.sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize(("queries", "padded"), [(1, 128), (64, 128), (100, 128), (128, 128)])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_what_goes_before_and_after_the_kernel(queries: int, padded: int, head_dim: int):
    """The statistics and zeros that it reads, and dQ of what it leaves: in the interpreter too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    batches, heads = 2, 3
    out, gradient = (torch.randn(batches, heads, queries, head_dim, generator=generator).to(device) for _ in range(2))
    logsumexp, extra = (torch.randn(batches, heads, queries, generator=generator).to(device) for _ in range(2))
    logsumexp[0, 0, 0] = float("-inf")
    rows = batches * heads
    statistics = torch.full((2 * rows, padded), float("nan"), device=device)
    sums = torch.full((rows * padded, head_dim), float("nan"), device=device)
    dq = torch.full((batches, queries, heads, head_dim), float("nan"), device=device).transpose(1, 2)
    backward = flash_launch.Backward(
        gradient, out, out, out, out, logsumexp, dq, out, out, statistics,
        causal=True, scale=0.125, window=None, precision="ieee", tma=False,
    )  # fmt: skip
    backward.preprocess(extra, sums=sums)
    assert torch.equal(sums, torch.zeros_like(sums))
    base_2, delta = statistics.view(2, batches, heads, padded)
    torch.testing.assert_close(delta[..., :queries], (out * gradient).sum(-1) - extra)
    expected = logsumexp / torch.log(torch.tensor(2.0))
    expected[0, 0, 0] = float("inf")
    torch.testing.assert_close(base_2[..., :queries], expected)
    # Rows beyond the sequence weigh nothing: 2^(s - inf).
    assert torch.equal(base_2[..., queries:], torch.full_like(base_2[..., queries:], float("inf")))

    sums.copy_(torch.randn(sums.shape, generator=generator))
    backward.finish(sums, padded)
    torch.testing.assert_close(dq, sums.view(batches, heads, padded, head_dim)[:, :, :queries] * 0.125)


@pytest.mark.parametrize("head_dim", [64, 48])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_shared_tiles_add_up(head_dim: int, parts: int):
    """The last three of four tiles of keys, two of each head: the sums before, and the rows beyond, are not theirs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    batches, heads, keys, queries, padded = 2, 1, 200, 70, 128
    k = torch.zeros(batches, keys, heads, head_dim, device=device).transpose(1, 2)
    q, dk, dv = torch.zeros(batches, heads, queries, head_dim, device=device), *(torch.full_like(k, 7) for _ in "kv")
    left = torch.randn(3, parts, 2, 128, head_dim, generator=generator).to(device)
    before = torch.full((batches * heads * padded, head_dim), float("nan"), device=device)
    sums = torch.cat([before, left.view(-1, head_dim)])
    backward = flash_launch.Backward(
        q, q, k, k, q, q[..., 0], q, dk, dv, torch.zeros(2 * batches * heads, padded, device=device),
        causal=False, scale=0.5, window=None, precision="ieee", tma=False,
    )  # fmt: skip
    backward.finish_keys(sums, Sharing(whole=1, shared=3, parts=parts))
    expected = left.sum(1)  # (3, 2, 128, D)
    for found, of_tiles in ((dk, expected[:, 0] * 0.5), (dv, expected[:, 1])):
        assert torch.equal(found[0, 0, :128], torch.full_like(found[0, 0, :128], 7))
        torch.testing.assert_close(found[0, 0, 128:], of_tiles[0, :72])
        torch.testing.assert_close(found[1, 0], torch.cat([of_tiles[1], of_tiles[2, :72]]))


@pytest.mark.parametrize(
    ("tiles", "visits", "expected"),
    [
        # 15 rounds of 132 and 68 tiles. In five parts these are 340, three rounds of 26 visits in place of one of 128.
        (2048, 128, (1980, 68, 5)),
        (2 * 132, 128, (264, 0, 1)),  # no round is left over
        (131, 128, (131, 0, 1)),  # in parts as long
        (66, 128, (0, 66, 2)),
        (4, 64, (0, 4, 8)),
        (68, 8, (68, 0, 1)),  # what parts cost is more than they save
    ],
)
def test_the_last_tiles_are_shared_where_that_ends_sooner(tiles: int, visits: int, expected: tuple[int, int, int]):
    assert shared_tiles(tiles, visits, 132) == expected


@given(tiles=st.integers(1, 3000), visits=st.integers(1, 500), multiprocessors=st.integers(1, 200))
def test_every_tile_has_its_programs(tiles: int, visits: int, multiprocessors: int):
    found = shared_tiles(tiles, visits, multiprocessors)
    assert found.whole + found.shared == tiles and found.shared < multiprocessors
    assert (found.parts > 1) == (found.shared > 0) and found.parts <= visits
    assert found.programs == found.whole + found.shared * found.parts


@pytest.mark.parametrize("hopper", BACKWARDS[64])
def test_statistics_are_padded_for_it_whatever_the_other_kernels_tiles(hopper: HopperBackward):
    """What it read beyond would be another head's, whose sums it would add to."""
    small = BackwardConfiguration(keys=tiles(16, 32, 4, 1), queries=tiles(32, 16, 4, 1))
    for queries, padded in ((1, 128), (64, 128), (70, 128), (128, 128), (192, 256)):
        q = torch.zeros(2, 3, queries, 64)
        assert flash_launch.statistics_for(q, small).shape == (12, -(-queries // 32) * 32)
        # Under a causal mask it visits the queries of all positions of its 128 keys.
        assert flash_launch.statistics_for(q, msgspec.structs.replace(small, hopper=hopper)).shape == (12, padded)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "taken"),
    [(128, 128, True, True), (64, 128, True, True), (64, 129, True, False), (64, 129, False, True),
     (300, 77, True, True), (70, 300, True, False)],
)  # fmt: skip
def test_no_tile_of_queries_lies_behind_the_rows_of_its_head(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, causal: bool, taken: bool
):
    """What it added there was another head's: zeros where keys and values are finite, and NaN where they are not."""
    monkeypatch.setattr(flash_launch, "hopper_takes", lambda *tensors, limited: True)
    monkeypatch.setattr(
        flash_launch, "_required_hopper", lambda: SimpleNamespace(sums_for=lambda q, k, rows, **_: rows)
    )
    some = tiles(64, 64, 4, 2)
    configuration = BackwardConfiguration(keys=some, queries=some, hopper=BACKWARDS[64][0])
    q, k = torch.zeros(1, 2, queries, 64), torch.zeros(1, 2, keys, 64)
    rows = flash_launch.statistics_for(q, configuration)
    sums = flash_launch.sums_for(configuration, rows, q, k, k, q, causal=causal, limited=False)
    assert (sums is not None) == taken
    if causal and taken:
        assert -(-keys // 128) * 128 <= rows.shape[1]


@needs_gluon
@pytest.mark.parametrize("head_dim", [64, 72, 80, 112, 128])
def test_descriptors_end_where_a_head_ends(monkeypatch: pytest.MonkeyPatch, head_dim: int):
    """Their blocks have 64 or 128 columns, their tensors head_dim: what is beyond belongs to the next head."""
    from stepscope.kernels.hopper import launch as hopper_launch

    launched: list[tuple[str, Any]] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
        launched.extend((kernel.__name__, each) for each in arguments if hasattr(each, "block_shape"))
        assert kernel.__name__ != "hopper_gradients" or arguments[-7:] == (head_dim, *[False] * 6)

    monkeypatch.setattr(flash_launch, "_required_hopper", lambda: hopper_launch)
    q = torch.zeros(2, 10, 3, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    logsumexp, statistics = torch.zeros(2, 3, 10), torch.empty(12, hopper_launch.BLOCK_N)
    hopper_launch.launch_hopper_forward(
        q, q, q, q, logsumexp, causal=True, scale=1.0, configuration=FORWARDS[0], launcher=launcher
    )
    sums = hopper_launch.sums_for(q, q, statistics, masked=True, configuration=HopperBackward())
    backward = flash_launch.Backward(
        q, q, q, q, q, logsumexp, q, q, q, statistics,
        causal=True, scale=1.0, window=None, precision="ieee", tma=True, launcher=launcher,
    )  # fmt: skip
    backward.hopper(sums, HopperBackward())
    columns = 64 if head_dim == 64 else 128
    tensors = [each for _, each in launched if len(each.shape) == 4]
    assert len(tensors) == 8 and sums.shape == (6 * 128, head_dim)
    assert {(each.shape[-1], each.block_shape[-1], each.strides[1]) for each in tensors} == {
        (head_dim, columns, head_dim)
    }
    summed = [each for name, each in launched if name == "hopper_gradients" and each.base is sums]
    assert [(each.shape[-1], each.block_shape[-1]) for each in summed] == [(head_dim, columns // 2)]


OF_HEADS = "hopper_forward_of_heads", "hopper_gradients_of_heads"
IN_TRITON = "flash_forward", "flash_query_gradients"


@needs_gluon
@pytest.mark.parametrize(
    ("sizes", "more", "expected"),
    [
        ((132, 132, 197, 197), {}, OF_HEADS),
        ((132, 132, 256, 640), {}, OF_HEADS),
        ((132, 132, 257, 640), {}, (OF_HEADS[0], IN_TRITON[1])),
        ((132, 132, 192, 197), {}, (IN_TRITON[0], OF_HEADS[1])),
        ((132, 132, 513, 641), {}, IN_TRITON),
        ((264, 132, 197, 197), {}, (OF_HEADS[0], IN_TRITON[1])),
        ((140, 140, 197, 197), {}, IN_TRITON),  # a second round for eight heads
        ((132, 132, 197, 197), {"causal": True}, IN_TRITON),
        ((132, 132, 197, 197), {"window": 64}, IN_TRITON),
        ((132, 132, 197, 197), {"scoring": flash_launch.Scoring(30.0)}, IN_TRITON),
    ],
)
def test_whole_heads_are_of_short_sequences_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], more: dict[str, Any], expected: tuple[str, str]
):
    from stepscope.kernels.hopper import launch as hopper_launch

    launched: list[str] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
        launched.append(kernel.__name__)
        assert "of_heads" not in kernel.__name__ or grid[0] <= 132

    monkeypatch.setattr(flash_launch, "hopper_takes", lambda *tensors, limited: True)
    monkeypatch.setattr(flash_launch, "_required_hopper", lambda: hopper_launch)
    monkeypatch.setattr(hopper_launch, "_multiprocessors", lambda device: 132)
    heads, kv_heads, queries, keys = sizes
    q, k = (torch.empty(1, h, n, 64, dtype=torch.bfloat16) for h, n in ((heads, queries), (kv_heads, keys)))
    logsumexp, some = torch.empty(1, heads, queries), tiles(64, 64, 4, 2)
    same: dict[str, Any] = {"causal": False, "scale": 1.0, "window": None, "precision": "ieee", "launcher": launcher}
    same |= more
    flash_launch.launch_forward(
        q, k, k, q, logsumexp, configuration=ForwardConfiguration(tiles=some, hopper=HEADS), **same
    )
    configuration = BackwardConfiguration(keys=some, queries=some, hopper=HopperBackward(heads=True))
    assert configuration.deterministic
    statistics = flash_launch.statistics_for(q, configuration)
    of_pass = flash_launch.Backward(q, q, k, k, q, logsumexp, q, k, k, statistics, tma=True, **same)
    flash_launch.run_backward(of_pass, configuration)
    assert [name for name in launched if name != "flash_row_statistics"][:2] == [*expected]


@needs_gluon
def test_no_grid_is_larger_than_devices_allow(monkeypatch: pytest.MonkeyPatch):
    """Many short sequences: CUDA has 2^31 - 1 blocks in a grid's first dimension, 65535 in the others."""
    from stepscope.kernels.hopper import launch as hopper_launch

    grids = []

    def launcher(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
        grids.append((kernel.__name__, *grid))

    monkeypatch.setattr(flash_launch, "_required_hopper", lambda: hopper_launch)
    rows = 70_000
    q = torch.zeros(rows, 1, 1, 64, dtype=torch.bfloat16)
    logsumexp = torch.zeros(rows, 1, 1)
    statistics = torch.empty(2 * rows, hopper_launch.BLOCK_N)
    hopper_launch.launch_hopper_forward(
        q, q, q, q, logsumexp, causal=True, scale=1.0, configuration=FORWARDS[0], launcher=launcher
    )
    backward = flash_launch.Backward(
        q, q, q, q, q, logsumexp, q, q, q, statistics,
        causal=True, scale=1.0, window=None, precision="ieee", tma=True, launcher=launcher,
    )  # fmt: skip
    sums = hopper_launch.sums_for(q, q, statistics, masked=True, configuration=BACKWARDS[64][0])
    backward.hopper(sums, BACKWARDS[64][0])
    names = ["hopper_forward", "flash_row_statistics", "hopper_gradients", "flash_finish_queries"]
    assert [name for name, *_ in grids] == names
    assert all(max(rest, default=1) <= 65535 for _, _, *rest in grids), grids


def _truth(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, *, causal: bool, scale: float) -> dict[str, Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), float("-inf"))
    out = scores.softmax(-1) @ leaves[2].repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, leaves, gradient.double())
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def _run(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, run: Any) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = run(*leaves)
    gradients = torch.autograd.grad(out, leaves, gradient)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


SIZES = [  # batches, query heads, key heads, queries, keys
    (1, 1, 1, 1, 1), (1, 2, 2, 64, 64), (2, 2, 2, 63, 63), (1, 2, 2, 129, 129), (2, 4, 2, 200, 200),
    (1, 3, 1, 77, 300), (1, 2, 2, 300, 77), (1, 2, 2, 1025, 1025), (1, 2, 1, 640, 640),
    (1, 140, 140, 2048, 100), (5, 56, 28, 1024, 128), (4, 50, 50, 250, 250),  # more tiles of keys than multiprocessors
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestOnHopper:
    """No further from float64 than twice what PyTorch's attention in the same dtype is."""

    pytestmark = on_hopper

    @pytest.fixture(autouse=True)
    def however_few_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stepscope.kernels.hopper import launch as hopper_launch

        monkeypatch.setattr(hopper_launch, "_LEAST_BUSY", 0)

    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("strided", [False, True])
    def test_every_configuration_is_right(
        self, head_dim: int, causal: bool, dtype: torch.dtype, sizes: tuple[int, ...], strided: bool
    ):
        batches, heads, kv_heads, queries, keys = sizes
        torch.manual_seed(sum(sizes))

        def drawn(heads: int, length: int) -> Tensor:
            if strided:
                return torch.randn(batches, length, heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
            return torch.randn(batches, heads, length, head_dim, device="cuda", dtype=dtype)

        q, k, v, gradient = drawn(heads, queries), drawn(kv_heads, keys), drawn(kv_heads, keys), drawn(heads, queries)
        truth = _truth(q, k, v, gradient, causal=causal, scale=0.1)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = heads // kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1)

        same_dtype = _run(q, k, v, gradient, sdpa)
        for forward in FORWARDS:
            for backward in BACKWARDS[head_dim]:
                problem = tuning_cache.problem_of(q, causal=causal)
                with tuning_cache.forced(
                    forward=msgspec.structs.replace(default_forward(problem), hopper=forward),
                    backward=msgspec.structs.replace(default_backward(problem), hopper=backward),
                ):
                    _run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal, scale=0.1))
                    # A recorded launch, on other tensors.
                    found = _run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal, scale=0.1))
                for name, expected in truth.items():
                    error = (found[name].double() - expected).abs().max().item()
                    allowed = 2 * (same_dtype[name].double() - expected).abs().max().item() + 1e-5
                    assert error <= allowed, f"{name} of {forward}, {backward}: {error:.2e} > {allowed:.2e}"

    def test_heads_take_turns_in_groups(
        self, head_dim: int, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ):
        """Two at a time of three or six, the last group smaller; a mask decides, without one they do not."""
        from stepscope.kernels.hopper import launch as hopper_launch

        monkeypatch.setattr(hopper_launch, "_NUMBERS_TOGETHER", 2 * 333 * head_dim)
        for heads, group in ((3, 1), (6, 2)):  # of no other test: a launch is recorded by shape
            q, gradient = (torch.randn(1, heads, 333, head_dim, device="cuda", dtype=dtype) for _ in range(2))
            k, v = (torch.randn(1, heads // group, 333, head_dim, device="cuda", dtype=dtype) for _ in range(2))
            assert hopper_launch._together(333, q, heads, causal) == (2 if causal else 1)
            truth = _truth(q, k, v, gradient, causal=causal, scale=0.1)
            problem = msgspec.structs.replace(tuning_cache.problem_of(q, causal=causal), log2_queries=13)
            with tuning_cache.forced(forward=default_forward(problem), backward=default_backward(problem)):
                found = _run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal, scale=0.1))
            for name, expected in truth.items():
                # Tiles of another head, or none, are off by as much as the numbers are large.
                assert (found[name].double() - expected).abs().max() <= 0.05 * expected.abs().max(), name


def _among_nan(heads: int, length: int, batches: int, head_dim: int) -> Tensor:
    """Random numbers (B, H, L, D) as heads of rows lie, with NaN behind the columns of each head and around all."""
    whole = torch.full((batches, length + 2, heads, head_dim + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
    tensor = whole[:, 1:-1, :, :head_dim].transpose(1, 2)
    return tensor.copy_(torch.randn(batches, heads, length, head_dim, device="cuda"))


def _poisoned(likes: dict[str, Tensor]) -> None:
    """Leave memory of these sizes to the allocator, full of NaN: what a kernel does not write stays NaN."""
    filled = [torch.full_like(each, float("nan")) for each in likes.values() for _ in range(3)]
    torch.cuda.synchronize()
    del filled


@pytest.mark.parametrize("head_dim", [72, 80, 96, 112, 120, 128])
@pytest.mark.parametrize("causal", [True, False])
class TestColumnsBetween64And128:
    """Head dimensions that fill a part of a tile's 128 columns: nothing beyond is read, and nothing is written."""

    pytestmark = on_hopper

    @pytest.mark.parametrize("sizes", [
        (2, 2, 2, 63, 63), (1, 2, 2, 129, 129), (2, 4, 2, 200, 200), (1, 3, 1, 77, 300), (1, 2, 2, 300, 77),
        (1, 2, 1, 1025, 1025),
    ])  # fmt: skip
    def test_results_are_those_of_float64(self, head_dim: int, causal: bool, sizes: tuple[int, ...]):
        batches, heads, kv_heads, queries, keys = sizes
        torch.manual_seed(head_dim + sum(sizes))
        q, gradient = (_among_nan(heads, queries, batches, head_dim) for _ in range(2))
        k, v = (_among_nan(kv_heads, keys, batches, head_dim) for _ in range(2))
        assert flash_launch.hopper_takes(q, k, v, gradient, limited=False)
        truth = _truth(q, k, v, gradient, causal=causal, scale=0.1)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1)

        found = same_dtype = _run(q, k, v, gradient, sdpa)
        problem = msgspec.structs.replace(tuning_cache.problem_of(q, causal=causal), log2_queries=13)
        forward, backward = default_forward(problem), default_backward(problem)
        assert forward.hopper is not None and backward.hopper is not None
        with tuning_cache.forced(forward=forward, backward=backward):
            for _ in range(2):  # launched, and then as it was recorded
                _poisoned(same_dtype)
                found = _run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal, scale=0.1))
        for name, expected in truth.items():
            error, of_pytorch = (each[name].double() - expected for each in (found, same_dtype))
            mean = error.square().mean().sqrt().item()
            allowed = 1.25 * of_pytorch.square().mean().sqrt().item() + 1e-5
            assert mean <= allowed, f"root mean square of {name}: {mean:.2e} > {allowed:.2e}"
            # Where one weight dominates a row, the largest error is how one number of dS is rounded. PyTorch's
            # attention may round dS times the scale, so twice its largest error is sometimes passed by chance.
            largest, allowed = error.abs().max().item(), 4 * of_pytorch.abs().max().item() + 1e-5
            assert largest <= allowed, f"{name}: {largest:.2e} > {allowed:.2e}"

    def test_heads_beside_one_another_keep_their_own(self, head_dim: int, causal: bool):
        """A head gives the same bits among NaN as among numbers: no column of a neighbour comes in, or is written.

        Both runs have the same strides. Triton sums delta in another order where strides are no multiples of 16.
        """
        torch.manual_seed(0)
        q, k, v, gradient = (_among_nan(3, 2048, 1, head_dim) for _ in range(4))
        found = _run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal))
        assert not any(each.isnan().any() for each in found.values())
        for head in range(3):
            a, b, c, d = (_among_nan(3, 2048, 1, head_dim).fill_(float("nan")) for _ in range(4))
            for alone, among in ((a, q), (b, k), (c, v), (d, gradient)):
                alone[:, head] = among[:, head]
            of_head = _run(a, b, c, d, lambda *t: flash_attention(*t, causal=causal))
            for name in ("out", "dk", "dv"):
                assert torch.equal(found[name][:, head], of_head[name][:, head]), (name, head)
            torch.testing.assert_close(found["dq"][:, head], of_head["dq"][:, head], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
class TestDeterminism:
    pytestmark = on_hopper

    def test_it_is_had_where_pytorch_is_asked_for_it(self, head_dim: int):
        q, k, v, gradient = (torch.randn(1, 4, 2048, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        torch.use_deterministic_algorithms(True)
        try:
            runs = [_run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=True)) for _ in range(3)]
        finally:
            torch.use_deterministic_algorithms(False)
        for name in runs[0]:
            assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:]), name

    @pytest.mark.parametrize("causal", [True, False])
    def test_dk_and_dv_agree_bit_for_bit_always(self, head_dim: int, causal: bool):
        """Without a mask these are 64 tiles of keys, which programs share."""
        q, k, v, gradient = (torch.randn(1, 4, 2048, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        runs = [_run(q, k, v, gradient, lambda *t: flash_attention(*t, causal=causal)) for _ in range(3)]
        for name in ("out", "dk", "dv"):
            assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:]), name
