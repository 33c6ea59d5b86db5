"""The textbook's step with fused parts beside its own code: the same losses and gradients, on a GPU or interpreted."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")

from stepscope.core import parts as records
from stepscope.core.errors import InputError
from stepscope.core.parts import KERNELS, PARTS, Kernels, Part, TensorDtype
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.parts import formulas, libraries, part_function, parts_for
from stepscope.training.parts.gate import (
    LARGE_CASES,
    SMALL_CASES,
    PartCase,
    _padded_loss,  # pyright: ignore[reportPrivateUsage]
    check_part,
)
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, mini, run_steps

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED: dict[str, Any] = dict.fromkeys(PARTS, "fused")
UNITS = {"fp32": 2e-6, "bf16": 2e-2, "bf16-master": 2e-2, "bf16-pure": 3e-2, "fp16": 4e-3}
"""How far losses and gradients may be apart, by dtype: in 16 bits the fused parts round less often."""


def gradients(workload: TextbookWorkload) -> tuple[float, torch.Tensor]:
    """The loss of the first step and all its gradients as one tensor."""
    step = TrainingStep(workload, DEVICE)
    loss = run_steps(step)
    assert loss is not None
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    return loss, torch.cat([p.grad.double().flatten() / scale for p in step.model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("dtype", "choices"),
    [
        ("fp32", {}),
        ("bf16", {"checkpointing": "selective"}),
        ("bf16", {"checkpointing": "selective-1", "attention": "sdpa"}),
        ("bf16-master", {"accumulation": 2}),
        ("fp32", {"tied": True, "kv_heads": 1, "attention": "sdpa"}),
        *at_length(
            ("fp32", {"norm": "reference"}), ("fp32", {"rope": "reference", "checkpointing": "every-1"}),
            ("bf16", {"mlp": "reference"}), ("bf16", {"loss": "reference", "checkpointing": "every-2"}),
            ("fp16", {}), ("bf16-pure", {}), ("bf16-pure", {"norm": "reference", "checkpointing": "selective"}),
        ),
    ],
)  # fmt: skip
def test_a_step_of_fused_parts_has_the_gradients_of_the_textbooks(dtype: str, choices: dict[str, Any]):
    common = {"phase": "forward-backward", "dtype": dtype, "seq_len": 4}  # the interpreter takes time by the token
    fused = gradients(mini(**common, **{**FUSED, **choices}))
    plain = gradients(mini(**common, **{**choices, **dict.fromkeys(PARTS, "reference")}))
    assert fused[0] == pytest.approx(plain[0], rel=UNITS[dtype])
    assert float((fused[1] - plain[1]).norm()) <= UNITS[dtype] * float(plain[1].norm())


COMPILED: dict[str, Any] = dict.fromkeys(PARTS, "compiled")


NOT_INTERPRETED = "Triton's interpreter gives this kernel a plain number where it asks a scalar for its dtype"


@pytest.mark.parametrize(
    ("part", "name"),
    # Compiled, each part is one of the step's below as well, but for a norm's branch.
    [
        case
        for part, ways in PARTS.items()
        for name in ways
        for case in at_length((part, name), long=name == "compiled" and part != "norm")
    ],
)
def test_every_part_passes_the_gate_with_any_inputs_frozen(part: Part, name: Kernels):
    """The smallest case of each, since a compiler takes seconds for each shape and each subset of its inputs. Of norms
    it has a branch: three inputs."""
    record = PARTS[part][name]
    case = [*(case for case in SMALL_CASES if case.part == part)][1 if part == "norm" else -1]
    function = None
    if name == "liger" and DEVICE.type == "cpu":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
        if part in ("norm", "mlp"):
            pytest.skip(NOT_INTERPRETED)
        function = part_function(part, name)
    elif fault := record.fault(DEVICE.type, "fp32", case.width):
        pytest.skip(f"{part} {name} {fault}")
    (verdict,) = check_part(name, [case], ["fp32"], DEVICE, function)
    assert verdict.passed, f"{verdict.case}: {verdict.reason}"


def test_the_gate_sees_a_gradient_that_is_dropped_where_another_input_is_frozen():
    """As of Liger's loss, which makes the head's gradient only where the hidden state needs one."""

    def drops(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return formulas.linear_cross_entropy(x, weight if x.requires_grad else weight.detach(), targets)

    case = next(case for case in SMALL_CASES if case.part == "loss")
    (verdict,) = check_part("fused", [case], ["fp32"], DEVICE, drops)
    assert verdict.reason == "with input 0 frozen, gradient 1 is missing"


def loss_without_the_last_rows_gradient(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return formulas.linear_cross_entropy(x, torch.cat([weight[:-1], weight[-1:].detach()]), targets)


def loss_a_little_off(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return formulas.linear_cross_entropy(x, weight, targets) * (1 + 1e-4)


def loss_with_gradients_a_little_off(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss = formulas.linear_cross_entropy(x, weight, targets)
    return loss + 1e-5 * (loss - loss.detach())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (loss_without_the_last_rows_gradient, "gradient 1 is off by"),
        (loss_a_little_off, "result 0 is off by"),
        (loss_with_gradients_a_little_off, "gradient 0 is off by"),
        (formulas.linear_cross_entropy, ""),
        (_padded_loss, ""),
    ],
)
def test_the_gate_of_a_loss_sees_what_is_wrong_beside_both_of_its_yardsticks(function: Any, says: str):
    case = LARGE_CASES[-1]
    (verdict,) = check_part("fused", [case], ["fp32"], DEVICE, function)
    assert case.part == "loss" and verdict.reason.startswith(says) and verdict.passed == (not says), verdict.reason


@pytest.mark.parametrize("vocabulary", [3, 16, 151])
def test_rows_of_zeros_below_the_weight_leave_a_loss_as_it_is(vocabulary: int):
    x, weight = (torch.randn(n, 8, dtype=torch.float64, device=DEVICE, requires_grad=True) for n in (5, vocabulary))
    targets = torch.tensor([0, 1, -100, 2, vocabulary - 1], device=DEVICE)
    ways = (_padded_loss, formulas.linear_cross_entropy)
    found, right = ([loss, *torch.autograd.grad(loss, [x, weight])] for loss in (f(x, weight, targets) for f in ways))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", PARTS["loss"])
@pytest.mark.parametrize("wrong", [7, -1, -99])
def test_a_target_out_of_range_is_the_error_that_pytorch_raises(name: Kernels, wrong: int):
    """On a CPU. A GPU's assertion ends the process (tests/kernels/parts)."""
    if DEVICE.type != "cpu" or name == "quack":
        pytest.skip("needs a CPU" if name != "quack" else "quack runs on a GPU alone")
    if name == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    loss = part_function("loss", name) or formulas.linear_cross_entropy
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    targets = torch.tensor([0, wrong, -100])
    if name == "compiled":
        with pytest.raises(RuntimeError, match="index out of bounds"):
            loss(x, weight, targets)
    else:
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds."):
            loss(x, weight, targets)
    assert torch.isfinite(loss(x, weight, torch.tensor([0, 6, -100])))


@pytest.mark.parametrize(
    ("dtype", "choices"),
    [
        ("fp32", {}),
        *at_length(
            ("bf16", {"checkpointing": "selective"}), ("bf16-master", {"accumulation": 2, "compile": "default"}),
            ("fp32", {"checkpointing": "every-1", "tied": True}), ("fp16", {"projections": "joint"}),
        ),
    ],
)  # fmt: skip
def test_a_step_of_compiled_parts_has_the_gradients_of_the_textbooks(dtype: str, choices: dict[str, Any]):
    common = {"phase": "forward-backward", "dtype": dtype, **choices}
    step = TrainingStep(mini(**common, **COMPILED), DEVICE)
    assert step.compiles_parts == (choices.get("compile") is None), "its warm-up compiles, and no hooks are set"
    found, plain = gradients(mini(**common, **COMPILED)), gradients(mini(**common))
    assert found[0] == pytest.approx(plain[0], rel=UNITS[dtype])
    assert float((found[1] - plain[1]).norm()) <= UNITS[dtype] * float(plain[1].norm())


def test_inference_has_the_same_logits():
    step, plain = TrainingStep(mini(phase="forward", **FUSED), DEVICE), TrainingStep(mini(phase="forward"), DEVICE)
    assert step.workload.loss == "reference", "inference ends with the logits"
    torch.testing.assert_close(step.model(step.tokens), plain.model(plain.tokens), rtol=1e-4, atol=1e-5)


def test_every_name_of_kernels_is_one_of_every_part_but_one():
    for part, ways in PARTS.items():
        assert set(KERNELS) - set(ways) == ({"quack"} if part == "mlp" else set())


class Overwriting(torch.autograd.Function):
    """SwiGLU's product, whose backward writes over its inputs, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.nn.functional.silu(gate) * up
        found = torch.autograd.grad(out, [gate, up], gradients[0])
        with torch.no_grad():
            return gate.detach().copy_(found[0]), up.detach().copy_(found[1])


def test_what_writes_over_its_inputs_must_say_so():
    case = next(case for case in SMALL_CASES if case.part == "mlp")
    (said,) = check_part("liger", [case], ["fp32"], DEVICE, Overwriting.apply)
    (unsaid,) = check_part("fused", [case], ["fp32"], DEVICE, Overwriting.apply)
    assert said.passed and said.repeats
    assert unsaid.reason == "it writes to its inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in ("liger", "quack")
        for case in LARGE_CASES
        if not case.strided and name in PARTS[case.part]
    ],
    ids=str,
)
def test_others_kernels_pass_the_gate(name: str, case: PartCase, dtype: TensorDtype):
    fault = PARTS[case.part][name].fault("cuda", dtype, case.width)
    if fault is not None:
        pytest.skip(f"{case.part} {name} {fault}")
    (verdict,) = check_part(name, [case], [dtype], DEVICE)
    assert verdict.passed, verdict.reason


QUACK = {
    "quack.rmsnorm": """
import torch
def rmsnorm(x, weight, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
    x = x if residual is None else (x + residual).to(residual_dtype)
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps).to(out_dtype)
    return (y, x) if prenorm and residual is not None else y
""",
    "quack.rotary": """
import torch
def apply_rotary_emb(x, cos, sin):  # (B, S, H, D), and tables of half of D
    assert x.shape[1] == len(cos) and x.shape[3] == 2 * cos.shape[1]
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
""",
    "quack.linear_cross_entropy": """
from torch.nn.functional import cross_entropy, linear
def linear_cross_entropy_func(x, weight, bias, target):
    return cross_entropy(linear(x, weight, bias), target)
def chunked_linear_cross_entropy(x, weight, target):
    assert not len(x) % 8 and not x.shape[1] % 8 and not len(weight) % 8
    return cross_entropy(linear(x, weight), target)
""",
}
"""What QuACK's functions take and return, written in PyTorch: it runs on GPUs alone."""


@pytest.mark.parametrize("compiled", [False, True])
def test_quack_is_called_as_it_asks_to_be(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """And a compiler sees one graph. Its own kernels are a matter of the GPU."""
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for name, source in QUACK.items():
        module = ModuleType(name)
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules["quack"], name.partition(".")[2], module, raising=False)
    monkeypatch.setattr(libraries, "_quack_fault", lambda *_: None)
    torch.manual_seed(0)
    x, branch, weight, head = torch.randn(2, 4, 16), torch.randn(2, 4, 16), torch.randn(16), torch.randn(24, 16)
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.rand(9, 4).repeat(1, 2)
    targets = torch.randint(24, (2, 4))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, None, weight, 1e-5)), ("rms_norm", (x, branch, weight, 1e-5)),
        ("rms_norm", (x, branch.bfloat16(), weight, 1e-5)), ("rotated", (q, k, angles.cos(), angles.sin())),
        ("linear_cross_entropy", (x, head, targets)), ("linear_cross_entropy", (x[:, :3], head, targets[:, :3])),
    ]  # fmt: skip
    for name, arguments in calls:
        function = getattr(libraries, f"quack_{name}")
        found = (torch.compile(function, backend="eager", fullgraph=True) if compiled else function)(*arguments)
        torch.testing.assert_close(found, getattr(formulas, name)(*arguments))


def test_a_part_that_does_not_run_here_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="norm liger runs on cuda, not on cpu: choose --norm reference"):
        parts_for(mini(norm="liger"), "cpu")
    monkeypatch.delenv(records.INTERPRETER, raising=False)
    with pytest.raises(InputError, match="mlp fused runs on cpu in Triton's interpreter only"):
        parts_for(mini(mlp="fused"), "cpu")
    with pytest.raises(InputError, match="needs quack, which is not installed: pip install quack-kernels"):
        parts_for(mini(norm="quack"), "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for choices, fault in (
        ({"loss": "quack", "dtype": "bf16"}, "loss quack takes rows of a multiple of 2 numbers in bf16, not 101"),
        (
            {"rope": "quack", "d_model": 24, "heads": 2},
            "rope quack takes rows of a multiple of 8 numbers in fp32, not 12",
        ),
    ):
        with pytest.raises(InputError, match=fault):
            parts_for(mini(**choices), "cuda")
    wide = mini(norm="fused", d_model=65536, heads=64)
    with pytest.raises(InputError, match="norm fused takes rows of up to 32768 numbers, not 65536"):
        parts_for(wide, "cuda")
    with pytest.raises(InputError, match="loss fused runs where a rank computes whole blocks of its own samples"):
        mini(loss="fused", parallel="tensor", ranks=2)
    with pytest.raises(InputError, match="loss fused reads the head's weight without calling the head"):
        mini(loss="fused", parallel="fsdp-textbook", ranks=2)
    assert mini(loss="fused", parallel="fsdp2", ranks=2).parts["loss"] == "fused"
