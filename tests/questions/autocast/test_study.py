"""Dtypes under autocast as they were seen: the toy network, transformers, and a user's own module."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.core.answer import Answer, Cell, decode_answer
from stepscope.core.errors import InputError
from stepscope.questions.autocast import (
    CASTS,
    LOW,
    OPERATOR_TABLE,
    TREE,
    observe_operators,
    study_autocast,
)
from tests.command import Done, stepscope
from tests.questions.verbs import refused

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Answer:
    return study_autocast(dtype="bf16", device="cpu")


def tree(found: Answer) -> dict[str, dict[str, Cell]]:
    """Rows by path: what stands deeper belongs to what stands above it."""
    table, rows, path = found.table(TREE), {}, []
    for row in table.rows:
        depth, label = (len(str(row[0])) - len(str(row[0]).lstrip())) // 2, str(row[0]).strip()
        path = [*path[:depth], label]
        rows[".".join(path[1:]) or label] = dict(zip(table.columns, row, strict=True))
    return rows


def casts(found: Answer) -> dict[Cell, tuple[Cell, ...]]:
    """Casts of parameters, and how many parameters, by how often forward ran."""
    return {row[0]: row[1:3] for row in found.table(CASTS).rows}


# --- the toy network ---


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_toy_on_the_cpu(dtype: str):
    rows = tree(study_autocast(dtype=dtype, device="cpu"))
    weights = [row for row in rows.values() if str(row["kind"]).startswith("parameter")]
    assert len(weights) == 4
    assert {(row["dtype"], row["gradient"]) for row in weights} == {("fp32", "fp32")}
    assert (rows["fc1"]["input"], rows["fc1"]["output"], rows["fc1"]["gradient"]) == ("fp32", dtype, dtype)
    assert (rows["loss"]["input"], rows["loss"]["output"]) == (dtype, "fp32")
    # What the norm gives is what its operator gave alone.
    assert rows["ln"]["output"] == observe_operators(CPU, LOW[dtype])["layer_norm"].of_low


@pytest.mark.gpu
def test_toy_under_fp16_on_a_gpu():
    rows = tree(study_autocast(dtype="fp16", device="cuda"))
    assert {name: (rows[name]["input"], rows[name]["output"]) for name in ("fc1", "relu", "ln", "fc2", "loss")} == {
        "fc1": ("fp32", "fp16"), "relu": ("fp16", "fp16"), "ln": ("fp16", "fp32"), "fc2": ("fp32", "fp16"),
        "loss": ("fp16", "fp32"),
    }  # fmt: skip
    weights = [row for row in rows.values() if str(row["kind"]).startswith("parameter")]
    assert {(row["dtype"], row["gradient"]) for row in weights} == {("fp32", "fp32")}


def test_the_optimizer_is_out_of_autocasts_reach(toy: Answer):
    rows = tree(toy)
    assert (rows["optimizer state"]["dtype"], rows["update"]["dtype"]) == ("fp32", "fp32")
    half = tree(study_autocast(dtype="bf16", device="cpu", factory=None, model="tiny"))
    assert half["optimizer state"]["dtype"] == "fp32"


def test_toy_keeps_copies_of_its_two_matrices(toy: Answer):
    assert casts(toy) == {
        "one forward": (2, 2), "two forwards in one region": (2, 2), "the same, cache off": (4, 2),
        "two forwards, a region each": (4, 2),
    }  # fmt: skip
    (cache,) = [finding for finding in toy.findings if finding.kind == "cast-cache"]
    assert cache.evidence["bytes_of_copies"] == 2 * (10 * 20 + 5 * 10)
    assert "casts 0: the copies are kept" in cache.sentence


def test_sentences_quote_the_table(toy: Answer):
    treated = [row[5] for row in toy.table(OPERATOR_TABLE).rows]
    (operators,) = [finding for finding in toy.findings if finding.kind == "operators"]
    assert operators.evidence["sent down"] == treated.count("sent down")
    assert f"{treated.count('sent down')} sent down to 16 bits" in operators.sentence
    (differences,) = [finding for finding in toy.findings if finding.kind == "cpu-against-cuda"]
    seen = [(row[5], row[6]) for row in toy.table(OPERATOR_TABLE).rows if row[6] is not None]
    assert differences.evidence == {"different": sum(a != b for a, b in seen), "operators": len(seen)}


def test_squares_overflow_in_fp16_and_not_in_bf16(toy: Answer):
    def variance(found: Answer) -> str:
        return str(next(finding for finding in found.findings if finding.kind == "squares").evidence["variance"])

    # 1000 is 1000 in both; its square is beyond fp16's 65504, and rounds to 8 bits in bf16: 244 * 4096.
    assert variance(study_autocast(dtype="fp16", device="cpu")) == "inf"
    assert variance(toy) == str(244.0 * 4096)


# --- by the rules of CUDA, on a CPU ---


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_by_the_rules_of_cuda_on_a_cpu(dtype: str):
    """As `test_toy_under_fp16_on_a_gpu` sees it on one."""
    found = study_autocast(dtype=dtype, device="cpu", rules="cuda")
    rows = tree(found)
    assert {name: (rows[name]["input"], rows[name]["output"]) for name in ("fc1", "relu", "ln", "fc2", "loss")} == {
        "fc1": ("fp32", dtype), "relu": (dtype, dtype), "ln": (dtype, "fp32"), "fc2": ("fp32", dtype),
        "loss": (dtype, "fp32"),
    }  # fmt: skip
    assert found.settings["rules"] == "cuda" and found.question.endswith("by CUDA's rules?")
    (rules,) = [finding for finding in found.findings if finding.kind == "rules"]
    assert f"as PyTorch {torch.__version__} registers them, read here without a GPU" in rules.sentence
    columns = {row[0]: row[1:] for row in found.table(OPERATOR_TABLE).rows}
    assert columns["layer_norm"][:2] == ("fp32", "fp32") and columns["layer_norm"][5] == "kept up"
    (treated,) = [finding for finding in found.findings if finding.kind == "operators"]
    assert "autocast on cuda has 13 sent down" in treated.sentence
    assert [line.text for line in found.table(TREE).notes] == ["By CUDA's rules, imitated here."]
    plain = study_autocast(dtype=dtype, device="cpu")
    assert all(finding.kind != "rules" for finding in plain.findings)
    assert plain.settings["rules"] == "cpu" and plain.question.endswith("by the CPU's rules?")
    assert [line.text for line in plain.table(TREE).notes] == ["By the CPU's rules."]


def test_what_the_imitation_of_cuda_gets_wrong_is_named():
    found = study_autocast(device="cpu", rules="cuda")
    (rules,) = [finding for finding in found.findings if finding.kind == "rules"]
    named = rules.sentence.partition("alike in both. ")[2].partition(" do not")[0].split(", ")
    assert len(named) == rules.evidence["different"]
    # What a transformer runs is imitated; operators that promote are not.
    used = {"linear", "layer_norm", "rms_norm", "softmax", "cross_entropy", "gelu", "silu", "add", "mul", "pow", "sum"}
    if torch.__version__ < "2.13":  # an earlier one makes rms_norm of other operators on a CPU, and fuses it on a GPU
        used.remove("rms_norm")
    assert used.isdisjoint(named) and "addcmul" in named


def test_a_transformer_and_ones_own_by_the_rules_of_cuda(own: str):
    rows = tree(study_autocast("tiny", device="cpu", rules="cuda"))
    assert rows["blocks.0 to 3, each.attention.query"]["output"] == "bf16"
    rows = tree(study_autocast(factory=f"{own}:late", device="cpu", rules="cuda"))
    assert rows["norm"]["output"] == "fp32", "on a CPU it stays in the 16 bits that go in"


# --- a transformer, and models of the user's ---


def test_blocks_that_are_alike_stand_once():
    rows = tree(study_autocast("tiny", device="cpu"))
    assert rows["blocks.0 to 3, each"]["kind"] == "Block"
    block = "blocks.0 to 3, each"
    assert (rows[block]["input"], rows[block]["output"]) == ("fp32", "fp32")  # the residual stream
    assert rows[f"{block}.attention.query"]["output"] == "bf16"
    assert rows[f"{block}.attention_norm"]["output"] == "fp32"
    assert (rows["rotary"]["calls"], rows[f"{block}.attention.rotary"]["kind"]) == (8, "the same as rotary")
    assert rows["embedding"]["input"] == "int64"


OWN = """
import torch
from torch import nn

def square(output):
    return output["y"].square().mean()

class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.shared.weight
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(4)
    def forward(self, x, ids=None):
        for _ in range(3):
            x = self.shared(x)
        return {"y": self.norm(self.narrow(self.relu(self.tied(x)))), "ids": (ids, None)}

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
    def forward(self):
        return self.fc(torch.ones(2, 4)).sum()

class Frozen(Loss):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        return self.late(self.norm(x)).sum()

class Again(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False).sum()

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("no way\\nat all")

instance = Loss()
number = 3
def uneven(): return Uneven(), {"x": torch.randn(8, 4), "ids": torch.arange(3)}, square
def pair(): return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.ones(1, 4)
def infinite(): return nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum() / 0
def late(): return Late(), torch.ones(3, 4)
def again(): return Again(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(3, 4)
def scripted(): return torch.jit.trace(nn.Linear(4, 2), torch.ones(3, 4)), torch.ones(3, 4), square
def no_loss(): return nn.Linear(4, 2), torch.ones(3, 4)
def count(): return nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.argmax()
def text(): return nn.Linear(4, 2), torch.ones(3, 4), "mse"
def loss_fails(): return nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.nonsense
def broken(): return Broken(), torch.ones(2)
def no_module(): return 7
def nothing(): return None
def fails(): raise KeyError("weights")
def leaves(): raise SystemExit(0)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current directory."""
    name = f"models_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def test_an_uneven_model_of_ones_own(own: str):
    found = study_autocast(factory=f"{own}:uneven", device="cpu")
    rows = tree(found)
    assert rows["shared"]["calls"] == 3
    assert rows["shared"]["input"] == "fp32, bf16"  # the first call, and those after it
    assert rows["tied.weight"]["kind"] == "the same as shared.weight 4 x 4"
    assert (rows["unused"]["calls"], rows["unused.weight"]["gradient"]) == (None, "none")
    assert (rows["narrow.weight"]["dtype"], rows["narrow.weight"]["gradient"]) == ("bf16", "bf16")
    assert rows["norm.num_batches_tracked"]["dtype"] == "int64"
    assert rows["Uneven"]["input"] == "fp32, int64"
    assert rows["loss"]["kind"] == "square"
    # Four uses of one weight and three of its bias, each cast once: narrow is 16 bits already.
    assert casts(found)["one forward"] == (2, 2)
    assert casts(found)["the same, cache off"] == (2 * 7, 2)
    (parameters,) = [finding for finding in found.findings if finding.kind == "parameters"]
    assert parameters.evidence["gradients_none"] == 2
    assert parameters.evidence["gradients_bf16"] == 1


@pytest.mark.parametrize("factory", ["Loss", "instance", "pair"])
def test_forward_may_return_the_loss(own: str, factory: str):
    rows = tree(study_autocast(factory=f"{own}:{factory}", device="cpu"))
    assert str(rows["loss"]["kind"]).startswith("returned by ")


def test_what_a_checkpoint_runs_again_is_no_call_of_forward(own: str):
    rows = tree(study_autocast(factory=f"{own}:again", device="cpu"))
    assert rows["0"]["calls"] == rows["1"]["calls"] == 1


def test_a_module_that_forward_makes_is_shown_without_what_hooks_would_have_seen(own: str):
    rows = tree(study_autocast(factory=f"{own}:late", device="cpu"))
    assert rows["norm"]["calls"] == 1
    assert (rows["late.0"]["kind"], rows["late.0"]["calls"], rows["late.0"]["output"]) == ("Linear", None, "")
    assert (rows["late.0.weight"]["dtype"], rows["late.0.weight"]["gradient"]) == ("fp32", "fp32")


def test_a_loss_that_is_no_number_is_said(own: str):
    found = study_autocast(factory=f"{own}:infinite", device="cpu")
    assert [finding.severity for finding in found.findings if finding.kind == "loss"] == ["warning"]


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("no_loss", r"has no loss: forward returned a tensor \(3, 2\)"),
        ("count", r"has no loss: its loss function returned a tensor \(\) of torch.int64"),
        ("Frozen", "a loss without gradients"),
        ("scripted", "compiled by torch.jit, which takes no hooks"),
        ("text", "the loss is str, which cannot be called"),
        ("loss_fails", "the loss of .* fails: AttributeError"),
        ("broken", "fails in forward: ValueError: no way"),
        ("no_module", "gave int, and no nn.Module"),
        ("number", "gave int, and no nn.Module"),
        ("nothing", "gave NoneType, and no nn.Module"),
        ("fails", "fails: KeyError: 'weights'"),
        ("leaves", "fails: SystemExit"),
        ("absent", "has no 'absent'"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_line(own: str, factory: str, said: str):
    with pytest.raises(InputError, match=said) as raised:
        study_autocast(factory=f"{own}:{factory}", device="cpu")
    assert "\n" not in str(raised.value)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"factory": "nowhere_to_be_found:f"}, "cannot be imported: ModuleNotFoundError"),
        ({"factory": "torch"}, "write package.module:factory"),
        ({"factory": ":f"}, "write package.module:factory"),
        ({"factory": ".relative:f"}, "cannot be imported"),
        ({"model": "huge"}, "unknown model 'huge'"),
        ({"model": "10B"}, "choose a smaller preset"),
        ({"dtype": "fp32"}, "unknown dtype 'fp32'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"rules": "tpu"}, "unknown rules 'tpu': choose one of cpu, cuda"),
    ],
)
def test_wrong_names(arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch):
    told = {"SC_PHYS_PAGES": 2**22, "SC_PAGE_SIZE": 2**12}  # a machine of 16 GiB
    asked = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: told.get(name) or asked(name))
    with pytest.raises(InputError, match=said):
        study_autocast(**{"device": "cpu", **arguments})


# --- the command line ---


def autocast(*arguments: object) -> Done:
    return stepscope("study", "autocast", *arguments)


def test_json_is_the_experiment_and_is_read_again(tmp_path: Path):
    done = autocast("--device", "cpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = decode_answer(done.stdout.encode(), "stdout")
    assert tree(found)["fc1"]["output"] == "bf16" and found.settings["model"] == "toy"
    kept = tmp_path / "answer.json"
    kept.write_text(done.stdout)
    by_cuda = autocast("--device", "cpu", "--rules", "cuda", "--only", "findings")
    assert by_cuda.stdout.startswith("The rules are CUDA's, as PyTorch") and by_cuda.returncode == 0
    shown = autocast("--from", str(kept))
    assert shown.returncode == 0 and "LayerNorm" in shown.stdout and "scaled_dot_product_attention" in shown.stdout


def test_bad_input_is_one_line_and_two(own: str):
    for arguments, said in (
        (["--module", f"{own}:no_loss"], "has no loss"),
        (["--module", f"{own}:broken"], "fails in forward"),
        (["--model", "toy", "--module", f"{own}:uneven"], "give one"),
    ):
        assert said in refused("autocast", "--device", "cpu", *arguments)
