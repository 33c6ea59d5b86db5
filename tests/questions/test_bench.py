"""The bench of any function: inputs as they are spelled, faults that the gate must see, times, and what is said."""

import dataclasses
import functools
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.samples import Samples
from stepscope.questions.bench import answer_bench, decided, verdict_of
from stepscope.questions.bench_calls import Asked, call_of, run_bench, with_ratios
from stepscope.questions.bench_functions import (
    PRESETS,
    asked_by_functions,
    asked_by_name,
    called_with,
    left_out,
    load_function,
    names_of,
)
from stepscope.questions.bench_records import (
    Bench,
    Timing,
    decode_bench,
    encode_bench,
    odd,
    parse_shape,
    parse_sizes,
    shape_words,
    smaller,
)
from stepscope.recording.environment import resolve_device
from stepscope.training.attention import implementation
from stepscope.training.user_functions import reached_by
from tests.conftest import at_length
from tests.shown import shown

CPU = torch.device("cpu")
sdpa = F.scaled_dot_product_attention


def bench_of(mine: Callable[..., Any], rival: Callable[..., Any], shape: str, **more: Any) -> Bench:
    fields: dict[str, Any] = {"reference": None, "inputs": None, "sizes": {}, "arguments": {}, "dtype": "fp32"}
    fields |= {"backward": True, "seconds": 0.02}
    asked = asked_by_functions({"mine": mine, "rival": rival}, shape=shape, **{**fields, **more})
    return run_bench(asked, CPU)


# ---- what is called


def test_shapes_are_read_as_they_are_written():
    q, k, v, mask = parse_shape("2x8xNx64*3, mask=NxN:bool")
    assert q == k == v and q.shape == (2, 8, "N", 64) and mask.name == "mask" and mask.dtype == "bool"
    sized = tuple(one.sized({"N": 4096}) for one in (q, k, v, mask))
    assert shape_words(sized) == "2x8x4096x64*3,mask=4096x4096:bool"
    # Equal sizes stay equal, small ones stay as they are, and no tile divides an odd one.
    assert shape_words(smaller(sized, 128)) == "2x8x128x64*3,mask=128x128:bool"
    assert shape_words(odd(sized, 256)) == "2x8x249x64*3,mask=249x249:bool"
    assert shape_words(odd(parse_shape("1x2x64x32*3"), 256)) == "1x2x63x32*3", "the largest, where none is large"
    logits = parse_shape("4096x50257,4096:int64<50257")
    cut = odd(logits, 512)
    assert cut[1].shape[0] == cut[0].shape[0] and cut[1].below == cut[0].shape[1]
    assert all(isinstance(size, int) and size % 2 for size in cut[0].shape)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no shape"), ("2x", "is no shape"), ("2x3:fp33", "is no dtype"),
        ("4:int64", "need what they are below"),
        ("4:fp32<3", "need what they are below"), ("a=2*3", "repeats a tensor without a name"),
        ("a=2,a=3", "names an argument twice"), ("2*99", "up to 16 times"),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be_are_one_line(text: str, said: str):
    with pytest.raises(InputError, match=said):
        parse_shape(text)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["N"], "write NAME=NUMBER"), (["N=0"], "from 1 to"), (["N=1", "N=2"], "given twice"),
        (["A=1,2,3,4,5,6,7,8,9", "B=1,2,3,4,5,6,7,8"], "at most 64"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_one_line(sizes: list[str], said: str):
    with pytest.raises(InputError, match=said):
        parse_sizes(sizes)
    with pytest.raises(InputError, match="has no value: give --size N=1024"):
        parse_shape("Nx3")[0].sized({})


def test_sizes_make_every_combination():
    assert parse_sizes(["N=1,2", "D=64"]) == ({"N": 1, "D": 64}, {"N": 2, "D": 64})
    assert parse_sizes([]) == ({},)


def test_a_factory_of_inputs_may_return_any_form():
    x = torch.ones(3)
    assert call_of(x, "f").args == (x,) and call_of((x, 2), "f").args == (x, 2)
    assert call_of({"x": x}, "f").kwargs == {"x": x} and call_of(((x,), {"y": 1}), "f").kwargs == {"y": 1}
    with pytest.raises(InputError, match="returns int"):
        call_of(3, "f")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_kernels.py"
    file.write_text(
        textwrap.dedent("""
            import torch

            class Square(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, times):
                    ctx.save_for_backward(x)
                    ctx.times = times
                    return x * x * times

                @staticmethod
                def backward(ctx, gradient):
                    return 2 * ctx.saved_tensors[0] * gradient * ctx.times, None

            def make(n, device, dtype):
                return torch.randn(n, 8, device=device, dtype=dtype)

            def right(x, *, times=1):
                return x * x * times

            number = 3
        """)
    )
    return file


def test_functions_are_found_by_how_they_are_spelled(mine: Path):
    assert load_function("my_kernels.py:right", "bench")(torch.tensor(3.0)).item() == 9
    assert load_function("torch.nn.functional.softmax", "bench") is F.softmax
    assert load_function("my_kernels.py:Square", "bench")(torch.tensor(3.0), 2).item() == 18
    assert load_function("flash-tiled", "--against")(*(torch.ones(1, 1, 2, 4),) * 3, is_causal=True).shape == (
        1,
        1,
        2,
        4,
    )
    for spelled, said in (
        ("nothing", "write path/file.py:name"), ("math.nope", "math has no nope"),
        ("no.such.place", "cannot be imported"),
        ("my_kernels.py:rihgt", "there is right"), ("my_kernels.py:number", "cannot be called"),
        ("missing.py:f", "is not there"), ("torch.nn.Linear", "a class of modules"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_function(spelled, "bench")
    assert names_of(("a.py:flash", "torch.softmax", "flash")) == {
        "a.py:flash": "a.py:flash", "softmax": "torch.softmax", "flash": "flash",
    }  # fmt: skip
    assert names_of(("a.py:f", "b.py:f", "torch.softmax")) == {
        "f": "a.py:f",
        "b.py:f": "b.py:f",
        "softmax": "torch.softmax",
    }
    with pytest.raises(InputError, match="named twice"):
        names_of(("a.py:f", "a.py:f"))


def test_arguments_go_by_the_names_that_a_signature_has():
    def takes_causal(x: int, causal: bool = False) -> tuple[int, bool]:
        return x, causal

    def takes_nothing(x: int) -> int:
        return x

    def by_place(*args: Any) -> tuple[Any, ...]:
        return args

    arguments = {"is_causal": True}
    assert called_with(takes_causal, arguments)(1, is_causal=True) == (1, True)
    assert called_with(by_place, arguments)(1, is_causal=True) == (1, True)
    assert called_with(takes_nothing, arguments)(1, is_causal=True) == 1
    assert left_out(takes_nothing, arguments) == ["is_causal"] and not left_out(takes_causal, arguments)


# ---- right or wrong


def attention_by(name: str) -> Callable[..., Tensor]:
    run = implementation(name)
    return lambda q, k, v, is_causal: run(q, k, v, causal=is_causal)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["reference", "flash-tiled", "sdpa-flash"])
def test_what_is_right_is_called_right(name: str, dtype: str):
    found = bench_of(attention_by(name), sdpa, "2x2x70x32*3", arguments={"is_causal": True}, dtype=dtype)
    assert {verdict.judged for verdict in found.verdicts} == {"right"}
    assert {verdict.case for verdict in found.verdicts} >= {"as timed", "odd lengths", "views", "large numbers"}
    assert all(row.outcome == "measured" and row.seconds for row in found.timings)


def unsafe(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def of_whole_tiles(x: Tensor) -> Tensor:
    """Softmax of a kernel that forgets the last numbers of a row that no tile of 64 divides."""
    whole = x.shape[-1] // 64 * 64 or x.shape[-1]
    return torch.cat([x[..., :whole].softmax(-1), torch.zeros_like(x[..., whole:])], dim=-1)


def by_its_memory(x: Tensor) -> Tensor:
    """Softmax of a kernel that takes rows to lie side by side."""
    return torch.as_strided(x, x.shape, (x.shape[-1], 1), x.storage_offset()).softmax(-1)


def without_its_gradient(x: Tensor) -> Tensor:
    return x.detach().softmax(-1)


def wrong_backward(x: Tensor) -> Tensor:
    return x.softmax(-1) + (x * 0.1 - (x * 0.1).detach())


def writes(x: Tensor) -> Tensor:
    x.data.add_(1)
    return x.softmax(-1)


def writes_before(x: Tensor) -> Tensor:
    if x.storage_offset():
        x.detach().as_strided((1,), (1,), x.storage_offset() - 1).zero_()
    return x.softmax(-1)


def refuses_odd(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        raise ValueError("the width must be even")
    return x.softmax(-1)


def by_shape(x: Tensor, known: dict[torch.Size, Tensor] = {}) -> Tensor:  # noqa: B006  (it keeps what it makes)
    return known.setdefault(x.shape, x.softmax(-1))


def of_wider_tensors(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return x.softmax(-1)


_CALLS: list[int] = []


def of_other_bits(x: Tensor) -> Tensor:
    _CALLS.append(1)
    return x.softmax(-1) * (1 + len(_CALLS) % 2 * 1e-7)


FAULTS: tuple[tuple[Callable[[Tensor], Any], str, str], ...] = (
    (unsafe, "large numbers", "not finite"),
    (of_whole_tiles, "odd lengths", "is off by"),
    (by_its_memory, "views", ""),
    (without_its_gradient, "as timed", "the gradient of"),
    (wrong_backward, "as timed", "gradient of .* is off by"),
    (writes, "as timed", "it writes to"),
    (writes_before, "views", "it writes to"),
    (lambda x: x.softmax(-1).double(), "as timed", "is in float64, not float32"),
    (lambda x: x.softmax(-1)[:, :1], "as timed", "is .*, not"),
    (lambda x: (x.softmax(-1), x), "as timed", "returns 2 tensors, not 1"),
    (lambda x: x.nope(), "as timed", "it raises AttributeError"),  # type: ignore[attr-defined]
    (by_shape, "as timed", "the gradient of x is missing"),
    (of_wider_tensors, "as timed", "it changes PyTorch's default dtype, float32 to float64, for all that comes after"),
)


@pytest.mark.parametrize(("fault", "case", "said"), FAULTS)
def test_every_fault_is_seen_in_the_case_that_shows_it(fault: Callable[[Tensor], Any], case: str, said: str):
    found = bench_of(fault, lambda x: x.softmax(-1), "64x192")
    wrong = {verdict.case: verdict.reason for verdict in found.wrong("mine")}
    assert case in wrong
    assert re.search(said, wrong[case])
    assert verdict_of(found, "mine") == "wrong" and verdict_of(found, "rival").startswith("right in ")
    timing = {row.function: row for row in found.timings}
    assert timing["mine"].outcome == "wrong" and timing["mine"].seconds is None and timing["rival"].seconds
    assert "Wrong, so it has no time" in shown(answer_bench(found))


def test_a_function_that_a_later_size_shows_to_be_wrong_has_no_time_on_any():
    def up_to_64(x: Tensor) -> Tensor:
        return x.softmax(-1) if x.shape[0] <= 64 else torch.zeros_like(x).requires_grad_()

    found = bench_of(up_to_64, lambda x: x.softmax(-1), "Nx32", sizes={"N": [16, 100]})
    assert {(row.function, row.outcome) for row in found.timings} == {("mine", "wrong"), ("rival", "measured")}
    assert all(row.ratio in (None, 1.0) for row in found.timings)


def test_a_first_call_that_writes_to_its_inputs_changes_nobody_s():
    def spoils(x: Tensor) -> Tensor:
        out = x.softmax(-1)
        x.data.fill_(float("nan"))
        return out

    found = bench_of(spoils, lambda x: x.softmax(-1), "64x192")
    assert "it writes to" in found.wrong("mine")[0].reason
    rival = [verdict.judged for verdict in found.verdicts if verdict.function == "rival"]
    assert set(rival) == {"right"}


def test_a_first_call_that_does_not_end_is_given_up():
    def slow(x: Tensor) -> Tensor:
        time.sleep(30)
        return x.softmax(-1)

    asked = asked_by_functions(
        {"mine": slow, "rival": lambda x: x.softmax(-1)}, reference=None, shape="8x8", inputs=None, sizes={},
        arguments={}, dtype="fp32", backward=True, seconds=0.02,
    )  # fmt: skip
    found = run_bench(dataclasses.replace(asked, patience_s=0.2), CPU)
    mine, rival = found.timings
    assert mine.outcome == "failed" and "its first call had not ended after 0.2 s" in mine.reason
    assert rival.seconds and verdict_of(found, "rival").startswith("right")


def test_a_case_that_is_refused_is_no_fault_and_is_said():
    found = bench_of(refuses_odd, lambda x: x.softmax(-1), "64x192")
    assert not found.wrong("mine") and next(row for row in found.timings if row.function == "mine").seconds
    assert "mine refuses odd lengths: it raises ValueError: the width must be even" in shown(answer_bench(found))


def test_other_bits_are_said():
    found = bench_of(of_other_bits, lambda x: x.softmax(-1), "64x192")
    assert "mine gives other bits when it is called again" in shown(answer_bench(found))


def test_rows_that_a_mask_hides_whole():
    def without_keys(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~attn_mask, float("-inf"))
        return scores.softmax(-1) @ v

    found = bench_of(without_keys, sdpa, "2x2x80x16*3,attn_mask=80x80:bool")
    assert [verdict.case for verdict in found.wrong("mine")] == ["fully masked rows"]
    assert "mine is right but for rows that the mask hides whole" in shown(answer_bench(found))

    def forgets(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        return sdpa(q, k, v)

    assert {v.case for v in bench_of(forgets, sdpa, "2x2x80x16*3,attn_mask=80x80:bool").wrong("mine")} >= {"as timed"}


def test_integers_go_where_they_are_below():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(-1, targets[:, None]).mean()

    found = bench_of(loss, F.cross_entropy, "64x300,64:int64<300")
    assert not found.wrong("mine") and verdict_of(found, "mine").startswith("right")


def test_several_outputs_and_indices_are_held_against_the_reference():
    def top(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(dim=-1, descending=True)
        return values[:, :3], places[:, :3]

    def rival(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(3)
        return values, places

    assert not bench_of(top, rival, "32x100").wrong("mine")
    shifted = bench_of(lambda x: (top(x)[0], top(x)[1] + 1), rival, "32x100")
    assert "the output 2 is not the reference's" in shifted.wrong("mine")[0].reason


def test_a_reference_that_float64_cannot_run_is_one_line():
    def no_doubles(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for double")
        return x

    with pytest.raises(InputError, match="cannot judge: in float64 it raises RuntimeError: no kernel for double"):
        bench_of(no_doubles, no_doubles, "64x192")


def test_without_a_reference_nothing_is_judged_and_that_is_said():
    asked = asked_by_functions(
        {"mine": torch.relu}, reference=None, shape="8x8", inputs=None, sizes={}, arguments={}, dtype="fp32",
        backward=True, seconds=0.02,
    )  # fmt: skip
    found = run_bench(asked, CPU)
    assert not found.verdicts and found.timings[0].seconds
    assert "Nothing judged these functions" in shown(answer_bench(found))


# ---- time


def test_work_is_that_of_the_operators():
    found = bench_of(lambda a, b: a @ b, torch.matmul, "64x32,32x16")
    work = found.works[0]
    assert work.forward_flops == 2 * 64 * 32 * 16 and work.backward_flops == 2 * work.forward_flops
    assert work.forward_bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    # Backward keeps both inputs, reads the output's gradient and writes those of the inputs.
    assert work.backward_bytes == 4 * (2 * (64 * 32 + 32 * 16) + 64 * 16)
    # A softmax keeps its output alone.
    softmax = bench_of(lambda x: x.softmax(-1), lambda x: x.softmax(-1), "64x32").works[0]
    assert softmax.forward_bytes == 4 * 2 * 64 * 32 and softmax.backward_bytes == 4 * 3 * 64 * 32


def test_what_autograd_saves_is_counted():
    found = bench_of(lambda x: (x * 2).exp() * 3, lambda x: (x * 2).exp() * 3, "128x128")
    # exp keeps its result, which is neither an input nor the output.
    assert {row.saved_bytes for row in found.timings} == {4 * 128 * 128}
    forward = bench_of(torch.exp, torch.exp, "128x128", backward=False)
    assert all(row.backward is None and row.saved_bytes is None and row.seconds for row in forward.timings)


def test_ratios_are_of_neighbours_and_stand_together():
    def row(name: str, *seconds: float) -> Timing:
        samples = Samples(values_s=seconds, clock="host")
        return Timing(function=name, inputs="8", dtype="fp32", outcome="measured", forward=samples)

    one, other = with_ratios([row("mine", *[1.0, 2.0] * 20), row("rival", *[2.0, 4.0] * 20)])
    assert one.ratio == 1 and other.ratio == 2 and other.interval is not None
    found = bench_of(torch.relu, torch.relu, "8x8")
    found = msgspec.structs.replace(found, timings=(one, other))
    assert decided(found) == {("rival", "8"): True}
    assert "mine is 2.00 times as fast as rival" in shown(answer_bench(found))
    few = msgspec.structs.replace(found, timings=tuple(with_ratios([row("mine", 1e-3), row("rival", 2.0)])))
    assert "too few pairs were timed to tell mine from rival, which took 2000 times as long" in shown(answer_bench(few))


def test_sizes_make_a_curve_and_the_document_comes_back(mine: Path):
    asked = asked_by_name(
        "my_kernels.py:Square", ("my_kernels.py:right",), reference=None, preset=None, shape=None,
        inputs="my_kernels.py:make", sizes=("n=16,64",), arguments={"times": 2}, dtype=None, backward=True,
        seconds=0.02,
    )  # fmt: skip
    found = run_bench(asked, CPU)
    assert not found.wrong("Square") and [row.sizes for row in found.timings[::2]] == [{"n": 16}, {"n": 64}]
    (panel,) = answer_bench(found).panels
    assert {point.x for point in panel.points} == {16, 64}
    assert decode_bench(encode_bench(found), "file") == found


def test_a_function_that_leaves_the_process_is_wrong():
    def leaves(x: Tensor) -> Tensor:
        sys.exit(0)

    found = bench_of(leaves, torch.relu, "8x16")
    assert all("it raises SystemExit: 0" in verdict.reason for verdict in found.wrong("mine")) and found.wrong("mine")
    assert [row.outcome for row in found.timings] == ["wrong", "measured"]


def test_an_argument_that_a_function_does_not_take_is_said():
    found = bench_of(lambda x: x.softmax(-1), torch.softmax, "8x16", arguments={"dim": -1})
    assert found.left_out == {"mine": ("dim",)} and not found.wrong("mine")
    assert "mine has no parameter dim, and was called without" in shown(answer_bench(found))


def test_what_is_asked_needs_inputs_once():
    more: dict[str, Any] = {"reference": None, "sizes": (), "arguments": {}, "dtype": None, "backward": True}
    more |= {"seconds": 1.0}
    with pytest.raises(InputError, match="needs what to call the function with"):
        asked_by_name("flash", (), preset=None, shape=None, inputs=None, **more)
    with pytest.raises(InputError, match=r"names a file and no function in it: write flash\.py:NAME"):
        asked_by_name("flash.py", (), preset=None, shape="8", inputs=None, **more)
    with pytest.raises(InputError, match="leave one out"):
        asked_by_name("flash", (), preset=None, shape="8", inputs="a.py:f", **more)
    with pytest.raises(InputError, match="choose among fp32, bf16, fp16"):
        asked_by_name("flash", (), preset=None, shape="8", inputs=None, **{**more, "dtype": "fp64"})
    asked = asked_by_name("flash-tiled", (), preset="cs336-attention", shape="1x1x64x64*3", inputs=None, **more)
    assert isinstance(asked, Asked) and asked.dtype == PRESETS["cs336-attention"].dtype
    assert [*asked.functions] == ["flash-tiled", "scaled_dot_product_attention", "flash"]
    assert math.isfinite(asked.seconds)


KERNEL = SimpleNamespace(fn=lambda: None)


@torch.library.custom_op("test_bench::through_a_kernel", mutates_args=())
def operator(x: Tensor) -> Tensor:
    return KERNEL.fn(x) or x.clone()


class Called:
    def __call__(self, x: Tensor) -> Any:
        return (KERNEL.fn(each) for each in x)


def closing_over(kernel: Any) -> Callable[[Tensor], Any]:
    return lambda x: kernel.fn(x.contiguous())


def test_a_kernel_is_found_behind_whatever_holds_it():
    closing = closing_over(KERNEL)
    for held in (operator, Called(), Called().__call__, closing, torch.no_grad()(closing), functools.partial(closing)):
        assert any(one is KERNEL for one in reached_by(held)), held


def softmax(x: Tensor) -> Any:
    return KERNEL.fn(x)


def test_a_method_of_a_tensor_is_not_the_files_function_of_its_name():
    assert any(one is KERNEL for one in reached_by(softmax))
    assert not any(one is KERNEL for one in reached_by(lambda x: x.softmax(-1)))


@pytest.mark.parametrize("name", ["softmax", *at_length("flash")])
def test_a_kernel_that_the_interpreter_runs_is_found_through_its_function(name: str, tmp_path: Path):
    """Behind an autograd.Function, and imported from the user's other file: it is judged, and has no time."""
    shutil.copy(Path(__file__).parents[2] / "docs" / "examples" / "kernels.py", tmp_path / "kernels.py")
    rival, shape, takes = {
        "softmax": ("torch.softmax", "4x16", "x"),
        "flash": ("torch.nn.functional.scaled_dot_product_attention", "1x1x16x16*3", "q, k, v"),
    }[name]
    (tmp_path / "mine.py").write_text(f"import kernels\n\n\ndef mine({takes}):\n    return kernels.{name}({takes})\n")
    options = ["--against", rival, "--shape", shape, "--seconds", "0", "--json"]
    options += ["--arg", "dim=-1"] if name == "softmax" else []
    command = [sys.executable, "-m", "stepscope", "bench", f"{tmp_path}/mine.py:mine", *options]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == (name == "flash"), ran.stderr  # which has a fault at odd lengths
    assert json.loads(ran.stdout)["interpreted"] == ["mine"]


# ---- on a GPU


@pytest.mark.gpu
def test_on_a_gpu_launches_are_hidden_and_memory_is_counted():
    def with_a_copy(x: Tensor) -> Tensor:
        return (x.float() * 2).to(x.dtype)

    asked = asked_by_functions(
        {"mine": with_a_copy, "rival": lambda x: x * 2}, reference=None, shape="4096x4096", inputs=None, sizes={},
        arguments={}, dtype="bf16", backward=False, seconds=0.1,
    )  # fmt: skip
    found = run_bench(asked, resolve_device("cuda"))
    mine, rival = found.timings
    assert mine.hidden and rival.hidden and not found.wrong("mine")
    # fp32 copies of 64 MiB are alive together, the input's and twice it: beside them the output would have room in one.
    assert mine.beyond_bytes == (2 * 4 - 2) * 4096**2 and rival.beyond_bytes == 0
    assert mine.ratio == 1 and rival.ratio is not None and rival.ratio < 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "wrong"), [("softmax", []), ("flash", ["odd lengths"])])
def test_kernels_in_triton_are_judged_and_timed(name: str, wrong: list[str]):
    kernels = Path(__file__).parents[2] / "docs" / "examples" / "kernels.py"
    rival = {"softmax": "torch.softmax", "flash": "torch.nn.functional.scaled_dot_product_attention"}[name]
    shape, arguments = ("512x1024", {"dim": -1}) if name == "softmax" else ("1x2x256x64*3", {})
    asked = asked_by_name(
        f"{kernels}:{name}", (rival,), reference=None, preset=None, shape=shape, inputs=None, sizes=(),
        arguments=arguments, dtype="fp16", backward=True, seconds=0.1,
    )  # fmt: skip
    found = run_bench(asked, resolve_device("cuda"))
    assert [verdict.case for verdict in found.wrong(name)] == wrong and not found.interpreted
    timing = next(row for row in found.timings if row.function == name)
    assert bool(timing.seconds) is not bool(wrong)
