"""What FlashAttention does to scores beside the scale: softcap, sinks, slopes, a bias; by the gate, against float64."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core.errors import InputError
from stepscope.core.parts import TensorDtype
from stepscope.kernels.flash import launch
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.flash.configuration import BackwardConfiguration
from stepscope.training.attention.gate import (
    AttentionFunction,
    check_attention_implementation,
    long_limited_shapes,
    scored_shapes,
)
from stepscope.training.attention.written_out import dropout_numbers, reference
from tests.conftest import in_the_interpreter_at_length
from tests.kernels.test_flash_attention import (
    DEVICE,
    _interpreter_with_new_numpy,  # noqa: F401  (a fixture)
    inputs,
    way,  # noqa: F401  (a fixture)
)
from tests.kernels.test_flash_attention import (
    SMALL as SMALL_TILES,
)

pytestmark = pytest.mark.slow
ALL = scored_shapes()
SMALL = {"softcap": ALL[0], "sinks": ALL[2], "slopes": ALL[5], "bias": ALL[9], "dropout": ALL[-1]}
# For Triton's interpreter, whose tiles have 16 and 32 positions.
SMALLER = (
    msgspec.structs.replace(
        ALL[7], batch=1, heads=2, key_heads=1, queries=50, keys=34, window=10, bias="by distance", dropout=0.3
    ),
    msgspec.structs.replace(
        ALL[8], batch=1, heads=2, key_heads=1, queries=34, keys=34, documents=(1, 20, 13), bias="of heads", dropout=0.1
    ),
    msgspec.structs.replace(ALL[13], batch=1, heads=2, key_heads=1, queries=50, keys=34, dropout=0.25),
)


def judge(*shapes: Any, dtype: TensorDtype = "fp32", function: AttentionFunction | None = None) -> list[str]:
    report = check_attention_implementation(
        "flash", device=torch.device(DEVICE), dtypes=(dtype,), shapes=shapes, function=function
    )
    return [verdict.outcome for verdict in report.verdicts]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, "fp32") for shape in SMALLER),
     *in_the_interpreter_at_length(*((shape, dtype) for shape in ALL for dtype in ("fp32", "bf16", "fp16")))],
    ids=str,
)  # fmt: skip
def test_every_way_passes_the_gate(shape: Any, dtype: TensorDtype):
    assert judge(shape, dtype=dtype) == ["passed"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(6))
def test_the_kernels_of_long_sequences_pass_the_gate(part: int):
    shapes = long_limited_shapes()[part::6]
    for dtype in ("bf16", "fp16"):
        assert judge(*shapes, dtype=dtype) == ["passed"] * len(shapes)


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("softcap", lambda given: {"softcap": None}),
        ("softcap", lambda given: {"softcap": given["softcap"] * 1.01}),
        ("sinks", lambda given: {"sinks": given["sinks"].detach()}),
        ("sinks", lambda given: {"sinks": given["sinks"].flip(0)}),
        ("slopes", lambda given: {"slopes": given["slopes"] * 1.01}),
        ("slopes", lambda given: {"slopes": given["slopes"].detach()}),
        ("bias", lambda given: {"bias": given["bias"].roll(1, -1)}),
        ("bias", lambda given: {"bias": given["bias"].detach()}),
        ("dropout", lambda given: {"seeds": given["seeds"] + torch.tensor([0, 1], device=DEVICE)}),
        ("dropout", lambda given: {"dropout": given["dropout"] + 0.01}),
    ],
)
def test_the_gate_sees_a_mistake(kind: str, mistake: Any):
    def wrong(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return reference(q, k, v, **given | mistake(given))

    assert judge(SMALL[kind], function=reference) == ["passed"]
    assert judge(SMALL[kind], function=wrong) == ["failed"]


def test_a_sink_by_hand():
    """Two keys with scores 0 and a sink of log 2: weights 1/4, 1/4, and 1/2 of nothing."""
    q, k = torch.zeros(1, 1, 1, 16, device=DEVICE), torch.zeros(1, 1, 2, 16, device=DEVICE)
    v = torch.stack([torch.full((16,), 4.0), torch.full((16,), 8.0)])[None, None].to(DEVICE)
    sinks = torch.tensor([2.0], device=DEVICE).log().requires_grad_()
    out = flash_attention(q, k, v, causal=False, sinks=sinks)
    assert torch.allclose(out.detach(), torch.full_like(out, 3.0))
    # d(12 / (2 + e^s)) / ds = -12 * 2 / 16 for each of 16 numbers.
    (gradient,) = torch.autograd.grad(out.sum(), [sinks])
    assert gradient.item() == pytest.approx(-24.0)


def test_a_bias_by_hand():
    """The second query's weights are 1/4 of the key before it and 3/4 of its own; the first sees its own alone."""
    q, k = (torch.zeros(1, 1, 2, 16, device=DEVICE) for _ in range(2))
    v = torch.stack([torch.full((16,), 4.0), torch.full((16,), 8.0)])[None, None].to(DEVICE)
    bias = torch.tensor([[1.0, 3.0, 5.0]], device=DEVICE).log().requires_grad_()  # of the distances -1, 0 and 1
    out = flash_attention(q, k, v, causal=True, bias=bias)
    assert torch.allclose(out.detach()[0, 0, :, 0], torch.tensor([4.0, 7.0], device=DEVICE))
    # dS is P (dP - D), summed over 16 numbers a row: 16 * 1/4 (4 - 7) = -12, and 16 * 3/4 (8 - 7) = 12.
    (gradient,) = torch.autograd.grad(out.sum(), [bias])
    assert torch.allclose(gradient, torch.tensor([[-12.0, 12.0, 0.0]], device=DEVICE))


def test_philox_has_the_numbers_that_its_authors_publish():
    """Random123's known answer of philox4x32 in seven rounds, of a counter and a key of zeros: a bit of each key."""
    drawn = dropout_numbers(torch.Size((1, 1, 1, 32)), torch.zeros(2, dtype=torch.int64)).flatten().tolist()
    assert [sum((number >> bit & 1) << key for key, number in enumerate(drawn)) for bit in range(4)] == [
        0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48,
    ]  # fmt: skip


@pytest.mark.parametrize(("queries", "keys", "causal"), [(200, 300, False), (300, 200, True)])
def test_words_drawn_before_backward_are_the_weights_that_dropout_takes(queries: int, keys: int, causal: bool):
    """Words of queries, of whose bits each is a key, then words of keys; both padded to 256 rows and columns."""
    q, k = inputs(q_shape=(1, 3, queries, 16), k_shape=(1, 3, keys, 16))[:2]
    configuration = BackwardConfiguration(keys=SMALL_TILES, queries=SMALL_TILES, tma=False, draw_first=True)
    seeds = torch.tensor([123456789123, 77], device=DEVICE)
    words = launch.words_for(configuration, q, k, seeds, limited=False)
    assert words is not None
    backward = launch.Backward(
        q, q, k, k, q, q[..., 0].contiguous(), q, k, k, launch.statistics_for(q, configuration), causal=causal,
        scale=1.0, window=None, precision="ieee", tma=False, scoring=launch.Scoring(dropout=0.3, seeds=seeds),
        words=words,
    )  # fmt: skip
    backward.draw()
    rows, columns, place = (-(-queries // 256) * 256, -(-keys // 256) * 256, torch.arange(32, device=DEVICE))
    of_queries, of_keys = words.view(2, -1)
    by_query = (of_queries.view(3, -1, rows, 1) >> place & 1).transpose(1, 2).flatten(2)[:, :queries, :keys]
    by_key = (of_keys.view(3, -1, columns, 1) >> place & 1).transpose(2, 3).flatten(1, 2)[:, :queries, :keys]
    taken = dropout_numbers(torch.Size((1, 3, queries, keys)), seeds)[0] >= 256 - 77
    seen = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE)
    seen = seen.tril() if causal else seen
    for drawn in (by_query, by_key):
        assert torch.equal(drawn.bool() & seen, taken & seen)


def test_what_is_drawn_before_backward_takes_no_more_memory_than_is_allowed():
    """(16, 16, 1024, 64) is the most: 64 MiB. Nothing is drawn before without dropout, nor where most is hidden."""
    configuration = BackwardConfiguration(keys=SMALL_TILES, queries=SMALL_TILES, draw_first=True)
    seeds = torch.zeros(2, dtype=torch.int64)
    most, more = (torch.empty(16, heads, 1024, 64, device="meta") for heads in (16, 17))
    words = launch.words_for(configuration, most, most, seeds.to("meta"), limited=False)
    assert words is not None and words.nbytes == 64 << 20
    assert launch.words_for(configuration, more, more, seeds, limited=False) is None
    assert launch.words_for(configuration, most, most, seeds, limited=True) is None
    assert launch.words_for(configuration, most, most, None, limited=False) is None
    apart = msgspec.structs.replace(configuration, draw_first=False)
    assert launch.words_for(apart, most, most, seeds, limited=False) is None


def test_dropout_keeps_its_rate_and_the_mean():
    """Where all scores and all values are alike, the output is the share of kept weights over the probability."""
    q, v = torch.zeros(1, 2, 32, 16, device=DEVICE), torch.ones(1, 2, 128, 16, device=DEVICE)
    torch.manual_seed(0)
    first, second = (flash_attention(q, v, v, causal=False, dropout=0.3)[..., 0] for _ in range(2))
    assert not torch.equal(first, second)  # each call draws seeds of its own, from PyTorch's generator
    torch.manual_seed(0)
    assert torch.equal(flash_attention(q, v, v, causal=False, dropout=0.3)[..., 0], first)
    deviation = (0.3 / 0.7 / (2 * 32 * 128)) ** 0.5
    assert float(first.mean()) == pytest.approx(1, abs=4 * deviation)


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_anew():
    q, k, v, gradient = (each.bfloat16() for each in inputs(q_shape=(1, 2, 100, 64)))
    leaf = v.requires_grad_()

    def both() -> tuple[Tensor, Tensor]:
        out = flash_attention(q, k, leaf, causal=True, dropout=0.5)
        return out.detach(), torch.autograd.grad(out, leaf, gradient)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    replays: list[list[Tensor]] = []
    for _ in range(2):
        graph.replay()
        replays.append([each.clone() for each in found])
    for (out, of_v), other in zip(replays, reversed(replays), strict=True):
        assert not torch.equal(out, other[0])
        # out is linear in v, with the same weights in backward.
        pairs = (out.double() * gradient.double()).sum(), (of_v.double() * v.detach().double()).sum()
        assert float(pairs[0]) == pytest.approx(
            float(pairs[1]), abs=0.02 * float(out.double().norm() * gradient.double().norm())
        )


def test_a_transformation_of_each_head_or_sample():
    q, k, v, gradient = inputs(q_shape=(1, 2, 20, 16))
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)

    def loss(sinks: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        return (attention(q, k, v, causal=True, sinks=sinks, softcap=3.0) * gradient).sum()

    ours, right = (torch.func.grad(loss)(sinks, each) for each in (flash_attention, reference))
    assert torch.allclose(ours, right, atol=1e-5)
    many = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(lambda q: flash_attention(q, k, v, causal=True, softcap=3.0))(many)
    assert torch.allclose(mapped[1], reference(2 * q, k, v, causal=True, softcap=3.0), atol=1e-5)
    with pytest.raises(InputError, match="vmap takes no sinks, slopes, bias or dropout"):
        torch.func.vmap(lambda q: flash_attention(q, k, v, causal=True, sinks=sinks))(many)


def test_the_operator_with_sinks_is_sound():
    leaves = [t.detach().requires_grad_() for t in inputs(q_shape=(1, 2, 10, 16))[:3]]
    sinks = torch.zeros(2, device=DEVICE, requires_grad=True)
    slopes = torch.tensor([0.25, 0.5], device=DEVICE, requires_grad=True)
    bias = torch.zeros(2, 19, device=DEVICE, requires_grad=True)
    arguments = (*leaves, True, 0.25, None, None, 5.0, sinks, slopes, bias, 0.5, torch.tensor([1, 2], device=DEVICE))
    torch.library.opcheck(torch.ops.stepscope.flash_attention_forward.default, arguments)


def test_what_cannot_be_done_to_scores_is_one_clear_error():
    q, k, v, _ = inputs(q_shape=(1, 2, 8, 16))
    two = torch.ones(2, device=DEVICE)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"softcap": 0.0}, "a softcap above zero, not 0"),
        ({"sinks": torch.ones(3, device=DEVICE)}, r"takes sinks \(2,\) in fp32 .*, not \(3,\) in float32"),
        ({"slopes": two.double()}, r"takes slopes \(2,\) in fp32 .* in float64"),
        ({"bias": torch.ones(2, 8, device=DEVICE)}, r"here \(2, 15\) or \(2, 8, 8\), not \(2, 8\)"),
        ({"dropout": 1.0}, "a dropout of 0 or more and below 1, not 1"),
        ({"dropout": 0.5, "seeds": two}, r"takes seeds \(2,\) in int64 on .*, not \(2,\) in float32"),
        ({"bias": torch.ones(2, 15, device=DEVICE).half()}, "takes a bias in fp32, or in the queries' dtype"),
    )
    for wrong, words in cases:
        with pytest.raises(InputError, match=words):
            flash_attention(q, k, v, causal=True, **wrong)


def test_an_attention_without_them_says_so():
    report = check_attention_implementation(
        "sdpa", device=torch.device(DEVICE), dtypes=("fp32",), shapes=[msgspec.structs.replace(ALL[2], batch=1)]
    )
    assert report.verdicts[0].reason == "takes no softcap, sinks, slopes, bias or dropout"
