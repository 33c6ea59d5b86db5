"""Kernels in the step of a user's own model: the same numbers, what was replaced and what was left, and refusals."""

import inspect
import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")

from stepscope.app.verbs.measure import measure as stepscope_measure
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, StepOperators
from stepscope.core.formulas.spelled import script_lines
from stepscope.core.parts import PartFound
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.fake_module import watch_module_step
from stepscope.kernels.parts.projections import join_projections, joined, projections_found
from stepscope.recording.device import timing_device
from stepscope.recording.driven import step_flops
from stepscope.recording.step import drive
from stepscope.runs.answer import answer_run
from stepscope.runs.checks import check_run
from stepscope.training.attention import implementation
from stepscope.training.attention.pytorch import as_captured, attention_found, calls_held, swap_attention
from stepscope.training.parts.replaced import absent_from, replace_parts
from stepscope.training.user_module.loading import make_user_step
from stepscope.training.user_module.module_step import ModuleStep
from tests.command import stepscope
from tests.conftest import at_length, make_run
from tests.shown import shown

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = {"norm": "fused", "mlp": "fused", "loss": "fused"}
QUICK = ("--warmup", 1, "--steps", 3, "--no-profile", "--device", "cpu")

QUICKENED = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
import triton.runtime.interpreter
from tests.interpreter import quicken
quicken()
"""
"""For a factory's file: its processes run kernels in Triton's interpreter, as quickly as this one does."""

OWN = """
import torch
import torch.nn.functional as F
from torch import nn

class SwiGLU(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down_proj, self.act = nn.Linear(32, 16, bias=False), act
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Module):
    def __init__(self, norm, mlp):
        super().__init__()
        self.norm, self.mlp = norm, mlp
    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self, norms, activations):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48, bias=False)
        bare = lambda: nn.LayerNorm(16, elementwise_affine=False)
        self.blocks = nn.ModuleList(
            Block(nn.RMSNorm(16, eps=1e-5) if norms else bare(), SwiGLU(act)) for act in activations
        )
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())

def make(norms=True, gelus=0):
    activations = [nn.GELU() if i < gelus else nn.SiLU() for i in range(2)]
    return Net(norms, activations), torch.arange(16).view(4, 4) % 7
def plain():
    return nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8), lambda y: y.square().mean()
class Steps:
    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.phases = [("all", lambda: self.model(torch.ones(2, 4)).sum().backward())]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "own.py"
    place.write_text(OWN)
    return place


def made(file: Path, factory: str = "make", **choices: Any) -> ModuleStep:
    step, _ = make_user_step(FactoryWorkload(model=UserModel(name=""), factory=f"{file}:{factory}", **choices), DEVICE)
    assert isinstance(step, ModuleStep)
    return step


def numbers(step: ModuleStep) -> tuple[float, list[Tensor]]:
    """The loss of the first step, and its gradients."""
    step.prepare()
    drive(step)
    assert step.loss is not None
    return float(step.loss), [p.grad.double() for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("choices", "bound"),
    [
        ({}, 1e-5),
        ({"checkpointing": "every-1", "accumulation": 2}, 1e-5),
        ({"checkpointing": "selective"}, 1e-5),
        ({"dtype": "bf16"}, 2e-2),
        ({"dtype": "fp16"}, 4e-3),
        ({"dtype": "bf16-pure"}, 4e-2),
        ({"dtype": "bf16-master"}, 2e-2),
        ({"dtype": "fp8"}, 0.15),
    ],
    ids=str,
)
def test_a_step_with_other_kernels_has_the_numbers_of_the_model_s_own(
    file: Path, choices: dict[str, Any], bound: float
):
    """Gradients parameter by parameter, by the norm of what differs."""
    own, other = (made(file, phase="forward-backward", **choices, **parts) for parts in ({}, FUSED))
    assert [(one.part, one.type, one.modules) for one in other.found if one.replaced] == [
        ("norm", "RMSNorm", 2), ("mlp", "SwiGLU", 2),
    ]  # fmt: skip
    assert not own.found and own.model.state_dict().keys() == other.model.state_dict().keys()
    (loss, gradients), (found, others) = numbers(own), numbers(other)
    assert found == pytest.approx(loss, rel=bound)
    assert len(gradients) == len(others) == len([*own.model.parameters()])
    for right, near in zip(gradients, others, strict=True):
        assert float((near - right).norm()) <= bound * float(right.norm())


def test_training_updates_the_parameters_that_the_kernels_read(file: Path):
    """The optimizer is made of the same parameters, and of masters where weights are bf16."""
    for dtype in ("fp32", "bf16-master"):
        step = made(file, dtype=dtype, optimizer="adamw-fused", **FUSED)
        losses = [numbers(step)[0] for _ in range(4)]
        assert losses[-1] < losses[0], dtype


def test_kernels_of_parts_are_no_products_of_unknown_flops(file: Path):
    counted = [step_flops(made(file, **parts), timing_device(DEVICE)) for parts in ({}, FUSED)]
    assert counted[0] == counted[1] and not counted[1][1]


@pytest.mark.parametrize("how", [*at_length({"compile": "default"}), {"compile": "blocks"}], ids=str)
@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_compiled_step_has_them_too(file: Path, how: dict[str, Any]):
    torch._dynamo.reset()
    (loss, gradients), (found, others) = (
        numbers(made(file, phase="forward-backward", **FUSED, **compiled)) for compiled in ({}, how)
    )
    assert found == pytest.approx(loss, rel=1e-5)
    for right, near in zip(gradients, others, strict=True):
        assert float((near - right).norm()) <= 1e-5 * float(right.norm())


def test_a_compiler_finds_one_graph_in_a_replaced_model(file: Path):
    torch._dynamo.reset()
    step = made(file, **FUSED)
    tokens = step.batches[0][0]
    whole = torch.compile(step.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(tokens), step.model(tokens))


def test_what_differs_is_left_and_the_rest_is_replaced(file: Path):
    found = made(file, arguments={"gelus": 1}, **FUSED).found
    assert [(one.part, one.replaced, one.modules, one.where) for one in found] == [
        ("norm", True, 2, "blocks.0.norm"), ("mlp", False, 1, "blocks.0.mlp"), ("mlp", True, 1, "blocks.1.mlp"),
        ("loss", False, 0, ""),
    ]  # fmt: skip
    absent = made(file, arguments={"norms": False}, **FUSED).found
    assert [(one.part, one.replaced, one.why) for one in absent] == [
        ("norm", False, "it has no RMSNorm"), ("mlp", True, ""),
        ("loss", False, "it has no language model of transformers with a head of one product"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("factory", "choices", "said"),
    [
        ("plain", FUSED, "kernels fused replace nothing in Sequential: it has no RMSNorm, no SwiGLU of gate, up"),
        ("plain", {"norm": "fused"}, "norm fused replaces nothing in Sequential: it has no RMSNorm; leave out --norm"),
        (
            "make",
            {"mlp": "fused", "arguments": {"gelus": 2}},
            "own.py:make stays as it is: mlp fused: 2 SwiGLU left, they compute something else: ",
        ),
        ("make", {"arguments": {"norms": False}, "norm": "fused"}, "replaces nothing in Net: it has no RMSNorm"),
        ("Steps", {"mlp": "fused"}, "gave a step of its own, on which mlp fused has no effect: leave it out"),
        ("make", {"norm": "odd"}, "unknown norm 'odd': choose one of reference, compiled, fused, liger, quack"),
    ],
)
def test_where_nothing_is_replaced_one_line_says_why(file: Path, factory: str, choices: dict[str, Any], said: str):
    with pytest.raises(InputError) as raised:
        made(file, factory, **choices)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_fake_tensors_cannot_tell_whether_kernels_compute_the_same(file: Path):
    workload = FactoryWorkload(model=UserModel(name=""), factory=f"{file}:make", norm="fused")
    with pytest.raises(InputError, match="other kernels in a model of your own cannot be run on fake tensors: leave"):
        watch_module_step(workload, "cuda")


def test_the_command_measures_them_and_says_what_was_replaced(file: Path):
    asked = ("run", "--module", "own.py:make", "--arg", "gelus=1", "--kernels", "fused")
    done = stepscope(*asked, *QUICK, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "each held against its own code first: 2 RMSNorm by fused norm, 1 SwiGLU by fused mlp." in said
    assert "mlp fused was asked for, and did not replace 1 SwiGLU: they compute something else: " in said
    assert "fp32, train, fused parts, eager" in said and "UserWarning" not in done.stderr
    (stored,) = file.parent.glob("runs/*/run.json")
    run = json.loads(stored.read_bytes())
    assert (run["workload"]["norm"], run["workload"]["mlp"]) == ("fused", "fused")
    assert [(one["type"], one["modules"], one["replaced"]) for one in run["evidence"]["parts"]] == [
        ("RMSNorm", 2, True), ("", 0, False), ("SwiGLU", 1, False), ("SwiGLU", 1, True), ("", 0, False),
    ]  # fmt: skip
    kinds = [finding["kind"] for finding in run["findings"]]
    assert "part-left" in kinds and "part-mismatch" not in kinds
    assert "2 RMSNorm by fused norm" in stepscope("show", "last", cwd=file.parent).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("run", "--rope", "fused", *QUICK),
            "rope fused replaces nothing in Net: it has no attention whose forward ca",
        ),
        (
            ("run", "--loss", "fused", *QUICK),
            "loss fused replaces nothing in Net: it has no language model of t",
        ),
        (("fit", "--kernels", "fused"), "cannot be run on fake tensors: leave out norm, rope, mlp and loss"),
        (("fit", "--optimizer", "adamw-one-launch"), "adamw-one-launch cannot be run on fake tensors, which have no"),
        (("run", "--norm", "liger", *QUICK), "norm liger runs on cuda, not on cpu: choose --norm reference"),
    ],
)
def test_what_cannot_be_is_one_line_of_the_command(file: Path, words: tuple[str, ...], said: str):
    done = stepscope(words[0], "--module", "own.py:make", *words[1:], cwd=file.parent)
    refused = [line for line in done.stderr.splitlines() if not line.startswith("stepscope: build")]
    if words[0] == "fit":  # which says what it does, where that takes over two seconds
        refused = refused[-1:]
    assert done.returncode == 2 and len(refused) == 1 and said in refused[0], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtype"), [*at_length(("ddp-bucketed", "fp32"), ("fsdp2", "fp32")), ("fsdp2:compute=bf16", "bf16")]
)
def test_ranks_compute_with_other_kernels_what_one_process_does(file: Path, strategy: str, dtype: str):
    """Sharded parameters are whole and plain when a module runs, so the kernels take them."""
    file.write_text(QUICKENED + OWN)
    done = stepscope(
        "run", "--module", "own.py:make", "--kernels", "fused", "--parallel", strategy, "--ranks", 2, "--dtype", dtype,
        *QUICK, "--json", cwd=file.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert [one["modules"] for one in run["evidence"]["parts"] if one["replaced"]] == [2, 2]
    assert run["shared"]["correct"] is not None
    forward = run["evidence"]["operators"]["calls"]["forward"]
    assert (forward["stepscope::rms_norm_forward"], forward["stepscope::silu_product_forward"]) == (2, 2)


def test_kernels_that_never_ran_are_a_finding():
    """As where a model calls its norms with other arguments, which their own forward takes."""
    workload = FactoryWorkload(model=UserModel(name="Net"), factory="own.py:make", norm="fused", mlp="fused")
    norm = PartFound(part="norm", kernels="fused", type="RMSNorm", modules=2, replaced=True)
    mlp = PartFound(part="mlp", kernels="fused", type="GLU", modules=2, replaced=False, why="they are replaced already")

    def kinds(calls: dict[str, int]) -> list[str]:
        evidence = Evidence(parts=(norm, mlp), operators=StepOperators(calls={"forward": calls}))
        run = msgspec.structs.replace(make_run(step=[1.0] * 9, evidence=evidence), workload=workload)
        judged = msgspec.structs.replace(run, findings=check_run(run))
        said = "mlp fused was asked for, and did not replace 2 GLU: they are replaced already."
        assert said in " ".join(shown(answer_run(judged), 200).split())
        return [f.sentence for f in check_run(run) if f.kind == "part-mismatch"]

    assert kinds({"stepscope::rms_norm_forward": 1}) == []
    assert kinds({"aten::rsqrt": 1}) == ["norm fused was asked for, but it ran 0 times where the step has 1 calls."]


SWAPPED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def make(dropout=0.0):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, attention_dropout=dropout, use_cache=False, attention_bias=True)
    config = LlamaConfig(**sizes)
    config._attn_implementation = "sdpa"
    ids = torch.randint(64, (2, 12))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
"""


def own_llama(folder: Path, arguments: dict[str, Any] | None = None, **choices: Any) -> ModuleStep:
    pytest.importorskip("transformers", reason="its models are swapped")
    (folder / "swapped.py").write_text(SWAPPED)
    workload = FactoryWorkload(
        model=UserModel(name=""), factory=f"{folder}/swapped.py:make", arguments=arguments or {}, **choices
    )
    step, _ = make_user_step(workload, DEVICE)
    assert isinstance(step, ModuleStep)
    return step


def losses_of(step: ModuleStep, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        drive(step)
        assert step.loss is not None
        losses.append(step.loss.item())
    return losses


def test_joint_projections_and_another_attention_train_a_user_s_model_alike(tmp_path: Path):
    plain = own_llama(tmp_path)
    own = losses_of(plain)
    whole = ("attention", "projections", "norm", "rope", "mlp", "loss")
    assert not plain.absent and absent_from(torch.nn.Linear(4, 4)) == whole
    swapped = own_llama(tmp_path, attention="sdpa", projections="joint")
    assert losses_of(swapped) == pytest.approx(own, rel=1e-5)
    first: Any = swapped.model.get_submodule("model.layers.0.self_attn")
    q, k = first.q_proj.weight, first.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + q.nbytes, "one product reads them"
    q, k = first.q_proj.bias, first.k_proj.bias
    assert k.data_ptr() == q.data_ptr() + q.nbytes, "and adds these"
    assert not first.q_proj.joint.apart
    assert [str(one) for one in swapped.found] == [
        "attention sdpa: 2 LlamaAttention replaced",
        "projections joint: 2 LlamaAttention replaced",
        "projections joint: 2 LlamaMLP replaced",
    ]


def test_restore_takes_back_all_that_was_replaced_and_a_refusal_leaves_nothing(tmp_path: Path):
    model: Any = own_llama(tmp_path).user_module.module
    before = [(type(module), [*vars(module)]) for module in model.modules()]
    whole = replace_parts(model, norm="fused", loss="fused", attention="reference", projections="joint")
    assert {one.part for one in whole.replaced} == {"norm", "loss", "attention", "projections"}
    assert model.config._attn_implementation == "stepscope-reference"
    batch = own_llama(tmp_path).user_module.batches[0]
    base = pickle.loads(pickle.dumps(model.model))
    assert type(base) is type(model.model) and torch.equal(
        base(batch["input_ids"])[0], model.model(batch["input_ids"])[0]
    )
    for _ in range(2):
        whole.restore()
        assert [(type(module), [*vars(module)]) for module in model.modules()] == before
        assert model.config._attn_implementation == "sdpa"
    for block in model.model.layers:  # nothing is joint then
        for layer in (block.self_attn.k_proj, block.mlp.up_proj):
            layer.register_forward_hook(lambda *_: None)
    hooked = [(type(module), [*vars(module)]) for module in model.modules()]
    for choices in (
        {"norm": "fused", "attention": "reference", "projections": "joint"},
        {"norm": "fused", "mlp": "quack"},
    ):
        with pytest.raises(InputError, match=r"LlamaAttention: one has hooks; LlamaMLP: one has hooks|quack"):
            replace_parts(model, **choices)
        assert [(type(module), [*vars(module)]) for module in model.modules()] == hooked
        assert model.config._attn_implementation == "sdpa"


def test_a_padded_batch_keeps_the_mask_that_transformers_makes(tmp_path: Path):
    """The mask is decided call by call: a swapped model that gets a padding mask computes what it did before."""
    step = own_llama(tmp_path, attention="sdpa")
    model: Any = step.user_module.module
    batch = step.user_module.batches[0]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :5] = 0
    packed = torch.tensor([[*range(4), *range(8)], [*range(12)]], device=mask.device)
    for more in ({"attention_mask": mask}, {"position_ids": packed}):
        swapped = model(**batch, **more).loss.item()
        model.config._attn_implementation = "sdpa"
        assert swapped == pytest.approx(model(**batch, **more).loss.item(), rel=1e-6)
        model.config._attn_implementation = "stepscope-sdpa"
    assert swapped != pytest.approx(model(**batch).loss.item(), rel=1e-5), "packed documents are told apart"


def test_a_model_with_another_attention_than_the_swap_assumes_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"takes no call of .*it has dropout"):
        own_llama(tmp_path, {"dropout": 0.1}, attention="sdpa-math")


def test_a_model_s_dropout_is_that_of_the_attention_in_its_place(tmp_path: Path):
    """While it is held it draws as its own does, so that gradients can be compared; afterwards anew in each call."""
    model: Any = (step := own_llama(tmp_path, {"dropout": 0.5}, attention="reference")).user_module.module
    assert [each.replaced for each in step.found if each.part == "attention"] == [True]
    batch = step.user_module.batches[0]
    assert model(**batch).loss.item() != model(**batch).loss.item()
    own = model.eval()(**batch).loss.item()
    model.config._attn_implementation = "sdpa"
    assert model(**batch).loss.item() == pytest.approx(own, rel=1e-6)


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
WITH_KINDS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 4},
    # Some releases of transformers give it SDPA, which leaves the softcap out.
    "Gemma2": {
        "sliding_window": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "attn_implementation": "eager",
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "GptOss": {"sliding_window": 4, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "ModernBert": {"local_attention": 4, "num_hidden_layers": 3},
}
"""Attention of more kinds than causal: windows on one side and on both, a softcap, and sinks."""
PACKED = torch.tensor([[*range(5), *range(7)], [*range(12)]])


def hugging_face(name: str) -> Any:
    transformers: Any = pytest.importorskip("transformers", reason="its models are swapped")
    rest = {f"{each}_token_id": 1 for each in ("bos", "eos", "cls", "sep")} if name == "ModernBert" else {}
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **WITH_KINDS[name], **rest})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{'MaskedLM' if name == 'ModernBert' else 'CausalLM'}")(config).to(DEVICE)


def gradients(model: Any, **more: Any) -> list[Tensor]:
    """The loss of two sequences of 12 tokens, and all gradients."""
    ids = torch.arange(1, 25, device=DEVICE).view(2, 12) * 7 % 63 + 1
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def apart(these: list[Tensor], those: list[Tensor]) -> float:
    pairs = list(zip(these, those, strict=True))
    norms = [sum(each.square().sum().item() for each in of) for of in ([a - b for a, b in pairs], those)]
    return (norms[0] / norms[1]) ** 0.5


@pytest.mark.parametrize("name", WITH_KINDS)
def test_windows_softcap_sinks_and_documents_are_kinds_of_the_attention_and_no_masks(name: str):
    """Loss and gradients beside the model's own attention, which is PyTorch's with masks, or written out."""
    model = hugging_face(name)
    attention = "flash" if name == "Gemma2" else "reference"
    seen: list[dict[str, Any]] = []

    def function(*args: Any, **options: Any) -> Tensor:
        seen.append(options)
        return implementation(attention)(*args, **options)

    for more in ({}, {"position_ids": PACKED.to(DEVICE)})[name == "Gemma2" :]:  # kernels in the interpreter are slow
        own = gradients(model, **more)
        undo = swap_attention(model, attention, function)
        with calls_held() as calls:
            assert apart(gradients(model, **more), own) < 2e-6
        assert {why for _, why in calls} == {""}, "every call is taken"
        undo()
        assert apart(gradients(model, **more), own) == 0
    assert all({"softcap", "sinks", "bounds"} & {*each} == kinds_of(name, each) for each in seen)
    assert {each.get("window") for each in seen} == {None if name != "Mistral" else 4, 3 if name == "ModernBert" else 4}


def kinds_of(name: str, options: dict[str, Any]) -> set[str]:
    bounds = options.get("bounds")
    documents = set[str]() if bounds is None else {"bounds"}
    if bounds is not None and bounds.shape[1] == 2:
        assert bounds[:, 0, [0, 4, 5, 11]].tolist() == [[0, 0, 5, 5], [5, 5, 12, 12]]
    return documents | {"Gemma2": {"softcap"}, "GptOss": {"sinks"}}.get(name, set())


def test_what_the_mask_says_beyond_those_kinds_keeps_the_model_s_own_attention():
    transformers: Any = pytest.importorskip("transformers", reason="its models are swapped")
    model = hugging_face("Mistral")
    ones = torch.ones(2, 12, dtype=torch.int64, device=DEVICE)
    padding = ones.clone()
    padding[0, 9:] = 0
    own_mask = (torch.rand(2, 1, 12, 12, device=DEVICE) > 0.5) | torch.eye(12, dtype=torch.bool, device=DEVICE)
    cases: dict[str, dict[str, Any]] = {
        "": {"attention_mask": ones},
        "it has a mask of padding": {"attention_mask": padding},
        "it has a mask": {"attention_mask": own_mask},
        "its weights are asked for (output_attentions)": {"output_attentions": True},
        "it has cu_seq_lens_q, and position_ids that do not restart": {"cu_seq_lens_q": ones[0, :3]},
    }
    own = [gradients(model, **more) for more in cases.values()]
    undo = swap_attention(model, "reference", implementation("reference"))
    for (why, more), theirs in zip(cases.items(), own, strict=True):
        with calls_held() as calls:
            assert apart(gradients(model, **more), theirs) < 1e-6
        assert [*calls] == [("MistralAttention", why)]
    with calls_held() as calls:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ones[:, :3], past_key_values=cache, use_cache=True)
        gradients(model, past_key_values=cache, use_cache=True)
    assert [*calls] == [("MistralAttention", "it has a mask of a cache")]
    undo()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(
        InputError, match=r"takes the place of sdpa or eager, and MistralForCausalLM has flex_attention"
    ):
        swap_attention(model, "reference", implementation("reference"))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Adapted(torch.nn.Module):
    """A layer with an adapter of low rank, and a weight that is the layer's."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight = layer, layer.weight
        self.down, self.up = torch.nn.Linear(32, 2), torch.nn.Linear(2, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_alibi(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float, **_: Any) -> Any:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    at = torch.arange(q.shape[2], device=q.device)
    scores = q @ k.mT * scaling - (at[:, None] - at).abs() + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


def change(model: Any, how: str) -> None:
    """Make a model one that the swaps may not assume."""
    attentions = [block.self_attn for block in model.model.layers]
    first, second = attentions
    match how:
        case "own scale":
            first.scaling = 0.7
        case "weight norm":
            torch.nn.utils.parametrizations.weight_norm(first.k_proj)
        case "shared weight":
            second.q_proj.weight = first.q_proj.weight
        case "shared block":
            model.model.layers[1] = model.model.layers[0]
        case "hook":
            first.q_proj.register_forward_hook(lambda _, __, out: 1.5 * out)
        case "own autograd":
            first.q_proj.register_forward_hook(lambda _, __, out: Doubled.apply(out))
        case "adapter":
            first.v_proj = Adapted(first.v_proj)
        case "cut mask":
            forward = first.forward
            first.forward = lambda *args, attention_mask, **more: forward(
                *args, attention_mask=attention_mask[:, :, :, :12], **more
            )
        case "own function":
            model.config._attn_implementation = "eager"
            own = inspect.unwrap(type(first).forward)
            names = {**own.__globals__, "eager_attention_forward": with_alibi}
            forward = types.FunctionType(own.__code__, names, "forward", own.__defaults__, own.__closure__)
            for each in attentions:
                each.__class__ = type("Alibi", (type(each),), {"forward": forward})
        case _:
            model.config._attn_implementation = "flex_attention"


ONE = "attention reference: 1 MistralAttention replaced"
TWO = ONE.replace("1", "2")
LEFT = "projections joint: 1 MistralAttention left, "
UNUSUAL = {
    "own scale": (TWO, ""),
    "weight norm": (TWO, f"{LEFT}one is of ParametrizedLinear"),
    "shared weight": (TWO, "projections joint: 2 MistralAttention left, a weight is shared"),
    "shared block": (ONE, "MistralAttention: a weight is shared; MistralMLP: a weight is shared"),
    "hook": (TWO, f"{LEFT}one has hooks"),
    "own autograd": (TWO, f"{LEFT}one has hooks"),
    "adapter": (TWO, f"{LEFT}one is of Adapted"),
    "cut mask": ("attention reference: 1 MistralAttention left, it has a mask", ""),
    "own function": ("attention reference computes something else than Alibi", ""),
    "other attention": ("takes the place of sdpa or eager, and MistralForCausalLM has flex_attention", ""),
}
"""What the swap of attention says of such a model, and what joint projections say."""


@pytest.mark.parametrize("how", UNUSUAL)
def test_models_that_swaps_may_not_assume_compute_the_same_or_are_named(how: str):
    model = hugging_face("Mistral")
    change(model, how)
    own = gradients(model) if how != "other attention" else []

    def swapped(swap: Callable[[], Callable[[], None]], found: Callable[[Any], Any], said: str) -> None:
        try:
            undo = swap()
            with calls_held() as calls:
                ours = gradients(model)
        except InputError as error:
            assert said in str(error)
            return
        assert apart(ours, own) < 1e-6
        assert not said or said in map(str, found(calls))
        undo()

    attention, projections = UNUSUAL[how]
    swapped(
        lambda: swap_attention(model, "reference", implementation("reference")),
        lambda calls: attention_found(model, "reference", calls),
        attention,
    )
    if how not in ("own function", "other attention"):
        swapped(lambda: join_projections(model), lambda _: projections_found(model), projections)
        assert apart(gradients(model), own) == 0


def test_compiled_models_have_no_masks_either():
    """In one graph: a mask in its place says what it is while it is traced, documents by their positions too."""
    model = hugging_face("Mistral")
    own = gradients(model, position_ids=PACKED.to(DEVICE))
    undo = swap_attention(model, "reference", implementation("reference"))
    model.compile(backend="eager", fullgraph=True)
    assert apart(gradients(model, position_ids=PACKED.to(DEVICE)), own) < 1e-6
    undo()
    dropping = hugging_face("Mistral")  # calls that keep the model's own attention break no graph
    dropping.config.attention_dropout = 0.1
    for block in dropping.model.layers:
        block.self_attn.attention_dropout = 0.1
    undo = swap_attention(dropping, "sdpa", implementation("sdpa"))
    dropping.compile(backend="eager", fullgraph=True)
    assert all(each.isfinite().all() for each in gradients(dropping))
    undo()


@pytest.mark.parametrize("name", ["Qwen2", "ViT"])
def test_blocks_get_the_same_masks_before_a_capture_as_in_it(name: str, monkeypatch: pytest.MonkeyPatch):
    """transformers makes a mask where a CUDA graph is captured, and none elsewhere: compiled blocks would compile in
    the capture. Of a bidirectional model some releases make one of ones; a swapped attention needs none."""
    if name == "ViT":
        transformers: Any = pytest.importorskip("transformers", reason="its models are swapped")
        config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)
        model = transformers.ViTForImageClassification(config).to(DEVICE)
        batch = {"pixel_values": torch.randn(2, 3, 8, 8, device=DEVICE)}
        monkeypatch.setattr("transformers.masking_utils._ignore_bidirectional_mask_sdpa", lambda *_: False)  # 5.17
    else:
        model, batch = hugging_face(name), {"input_ids": torch.arange(1, 25, device=DEVICE).view(2, 12)}
        model.config.use_sliding_window = False
    block = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))[0]
    masks: list[Any] = []
    block.register_forward_pre_hook(lambda _, args, more: masks.append([*args, *more.values()][1]), with_kwargs=True)

    def seen(*, capturing: bool) -> bool:
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
        model(**batch)
        return isinstance(masks[-1], Tensor)

    with as_captured():
        before = seen(capturing=False)
    assert before == seen(capturing=True)
    assert before
    undo = swap_attention(model, "sdpa", implementation("sdpa"))
    assert not seen(capturing=True)
    assert not seen(capturing=False)
    undo()


def test_a_swapped_call_is_held_on_scores_that_are_large():
    """Fresh models have scores near zero, in which nothing tells a softcap that is left out."""
    model = hugging_face("Gemma2")

    def uncapped(*args: Tensor, **more: Any) -> Tensor:
        return implementation("reference")(*args, **{**more, "softcap": None})

    undo = swap_attention(model, "reference", uncapped)
    with (
        pytest.raises(InputError, match="attention reference computes something else than Gemma2Attention"),
        calls_held(),
    ):
        gradients(model)
    undo()


def test_an_attention_that_computes_something_else_is_refused_by_the_model_s_own_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from stepscope.training.user_module import module_step

    # Equal outputs, and half of a gradient.
    wrong = lambda q, k, v, **more: implementation("reference")((q + q.detach()) / 2, k, v, **more)  # noqa: E731
    monkeypatch.setattr(module_step, "implementation", lambda _: wrong)
    with pytest.raises(InputError, match=r"attention sdpa-math changes what .* computes: its gradients are"):
        own_llama(tmp_path, attention="sdpa-math")


def test_projections_called_with_other_inputs_compute_apart():
    class Cross(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(4, n) for n in (4, 2, 2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(y), self.v_proj(y)], -1)

    cross, x, y = Cross(), torch.randn(3, 4), torch.randn(3, 4)
    own = cross(x, y)
    undo = join_projections(cross)
    assert torch.allclose(cross(x, y), own) and joined(cross)[0].apart
    undo()
    assert type(cross.q_proj) is torch.nn.Linear and not joined(cross)


@pytest.mark.parametrize("masters", [False, True])
def test_the_lines_for_a_script_give_it_the_step_that_was_found(tmp_path: Path, masters: bool):
    """Applied to the same model in a plain loop, they train as the measured step does, and take as long to a factor."""
    choices: dict[str, Any] = {"attention": "sdpa", "projections": "joint", "optimizer": "adamw-fused"}
    step = own_llama(tmp_path, dtype="bf16-master" if masters else "fp32", **choices)
    lines = script_lines(step.workload)
    swaps = ["import stepscope", "stepscope.replace_parts(model, attention='sdpa', projections='joint')"]
    assert lines[-3:] == [*swaps, "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)"] or masters
    theirs = own_llama(tmp_path).user_module
    script: dict[str, Any] = {"torch": torch, "model": theirs.module, "lr": 1e-4}
    exec("\n".join(lines), script)

    def loop() -> float:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=masters):
            loss = theirs.module(**theirs.batches[0]).loss
        loss.backward()
        script["optimizer"].step()
        script["optimizer"].zero_grad()
        return loss.item()

    assert [loop() for _ in range(3)] == pytest.approx(losses_of(step), rel=1e-6)
    if masters:
        return
    measured = stepscope_measure({"loop": loop, "found": lambda: drive(step)}, steps=5, warmup=1)
    loop_s, step_s = (measured.samples[name].median_s for name in ("loop", "found"))
    assert loop_s and step_s and 0.2 < loop_s / step_s < 5


@pytest.mark.parametrize(
    ("choices", "lines"),
    [
        (
            {"dtype": "bf16-master", "optimizer": "adamw-one-launch", "graph": "step", "compile": "blocks"},
            [
                "from stepscope.training.half_optimizers import halve",
                "masters = halve(model)",
                "from stepscope.training.one_launch import AdamWOneLaunch",
                "optimizer = AdamWOneLaunch(model.parameters(), lr=lr, masters=masters)",
                "for block in blocks:  # the model's list of blocks",
                "    block.compile()",
                "# forward and loss: with torch.autocast(device, torch.bfloat16)",
                "# the whole step as one CUDA graph: torch.cuda.graph",
            ],
        ),
        (
            {"compile": "max-autotune", "optimizer": "adamw-under-backward", "loss": "fused"},
            [
                "import stepscope",
                "stepscope.replace_parts(model, loss='fused')",
                "from stepscope.training.one_launch import AdamWUnderBackward",
                "optimizer = AdamWUnderBackward(model.parameters(), lr=lr)",
                "from stepscope.kernels.operators import use_graph_passes",
                "use_graph_passes()",
                "model.compile(mode='max-autotune')",
            ],
        ),
    ],
)
def test_lines_for_a_script_say_each_choice(choices: dict[str, Any], lines: list[str]):
    own = FactoryWorkload(model=UserModel(name=""), factory="own.py:make", **choices)
    assert script_lines(own) == lines
