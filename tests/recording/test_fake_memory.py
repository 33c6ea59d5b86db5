"""A step on fake tensors: what it would allocate, against hand counts, real steps on the CPU and measured GPUs."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from stepscope.core.errors import InputError
from stepscope.core.evidence import MemoryCategory
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.fake_module import estimate_by_running
from stepscope.recording.as_on_cuda import _IN_FP32, AsOnCuda, AttentionBackend, chosen_backend
from stepscope.recording.driven import observe_step
from stepscope.recording.fake_memory import _TAKES_OF_OTHERS, FakeMemory, FakeMemoryOfOwn
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, mini
from tests.cpu_allocations import allocated_bytes
from tests.fake_compile import saved_by_compiled_step

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
H200 = Path(__file__).parents[2] / "results" / "h200"


def sizes(watch: FakeMemory) -> list[int]:
    """The events as signed bytes."""
    allocations = watch.allocations
    return [allocations[event].nbytes if event >= 0 else -allocations[~event].nbytes for event in watch.events]


def live_bytes(watch: FakeMemory, *categories: MemoryCategory) -> int:
    return sum(a.nbytes for a in watch.allocations if a.live and a.category in categories)


def test_allocations_and_releases_by_hand():
    with FakeTensorMode(), FakeMemory() as watch:
        a = torch.empty(10, 100)
        b = a.t().reshape(10, 100)  # transposed: a copy
        c = a.view(100, 10)[3:]  # a view: nothing
        a.add_(1)  # in place: nothing
        del b
        del a  # c still needs its storage
        d = c.half()
        del c
    assert sizes(watch) == [4000, 4000, -4000, 1940, -4000]
    assert [a.operator for a in watch.allocations] == [
        "aten.empty.memory_format", "aten.clone.default", "aten._to_copy.default",
    ]  # fmt: skip
    assert d.dtype == torch.float16


def test_a_tensor_made_of_others_is_those():
    """Its own size is one that it only appears to have."""
    with FakeTensorMode(), FakeMemory() as watch:
        pair = TwoTensor(torch.empty(4), torch.empty(4))
        doubled = pair * 2
        assert sizes(watch) == [16, 16, 16, 16]
        watch.label([doubled], "optimizer state")
        assert live_bytes(watch, "optimizer state") == 32


def test_nothing_is_allocated_in_truth():
    with FakeTensorMode(), FakeMemory() as watch:
        huge = torch.empty(2**20, 2**20)
        _ = huge @ huge
    assert watch.allocations[0].nbytes == 2**42


def test_a_layer_by_hand():
    """y = relu(x w^T): w's product saves x, an input; relu its result; backward makes one temporary."""
    with FakeTensorMode(), FakeMemory(workspace_bytes=1000) as watch:
        layer = nn.Linear(8, 16, bias=False)
        x = torch.empty(4, 8)
        watch.label(layer.parameters(), "parameters")
        watch.label([x], "inputs")
        with watch.phase("forward"):
            loss = layer(x).relu().sum()
        assert live_bytes(watch, "saved for backward") == 4 * 16 * 4 + 4  # and the loss
        with watch.phase("backward"):
            loss.backward()
        assert layer.weight.grad is not None
        watch.label([layer.weight.grad], "gradients")
    assert live_bytes(watch, "gradients") == live_bytes(watch, "parameters") == 16 * 8 * 4
    assert live_bytes(watch, "inputs") == 4 * 8 * 4
    assert live_bytes(watch, "workspaces") == 2000, "cuBLAS keeps one for each of two threads"
    assert [phase.name for phase in watch.phases] == ["forward", "backward"]


def test_recomputation_keeps_what_forward_would_have_kept():
    with FakeTensorMode(), FakeMemory() as watch:
        w = nn.Parameter(torch.empty(8, 8))
        x = torch.empty(4, 8)
        with watch.phase("forward"):
            loss = checkpoint(lambda x: (x @ w).exp().exp(), x, use_reentrant=False).sum()
        assert live_bytes(watch, "saved for backward") == 4
        with watch.phase("backward"):
            loss.backward()
    again = [a for a in watch.allocations if a.phase == "backward" and a.category == "saved for backward"]
    assert [a.operator for a in again] == ["aten.exp.default"] * 2


def saved_by_a_fake_step(workload: TextbookWorkload) -> int:
    """As the CPU would run it, without CUDA's ways: what the second forward leaves, but for the loss."""
    with FakeTensorMode(), FakeMemory() as watch:
        step = TrainingStep(workload, CPU)
        watch.label([*step.model.parameters(), *step.model.buffers()], "parameters")
        watch.label([tensor for batch in step.batches for tensor in batch], "inputs")
        for phases in (step.phases, step.phases[:1]):
            step.prepare()
            for phase in phases:
                with watch.phase(phase.name):
                    phase.run()
        return live_bytes(watch, "saved for backward", "cast copies") - 4


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", *at_length("fp16")])
@pytest.mark.parametrize("checkpointing", ["none", "every-2", *at_length("every-1")])
def test_saved_for_backward_is_what_a_real_step_saves(dtype: str, attention: str, checkpointing: str):
    """To the byte. The real step is watched by autograd's hooks, the fake one by its allocations."""
    workload = mini(dtype=dtype, attention=attention, checkpointing=checkpointing)
    _, real = observe_step(TrainingStep(workload, CPU), CPU)
    assert saved_by_a_fake_step(workload) == real.saved_for_backward


@pytest.mark.parametrize("backend", ["efficient", "flash", "cudnn", "math"])
def test_attention_becomes_the_kernel_that_a_gpu_runs(backend: AttentionBackend):
    with FakeTensorMode(), FakeMemory() as watch, AsOnCuda(lambda _: backend):
        q, k, v = (torch.empty(2, 3, 64, 20, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    operators = {a.operator for a in watch.allocations}
    name = f"aten._scaled_dot_product_{backend}_attention.default"
    assert (name in operators) == (backend != "math")
    assert ("aten.bmm.default" in operators) == (backend == "math")


def queries(heads: int = 4, dim: int = 16, dtype: torch.dtype = torch.bfloat16, seq: int = 12) -> torch.Tensor:
    return torch.empty(2, heads, seq, dim, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "backend"),
    [
        ({}, "cudnn"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float64}, "math"),
        ({"key_heads": 1}, "math"),  # as Falcon's, one head of keys for all: broadcast, and not said to be shared
        ({"key_heads": 2, "enable_gqa": True}, "cudnn"),
        ({"key_heads": 2, "enable_gqa": True, "dtype": torch.float32}, "math"),
        ({"dim": 12}, "flash"),  # which pads it
        ({"dim": 12, "mask": (12, 12)}, "math"),
        ({"dim": 12, "dtype": torch.float32}, "efficient"),
        ({"dim": 264}, "efficient"),
        ({"mask": (12, 12)}, "cudnn"),
        ({"mask": (2, 1, 1, 12)}, "cudnn"),
        ({"mask": (4, 12, 12)}, "efficient"),
        ({"mask": (1, 4, 12, 12), "bias": True}, "efficient"),  # as Swin's table of relative positions
        ({"off": "cudnn"}, "flash"),
        ({"off": "cudnn", "mask": (12, 12)}, "efficient"),
    ],
)  # fmt: skip
def test_the_backend_is_the_first_that_is_able(call: dict[str, Any], backend: str):
    off = torch.backends.cuda.enable_cudnn_sdp
    off(call.get("off") != "cudnn")
    try:
        shape = {"dim": call.get("dim", 16), "dtype": call.get("dtype", torch.bfloat16)}
        query, key = queries(**shape), queries(call.get("key_heads", 4), **shape)
        mask = torch.empty(call["mask"], requires_grad=call.get("bias", False)) if "mask" in call else None
        grouped = call.get("enable_gqa", False)
        assert chosen_backend(query, key, key, mask, is_causal=False, enable_gqa=grouped) == backend
    finally:
        off(enabled=True)


def attended(
    *mask: int, heads: int = 4, grad: bool = False, condition: bool = False, dropout: float = 0, autocast: bool = False
) -> tuple[FakeMemory, int]:
    """What attention as chosen allocates in 16 bits, and the bytes that it keeps for backward."""
    with FakeTensorMode(), FakeMemory() as watch:
        dtype = torch.bool if condition else torch.bfloat16
        given = torch.empty(mask, dtype=dtype, requires_grad=grad) if mask else None
        query, key, value = queries(), queries(heads), queries(heads)
        with watch.phase("forward"), AsOnCuda("chosen"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = F.scaled_dot_product_attention(query, key, value, given, dropout)
        kept = live_bytes(watch, "saved for backward")
        out.sum().backward()
    return watch, kept


@pytest.mark.parametrize("autocast", [False, True])
def test_heads_that_are_broadcast_keep_their_scores(autocast: bool):
    """In bf16, too: PyTorch computes them in fp32 unless it is told not to, and autocast casts nothing in between."""
    _, kept = attended(heads=1, autocast=autocast)
    numbers, scores = 2 * 4 * 12 * 16, 2 * 4 * 12 * 12
    # In fp32 the scores, scaled queries, and keys and values that are expanded to the heads of the queries.
    assert kept == 4 * (3 * numbers + scores) + 2 * numbers


def test_dropped_weights_of_such_heads_are_kept_with_a_byte_each():
    """CUDA's dropout, in attention that is written out, too."""
    numbers, scores = 2 * 4 * 12 * 16, 2 * 4 * 12 * 12
    assert attended(heads=1, dropout=0.1)[1] == attended(heads=1)[1] + scores * (4 + 1)
    assert 4 * (3 * numbers + scores) + 2 * numbers == attended(heads=1)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_written_out_gives_what_pytorchs_gives(dtype: torch.dtype):
    """Beside its own operator, with dropout of nearly nothing."""
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=dtype) for _ in range(3))
    mask = torch.randn(2, 1, 6, 6, dtype=dtype)
    calls: list[dict[str, Any]] = [{"attn_mask": mask}, {"is_causal": True}, {"scale": 0.3}]
    for given in calls:
        with AsOnCuda(lambda _: "math"):
            plain = F.scaled_dot_product_attention(q, k, v, **given)
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **given), plain)


@pytest.mark.parametrize(
    ("shape", "over", "dtype", "bytes_taken"),
    [
        ((4096, 3072), [0], torch.bfloat16, 100_663_296),  # both seen in the allocator's history on an H200
        ((3152, 3072), [0], torch.bfloat16, 78_643_200),
        ((4096, 3072), [0], torch.float32, 100_663_296),
        ((8, 512, 3072), [0, 1], torch.bfloat16, 100_663_296),  # dimensions that follow each other are one
        ((4096, 3072), [1], torch.bfloat16, 0),  # neighbours
        ((64, 3072), [0], torch.bfloat16, 0),  # few enough for the threads of a block
    ],
)
def test_sums_over_rows_leave_their_parts_in_memory(
    shape: tuple[int, ...], over: list[int], dtype: torch.dtype, bytes_taken: int
):
    """64 blocks (50 for 3,152 rows) of 32 x 4 threads leave 4 vectors of 4 bytes for each of 3,072 sums."""
    with FakeTensorMode(), FakeMemory(workspace_bytes=1) as watch:
        sums = torch.empty(shape, dtype=dtype).sum(over)
    passing = [a.nbytes for a in watch.allocations if a.operator.startswith("aten.sum") and a.nbytes != sums.nbytes]
    assert passing == ([bytes_taken] if bytes_taken else [])


def test_a_mask_is_padded_and_its_gradient_too():
    watch, _ = attended(1, 4, 12, 12, grad=True)
    made = [(a.operator.split(".")[1], a.nbytes) for a in watch.allocations]
    assert ("constant_pad_nd", 4 * 12 * 16 * 2) in made  # rows of 12 elements begin at multiples of 8
    # Gradients of query, key and value, and one of all scores, whose rows lie in multiples of 16.
    assert made.count(("_scaled_dot_product_efficient_attention_backward", 2 * 4 * 12 * 16 * 2)) == 4


def test_a_condition_becomes_numbers_once_and_no_copy_by_head():
    watch, _ = attended(2, 1, 12, 12, condition=True)
    assert [a.nbytes for a in watch.allocations if a.operator == "aten.where.self"] == [2 * 12 * 12 * 2]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_inside_pytorchs_own_module_becomes_that_kernel_too(dropout: float):
    """nn.MultiheadAttention calls it in a function of Python, for which PyTorch takes the mode off."""
    asked: list[tuple[int, ...]] = []

    def backend(query: torch.Tensor) -> AttentionBackend:
        asked.append(tuple(query.shape))
        return "efficient"

    before = F.softmax, F.scaled_dot_product_attention
    with FakeTensorMode(), FakeMemory() as watch:
        module = torch.nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)
        x = torch.empty(3, 8, 16)
        with AsOnCuda(backend):
            module(x, x, x, need_weights=False)[0].sum().backward()
    assert asked == [(3, 2, 8, 8)]
    assert "aten._scaled_dot_product_efficient_attention.default" in {a.operator for a in watch.allocations}
    assert (F.softmax, F.scaled_dot_product_attention) == before


@pytest.mark.parametrize("call", ["function", "attention"])
def test_dropout_saves_a_byte_an_element(call: str):
    """CUDA's fused kernel saves a mask; a CPU saves factors of four bytes."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with FakeTensorMode():
        module = torch.nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        x = torch.empty(3, 8, 16, requires_grad=True)
        with AsOnCuda(lambda _: "math"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if call == "function":
                F.dropout(x, 0.1)
            else:
                module(x, x, x, need_weights=True)
    masks = [tensor.nbytes for tensor in saved if tensor.dtype == torch.bool]
    assert masks == [3 * 8 * 16 if call == "function" else 3 * 2 * 8 * 8]


@pytest.mark.parametrize(
    "loss",
    [
        *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    ],
)
def test_a_mean_keeps_the_storage_that_pytorch_keeps(loss: str):
    """That of every element's loss, where PyTorch shrinks it to one number in place."""
    x, y = torch.rand(20, 50).requires_grad_(), torch.rand(20, 50)
    truth: list[torch.Tensor] = []
    left, peak = allocated_bytes(lambda: truth.append(getattr(F, loss)(x, y)))
    with FakeTensorMode(allow_non_fake_inputs=True), FakeMemory() as watch:
        watch.hold([x, y])
        _kept = getattr(F, loss)(x, y)
    alive = [*itertools.accumulate(sizes(watch)[2:])]
    assert (alive[-1], max(alive)) == (left, pytest.approx(peak, abs=16))


TRANSPOSED: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda x, _y, _words: torch.softmax(x.t(), -1),
    "log_softmax": lambda x, _y, _words: torch.log_softmax(x.t(), -1),
    "softmax backward": lambda x, y, _words: torch.ops.aten._softmax_backward_data(y.t(), x, -1, torch.float32),
    "log_softmax backward": lambda _x, y, _words: torch.ops.aten._log_softmax_backward_data(
        y.t(), y.t(), -1, torch.float32
    ),
    "layer_norm": lambda x, _y, _words: F.layer_norm(x.t(), (64,)),
    "embedding backward": lambda _x, y, words: torch.ops.aten.embedding_dense_backward(y.t(), words, 7, -1, False),
    "nll_loss": lambda x, _y, words: F.nll_loss(x.view(4, 16, 24).transpose(1, 2), words.view(4, 16)),
    "cross_entropy": lambda x, _y, words: F.cross_entropy(x.view(4, 16, 24).transpose(1, 2), words.view(4, 16)),
}


@pytest.mark.parametrize("call", TRANSPOSED)
def test_a_kernel_copies_what_is_not_contiguous(call: str):
    run, tensors = TRANSPOSED[call], [torch.rand(64, 24), torch.rand(24, 64), torch.arange(64) % 7]
    _, peak = allocated_bytes(lambda: run(*tensors))
    with FakeTensorMode() as mode, FakeMemory() as watch:
        watch.hold(held := [*map(mode.from_tensor, tensors)])
        run(*held)
    assert max(itertools.accumulate(sizes(watch)[3:])) == pytest.approx(peak, abs=16)


def test_autocast_is_cudas():
    with FakeTensorMode(), AsOnCuda(lambda _: "math"), torch.autocast("cpu", torch.bfloat16):
        x = torch.empty(4, 4) @ torch.empty(4, 4)
        assert x.dtype == torch.bfloat16
        assert x.exp().dtype == x.sum().dtype == (x**2).dtype == torch.float32
        assert x.square().dtype == F.interpolate(x[None], 8).dtype == torch.float32, "which are made of such"
        assert (x * 2).dtype == torch.bfloat16
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        assert (torch.empty(4, 4) @ torch.empty(4, 4)).exp().dtype == torch.bfloat16, "and not the CPU's"


def test_cross_entropy_under_autocast_keeps_log_softmax_in_the_dtype_of_the_scores():
    """CUDA's lists name nll_loss and not cross_entropy, so both are kept: log-softmax in 16 bits, and its fp32 copy."""
    with FakeTensorMode(), FakeMemory() as watch, AsOnCuda(), torch.autocast("cpu", torch.bfloat16):
        scores = torch.empty(6, 10, dtype=torch.bfloat16, requires_grad=True)
        with watch.phase("forward"):
            loss = F.cross_entropy(scores, torch.zeros(6, dtype=torch.int64))
    assert loss.dtype == torch.float32
    kept = [a.nbytes for a in watch.allocations if a.category == "saved for backward" and a.nbytes > 8]
    assert sorted(kept) == [6 * 8, 6 * 10 * 2, 6 * 10 * 4]  # and the targets


@pytest.mark.parametrize(("kind", "kept"), [(torch.nn.LSTM, 6), (torch.nn.GRU, 7), (torch.nn.RNN, 2)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_recurrent_layers_keep_what_cudnn_keeps(kind: type[torch.nn.RNNBase], kept: int, both_ways: bool):
    """Beside calls on an H200: what is alive after forward is so many outputs a layer, and little else."""
    recurrent = H200 / "fit-truth" / "recurrent.json"
    names = {torch.nn.LSTM: "lstm", torch.nn.GRU: "gru", torch.nn.RNN: "relu"}
    measured = next(
        row for row in json.loads(recurrent.read_text())
        if (row["kind"], row["dtype"], row["L"], row["bi"], row["p"]) == (names[kind], "torch.float32", 2, both_ways, 0)
    )  # fmt: skip
    with FakeTensorMode(), FakeMemory() as watch:
        module = kind(measured["I"], measured["H"], 2, bidirectional=both_ways)
        x = torch.empty(measured["T"], measured["B"], measured["I"], requires_grad=True)
        before = sum(a.nbytes for a in watch.allocations if a.live)
        with AsOnCuda() as mode:
            out, last = module(x)
        alive = sum(a.nbytes for a in watch.allocations if a.live) - before
        assert alive == pytest.approx(measured["saved"], rel=0.01) and mode.recurrent == 1
        assert alive // out.nbytes == kept * 2
        out.sum().backward()
    assert out.shape == (measured["T"], measured["B"], measured["H"] * (1 + both_ways)) and x.grad is not None
    assert {p.grad is None for p in module.parameters()} == {False} and last is not None


def test_code_that_asks_for_cudas_autocast_hears_of_it():
    """As Nemotron's norms do, which cast by themselves."""
    asked = torch.is_autocast_enabled
    with AsOnCuda().throughout([]), torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert torch.is_autocast_enabled is asked and not torch.is_autocast_enabled()


@pytest.mark.parametrize("autocast", [lambda **how: torch.autocast("cuda", **how), torch.cuda.amp.autocast])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
def test_a_module_that_enters_cudas_autocast_casts(autocast: Any, dtype: torch.dtype):
    """Where CUDA is missing, PyTorch would warn and cast nothing."""
    linear = nn.Linear(4, 4)
    with AsOnCuda().throughout([]):
        with autocast(dtype=dtype):
            assert linear(torch.ones(2, 4)).dtype == dtype
        with autocast(enabled=False):
            assert linear(torch.ones(2, 4)).dtype == torch.float32
        with autocast():
            assert linear(torch.ones(2, 4)).dtype == torch.float16, "the default of CUDA"


def test_tensors_that_code_puts_on_the_gpu_are_where_it_runs():
    with FakeTensorMode(), AsOnCuda():
        x = torch.ones(2)
        assert x.cuda() is x and x.to("cuda") is x and x.to(torch.device("cuda", 0), torch.half).device.type == "cpu"
        assert torch.arange(2, device="cuda:0").device.type == "cpu" and x.to("meta").device.type == "meta"


def test_autocast_casts_all_that_pytorchs_header_lists():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)((?:.*\\\n)+.*)", header.read_text())
    listed = {name for each in lists for name in re.findall(r"_\((\w+)", each)}
    assert len(listed) > 60 and listed - _IN_FP32 == {"sum"}  # which is cast as it adds
    made_of_such = {"__pow__", "__rpow__", "square", "interpolate", "softmin"}
    assert {name for name in _IN_FP32 - listed if "norm" not in name and "upsample" not in name} == made_of_such


@pytest.mark.parametrize("known", [True, False])
def test_the_alignments_of_ctc_are_of_the_longest_target(known: bool):
    """10 steps, 2 samples, targets of 3 and 2: 2 L + 1 states, and backward takes as much again for itself."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FakeMemoryOfOwn(name="own") as watch:
        scores = torch.empty(10, 2, 5, requires_grad=True)
        with unset_fake_temporarily():
            real = torch.tensor([3, 2])
        given = real if known else mode.from_tensor(real)
        with watch.phase("forward"):
            loss = F.ctc_loss(scores.log_softmax(-1), torch.ones(5, dtype=torch.long), torch.tensor([10, 10]), given)
        loss.backward()
    states = 2 * (3 if known else 5) + 1
    taken = [(a.operator.split(".")[1], a.nbytes) for a in watch.allocations if "ctc" in a.operator]
    alpha = 2 * 10 * states * 4
    ours = [("_ctc_loss", 2 * 4), ("_ctc_loss", alpha)]
    assert taken == [*ours, ("_ctc_loss_backward", 400), ("_ctc_loss_backward", alpha)]
    assert bool(watch.at_most) == (not known)


def stored(pattern: str) -> tuple[TextbookWorkload, dict[str, int | None]]:
    (file,) = H200.glob(f"{pattern}/run.json")
    run = json.loads(file.read_text())
    return msgspec.convert(run["workload"], TextbookWorkload), run["evidence"]["memory"]


@pytest.mark.parametrize(
    "pattern",
    [
        "optimizer/*-small-b4-s512-fp32-*-adamw-fused-*",
        "kernels/*-small-b4-s128-bf16-forward-*",
        "memory-constants/*-small-b4-s1024-bf16-forward-sdpa-math-*",
        *(
            pytest.param(larger, marks=pytest.mark.long)
            for larger in (
                "plain/*-small-b4-s512-fp32-*", "plain/*-small-b4-s1024-bf16-*",
                "plain/*-medium-b4-s1024-fp32-*", "plain/*-2.7B-b4-s512-bf16-*",
                "optimizer/*-small-b4-s512-bf16-*-adamw-loop-*", "tf32/*-small-b4-s512-*",
            )
        ),
    ],
)  # fmt: skip
def test_phases_are_those_measured_on_a_gpu(pattern: str):
    """H200, PyTorch 2.11. What differs is the allocator's remainders: they depend on all that ran before."""
    workload, measured = stored(pattern)
    memory = msgspec.structs.asdict(estimate_by_running(workload).memory)
    for name in ("after_parameters", "forward_peak", "saved_for_backward", "backward_peak", "optimizer_peak"):
        assert memory[name] == (pytest.approx(measured[name], rel=0.004) if measured.get(name) else None), name


def test_the_make_up_of_the_peak_adds_up_to_it():
    for changes in ({"dtype": "bf16"}, {"phase": "forward"}, {"checkpointing": "every-1", "accumulation": 2}):
        estimate = estimate_by_running(mini(**changes))
        assert sum(estimate.categories.values()) == estimate.peak_bytes == estimate.memory.allocated_peak
        assert min(estimate.categories.values()) >= 0


@pytest.mark.long
def test_choices_do_to_memory_what_they_are_for():
    sizes = {"d_model": 64, "d_ff": 256, "layers": 4, "seq_len": 128}
    plain = estimate_by_running(mini(**sizes)).memory
    saved = plain.saved_for_backward
    assert saved is not None
    for changes in (
        {"checkpointing": "every-1"}, {"checkpointing": "selective"}, {"accumulation": 2},
        {"attention": "sdpa-efficient"}, {"dtype": "bf16"}, {"dtype": "bf16-pure"},
    ):  # fmt: skip
        less = estimate_by_running(mini(**sizes, **changes)).memory.saved_for_backward
        assert less is not None and less < 0.9 * saved, changes
    assert plain.parameter_bytes == 2 * estimate_by_running(mini(**sizes, dtype="bf16-pure")).memory.parameter_bytes


def test_half_the_optimizer_state_in_bf16():
    states = [
        estimate_by_running(mini(optimizer=name, layers=1, vocabulary=10_000, seq_len=2)).categories["optimizer state"]
        for name in ("adamw-loop", "adamw-bf16-state")
    ]
    assert states[0] == 2 * states[1] > 0


def test_the_process_is_left_as_it_was():
    estimate_by_running(mini(dtype="bf16-pure"))
    assert torch.get_default_dtype() == torch.float32
    assert not isinstance(torch.empty(1), FakeTensor)


def test_a_compiled_step_is_refused():
    with pytest.raises(InputError, match="compile default cannot be run on fake tensors: leave it out"):
        estimate_by_running(mini(compile="default"))


def test_attention_that_a_gpu_refuses_is_refused():
    with pytest.raises(InputError, match="does not run in fp32"):
        estimate_by_running(mini(attention="sdpa-flash"))


def test_gradients_of_joint_projections_are_copied_unless_they_lie_side_by_side():
    def taken(*dys: torch.Tensor) -> int:
        return _TAKES_OF_OTHERS["stepscope::joint_projections_backward"](dys, x, weights, torch.float32)

    with FakeTensorMode():
        x, weights = torch.empty(8, 4), [torch.empty(width, 4) for width in (6, 2)]
        first, second = torch.empty(8, 8).split([6, 2], 1)
        copied, always = 8 * 8 * 4, 8 * 4 * 4 + 8 * 4 * 4
        assert taken(first, second) == always
        for dys in ((second, first), (first, second.clone()), (first.contiguous(), second)):
            assert taken(*dys) == copied + always


def test_sizes_beyond_counting_are_refused():
    with pytest.raises(InputError, match="64-bit"):
        estimate_by_running(mini(seq_len=2**30))


@pytest.mark.parametrize(
    ("pattern", "tolerance"),
    [
        ("compile/*-small-b4-s512-fp32-*-compile-default-*", 0.001),
        # The allocator's remainders are not counted here: up to 1 MiB each, beside tensors of one or two.
        pytest.param("compile/*-small-b4-s512-bf16-*-compile-default-*", 0.03, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_what_a_compiled_step_saves_is_what_was_measured_on_a_gpu(pattern: str, tolerance: float):
    workload, measured = stored(pattern)
    assert saved_by_compiled_step(workload) == pytest.approx(measured["saved_for_backward"], rel=tolerance)


@pytest.mark.parametrize("attention", ["reference", *at_length("sdpa")])
def test_compiling_saves_less_than_eager(attention: str):
    eager = estimate_by_running(mini(attention=attention, seq_len=128)).memory.saved_for_backward
    compiled = saved_by_compiled_step(mini(attention=attention, seq_len=128, compile="default"))
    assert eager is not None and 0 < compiled < eager


@pytest.mark.parametrize("changes", [{"phase": "forward"}, {"checkpointing": "every-1"}])
def test_no_cut_is_made_where_there_is_none(changes: dict[str, str]):
    with pytest.raises(InputError, match="no cut"):
        saved_by_compiled_step(mini(compile="default", **changes))
