"""`fit` of a user's own module: hand counts, the textbook given as a module, what is refused, and the contract."""

import gc
import importlib
import json
import math
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.allocations.prediction.answer import answer_fit
from stepscope.allocations.prediction.estimate import DeviceType
from stepscope.allocations.prediction.fit import KEPT_FREE, Budget, FakeEstimate, Fit, Unseen, budget_of_memory
from stepscope.core.errors import InputError
from stepscope.core.formulas import bytes_of_convolution
from stepscope.core.units import GIB, MIB
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine import fake_module
from stepscope.engine.fake_module import estimate_by_running, fit_module, replayed, watch_module_step
from stepscope.engine.request import Stage
from stepscope.questions.fit_apart import Request, fit_apart, held_at_peak
from stepscope.recording import fake_memory
from stepscope.training.user_module.loading import make_user_step
from stepscope.training.user_module.module_step import UserModule
from stepscope.training.user_module.user_code import resized
from tests.command import stepscope
from tests.conftest import at_length, mini
from tests.cpu_allocations import allocated_bytes

RESULTS = Path(__file__).parents[2] / "results"

pytestmark = pytest.mark.slow

OWN = """
import time
import torch
import torch.nn.functional as F
from torch import nn
from stepscope.core.model_config import ModelConfig
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.training_step import ForwardLoss, build_model

def mlp(batch_size=16, width=64):
    model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, 1, bias=False))
    return model, torch.randn(batch_size, width), lambda out: out.sum()

def eight():
    sizes = [(64, 256), (256, 64), (64, 1)]
    layers = [nn.Linear(*each, bias=False) for each in sizes]
    model = nn.Sequential(layers[0], nn.ReLU(), *layers[1:])
    return model, torch.randn(512, 64), lambda out: out.sum()

def deep(batch_size=64, width=256, optimizer=False):
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    x = torch.randn(batch_size, width)
    own = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    return model, x, lambda out: out.square().mean(), own

class Positions(nn.Module):
    def __init__(self, positions, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(positions, width)
        self.head = nn.Linear(width, 50)
    def forward(self, x):
        if x.shape[1] > self.positions.num_embeddings:
            raise ValueError("too long")
        return self.head(self.tokens(x) + self.positions.weight[: x.shape[1]])

def text(batch_size=4, seq_len=64, positions=100_000):
    x = torch.randint(50, (batch_size, seq_len))
    return Positions(positions, 16), x, lambda out: out.square().mean()

def slow(batch_size=4, seq_len=64):
    if seq_len != 64:
        time.sleep(60)
    return text(batch_size, seq_len)

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.cell = nn.Embedding(50, 64), nn.LSTMCell(64, 64)
    def forward(self, x):
        states, out = None, []
        for token in self.tokens(x).unbind(1):
            states = self.cell(token, states)
            out.append(states[0])
        return torch.stack(out, 1)

def loop(batch_size=4, seq_len=20):
    return Cells(), torch.randint(50, (batch_size, seq_len)), lambda out: out.square().mean()

def textbook(dtype="fp32"):
    workload = TextbookWorkload(
        model=ModelConfig(name="mini", d_model=32, d_ff=64, layers=2, heads=2, vocabulary=64),
        batch_size=2, seq_len=8,
    )
    torch.manual_seed(0)
    tokens = torch.randint(64, (4, 2, 2, 8))
    return ForwardLoss(build_model(workload, "cpu")), [(t[0].clone(), t[1].clone()) for t in tokens]

class Routed(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.inner, self.reads = nn.Linear(8, 8), reads
    def forward(self, x):
        x = self.inner(x)
        if self.reads == "item":
            return x.sum() * x.max().item()
        if self.reads == "branch":
            return x.sum() if x.sum() > 0 else x.mean()
        if self.reads == "unique":
            return x.sum() + x.unique().sum()
        if self.reads == "integers":
            places = torch.arange(len(x))
            return x[places[places % 2 == 0]].sum() * places.max().item()
        return x[(x > 0)[:, 0].nonzero()[:, 0]].sum()

def routed(reads): return Routed(reads), torch.randn(6, 8)

@torch.library.custom_op("stepscope_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x): return (self.inner(x) + twice(x)).sum()

def unknown(): return Custom(), torch.randn(4, 8)
def known():
    twice.register_fake(torch.empty_like)
    return Custom(), torch.randn(4, 8)
class Flexible(nn.Linear):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention
        q = super().forward(x)[:, None]
        return flex_attention(q, q, q)

def flexible(): return Flexible(16, 16), torch.randn(2, 8, 16), lambda out: out.square().mean()

class OfGpus(nn.Linear):
    def forward(self, x): raise NotImplementedError("no CPU has this kernel")

def of_gpus(): return OfGpus(8, 8), torch.randn(2, 8), lambda out: out.sum()

class Launching(nn.Linear):
    def forward(self, x):
        import triton
        @triton.jit
        def doubled(x_ptr): pass
        doubled[(1,)](super().forward(x))

def launching(): return Launching(8, 8), torch.randn(2, 8), lambda out: out.sum()

class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))
    def forward(self, x):
        return F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))

def projected(): return nn.Sequential(Projected(), Projected()), torch.randn(16, 32, 64), torch.sum
def pictured():
    return nn.Sequential(nn.Conv2d(3, 48, 8, 8), nn.Flatten(2)), torch.randn(16, 3, 64, 64), lambda out: out.norm()

def plain(): return nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600)), torch.ones(2, 600), torch.sum
def there():
    module, batch, loss = plain()
    return module.cuda(), batch.to("cuda") + torch.ones(2, 600, device="cuda:0"), loss
def asking(): return torch.cuda.current_device()
def compiling():
    module, batch, loss = plain()
    module[0].compile()
    return module, batch, loss
def spread(views):
    module, batch, loss = plain()
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=views), batch, loss
def convolution(): return nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 16, 16), lambda out: out.sum()

class Graph:
    def __init__(self, x, edges, y): self.x, self.edges, self.y = x, edges, y
    def to(self, device): return Graph(self.x.to(device), self.edges.to(device), self.y.to(device))
class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, graph):
        x = self.inner(graph.x)
        x = torch.zeros_like(x).index_add(0, graph.edges[1], x[graph.edges[0]])
        return F.mse_loss(self.outer(x.relu()), graph.y)
def graph(): return Messages(), Graph(torch.randn(500, 64), torch.randint(500, (2, 2000)), torch.randn(500, 64))

class Several(torch.optim.Optimizer):
    def __init__(self, *others):
        self.others = others
        super().__init__([p for other in others for group in other.param_groups for p in group["params"]], {})
    def step(self, closure=None):
        for other in self.others:
            other.step()
def several():
    model = nn.Sequential(nn.Embedding(500, 64, sparse=True), nn.Linear(64, 64))
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())
    return model, torch.randint(500, (8,)), lambda out: out.square().mean(), Several(first, second)
def jagged():
    batch = torch.nested.nested_tensor([torch.randn(length, 64) for length in (5, 9, 3)], layout=torch.jagged)
    return nn.Linear(64, 64), batch, lambda out: out.values().square().mean()
def chosen():
    actions = torch.randint(8, (64,))
    def loss(out): return -torch.distributions.Categorical(logits=out).log_prob(actions).mean()
    return nn.Linear(64, 8), torch.randn(64, 64), loss

class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature, self.projection = nn.Parameter(torch.zeros(())), nn.Linear(64, 512)
    def forward(self, out):
        z = F.normalize(self.projection(out), dim=-1)
        return F.cross_entropy(z @ z.T * self.temperature.exp(), torch.arange(len(out)))
def contrast():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 64), Contrast()

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.more = nn.Linear(64, 64), [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    def forward(self, x):
        x = self.inner(x)
        for weight in self.more:
            x = x @ weight
        return x
def unregistered(own):
    model, of_loss = Listed(), nn.Parameter(torch.randn(64, 96))
    updated = [*model.parameters(), *model.more, of_loss]
    loss = lambda out: (out @ of_loss).square().mean()
    return model, torch.randn(32, 64), loss, torch.optim.AdamW(updated) if own else None

def on_meta():
    with torch.device("meta"):
        return deep()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "fits.py"
    path.write_text(OWN)
    return path


def own(file: Path, factory: str, *, arguments: dict[str, Any] | None = None, **choices: Any) -> FactoryWorkload:
    return FactoryWorkload(factory=f"{file}:{factory}", arguments=arguments or {}, model=UserModel(name=""), **choices)


def fitted(
    workload: FactoryWorkload, budget: Budget | None = None, *, device: DeviceType = "cuda", search: bool = True
) -> Fit[FakeEstimate]:
    """What is predicted for one budget, or without one."""
    (found,) = fit_module(workload, [budget] if budget else [], device, search=search)
    return found


def unseen_of(workload: FactoryWorkload, device: DeviceType = "cuda") -> Unseen:
    unseen = fitted(workload, device=device).estimate.unseen
    assert unseen is not None
    return unseen


@pytest.mark.parametrize(
    ("factory", "choices"),
    [
        ("textbook", {"checkpointing": "every-1"}),
        ("deep", {"accumulation": 4, "optimizer": "adamw-bf16-state"}),
        ("convolution", {"optimizer": "adamw-loop"}),
        ("routed", {}),
    ],
)
def test_sizes_worked_out_once_are_those_that_pytorchs_fake_mode_finds(
    file: Path, factory: str, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    workload = own(file, factory, arguments={"reads": "nonzero"} if factory == "routed" else None, **choices)
    quick = watch_module_step(workload, "cuda")
    monkeypatch.setattr(fake_memory._Call, "worked_out", fake_memory._Call.asked)
    asked = watch_module_step(workload, "cuda")
    assert quick.program() == asked.program()
    assert replayed(quick) == replayed(asked)


def test_a_program_of_another_size_is_scaled_from_three_and_asks_what_its_step_does(file: Path):
    def of(length: int) -> fake_module.Program:
        return watch_module_step(own(file, "text", arguments={"seq_len": length}), "cuda").program()

    known = {length: of(length) for length in (64, 128, 320)}
    assert fake_module.scaled(known, 192) == of(192)
    other = watch_module_step(own(file, "mlp"), "cuda").program()
    assert fake_module.scaled({64: known[64], 128: other}, 192) is None


def test_a_program_in_bf16_with_biases_is_scaled_too(file: Path):
    """Autocast frees its copies in any order, and the parts of a bias's sums are no polynomial of the rows."""

    def of(length: int) -> fake_module.Program:
        return watch_module_step(own(file, "text", arguments={"seq_len": length}, dtype="bf16"), "cuda").program()

    known = {length: of(length) for length in (64, 512, 1024)}
    for length in (192, 4096):
        scaled = fake_module.scaled(known, length)
        assert scaled is not None and scaled.sums
        assert scaled == of(length)


def test_what_is_known_is_told_before_the_search_ends(file: Path):
    told: list[Stage] = []
    known: list[Fit[FakeEstimate]] = []

    def tell(stage: Stage) -> None:
        told.append(stage)
        if stage.name.startswith("trying"):
            # To this thread, which is not the main one: the kernel may choose any for a signal to the process.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit_apart(own(file, "slow"), [budget_of_memory(GIB)], tell=tell, know=known.extend)
    names = "Positions: 1,601,650 parameters|running a step on fake tensors|trying --seq-len 32"
    assert "|".join(stage.name for stage in told[1:]) == names and told[0].name.startswith("loading ")
    found = known[-1]
    assert (found.fits, found.largest_batch, found.longest_sequence) == (True, None, None)
    assert found.peak_bytes == fitted(own(file, "slow")).peak_bytes


def test_the_peak_of_an_mlp_by_hand(file: Path):
    """On a CPU, in bytes of fp32: B = 16, M = 64, F = 4 M = 256; no optimizer, so that nothing but the step counts."""
    found = fitted(own(file, "mlp", phase="forward-backward"), device="cpu").estimate
    x, inner = 4 * 16 * 64, 4 * 16 * 256
    parameters = 4 * (64 * 256 + 256)
    loss = 4  # the number that the last step left
    assert found.memory.after_parameters == x + parameters + loss
    # Forward keeps the input, which is there already, and ReLU's output; its loss takes the last one's place. Where
    # ReLU runs, its input is alive as well.
    assert found.memory.saved_for_backward == inner
    assert found.memory.forward_peak == x + parameters + loss + 2 * inner
    # Backward is highest where the first weight's gradient is made: the gradient of ReLU's input is alive, and those of
    # the last weight and of the loss; ReLU's output has gone.
    assert found.memory.backward_peak == x + parameters + 2 * loss + inner + 4 * (256 + 64 * 256)
    assert sum(found.categories.values()) == found.peak_bytes


def bytes_on_a_cpu(workload: FactoryWorkload) -> dict[str, int]:
    """What the CPU's allocator gave when the step is made and run, before the third step and at its phases' peaks."""
    steps: list[Any] = []

    def begin() -> None:
        steps.append(make_user_step(workload, torch.device("cpu"))[0])
        for _ in range(2):
            steps[0].prepare()
            for phase in steps[0].phases:
                phase.run()
        gc.collect()

    alive, _ = allocated_bytes(begin)
    found = {"before": alive}
    steps[0].prepare()
    for phase in steps[0].phases:
        left, peak = allocated_bytes(phase.run)
        found[phase.name] = alive + peak
        alive += left
    return found


@pytest.mark.parametrize(
    ("factory", "arguments", "stateless"),
    [
        ("graph", {}, 0),
        ("contrast", {}, 0),
        ("unregistered", {"own": True}, 0),
        ("unregistered", {"own": False}, 4 * (3 * 64 * 64 + 64 * 96)),
        ("several", {}, 0),
        ("jagged", {}, 0),
        ("chosen", {}, 0),
    ],
)
def test_what_a_step_holds_wherever_it_is_kept(file: Path, factory: str, arguments: dict[str, Any], stateless: int):
    """Beside the step itself on a CPU: tensors of a batch of the user's own class; parameters of a loss; parameters in
    a list and in a closure, of which the optimizer's state is counted where the optimizer is known; states of
    optimizers inside another, and sparse gradients; a nested batch; a distribution that looks at its probabilities."""
    workload = own(file, factory, arguments=arguments)
    found = fitted(workload, device="cpu").estimate
    memory = found.memory
    predicted = {
        "before": memory.after_parameters,
        "forward": memory.forward_peak,
        "backward": memory.backward_peak,
        "optimizer": memory.optimizer_peak,
    }
    assert predicted == pytest.approx(bytes_on_a_cpu(workload), abs=64)  # numbers alone, as the mean in its wider dtype
    outside = 4 * (3 * 64 * 64 + 64 * 96) if factory == "unregistered" else 0
    assert found.unseen == Unseen(without_state_bytes=stateless, outside_bytes=outside)


@pytest.mark.parametrize("factory", ["projected", "pictured"])
def test_joint_projections_hold_at_their_peak_what_a_cpu_gives_them(file: Path, factory: str):
    workload = own(file, factory, projections="joint")
    found = fitted(workload, device="cpu", search=False)
    assert found.workload.projections == "joint"
    assert found.estimate.memory.backward_peak == pytest.approx(bytes_on_a_cpu(workload)["backward"], abs=64)
    assert found.estimate.unseen == Unseen()


def test_a_module_on_meta_is_predicted_as_one_with_values(file: Path):
    assert fitted(own(file, "on_meta")).estimate == fitted(own(file, "deep")).estimate


@pytest.mark.parametrize("dtype", ["bf16", "bf16-master", *at_length("fp32", "bf16-pure")])
def test_the_textbook_as_a_users_module_has_the_textbooks_peak(file: Path, dtype: Any):
    known = mini(dtype=dtype, d_model=32, d_ff=64, layers=2, heads=2, vocabulary=64, batch_size=2, seq_len=8)
    by_name = estimate_by_running(known)
    as_module = fitted(own(file, "textbook", dtype=dtype)).estimate
    assert as_module.memory.parameter_bytes == by_name.memory.parameter_bytes
    assert as_module.memory.saved_for_backward == by_name.memory.saved_for_backward
    assert as_module.peak_bytes == by_name.peak_bytes


@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
def test_layers_of_8_bits_keep_their_input_in_16_and_make_what_their_products_take(file: Path, dtype: Any):
    """Of two layers 64 -> 256 -> 64 and one that no product of 8 bits takes, 64 -> 1. The peak of forward is where the
    second layer's input is cast: a copy in fp32 becomes one of 8 bits."""
    found = fitted(own(file, "eight", dtype=dtype, phase="forward-backward"), device="cpu").estimate
    rows, weights = 512, 64 * 256 + 256 * 64 + 64
    inputs, loss = 4 * rows * 64, 2
    # The input in 16 bits, which the first layer casts to 8; ReLU's output, which the second does; the second's own.
    first, inner, second = 2 * rows * 64, 2 * rows * 256, 2 * rows * 64
    assert found.memory.parameter_bytes == 2 * weights
    assert found.memory.saved_for_backward == first + inner + second
    scales = {"fp8": 2 + 4, "fp8-row": (2 + 4) * rows}[dtype]
    assert found.memory.forward_peak == inputs + 2 * weights + loss + first + inner + 5 * rows * 256 + scales
    assert found.unseen is not None and not found.unseen.custom


@pytest.fixture
def _plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the largest batch has a test of its own, and takes as long as all plans."""
    monkeypatch.setattr(fake_module.FakePredictor, "_largest", lambda *_: None)


@pytest.mark.usefixtures("_plans_alone")
def test_plans_of_8_bits_keep_as_many_rows_as_products_take(file: Path):
    """And never propose an optimizer without master weights."""
    whole = own(file, "deep", dtype="fp8", arguments={"batch_size": 4096})
    peak = fitted(whole).estimate.peak_bytes
    verdict = fitted(whole, budget_of_memory(peak - 2 * MIB))
    assert not verdict.fits and any("micro-batches" in plan.change for plan in verdict.plans)
    assert not any("bf16-state" in plan.options for plan in verdict.plans)


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ("item", "aten._local_scalar_dense.default"), ("branch", "aten._local_scalar_dense.default"),
        ("unique", "aten._unique2.default"),
    ],
)  # fmt: skip
def test_an_operator_that_depends_on_data_is_named_and_refused(file: Path, reads: str, said: str):
    with pytest.raises(InputError, match=f"cannot be predicted: {said} .fits.py:[0-9]+.") as refused:
        fitted(own(file, "routed", arguments={"reads": reads}))
    assert "\n" not in str(refused.value)


def test_routing_is_counted_at_its_largest_and_integers_as_they_are(file: Path):
    routed = unseen_of(own(file, "routed", arguments={"reads": "rows"}), "cpu")
    assert routed.at_most == ("aten.nonzero.default",)
    assert unseen_of(own(file, "routed", arguments={"reads": "integers"})) == Unseen()


def test_an_operator_without_a_fake_is_refused_and_a_custom_one_widens_the_margin(file: Path):
    with pytest.raises(InputError, match=r"no fake impl.*stepscope_tests::twice"):
        fitted(own(file, "unknown"))
    budget = budget_of_memory(GIB)
    assert Unseen(custom=("mine",)).kept_free(budget) > Unseen().kept_free(budget) == int(GIB * KEPT_FREE)


def test_what_a_gpu_alone_computes_is_said_to_be_so(file: Path):
    """FlexAttention has no backward on a CPU, and is predicted as on a GPU, where only its forward imports it, too. Of
    what a CPU has no kernel for, the step is not at fault."""
    importlib.import_module("torch._dynamo")
    assert watch_module_step(own(file, "flexible"), "cuda").watch.custom.keys() == set()
    with pytest.raises(InputError, match="flexible fails in forward: NotImplementedError: FlexAttention"):
        watch_module_step(own(file, "flexible"), "cpu")
    with pytest.raises(
        InputError, match=r"cannot be predicted: .* which cannot do what it calls \(NotImplementedError: no CPU"
    ):
        watch_module_step(own(file, "of_gpus"), "cuda")
    pytest.importorskip("triton")
    with pytest.raises(InputError, match=r"the Triton kernel doubled: give it a fake rule"):
        watch_module_step(own(file, "launching"), "cuda")


def test_a_factory_that_makes_its_model_on_a_gpu_is_predicted_or_told_what_to_do(file: Path):
    assert fitted(own(file, "there"), search=False).estimate == fitted(own(file, "plain"), search=False).estimate
    with pytest.raises(InputError, match=r"fails: .*; a prediction needs no GPU: ask torch.cuda.is_available\(\)"):
        fitted(own(file, "asking"))


def test_a_compiled_part_is_said_to_be_predicted_without_and_widens_the_margin(file: Path):
    compiled = fitted(own(file, "compiling"), budget_of_memory(GIB), search=False)
    assert compiled.estimate.peak_bytes == fitted(own(file, "plain"), search=False).estimate.peak_bytes
    assert compiled.estimate.unseen == Unseen(compiled=True)
    assert "predicted as it runs without" in str(answer_fit(compiled))


def test_buckets_of_data_parallel_lie_beside_the_gradients_or_are_where_they_lie(file: Path):
    """By hand: two layers of 600 x 600 numbers and their biases, once as gradients and once in buckets."""
    gradients = 2 * 4 * (600 * 600 + 600)
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        beside, within = (
            fitted(own(file, "spread", arguments={"views": views}), search=False).estimate for views in (False, True)
        )
    finally:
        torch.distributed.destroy_process_group()
    alone = fitted(own(file, "plain"), search=False).estimate
    assert beside.categories["gradients"] == 2 * gradients
    assert within.categories["gradients"] == alone.categories["gradients"] == gradients
    assert (within.memory.forward_peak or 0) >= (alone.memory.forward_peak or 0) + gradients, "the buckets stay"
    assert beside.unseen == Unseen(bucket_bytes=gradients)


MEASURED_CONVOLUTIONS = RESULTS / "h200" / "convolutions" / "workspaces.json"


def test_a_convolution_is_counted_at_what_measured_ones_took_and_the_rest_is_kept_free(file: Path):
    """The cases of the file are compared one by one: what is counted is too low for few, and never by more than is kept
    free."""
    measured = json.loads(MEASURED_CONVOLUTIONS.read_bytes())["convolutions"]
    low = []
    for each in measured:
        batch, inputs, outputs, side = (each[name] for name in ("batch", "inputs", "outputs", "side"))
        kernel, stride, itemsize = each["kernel"], each["stride"], {"float32": 4, "bfloat16": 2}[each["dtype"]]
        across = (inputs, outputs) if each["transposed"] else (outputs, inputs)
        weight = (*across, kernel, kernel)
        pixels = (each["operand_bytes"] // itemsize - math.prod(weight) - batch * inputs * side**2) // (batch * outputs)
        for name, took in each["workspace_bytes"].items():
            plain, sums = kernel == stride == 1, name == "gradient of the weight"
            x, y = (batch, inputs, side, side), (batch, outputs, pixels)
            counted = bytes_of_convolution(x, weight, y, itemsize, groups=1, plain=plain, sums=sums)
            unseen = Unseen(convolutions=1, convolution_bytes=max(0, each["operand_bytes"] - counted))
            assert took <= counted + unseen.workspace_bytes, each
            low.append(took > counted)
    assert len(low) == 3888
    assert sum(low) < 0.09 * len(low)
    unseen = unseen_of(own(file, "convolution"))
    assert unseen.convolutions > 0
    assert unseen.convolution_bytes == 0, "its operands are counted"


@pytest.mark.parametrize(
    ("sizes", "itemsize", "taken"),
    [  # the blocks of results/h200/fit-truth/architectures.json that were alive at a peak
        ((1024, 512, 14, 1), 4, 33_554_432),  # ResNet-50: sums of 16 samples
        ((1024, 512, 14, 1), 2, 9_633_808),  # copies of image and output
        ((256, 64, 64, 3), 2, 42_238_099),  # U-Net: copies of all operands
        ((256, 64, 64, 3), 4, 88_605_351),  # with partial sums
    ],
)
def test_what_is_counted_for_the_convolutions_at_measured_peaks(
    sizes: tuple[int, int, int, int], itemsize: int, taken: int
):
    inputs, outputs, side, kernel = sizes
    x, weight, y = (16, inputs, side, side), (outputs, inputs, kernel, kernel), (16, outputs, side, side)
    sums = taken != 42_238_099  # of a forward
    counted = bytes_of_convolution(x, weight, y, itemsize, groups=1, plain=kernel == 1, sums=sums)
    assert taken - 512 <= counted <= taken + 5 * MIB


def test_a_verdict_never_says_fits_above_the_budget(file: Path):
    workload = own(file, "deep", phase="train")
    peak = fitted(workload).estimate.peak_bytes
    for share in (0.5, 0.9, 1.0, 1.02, 1.5, 4.0):
        budget = budget_of_memory(int(peak * share))
        verdict = fitted(workload, budget, search=False)
        assert not (verdict.fits and peak > budget.usable_bytes - (verdict.kept_free_bytes or 0))
        assert verdict.fits or verdict.fails_in
    assert verdict.fits


def test_the_largest_batch_fits_and_one_more_does_not(file: Path):
    budget = budget_of_memory(160 * MIB)
    verdict = fitted(own(file, "deep"), budget)
    largest = verdict.largest_batch
    assert largest is not None and largest > 64
    assert verdict.longest_sequence is None, "the factory has no seq_len"
    for size, fits in ((largest, True), (largest + 1, False)):
        found = fitted(own(file, "deep", arguments={"batch_size": size}), budget, search=False)
        assert found.fits == fits


def _tried(workload: FactoryWorkload, budget: Budget) -> tuple[Fit[FakeEstimate], list[str]]:
    told: list[Stage] = []
    [fit] = fit_module(workload, [budget], tell=told.append)
    return fit, [stage.name for stage in told if stage.name.startswith("trying")]


def test_a_batch_of_one_is_searched_from_two_recorded_steps(file: Path):
    """The optimizer's peak decides at such a batch, so that the guess is far off; no size between is run for it."""
    verdict, tried = _tried(own(file, "deep", arguments={"batch_size": 1}), budget_of_memory(160 * MIB))
    assert tried == ["trying --batch-size 2", f"trying --batch-size {(verdict.largest_batch or 0) + 1}"]
    assert verdict.largest_batch == fitted(own(file, "deep"), budget_of_memory(160 * MIB)).largest_batch


def test_a_loop_over_tokens_is_not_run_at_lengths_that_take_minutes(file: Path):
    verdict, tried = _tried(own(file, "loop"), budget_of_memory(GIB))
    assert verdict.longest_sequence is None and (verdict.largest_batch or 0) > 1000
    assert verdict.not_searched.startswith("The longest sequence is not looked for: a step at ")
    assert verdict.not_searched in str(answer_fit(verdict).tables[0])
    assert [each for each in tried if "seq-len" in each] == ["trying --seq-len 10"]


@pytest.mark.long
def test_the_longest_sequence_fits_and_a_longer_one_does_not(file: Path):
    budget = budget_of_memory(160 * MIB)
    verdict = fitted(own(file, "text"), budget)
    longest = verdict.longest_sequence
    assert longest is not None and longest > 64 and longest % 64 == 0 and not verdict.longest_is_the_models
    for length, fits in ((longest, True), (longest + 64, False)):
        longer = own(file, "text", arguments={"seq_len": length})
        assert fitted(longer, budget, search=False).fits == fits
    short = fitted(own(file, "text", arguments={"positions": 200}), budget)
    assert (short.longest_sequence, short.longest_is_the_models) == (192, True)


@pytest.mark.usefixtures("_plans_alone")
def test_plans_are_judged_by_the_same_prediction(file: Path):
    workload = own(file, "deep", arguments={"batch_size": 8192})  # more than segments of 20 MiB round
    budget = budget_of_memory(fitted(workload).estimate.peak_bytes * 4 // 5)
    verdict = fitted(workload, budget)
    assert not verdict.fits and verdict.plans
    assert all(plan.peak_bytes <= budget.usable_bytes - (verdict.kept_free_bytes or 0) for plan in verdict.plans)
    assert any("--checkpointing" in plan.options or "--accumulation" in plan.options for plan in verdict.plans)


def test_a_variant_with_another_optimizer_is_joined_of_two_steps_and_peaks_as_its_own(file: Path):
    workload = own(file, "deep", arguments={"batch_size": 4096})
    tried: list[str] = []
    predictor = fake_module.FakePredictor(workload, "cuda", None, lambda stage: tried.append(stage.name))
    for more in ({"dtype": "bf16"}, {"accumulation": 2, "checkpointing": "every-1"}):
        changed = msgspec.structs.replace(workload, optimizer="adamw-bf16-state", **more)
        assert predictor.peak(changed) == fitted(changed).estimate.peak_bytes
    options = ["--dtype bf16", "--optimizer adamw-bf16-state", "--accumulation 2 --checkpointing every-1"]
    assert [name for name in tried if name.startswith("trying")] == [f"trying {each}" for each in options]


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
def test_micro_batches_after_the_second_change_nothing(file: Path, checkpointing: Any, monkeypatch: pytest.MonkeyPatch):
    workload = own(file, "deep", arguments={"batch_size": 4096}, accumulation=8, checkpointing=checkpointing)
    short = fitted(workload).estimate
    monkeypatch.setattr(fake_module, "_without_repeats", lambda phases: phases)
    assert fitted(workload).estimate == short


def test_an_optimizer_of_the_users_own_is_kept(file: Path):
    found = fitted(own(file, "deep", arguments={"optimizer": True}))
    assert isinstance(found.workload, FactoryWorkload)
    assert (found.workload.optimizer, found.workload.by_factory) == ("SGD", ("optimizer",))
    assert not found.estimate.categories.get("optimizer state")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_states_of_8_bits_have_the_bytes_of_their_parts(tmp_path: Path, name: str):
    """A weight of 64 x 64 and a bias of 64, whose states stay fp32; codes of a byte, and a scale for 256 of them."""
    pytest.importorskip("torchao.optim")
    code = f"""
import torch, torchao.optim
def own():
    module = torch.nn.Linear(64, 64)
    return module, torch.randn(8, 64), lambda y, _: y.square().mean(), torchao.optim.{name}(module.parameters())
"""
    (tmp_path / "own.py").write_text(code)
    (fit,) = fit_module(FactoryWorkload(factory=f"{tmp_path / 'own.py'}:own", model=UserModel(name="")), [], "cpu")
    of_states = 2 * (64 * 64 + 16 * 4 + (256 * 4 if name == "AdamW8bit" else 0) + 64 * 4)
    assert fit.estimate.categories["optimizer state"] == pytest.approx(of_states, abs=32)  # and counts of steps


def test_a_batch_is_repeated_along_its_own_size_alone():
    batch = {"x": torch.ones(4, 3), "labels": torch.ones(4), "table": torch.ones(7, 2), "n": 3}
    found = resized(batch, 10)
    assert {key: tuple(getattr(value, "shape", ())) for key, value in found.items()} == {
        "x": (10, 3), "labels": (10,), "table": (7, 2), "n": (),
    }  # fmt: skip


def test_a_tensor_that_the_batch_has_twice_stays_one():
    """As the caller's, so that a step of another size holds as many tensors."""
    tokens = torch.arange(8).reshape(4, 2)
    found = resized({"input_ids": tokens, "labels": tokens, "others": tokens.clone()}, 6)
    assert found["input_ids"] is found["labels"] is not found["others"]
    assert found["labels"].shape == found["others"].shape == (6, 2)


def test_no_batch_is_taken_for_a_parameter_that_was_freed():
    """Tensors are known by their ids while the module and its batches get fake ones; what is freed leaves its own."""
    layers, lengths = [nn.Linear(4, 4) for _ in range(6)], range(1, 41)
    own = UserModule(name="m", module=nn.Sequential(*layers), batches=[torch.ones(2, length, 4) for length in lengths])
    del layers
    workload = FactoryWorkload(model=UserModel(name="m"), factory="")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        batches = fake_module._on_fake_tensors(own, workload, mode, 3).batches  # pyright: ignore[reportPrivateUsage]
    assert [tuple(batch.shape) for batch in batches] == [(3, length, 4) for length in lengths]


def test_large_parameters_take_no_memory_and_keep_their_values_out_of_it(file: Path):
    watched = watch_module_step(own(file, "deep", arguments={"width": 1024}, phase="forward"), "cpu")
    assert replayed(watched).memory.parameter_bytes == 2 * 4 * (2 * 1024 * 4 * 1024 + 5 * 1024)


def test_tensors_at_the_peak_are_named_and_add_up_to_it(file: Path):
    held = held_at_peak(Request(own(file, "text", arguments={"positions": 100}), (), "cuda", False, True))
    rows = {(each.category, each.name): each for each in held.tensors}
    assert sum(each.total_bytes for each in held.tensors) == held.fit.peak_bytes
    asked = sum(each.count * each.bytes_each for each in held.tensors)
    assert asked == held.fit.peak_bytes - held.fit.categories["rounding"]
    weight = rows["parameters", "positions.weight"]
    assert (weight.shape, weight.dtype, weight.bytes_each, weight.count) == ((100, 16), "float32", 4 * 100 * 16, 1)
    line = OWN[: OWN.index("return self.head(self.tokens")].count("\n") + 1
    assert rows["saved for backward", f"add ({file.name}:{line})"].shape == (4, 64, 16)


def test_compiled_steps_are_predicted_as_they_run_without_unless_they_replay_cuda_graphs(file: Path):
    plain, blocks = fitted(own(file, "mlp")).estimate, fitted(own(file, "mlp", compile="blocks")).estimate
    assert blocks.peak_bytes == plain.peak_bytes
    assert blocks.unseen is not None and plain.unseen is not None
    assert blocks.unseen.compiled and not plain.unseen.compiled
    for step in (own(file, "mlp", compile="max-autotune"), own(file, "mlp", graph="step")):
        with pytest.raises(InputError, match="replays CUDA graphs, which fake tensors cannot: leave it out"):
            fitted(step)


@pytest.mark.long
def test_the_contract_in_json_and_its_screen(file: Path):
    levels = stepscope("fit", "--module", f"{file}:deep", "--checkpointing", "none,every-1").stdout
    assert "The least peak is that of" in levels and "FLOPs again" not in levels  # which are counted of no such model
    done = stepscope("fit", "--module", f"{file}:deep", "--memory", "30MiB", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert not said["fits"] and said["peak_bytes"] == sum(said["categories"].values())
    assert said["margin_bytes"] == 30 * MIB - said["peak_bytes"]
    assert said["plans"] == [] and said["largest_batch"] == 0, "cuBLAS' workspaces alone are more"
    assert {"plans", "largest_batch", "kept_free_bytes", "fails_in", "budget", "estimate", "workload"} <= set(said)
    shown = stepscope("fit", "--module", f"{file}:mlp")
    assert shown.returncode == 0 and "The peak is" in shown.stdout and "phase by phase" in shown.stdout
    table = stepscope("fit", "--module", f"{file}:mlp", "--arg", "batch_size=1,2").stdout.splitlines()
    assert [row.split()[0] for row in table[-2:]] == ["1", "2"], "several values make a table"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fake",), "--fake is for the textbook's model"),
        (("--model", "small"), "--module and --model both say which model"),
    ],
)
def test_wrong_input_is_one_line(file: Path, options: tuple[object, ...], said: str):
    done = stepscope("fit", "--module", f"{file}:mlp", *options)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("os._exit(0)", 2, "ended its process"),
        ("os.kill(os.getpid(), 9)", 3, "was killed, most likely since the memory of this machine"),
    ],
)
def test_code_that_ends_its_process_is_one_line(tmp_path: Path, ends: str, code: int, said: str):
    (tmp_path / "ends.py").write_text(f"import os\ndef make(): {ends}\n")
    done = stepscope("fit", "--module", f"{tmp_path / 'ends.py'}:make")
    assert done.returncode == code and said in done.stderr
