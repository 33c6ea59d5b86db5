"""A user's own model: how it is found, what its factory may give, and the step that it becomes."""

import contextlib
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence
from stepscope.core.run import Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import FactoryWorkload, UserModel, Workload
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.recording.device import HostDevice
from stepscope.recording.driven import observe_step, step_operators
from stepscope.recording.memory_history import capture_memory
from stepscope.recording.step import drive
from stepscope.runs.checks import check_run
from stepscope.training.training_step import Shared, StepParts
from stepscope.training.user_module.loading import load_factory, load_module, make_user_step
from stepscope.training.user_module.module_step import ModuleStep, UserStep, find_blocks
from stepscope.training.user_module.user_code import named_tensors, split
from tests.conftest import make_run, mini
from tests.cpu_allocations import allocated_bytes
from tests.training.by_dtype import BY_DTYPE

CPU = torch.device("cpu")

OWN = """
import collections
import sys
import types
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import neighbour

print("imported")
if __name__ == "__main__":
    raise RuntimeError("this is no script here")

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)
    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.outer(torch.tanh(self.inner(x))))

class Net(nn.Module):
    def __init__(self, depth=3, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)
    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)

class WithLoss(Net):
    def forward(self, x, labels):
        logits = super().forward(x)
        return types.SimpleNamespace(logits=logits, loss=F.cross_entropy(logits, labels))

class AsDict(WithLoss):
    def forward(self, x, labels):
        return {"loss": super().forward(x, labels).loss}

class AsTuple(WithLoss):
    def forward(self, x, labels):
        out = super().forward(x, labels)
        return out.logits, out.loss

def data(n=4, width=8):
    torch.manual_seed(1)
    return torch.randn(n, width), torch.arange(n) % 5

def square(output): return output.square().mean()
def by_batch(output, batch): return F.cross_entropy(output, batch["labels"])
def by_pair(output, batch): return F.cross_entropy(output, batch[1])
def by_target(output, target): return F.cross_entropy(output, target)

def make(depth=3, *, width=8): return Net(depth, width), data(4, width)[0], square
def attribute(): return WithLoss(), data()
def mapping(): return AsDict(), dict(zip(("x", "labels"), data()))
def pair(): return AsTuple(), collections.UserDict(zip(("x", "labels"), data()))
def batch_of_dict(): return Net(), dict(zip(("x", "labels"), data())), by_batch
def batch_of_tuple(): return Net(), data(), by_pair
def target(): return Net(), data(), by_target
def criterion(): return Net(), data(), nn.CrossEntropyLoss()
def loader(): return Net(), DataLoader(TensorDataset(*data(12)), batch_size=4), by_target
def several(): return Net(), [data(4)[0], 2 * data(4)[0]], square
def generator(): return Net(), (data(4)[0] for _ in range(2)), square
def attributes():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return types.SimpleNamespace(module=net, batch=data(4)[0], loss=square, optimizer=optimizer)
def with_optimizer():
    net = Net()
    return net, data(4)[0], square, torch.optim.SGD(net.parameters(), 0.1)

class Steps:
    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.loss = None
        self.batches = [torch.ones(2, 4)]
        self.prepared = 0
        self.phases = [("forward", self.run), ("backward", lambda: self.loss.backward()), ("log", lambda: None)]
    def prepare(self): self.prepared += 1
    def run(self): self.loss = self.model(self.batches[0]).sum()

instance = Net()
number = 3
def needs(sizes, depth=2): return Net()
def raises(): raise KeyError("weights")
def mismatched(): Net().load_state_dict({})
def item(): return Net(), data(4)[0], lambda out: out.sum().item()
def unreduced(): return Net(), data(4)[0], lambda out: out
def closing():
    net = Net()
    return net, data(4)[0], square, torch.optim.LBFGS(net.parameters())
def leaves(): sys.exit(0)
def nothing(): return None
def empty(): return Net(), [], square
def exhausted(): return Net(), iter(()), square
def failing_loader():
    def batches():
        yield data(4)[0]
        raise OSError("disk gone")
    return Net(), batches(), square
def no_parameters(): return nn.ReLU(), torch.ones(2, 4), square
def frozen(): return Net().requires_grad_(False), data(4)[0], square
def no_gradient(): return Net(), data(4)[0], lambda y: y.detach().mean()
def no_number(): return Net(), data(4)[0]
def counts(): return Net(), data(4)[0], lambda y: y.argmax()
def bad_shape(): return Net(), torch.ones(2, 7), square
def bad_backward():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.sum()
        @staticmethod
        def backward(ctx, g): raise ValueError("not written yet")
    return Net(), data(4)[0], Bad.apply
def immovable():
    class Stuck:
        def to(self, *_): raise RuntimeError("stays here")
    return Net(), Stuck(), square
def scripted(): return torch.jit.script(nn.Linear(4, 2)), torch.ones(3, 4), square
def others_optimizer(): return Net(), data(4)[0], square, torch.optim.SGD(Net().parameters(), 0.1)
def no_optimizer(): return Net(), data(4)[0], square, "adam"
def bad_phase():
    steps = Steps()
    steps.phases = [("forward", 3)]
    return steps
def failing_phase():
    steps = Steps()
    steps.phases = [*steps.phases, ("late", lambda: data(4)[9])]
    return steps
def failing_optimizer():
    class Broken(torch.optim.SGD):
        def step(self, closure=None): raise Unsayable()
    model = Net()
    return model, data(4)[0], square, Broken(model.parameters(), 0.1)
class Unsayable(Exception):
    def __str__(self): raise RuntimeError("no words")
def unsayable(): raise Unsayable()
def unsayable_forward():
    def loss(*_): raise Unsayable()
    return Net(), data(4)[0], loss
def no_tensor(): return Net(), {"x": 3}, square
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of factories, with another beside it that it imports."""
    (tmp_path / "neighbour.py").write_text("")
    place = tmp_path / f"train_{tmp_path.name}.py"
    place.write_text(OWN)
    return str(place)


def factory_workload(factory: str, **changes: Any) -> FactoryWorkload:
    return FactoryWorkload(model=UserModel(name="not known yet"), factory=factory, **changes)


def made(factory: str, **changes: Any) -> tuple[ModuleStep, FactoryWorkload]:
    step, workload = make_user_step(factory_workload(factory, **changes), CPU)
    assert isinstance(step, ModuleStep) and isinstance(workload, FactoryWorkload)
    return step, workload


def run(step: Any, steps: int = 1) -> None:
    for _ in range(steps):
        step.prepare()
        drive(step)


def gradients(step: ModuleStep) -> list[Tensor]:
    step.model.eval()  # without dropout, whose mask would differ
    run(step)
    return [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]


# --- finding and calling ---


def test_a_file_is_loaded_with_its_folder_and_prints_to_stderr(file: str, capsys: pytest.CaptureFixture[str]):
    own = load_module(f"{file}:make")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "imported\n")
    assert sys.modules[type(own.module).__module__].__file__ == file


def test_a_file_named_as_a_library_takes_its_name_from_nobody(tmp_path: Path):
    (tmp_path / "json.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 1)\n")
    assert type(load_module(f"{tmp_path / 'json.py'}:make").module) is nn.Linear
    assert json.loads("3") == 3 and "json.py" not in str(sys.modules["json"].__file__)


def test_arguments_reach_the_factory(file: str):
    _, workload = made(f"{file}:make", arguments={"depth": 2, "width": 4})
    block = 4 * 8 + 8 + 8 * 4 + 4
    assert workload.model.parameters == 2 * block + 4 * 5 + 5


@pytest.mark.parametrize(
    ("called", "said"),
    [
        ("make deep=3", "has no parameter 'deep': its parameters are depth=3, width=8"),
        ("needs", "needs sizes: give --arg sizes=VALUE; its parameters are sizes, depth=2"),
        ("instance depth=3", "is Net already, which takes no --arg depth"),
        ("mak", "has no 'mak'; there is make"),
        ("make.inner", "has no 'make.inner'"),
        ("number", "gave int, and no nn.Module"),
        ("nothing", "gave NoneType, and no nn.Module"),
        ("raises", r"fails: KeyError: 'weights' \(\S+.py:88\)$"),
        (
            "mismatched",
            r"fails: RuntimeError: Error.* for Net: Missing key.* \(\S+.py:\d+\)$",
        ),
        ("leaves", "fails: SystemExit: 0"),
        ("empty", "has no batch: it gave an empty list"),
        ("exhausted", "has no batch: it gave tuple_iterator that gives none"),
        ("failing_loader", "the batches of .* fail: OSError: disk gone"),
        ("no_parameters", "has no parameters to train"),
        ("frozen", "has no parameters to train"),
        ("no_gradient", "has a loss without gradients"),
        ("no_number", r"has no loss: forward returned a tensor \(4, 5\) of torch.float32, and no floating tensor"),
        ("counts", r"its loss function returned a tensor \(\) of torch.int64, .*; return a floating number$"),
        ("item", "its loss function returned float, .*; return the tensor itself, without .item"),
        ("unreduced", r"its loss function returned a tensor \(4, \d+\) .*; reduce it, as by .mean\(\)$"),
        ("closing", "LBFGS steps by a closure that runs forward and backward again"),
        ("bad_shape", "fails in forward: RuntimeError"),
        ("bad_backward", r"fails in backward: ValueError: not written yet \(\S+.py:\d+\)$"),
        ("immovable", "the batch of .* cannot be moved to cpu: RuntimeError: stays here"),
        ("scripted", "is compiled by torch.jit"),
        ("others_optimizer", "its optimizer holds none of the module's parameters"),
        ("no_optimizer", "the optimizer is str, and no torch.optim.Optimizer"),
        ("failing_phase", "fails in late: IndexError: tuple index out of range"),
        ("failing_optimizer", r"fails in optimizer: Unsayable \(\S+.py:\d+\)$"),
        ("unsayable", r"fails: Unsayable \(\S+.py:\d+\)$"),
        ("unsayable_forward", r"fails in forward, in its loss function: Unsayable \(\S+.py:141\)$"),
        ("bad_phase", r"a step with the phase \('forward', 3\): each is a name and a function"),
    ],
)
def test_what_is_wrong_with_a_factory_is_one_line(file: str, called: str, said: str):
    factory, *given = called.split()
    arguments = dict(word.split("=") for word in given)
    with pytest.raises(InputError, match=said) as raised:
        step, _ = make_user_step(factory_workload(f"{file}:{factory}", arguments=arguments), CPU)
        run(step)
    assert "\n" not in str(raised.value) and factory in str(raised.value)


def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, file: str):
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "trains.py").write_text("raise SystemExit(0)\n")
    for spelled, said in (
        (f"{tmp_path}/trian.py:make", "trian.py is not there; there is train"),
        (f"{tmp_path}/broken.py:make", "cannot be loaded: SyntaxError"),
        (f"{tmp_path}/trains.py:make", "cannot be loaded: SystemExit"),
        (file, "write package.module:factory or path/file.py:factory"),
        ("no_such_package.at_all:make", "cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(InputError, match=said):
            load_module(spelled)


# --- what a factory may give ---


@pytest.mark.parametrize(
    "factory",
    ["attribute", "mapping", "pair", "batch_of_dict", "batch_of_tuple", "target", "criterion"],
)
def test_every_form_of_a_loss_is_the_same_number(file: str, factory: str):
    step, _ = made(f"{file}:{factory}", phase="forward-backward")
    step.model.eval()
    run(step)
    torch.manual_seed(0)
    plain = load_module(f"{file}:batch_of_tuple")
    plain.module.eval()
    x, labels = plain.batches[0]
    expected = nn.functional.cross_entropy(plain.module(x), labels)
    assert step.loss is not None
    torch.testing.assert_close(step.loss, expected.detach())
    names = [name for name, _ in step.named_tensors(step.batch)]
    assert names[0] == "x" and len(names) == 2


@pytest.mark.parametrize(("factory", "batches"), [("loader", 3), ("several", 2), ("generator", 2), ("make", 1)])
def test_steps_rotate_through_the_batches_that_were_given(file: str, factory: str, batches: int):
    step, _ = made(f"{file}:{factory}")
    observation, _ = observe_step(step, CPU)
    assert len(step.batches) == batches
    assert (observation.covers_batch, observation.model_forwards["forward"]) == (True, 1)
    assert observation.forward_tokens is None  # floating numbers are no tokens


def test_the_batch_of_the_workload_is_that_of_all_ranks(file: str):
    def half(parts: StepParts, _: Workload) -> Shared:
        batches = [parts.split(batch, 2)[0] for batch in parts.batches]
        return Shared(parts=dataclasses.replace(parts, batches=batches), finish=None, local=contextlib.nullcontext)

    alone = made(f"{file}:make")[1]
    step, found = make_user_step(factory_workload(f"{file}:make"), CPU, share=half)
    assert isinstance(found, FactoryWorkload) and found.model.inputs == alone.model.inputs
    assert [tensor.shape[0] for _, tensor in step.named_tensors(step.batch)] == [2] and alone.batch_size == 4


@pytest.mark.parametrize("factory", ["attributes", "with_optimizer"])
def test_an_optimizer_that_the_factory_gives_is_the_one_that_runs(file: str, factory: str):
    step, workload = made(f"{file}:{factory}")
    assert isinstance(step.optimizer, torch.optim.SGD)
    assert (workload.optimizer, workload.by_factory) == ("SGD", ("optimizer",))
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    run(step)
    assert any(not torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    evidence = Evidence(operators=step_operators(step, CPU, HostDevice()))
    assert not check_run(make_run(evidence=evidence, workload=workload)), "its operators are its own"


def test_a_step_of_ones_own_is_driven_as_it_is(file: str, tmp_path: Path):
    step, workload = make_user_step(factory_workload(f"{file}:Steps"), CPU)
    assert isinstance(step, UserStep) and workload.by_factory == ("optimizer", "phases")
    assert workload.model.name == "Linear" and workload.optimizer is None
    run(step, 2)
    assert [phase.name for phase in step.phases] == ["forward", "backward", "log"] and step.user_step.prepared == 2
    observation, _ = observe_step(step, CPU)
    assert observation.model_forwards == {"forward": 1, "backward": 0, "log": 0} and observation.backward_passes == 1
    assert capture_memory(step, CPU, tmp_path, workload=mini()).measured.gradient_bytes == 20
    with pytest.raises(InputError, match="on which dtype bf16 has no effect"):
        make_user_step(factory_workload(f"{file}:Steps", dtype="bf16"), CPU)
    with pytest.raises(InputError, match=r"on which clip 1\.0 has no effect"):
        make_user_step(factory_workload(f"{file}:Steps", clip=1), CPU)


# --- the step ---


@pytest.mark.parametrize("factory", ["attribute", "mapping", "target", "make"])
def test_accumulated_gradients_are_those_of_the_whole_batch(file: str, factory: str):
    whole, _ = made(f"{file}:{factory}", phase="forward-backward")
    halves, _ = made(f"{file}:{factory}", phase="forward-backward", accumulation=2)
    assert [phase.name for phase in halves.phases] == ["forward", "backward"] * 2
    for a, b in zip(gradients(whole), gradients(halves), strict=True):
        torch.testing.assert_close(a, b)


def test_a_batch_is_split_along_its_own_size_alone():
    mask = torch.ones(3, 3)
    first, second = split({"x": torch.arange(8).view(4, 2), "mask": mask, "y": (torch.arange(4), 7)}, 2, "mine")
    assert first["x"].tolist() == [[0, 1], [2, 3]] and second["y"][0].tolist() == [2, 3]
    assert second["mask"] is mask and second["y"][1] == 7
    assert [name for name, _ in named_tensors((mask, {"y": mask}), ("x",))] == ["x", "1.y"]


def test_a_batch_that_cannot_be_split_is_refused(file: str):
    with pytest.raises(InputError, match=r"4 samples, .* be split into 3 equal micro-batches: choose .* 2, 4"):
        made(f"{file}:make", accumulation=3)
    with pytest.raises(InputError, match="its batch has no tensor to split"):
        made(f"{file}:no_tensor", accumulation=2)


@pytest.mark.parametrize("checkpointing", ["every-1", "selective"])
def test_checkpointing_runs_each_block_again_and_changes_no_gradient(file: str, checkpointing: str):
    plain, _ = made(f"{file}:make", phase="forward-backward")
    step, _ = made(f"{file}:make", phase="forward-backward", checkpointing=checkpointing)
    observation, memory = observe_step(step, CPU)
    _, all_kept = observe_step(plain, CPU)
    assert observation.blocks_again == len(step.blocks) == 3
    assert memory.saved_for_backward and all_kept.saved_for_backward
    assert memory.saved_for_backward < all_kept.saved_for_backward
    for a, b in zip(gradients(plain), gradients(step), strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_keeps_the_outputs_of_fused_attention(tmp_path: Path):
    (tmp_path / "attending.py").write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.into = nn.Linear(16, 48)\n"
        "    def forward(self, x):\n"
        "        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)\n"
        "        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).sin()\n"
        "def make():\n"
        "    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 64, 16), lambda y: y.square().mean()\n"
    )
    kept: dict[str, int] = {}
    found: list[list[Tensor]] = []
    for checkpointing in ("none", "attention", "every-1"):
        step, _ = made(f"{tmp_path}/attending.py:make", phase="forward-backward", checkpointing=checkpointing)
        assert observe_step(step, CPU)[0].blocks_again == (0 if checkpointing == "none" else 3)
        found.append(gradients(step))
        step.prepare()
        step.loss = None
        gc.collect()
        kept[checkpointing] = allocated_bytes(step.phases[0].run)[0]
    # Three outputs, and a logsumexp for each query of two heads.
    assert kept["attention"] - kept["every-1"] == 3 * 4 * 2 * 64 * (16 + 2)
    assert kept["attention"] < kept["none"]
    for plain, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, plain)


def test_a_module_without_fused_attention_has_none_to_keep(file: str):
    step, _ = made(f"{file}:make", phase="forward-backward", checkpointing="attention")
    with pytest.raises(InputError, match=r":make calls none: let it call scaled_dot_product_attention .* or every-1$"):
        run(step)


def test_checkpointed_blocks_drop_the_same_numbers_again(file: str):
    """Dropout: a mask drawn anew in backward would make other gradients."""
    found: list[list[Tensor]] = []
    for checkpointing in ("none", "every-1"):
        step, _ = made(f"{file}:make", phase="forward-backward", checkpointing=checkpointing)
        torch.manual_seed(7)
        run(step)
        found.append([p.grad for p in step.model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_blocks_are_found_and_groups_need_a_sequential(file: str):
    own = load_module(f"{file}:make")
    assert list(find_blocks(own.module)) == ["blocks"]
    with pytest.raises(InputError, match="its own forward calls the blocks of blocks one by one"):
        made(f"{file}:make", checkpointing="every-2")
    with pytest.raises(InputError, match=r"selective-1: the textbook's models alone .* choose every-1, selective or"):
        made(f"{file}:make", checkpointing="selective-1")
    with pytest.raises(InputError, match="choose every-1 to 3"):
        made(f"{file}:make", checkpointing="every-4")
    with pytest.raises(InputError, match="it has no blocks"):
        made(f"{file}:make", checkpointing="every-1", arguments={"depth": 1})


def test_groups_of_a_sequential_keep_their_inputs_alone(tmp_path: Path):
    (tmp_path / "chain.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    chain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))\n"
        "    return chain, torch.randn(4, 8), lambda y: y.square().mean()\n"
    )
    kept = {}
    for checkpointing in ("none", "every-1", "every-2", "every-4"):
        step, _ = made(f"{tmp_path}/chain.py:make", phase="forward-backward", checkpointing=checkpointing)
        observation, memory = observe_step(step, CPU)
        kept[checkpointing] = memory.saved_for_backward or 0
        assert observation.blocks_again == (0 if checkpointing == "none" else 4)
    # The loss keeps the last output, 128 bytes; each group its input, and the first group's is the batch, there anyway.
    assert kept == {"none": 8 * 128, "every-1": 4 * 128, "every-2": 2 * 128, "every-4": 128}


@BY_DTYPE
def test_precision_is_what_the_dtype_says(file: str, dtype: str, parameters: torch.dtype, products: tuple[str, ...]):
    step, _ = made(f"{file}:attribute", dtype=dtype)
    assert {parameter.dtype for parameter in step.model.parameters()} == {parameters}
    observation, _ = observe_step(step, CPU)
    assert observation.product_dtypes == products and observation.covers_batch
    assert {str(t.dtype) for _, t in step.named_tensors(step.batch)} == {str(parameters), "torch.int64"}


@pytest.mark.parametrize(("inner", "products"), [(1, ("bfloat16",)), (2, ("bfloat16", "float32"))])
def test_angles_of_positions_are_no_products_of_the_model(tmp_path: Path, inner: int, products: tuple[str, ...]):
    (tmp_path / "angles.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Angles(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        with torch.autocast('cpu', enabled=False):\n"
        f"            angles = torch.ones(1, 4, {inner}) @ torch.ones(1, {inner}, 8)\n"
        "        return self.linear(x) * angles[0].cos()\n"
        "def make():\n"
        "    return Angles(), torch.randn(4, 8), lambda y: y.float().square().mean()\n"
    )
    step, _ = made(f"{tmp_path}/angles.py:make", dtype="bf16")
    assert observe_step(step, CPU)[0].product_dtypes == products


def test_inference_runs_the_module_without_its_loss(file: str):
    step, workload = made(f"{file}:batch_of_tuple", phase="forward")
    run(step)
    assert step.loss is None and step.optimizer is None and workload.optimizer is None
    assert [phase.name for phase in step.phases] == ["forward"]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_step_computes_what_the_eager_one_does(file: str):
    found = [
        gradients(made(f"{file}:attribute", phase="forward-backward", compile=how)[0]) for how in ("eager", "default")
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_textbooks_model_as_a_users_is_the_same_step(tmp_path: Path):
    """Losses and gradients to the bit, and the same bytes kept for backward."""
    from stepscope.training.training_step import TrainingStep

    (tmp_path / "textbook.py").write_text(
        "from stepscope.training.training_step import TrainingStep\nfrom tests.conftest import mini\nimport torch\n"
        "def make():\n"
        "    step = TrainingStep(mini(), torch.device('cpu'))\n"
        "    return step.forward_module, step.batches\n"
    )
    theirs, _ = made(f"{tmp_path}/textbook.py:make")
    ours = TrainingStep(mini(), CPU)
    for _ in range(3):
        run(theirs)
        run(ours)
        assert theirs.loss is not None and ours.loss is not None
        assert float(theirs.loss) == float(ours.loss)
    assert observe_step(theirs, CPU)[1].saved_for_backward == observe_step(ours, CPU)[1].saved_for_backward


# --- Hugging Face models by their configuration ---

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "vocab_size": 128, "max_source_positions": 25, "max_target_positions": 16,
    "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def configuration(tmp_path: Path, fields: dict[str, Any]) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "inputs", "blocks"),
    [
        (LLAMA, {"input_ids": "int64[2, 8]", "labels": "int64[2, 8]"}, 2),
        ({**LLAMA, "architectures": None}, {"input_ids": "int64[2, 8]", "labels": "int64[2, 8]"}, 2),
        (VIT, {"pixel_values": "float32[2, 3, 16, 16]", "labels": "int64[2]"}, 2),
        (WHISPER, {"input_features": "float32[2, 8, 50]", "labels": "int64[2, 8]"}, 2),
    ],
    ids=["llama", "no class", "vit", "whisper"],
)
def test_a_model_made_of_its_configuration(tmp_path: Path, fields: dict[str, Any], inputs: dict[str, str], blocks: int):
    pytest.importorskip("transformers")
    factory, sizes = configuration(tmp_path, fields), {"batch_size": 2, "seq_len": 8}
    step, workload = made(factory, arguments=sizes, phase="forward-backward")
    assert {name: str(one) for name, one in workload.model.inputs.items()} == inputs
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}
    again, _ = made(factory, arguments=sizes, phase="forward-backward", checkpointing="every-1")
    for a, b in zip(gradients(step), gradients(again), strict=True):
        torch.testing.assert_close(a, b)
    observation, _ = observe_step(again, CPU)
    assert observation.blocks_again == blocks and observation.covers_batch and observation.distinct_batches == 4


def test_joint_projections_of_a_vision_model_take_its_patches_as_rows_of_a_product(tmp_path: Path):
    pytest.importorskip("transformers")
    factory, sizes = configuration(tmp_path, VIT), {"batch_size": 2, "seq_len": 8}
    apart, joint = (
        made(factory, arguments=sizes, phase="forward-backward", projections=how)[0] for how in ("apart", "joint")
    )
    replaced = [str(one) for one in joint.found]
    assert len(replaced) == 2 and "projections joint: 1 ViTPatchEmbeddings replaced" in replaced
    assert apart.model.state_dict().keys() == joint.model.state_dict().keys()
    for a, b in zip(gradients(apart), gradients(joint), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        (
            {
                "model_type": "audio-spectrogram-transformer",
                "architectures": ["ASTForAudioClassification"],
                "max_length": 64,
                "num_mel_bins": 32,
                **dict.fromkeys(("hidden_size", "intermediate_size"), 24),
            },
            {"input_values": (2, 64, 32), "labels": (2,)},
        ),
        (
            {"model_type": "electra", "architectures": ["ElectraForPreTraining"], "hidden_size": 24, "vocab_size": 50},
            {"input_ids": (2, 8), "labels": (2, 8)},
        ),
    ],
)
def test_the_batch_is_of_the_shapes_that_the_class_reads(tmp_path: Path, fields: dict[str, Any], shapes: Any):
    pytest.importorskip("transformers")
    factory = configuration(tmp_path, {**fields, "num_hidden_layers": 1, "num_attention_heads": 4})
    own = load_factory(factory, {"batch_size": 2, "seq_len": 8}).user_module
    assert own is not None and {name: tuple(tensor.shape) for name, tensor in own.batches[0].items()} == shapes
    own.module(**own.batches[0]).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("architectures", [None, ["LlavaForConditionalGeneration"]])
def test_no_part_of_a_configuration_has_a_dtype_of_its_own(tmp_path: Path, architectures: Any):
    """Transformers makes a part by its own dtype where the whole is made by its class: products of unlike dtypes."""
    transformers = pytest.importorskip("transformers")
    asked = {"dtype": "bfloat16", "gradient_checkpointing": True}
    fields = {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {**LLAMA, "architectures": None, **asked},
        "vision_config": {**VIT, "model_type": "siglip_vision_model", "architectures": None, "torch_dtype": "float16"},
    }  # fmt: skip
    fields = fields if architectures else {**LLAMA, "architectures": None, **asked}
    own = load_factory(configuration(tmp_path, fields), {"batch_size": 2, "seq_len": 8}).user_module
    assert own is not None and {parameter.dtype for parameter in own.module.parameters()} == {torch.float32}
    assert not any(getattr(part, "gradient_checkpointing", False) for part in own.module.modules())
    assert isinstance(own.module, transformers.PreTrainedModel)
    own.module(**own.batches[0]).loss.backward()
    if architectures:  # nor of an argument in its place
        arguments = {"batch_size": 2, "seq_len": 8, "text_config": {**LLAMA, **asked}}
        own = load_factory(configuration(tmp_path, fields), arguments).user_module
        assert own is not None and {parameter.dtype for parameter in own.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("architectures", ["LlamaForSequenceClassification", ["LlamaForSequenceClassification"]])
def test_the_class_is_a_field_as_others_are(tmp_path: Path, architectures: Any):
    pytest.importorskip("transformers")
    for fields, arguments in (
        (LLAMA, {"architectures": architectures}),
        ({**LLAMA, "architectures": architectures}, {}),
    ):
        own = load_factory(configuration(tmp_path, fields), {"batch_size": 2, "seq_len": 8, **arguments}).user_module
        assert own is not None and type(own.module).__name__ == "LlamaForSequenceClassification"


@pytest.mark.parametrize(
    ("problem", "classes", "shape"),
    [("multi_label_classification", 3, (2, 3)), ("regression", 1, (2,)), ("regression", 3, (2, 3))],
)
def test_labels_are_those_of_the_problem(tmp_path: Path, problem: str, classes: int, shape: tuple[int, ...]):
    pytest.importorskip("transformers")
    kind = {
        "architectures": ["LlamaForSequenceClassification"], "problem_type": problem, "num_labels": classes,
        "pad_token_id": 0,
    }  # fmt: skip
    own = load_factory(configuration(tmp_path, {**LLAMA, **kind}), {"batch_size": 2, "seq_len": 8}).user_module
    assert own is not None
    labels = own.batches[0]["labels"]
    assert labels.is_floating_point() and labels.shape == shape
    own.module(**own.batches[0]).loss.backward()


def test_attention_is_a_field_by_either_name(tmp_path: Path):
    pytest.importorskip("transformers")
    for written in ("attn_implementation", "_attn_implementation"):
        for fields, arguments in ((LLAMA, {written: "eager"}), ({**LLAMA, written: "eager"}, {})):
            own = load_factory(
                configuration(tmp_path, fields), {"batch_size": 2, "seq_len": 8, **arguments}
            ).user_module
            config: Any = own.module.config if own is not None else None
            assert config._attn_implementation == "eager"


def test_parameters_of_a_configuration_are_made_where_the_step_is(tmp_path: Path):
    """A device draws half a billion random numbers sooner than a CPU does; a batch is drawn on the CPU everywhere."""
    pytest.importorskip("transformers")
    meta = torch.device("meta")
    loaded = load_factory(configuration(tmp_path, LLAMA), {"batch_size": 2, "seq_len": 8}, device=meta)
    assert loaded.user_module is not None
    assert {parameter.device for parameter in loaded.user_module.module.parameters()} == {meta}
    assert loaded.user_module.batches[0]["input_ids"].device.type == "cpu"


@pytest.mark.slow
def test_arguments_change_fields_of_the_configuration(tmp_path: Path):
    pytest.importorskip("transformers")
    factory = configuration(tmp_path, LLAMA)
    _, workload = made(factory, arguments={"batch_size": 2, "seq_len": 8, "num_hidden_layers": 1})
    # Embedding and head, the layer's four projections, its feed-forward of three, and three norms.
    assert workload.model.parameters == 2 * 128 * 32 + (2 * 32 * 32 + 2 * 32 * 16) + 3 * 32 * 64 + 3 * 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "arguments", "said"),
    [
        ({"hidden_size": 32}, {}, "has no model_type"),
        ({"model_type": "nonesuch"}, {}, "knows no model_type 'nonesuch'"),
        ({**LLAMA, "architectures": ["LlamaForEverything"]}, {}, "has no class 'LlamaForEverything'"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, {}, "LlamaModel has no loss that is known"),
        ({**LLAMA, "auto_map": {"AutoConfig": "far.away"}}, {}, "names code of its own"),
        ({**LLAMA, "num_attention_heads": 5}, {}, "cannot be made|is no configuration of llama"),
        (LLAMA, {"seq_len": 65}, "has 64 positions, and seq_len is 65: choose at most 64"),
        (LLAMA, {"depth": 3}, "has no field 'depth'"),
        (LLAMA, {"batch_size": 0}, "batch_size is 0: give a whole number from 1 on"),
        (LLAMA, {"dtype": "bfloat16"}, "does not take --arg dtype: say --dtype, where bf16-pure has"),
        (LLAMA, {"use_cache": True}, "does not take --arg use_cache: in training no next token needs"),
        (VIT | {"architectures": None}, {}, "has no causal language model: name its class"),
        (LLAMA, {"model_type": "mistral"}, "does not take --arg model_type: another type has fields of its own"),
        (LLAMA, {"implementation": "eager"}, "has no field 'implementation'"),
        ({**LLAMA, "architectures": [3]}, {}, "has the architectures .3.: name one class"),
        ({**LLAMA, "_attn_implementation": "odd"}, {}, "cannot be made with attn_implementation odd .--arg attn_impl"),
        ({**LLAMA, "architectures": None, "attn_implementation": "odd"}, {}, "cannot be made with attn_implementation"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_one_line(
    tmp_path: Path, fields: dict[str, Any], arguments: dict[str, Any], said: str
):
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=said) as raised:
        made(configuration(tmp_path, fields), arguments=arguments)
    assert "\n" not in str(raised.value)


# --- what names the experiment ---


def test_what_names_the_experiment(file: str):
    _, workload = made(f"{file}:attribute")
    assert workload.model.name == "WithLoss" and workload.batch_size == 4
    assert {name: str(one) for name, one in workload.model.inputs.items()} == {
        "x": "float32[4, 8]", "labels": "int64[4]",
    }  # fmt: skip
    assert made(f"{file}:attribute")[1] == workload
    deeper = made(f"{file}:make", arguments={"depth": 4})[1].model
    assert deeper.structure != made(f"{file}:make")[1].model.structure
    assert deeper.source == workload.model.source


def test_changed_code_is_another_experiment_and_a_moved_file_is_not(file: str, tmp_path: Path):
    _, workload = made(f"{file}:make")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = elsewhere / "moved_file.py"
    moved.write_text(OWN)
    assert made(f"{moved}:make")[1].model == workload.model
    moved.write_text(OWN + "\n# changed\n")
    changed = made(f"{moved}:make")[1].model
    assert changed.source != workload.model.source and changed.structure == workload.model.structure


def test_the_source_of_a_module_from_another_file_counts(tmp_path: Path):
    (tmp_path / "part_of_mine.py").write_text("from torch import nn\nclass Part(nn.Linear):\n    pass\n")
    factory = tmp_path / "factory_alone.py"
    factory.write_text("import part_of_mine\ndef make(): return part_of_mine.Part(2, 1), __import__('torch').ones(2)\n")
    _, before = made(f"{factory}:make")
    with (tmp_path / "part_of_mine.py").open("a") as source:
        source.write("# another line\n")
    assert made(f"{factory}:make")[1].model.source != before.model.source


@pytest.mark.parametrize(
    ("ending", "said"),
    [("sys.exit(5)", "the step called sys.exit(5)"), ("raise ValueError('five')", "ValueError: five")],
)
def test_a_step_that_ends_in_the_middle_keeps_what_was_measured(tmp_path: Path, ending: str, said: str):
    (tmp_path / "exits.py").write_text(
        "import sys, torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight, self.calls = torch.nn.Parameter(torch.ones(3)), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        f"        if self.calls > 5: {ending}\n"
        "        return (self.weight * x).sum()\n"
        "def make():\n"
        "    return Model(), torch.ones(3)\n"
    )
    workload = FactoryWorkload(factory=f"{tmp_path}/exits.py:make", model=UserModel(name=""))
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=10, steps_cap=10)
    run, directory = measure_step(StepRequest(workload=workload, device="cpu", settings=settings, out=str(tmp_path)))
    assert run.status == "failed" and run.failure is not None
    assert (run.failure.during, run.failure.phase) == ("measure", "forward")
    assert run.failure.message.startswith(said)
    assert 0 < run.samples["step"].count < 5 and load_run(directory).samples == run.samples
