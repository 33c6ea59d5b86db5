"""A user's functions as parts of a step: found, called by their conventions, and judged before a step runs them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepscope.core.errors import GateFailure, InputError
from stepscope.core.model_config import configure
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel
from stepscope.training.attention import implementation
from stepscope.training.parts import part_function
from stepscope.training.parts.gate import require_users
from stepscope.training.parts.replaced import replace_parts
from stepscope.training.user_functions import find_object
from tests.command import stepscope

WRITTEN = '''
import math, torch
import torch.nn.functional as F

def right(q, k, v, causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v

def in_tiles(q, k, v, is_causal=False, tile=16):
    """Drops the keys of the last tile where it is not whole: wrong at lengths that no tile divides."""
    whole = q.shape[-2] // tile * tile or q.shape[-2]
    scores = q @ k[..., :whole, :].mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)[:, :whole]
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[..., :whole, :]

def unmasked(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

def whole_tiles(q, k, v, is_causal=False):
    if q.shape[-2] % 16:
        raise ValueError("lengths are multiples of 16")
    return right(q, k, v, is_causal)

class Halved(torch.autograd.Function):
    """Its gradient of v is half of what it should be, in float64 alone."""

    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2 if gradient.dtype == torch.float64 else gradient

def halved(q, k, v, causal):
    return right(q, k, Halved.apply(v), causal)

def norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)

def double(x, weight, eps):
    return 2 * norm(x, weight, eps)

class Norm(torch.nn.Module):
    def __init__(self, width, eps=1e-3):
        super().__init__()
        self.scale, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scale

class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        return gradient * up, gradient * F.silu(gate)

def rope(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin

@torch.compile
def swiglu(gate, up):
    return F.silu(gate) * up

def make_swiglu():
    return swiglu

def loss(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[:, None]).mean()

def summed(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")

def in_place(gate, up):
    return up.mul_(F.silu(gate))

def one(x):
    return x
'''

TRITON = """
import math, torch, triton
import triton.language as tl

@triton.autotune([triton.Config({}, num_warps=count) for count in (1, 4)], key=["width"])
@triton.jit
def normalise(x, w, y, r, width, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    numbers = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(numbers * numbers, axis=0) / width + eps)
    tl.store(r + row, inverse)
    tl.store(y + row * width + at, numbers * inverse * tl.load(w + at, mask=inside, other=0.0), mask=inside)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows = x.contiguous().view(-1, x.shape[-1])
        y, r = torch.empty_like(rows), torch.empty(len(rows), device=x.device)
        normalise[(len(rows),)](rows, weight, y, r, rows.shape[1], eps, BLOCK=triton.next_power_of_2(rows.shape[1]))
        ctx.save_for_backward(x, weight, r)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        r = r.view(*x.shape[:-1], 1)
        normal, scaled = x.float() * r, dy.float() * weight.float()
        dx = r * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy.float() * normal).flatten(0, -2).sum(0).to(weight.dtype), None
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WRITTEN)


def workload(**chosen: Any) -> TextbookWorkload:
    return TextbookWorkload(model=configure("tiny", layers=1), batch_size=1, seq_len=32, **chosen)


def judged(**chosen: str) -> list[str]:
    return require_users(workload(**chosen), torch.device("cpu"))


def test_the_key_of_a_step_tells_versions_of_a_function_apart():
    before = workload(attention="mine.py:right", norm="mine.py:norm")
    assert before.attention.startswith("mine.py:right@")
    assert "/" not in before.key and ":" not in before.key
    Path("mine.py").write_text(WRITTEN + "# changed\n")
    after = workload(attention="mine.py:right", norm="mine.py:norm")
    assert before.key != after.key
    with pytest.raises(InputError, match=r"has changed since it was named, or is not there: name mine"):
        implementation(before.attention)
    Path("mine.py").unlink()
    assert TextbookWorkload(model=before.model, attention=before.attention).attention == before.attention  # as stored
    factory = FactoryWorkload(factory="x.py:make", model=UserModel(name=""), norm=before.norm)
    assert factory.norm == before.norm


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing.py:fn", "attention nothing.py:fn: nothing.py is not there"),
        ("mine.py", "attention mine.py names a file and no function in it: write mine.py:NAME"),
        ("mine.py:", "names no function that can be found"),
        ("no_such_package:fn", "names no function that can be found"),
        ("flashy", "unknown attention 'flashy': choose one of reference, .*path/file.py:name"),
        ("mine.py:rihgt", "mine.py has no 'rihgt'; there is right"),
        ("mine.py:one", r"attention mine.py:one takes \(x\): write attention\(q, k, v, causal\)"),
    ],
)
def test_what_cannot_be_called_is_one_line(name: str, says: str):
    with pytest.raises(InputError, match=says):
        judged(attention=name)


def test_right_functions_of_every_kind():
    sentences = judged(
        attention="mine.py:right",
        norm="mine.py:Norm",
        rope="mine.py:rope",
        mlp="mine.py:make_swiglu",
        loss="mine.py:loss",
    )
    assert [sentence.split()[0] for sentence in sentences] == ["attention", "norm", "rope", "mlp", "loss"]
    for sentence in sentences:
        assert "beside float64; gradcheck passes in float64" in sentence, sentence


def test_a_fault_at_odd_lengths_is_found_from_a_step_of_even_ones():
    with pytest.raises(GateFailure, match=r"wrong in 3 of 8 cases.*\(1, 2, 17, 32, causal, .*out is off by") as raised:
        judged(attention="mine.py:in_tiles")
    assert raised.value.exit_code == 1


def test_what_is_right_without_a_mask_alone_is_told_so():
    with pytest.raises(
        GateFailure, match=r"out is off by .*; so are dq, dk, dv \(that is attention without the causal"
    ):
        judged(attention="mine.py:unmasked")


def test_a_function_may_refuse_lengths_but_not_that_of_its_step():
    assert "right in 3 of 8 calls beside float64; it refuses lengths 1, 17, 65, 127, 203; gradcheck passes" in judged(
        attention="mine.py:whole_tiles"
    )[0]  # fmt: skip
    with pytest.raises(GateFailure, match=r"lengths are multiples of 16 \(mine.py:\d+\); it is called as attention"):
        step = TextbookWorkload(model=configure("tiny"), batch_size=1, seq_len=33, attention="mine.py:whole_tiles")
        require_users(step, torch.device("cpu"))


@pytest.mark.parametrize(
    ("part", "name", "says"),
    [
        ("mlp", "mine.py:WrongBackward", "gradient 0 is off by"),
        ("mlp", "mine.py:in_place", "it writes to its inputs|in-place"),
        ("loss", "mine.py:summed", "result 0 is off by 31"),
        ("norm", "mine.py:right", r"takes \(q, k, v, causal\): write norm\(x, weight, eps\)"),
    ],
)
def test_wrong_parts(part: str, name: str, says: str):
    with pytest.raises((GateFailure, InputError), match=says):
        judged(**{part: name})


def test_a_kernel_of_triton_in_the_interpreter(capsys: pytest.CaptureFixture[str]):
    Path("kernels.py").write_text(TRITON)
    (sentence,) = judged(norm="kernels.py:Norm")
    assert (
        "runs kernels in Triton's interpreter: it is judged, and times of its step say nothing"
        in capsys.readouterr().err
    )
    assert "right in 5 of 5 calls beside float64; gradcheck is left out, since it is off by" in sentence


def test_heads_that_share_keys_and_a_scale_of_the_users():
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    name = workload(attention="torch.nn.functional:scaled_dot_product_attention").attention
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(implementation(name)(q, k, v, causal=True), right, atol=1e-6)
    own = implementation(workload(attention="mine.py:right").attention)
    assert torch.allclose(own(q, k, v, causal=True), right, atol=1e-6)
    with pytest.raises(InputError, match="has no argument scale"):
        own(q, k, v, causal=True, scale=0.3)
    for eps in (1e-5, 1.0):
        total, normal = part_function("norm", workload(norm="mine.py:Norm").norm)(v, v, torch.ones(8), eps)
        assert torch.equal(total, v + v)
        assert torch.allclose(normal, F.rms_norm(v + v, (8,), eps=eps), atol=1e-6)


def test_a_users_functions_in_a_model_that_is_not_ours():
    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(12)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    model, x = nn.Sequential(RMSNorm(), nn.Linear(12, 12), RMSNorm()), torch.randn(3, 12)
    before = model(x)
    replaced = replace_parts(model, norm="mine.py:norm")
    assert [(each.modules, each.type) for each in replaced.replaced] == [(2, "RMSNorm")]
    assert torch.allclose(model(x), before, atol=1e-6)
    replaced.restore()
    with pytest.raises(GateFailure, match=r"norm mine.py:double@.* is wrong, .*d_model 12.*result 0 is off by 1"):
        replace_parts(model, norm="mine.py:double")
    assert torch.equal(model(x), before)


def test_a_run_of_a_users_attention_from_end_to_end():
    done = stepscope("run", "--model", "tiny", "--layers", "1", "--seq-len", "32", "--steps", "1", "--attention",
               "mine.py:right", "--norm", "mine.py:norm", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "attention mine.py:right@" in done.stderr and "gradcheck passes" in done.stderr
    stored = json.loads(done.stdout)
    assert stored["workload"]["attention"].startswith("mine.py:right@")
    assert not [one for one in stored["findings"] if "mismatch" in one["kind"]]
    wrong = stepscope("run", "--model", "tiny", "--seq-len", "32", "--attention", "mine.py:in_tiles", "--runs", "wrong")
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1 and "so that no time of it is shown" in wrong.stderr
    assert not Path("wrong").exists() or not [*Path("wrong").iterdir()]
    swept = stepscope("sweep", "--model", "tiny", "--layers", "1", "--seq-len", "32", "--steps", "1", "--no-profile",
                      "--attention", "mine.py:in_tiles,sdpa", "--runs", "swept")  # fmt: skip
    assert swept.returncode == 1, swept.stderr
    assert "1 of 2 cells measured, 1 failed" in swept.stdout + swept.stderr


def test_the_studies_of_attention_ask_gradcheck_of_a_users_function_too():
    few = ("--dtype", "fp32", "--device", "cpu", "--json")
    gate = stepscope("study", "attention-gate", "--attention", "mine.py:right,mine.py:halved", "--workers", "1", *few)
    assert gate.returncode == 1, gate.stderr
    reports = {one["implementation"].partition("@")[0]: one["verdicts"] for one in json.loads(gate.stdout)["reports"]}
    assert [one["outcome"] == "failed" for one in reports["mine.py:halved"]] == 16 * [False] + [True]
    assert not any(one["outcome"] == "failed" for one in reports["mine.py:right"])
    last = reports["mine.py:halved"][-1]
    assert last["dtype"] == "fp64" and last["reason"].startswith("gradcheck fails in float64: ")
    assert reports["mine.py:right"][-1]["reason"] == "gradcheck passes in float64"
    sizes = ("--seq-len", "64", "--head-dim", "16", "--batch-size", "1", "--heads", "1", "--steps", "2")
    timed = stepscope("study", "attention", "--attention", "mine.py:right,mine.py:halved", *sizes, *few)
    assert timed.returncode == 1, timed.stderr
    every, without = (next(one for one in json.loads(timed.stdout)["tables"] if one["title"] == title)["rows"]
                      for title in ("Every cell", "Without a time"))  # fmt: skip
    assert [row[2].partition("@")[0] for row in every] == ["mine.py:right"]
    assert [row[0].partition("@")[0] for row in without] == ["mine.py:halved"]
    assert "gradcheck fails in float64: GradcheckError" in without[0][-1]


HABITS = """
import torch
import torch.nn.functional as F

def product(gate, up):
    return F.silu(gate) * up

class Product(torch.autograd.Function):
    @staticmethod
    def forward(gate, up, beta=1.0):
        return F.silu(gate) * up

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, gradient):
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            return *torch.autograd.grad(product(*leaves), leaves, gradient), None

applied = Product.apply

@torch.library.custom_op("habits::attention", mutates_args=())
def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)

def kept(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])

def gradients(ctx, gradient):
    leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return *torch.autograd.grad(out, leaves, gradient), None, None

operator.register_autograd(gradients, setup_context=kept)

class Called:
    def __call__(self, x, weight, eps, /):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

def listed(gate, up):
    return [product(gate, up)]

calls, known = [], {}

def every_other(gate, up):
    calls.append(1)
    return product(gate, up) * (1 + len(calls) % 2)

def by_shape(gate, up):
    return known.setdefault(gate.shape, product(gate, up))

def wider(gate, up):
    torch.set_default_dtype(torch.float64)
    return product(gate, up)

class Gone(BaseException):
    pass

def gone(gate, up):
    raise Gone("no more")

def flat(gate, up):
    return product(gate, up).flatten()

torch.set_float32_matmul_precision("high")
"""


def test_functions_as_authors_of_kernels_write_them(capsys: pytest.CaptureFixture[str]):
    Path("habits.py").write_text(HABITS)
    sentences = judged(mlp="habits.py:applied", attention="habits.py:operator", norm="habits.py:Called")
    assert all("gradcheck passes in float64" in sentence for sentence in sentences), sentences
    assert torch.get_float32_matmul_precision() == "highest"
    assert "changes PyTorch's precision of fp32 products, highest to high, which is set back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("listed", "it returns list of Tensor, not one tensor"),
        ("every_other", "when it is called again, result 0 is off|result 0 is off"),
        ("by_shape", "gradient . is missing|when it is called again"),
        ("wider", "it changes PyTorch's default dtype, float32 to float64, for all that comes after it"),
        ("gone", "Gone: no more"),
        ("flat", r"result 0 is \(16384,\), not \(32, 512\)"),
    ],
)
def test_what_a_call_does_besides_its_result_is_seen(name: str, says: str):
    Path("habits.py").write_text(HABITS.replace("habits::", f"{name}::"))
    with pytest.raises(GateFailure, match=says):
        judged(mlp=f"habits.py:{name}")
    assert torch.get_default_dtype() == torch.float32


def test_a_file_that_a_functions_file_imports_counts_in_its_key():
    Path("inner").mkdir()
    Path("inner/__init__.py").write_text("")
    for folder, line in ((".", "from inner import deep\n"), ("inner", "from . import deep\n")):
        Path(folder, "outer.py").write_text(line + "def norm(x, weight, eps):\n    return deep.norm(x, weight, eps)\n")
        names: list[str] = []
        for text in ("import torch\n", "import torch  # changed\n"):
            Path("inner/deep.py").write_text(text)
            names.append(workload(norm=f"{folder}/outer.py:norm").norm)
        assert names[0] != names[1]


def test_two_versions_of_a_folder_keep_their_own_imports():
    for folder, factor in (("before", 1), ("after", 2)):
        Path(folder).mkdir()
        Path(folder, "entry.py").write_text("import inner_kernel\n\n\ndef fn(x):\n    return inner_kernel.times(x)\n")
        Path(folder, "inner_kernel.py").write_text(f"def times(x):\n    return x * {factor}\n")
    names = ["before/entry.py:fn", "after/entry.py:fn", "before/entry.py:fn"]
    assert [find_object(name, "--against")(1) for name in names] == [1, 2, 1]


def test_a_function_that_leaves_the_process_is_wrong_and_not_the_end():
    Path("leaves.py").write_text("import sys\n\n\ndef norm(x, weight, eps):\n    sys.exit(0)\n")
    with pytest.raises(GateFailure, match="SystemExit"):
        judged(norm="leaves.py:norm")
