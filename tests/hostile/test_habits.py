"""What loops do that costs them time or memory: each mistake planted in a loop, and nothing found without it.

The numbers are the rows of docs/measuring.md.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope.core.answer import Finding
from stepscope.core.device_spec import overridden_spec
from stepscope.core.evidence import Evidence, Saved, WatchedLoop
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine import watched_run
from stepscope.recording.compilation import reset_compilation
from stepscope.recording.driven import step_habits
from stepscope.runs.checks import check_run
from stepscope.training.user_module.loading import make_user_step
from stepscope.training.user_module.module_step import UserStep
from tests.conftest import make_run

pytestmark = pytest.mark.slow

HABITS = {
    "waiting-for-data", "rest-is-large", "host-waits", "gradients-zeroed", "no-gradient", "graph-kept-alive",
    "eval-while-training", "fp32-beside-half", "batch-not-pinned", "micro-batches-synchronised", "optimizer-loops",
    "shapes-change", "compile-fallback", "parameters-unchanged", "checkpointing-not-needed",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """In a process that has compiled, no operators are looked at; a test that ran before may have."""
    reset_compilation()


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are not traced for predictions, which takes longer than they do: tests/engine/test_traced_loop.py does."""
    monkeypatch.setattr(watched_run, "keep_traced", lambda *_, **__: None)


class Net(nn.Module):
    """A model whose step takes a few milliseconds."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x).square().mean()


class Rows(Dataset[Tensor]):
    """Examples, each of which takes so long to make."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._seconds)
        return torch.full((64,), float(index % 7))


@dataclass(kw_only=True)
class Loop:
    """A loop without a mistake; a test overrides what makes one."""

    model: nn.Module = field(default_factory=Net)
    micro_batches: int = 1
    batch_size: int = 64
    dataset: Dataset[Tensor] = field(default_factory=Rows)
    autocast: bool = False
    set_to_none: bool = True
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    batch: Callable[[Tensor, int], Tensor] = lambda x, _: x
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    after_backward: Callable[[nn.Module, Tensor], object] = lambda model, loss: None
    after_step: Callable[[], object] = lambda: None
    last_micro_batch: Callable[[nn.Module, bool], object] = lambda model, last: None

    def run(self, folder: Path, first: int = 4, end: int = 10) -> Run:
        torch.manual_seed(0)
        optimizer = self.optimizer(list(self.model.parameters()))
        batches: Iterator[Tensor] = iter(DataLoader(self.dataset, batch_size=self.batch_size))
        with stepscope.watch(self.model, optimizer, steps=(first, end), runs=folder, quiet=True) as watched:
            for i in range(end + 5):
                for micro in range(self.micro_batches):
                    x = self.batch(next(batches), i)
                    self.last_micro_batch(self.model, micro == self.micro_batches - 1)
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                        loss = self.call(self.model, x)
                    loss.backward()
                    self.after_backward(self.model, loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.set_to_none)
                self.after_step()
        assert not _get_current_function_mode_stack() and not is_in_torch_dispatch_mode(), "nothing is left"
        assert watched.run is not None and watched.run.evidence.notes == ()
        return watched.run


def habits(run: Run) -> dict[str, Finding]:
    """The findings of what loops do."""
    return {finding.kind: finding for finding in run.findings if finding.kind in HABITS}


def only(run: Run, kind: str) -> Finding:
    """The one finding of what the loop does. The share of time of this machine's load is no mistake of the loop."""
    found = {
        name: finding for name, finding in habits(run).items() if name not in {"waiting-for-data", "rest-is-large"}
    }
    assert list(found) == [kind]
    return found[kind]


@pytest.mark.parametrize(
    "loop",
    [
        Loop(batch_size=8),
        Loop(batch_size=8, autocast=True, micro_batches=2),
        Loop(batch_size=8, after_backward=lambda model, loss: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    ],
    ids=["plain", "autocast and accumulation", "clipping"],
)
def test_nothing_is_found_in_a_loop_without_a_mistake(tmp_path: Path, loop: Loop):
    found = habits(loop.run(tmp_path))
    assert set(found) <= {"waiting-for-data", "rest-is-large"}, "but for shares of a time that others may take"


def test_a_loop_that_ends_within_a_step_leaves_no_mode(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for last in range(8, 13):  # of 3 measured steps, then of those that are looked at
        with stepscope.watch(model, optimizer, steps=(4, 7), runs=tmp_path, quiet=True):
            for i in range(last):
                model(torch.randn(4, 64)).backward()
                if i < last - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        assert not _get_current_function_mode_stack() and not is_in_torch_dispatch_mode()


def test_28_waiting_for_data(tmp_path: Path):
    found = habits(Loop(dataset=Rows(seconds=0.002)).run(tmp_path))
    assert found["waiting-for-data"].severity == "warning"
    assert "waited for its next batch for" in found["waiting-for-data"].sentence
    assert (found["waiting-for-data"].evidence["share"] or 0) > 0.1  # type: ignore[operator]


def test_29_the_rest_takes_a_share(tmp_path: Path):
    def log() -> None:
        time.sleep(0.15)

    run = Loop(batch_size=8, after_step=log).run(tmp_path)
    sentence = habits(run)["rest-is-large"].sentence
    assert "is neither data, forward, backward nor optimizer" in sentence
    assert run.evidence.habits is not None
    line = run.evidence.habits.rest_lines[0]
    assert line.where.startswith("hostile/test_habits.py:") and line.share > 0.9
    code = Path(__file__).read_text().splitlines()[int(line.where.rpartition(":")[2]) - 1]
    assert code.strip() == "self.after_step()", "the loop's own line"
    assert f"{line.where} (log)" in sentence
    few = {name: msgspec.structs.replace(found, values_s=found.values_s[:2]) for name, found in run.samples.items()}
    assert "rest-is-large" not in {finding.kind for finding in check_run(msgspec.structs.replace(run, samples=few))}


def test_29_a_few_steps_that_make_up_the_rest_are_counted():
    def run(rest: list[float], forward: list[float], saved: Saved | None = None) -> Run:
        step = [1.0 + r + f for r, f in zip(rest, forward, strict=True)]
        parts = {"forward": forward, "backward": [1.0] * 20, "rest": rest, "step": step}
        samples = {name: Samples(values_s=tuple(values), clock="") for name, values in parts.items()}
        loop = WatchedLoop(why="", modules=("Net",), saved=saved)
        return make_run(evidence=Evidence(loop=loop), samples=samples)

    saves, usual = [0.1] * 18 + [9.1] * 2, [1.0] * 20
    found = next(f for f in check_run(run(saves, usual)) if f.kind == "rest-is-large")
    # 20 steps of 1 + 1 + 0.1 seconds, two of which take 9 more
    assert found.evidence["share"] == pytest.approx(20 / 60)
    assert "(1 s of 3 s a step on average: 2 steps of 20 took 9 s more)" in found.sentence
    for took_s, named in ((9.0, True), (1.0, False)):
        saved = Saved(where="train.py:9", steps=2, of=20, median_s=took_s)
        named_in = next(f.remedy for f in check_run(run(saves, usual, saved)) if f.kind == "rest-is-large") or ""
        assert (f"2 steps of 20 save for {took_s:.0f} s (torch.save at train.py:9)" in named_in) is named
    busy = [1.0] * 9 + [20.0] + [1.0] * 10
    for rest, forward in (([0.1] * 19 + [18.1], usual), (saves, busy), ([0.1] * 20, usual)):
        assert "rest-is-large" not in {f.kind for f in check_run(run(rest, forward))}, "one step, a busy machine, none"
    constant = next(f for f in check_run(run([1.0] * 18 + [9.1] * 2, usual)) if f.kind == "rest-is-large")
    assert "33.3 % of the time" in constant.sentence and "on average" not in constant.sentence, "as in the table"


READS: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "item": (lambda model, loss: loss.item(), ".item()"),
    "float": (lambda model, loss: float(loss), "float()"),
    "cpu": (lambda model, loss: loss.detach().cpu(), ".cpu()"),
    "if": (lambda model, loss: bool(loss > 3), "if"),
    "print": (lambda model, loss: print(loss), "print"),
    "format": (lambda model, loss: f"{loss:.3f}", "print"),
    "clip": (
        lambda model, loss: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
        "clip_grad_norm_",
    ),
    "norm": (lambda model, loss: [p.grad.norm().item() for p in model.parameters() if p.grad is not None], ".item()"),
}


@pytest.mark.parametrize("name", READS)
def test_30_a_host_that_waits_in_each_step(tmp_path: Path, name: str):
    read, call = READS[name]
    found = only(Loop(batch_size=8, after_backward=read).run(tmp_path), "host-waits")
    line = read.__code__.co_firstlineno
    assert found.severity == "note" and f"at hostile/test_habits.py:{line} ({call})" in found.sentence


def test_30_a_host_that_waits_now_and_then_is_not_found(tmp_path: Path):
    losses: list[Tensor] = []

    def now_and_then(_: nn.Module, loss: Tensor) -> None:
        losses.append(loss.detach())
        if len(losses) % 5 == 0:
            print(torch.stack(losses).mean().item())

    indices = Loop(batch_size=8, after_backward=now_and_then, batch=lambda x, _: x[torch.randint(8, (8,)).tolist()])
    assert "host-waits" not in habits(indices.run(tmp_path)), "and random indices are the host's own"


def test_31_gradients_filled_with_zeros(tmp_path: Path):
    found = only(Loop(batch_size=8, set_to_none=False).run(tmp_path), "gradients-zeroed")
    assert found.evidence["gradients"] == len(list(Net().parameters()))
    assert found.evidence["bytes"] == 4 * sum(p.numel() for p in Net().parameters())


def test_32_parameters_without_a_gradient(tmp_path: Path):
    model = Net()
    model.unused = nn.Linear(4, 4)
    found = only(Loop(batch_size=8, model=model).run(tmp_path), "no-gradient")
    assert "unused.weight, unused.bias" in found.sentence and found.evidence["parameters"] == 2
    model.unused.requires_grad_(False)
    assert not habits(Loop(batch_size=8, model=model).run(tmp_path)).keys() - {"waiting-for-data", "rest-is-large"}


def test_32_nothing_gets_a_gradient_since_it_is_thrown_away_first(tmp_path: Path):
    for none, had in ((True, "none"), (False, "only zeros")):
        model = Net()

        def throw_away(of: nn.Module, _: Tensor, none: bool = none) -> None:
            of.zero_grad(set_to_none=none)

        loop = Loop(batch_size=8, model=model, after_backward=throw_away, optimizer=sgd)
        found = habits(loop.run(tmp_path))["no-gradient"]
        assert found.evidence["parameters"] == len(list(model.parameters())) and f"had {had} in" in found.sentence


class WithAverage(Net):
    """A model that holds an average of its own weights, as timm's task does: a copy in eval mode, which nothing calls
    and no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self).eval()


def test_32_34_an_average_of_the_weights_is_no_mistake(tmp_path: Path):
    model = WithAverage()
    training = [p for name, p in model.named_parameters() if not name.startswith("average.")]
    run = Loop(batch_size=8, model=model, optimizer=lambda _: torch.optim.AdamW(training)).run(tmp_path)
    assert not habits(run).keys() - {"waiting-for-data", "rest-is-large"}
    assert run.evidence.loop is not None and run.evidence.loop.trainable == sum(p.numel() for p in training)
    assert run.workload.model.parameters == 2 * run.evidence.loop.trainable  # type: ignore[union-attr]
    model.head.eval()
    model.inside.eval()
    found = Loop(batch_size=8, model=model, optimizer=lambda _: torch.optim.AdamW(training)).run(tmp_path)
    assert "inside.1, inside.3" in only(found, "eval-while-training").sentence, "but for what it does train"


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_43_an_update_that_16_bits_round_away(tmp_path: Path):
    def small(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-7)

    torch.manual_seed(0)  # a number near zero may be any model's, and changes
    model = Net().bfloat16()
    in_half = Loop(batch_size=8, model=model, optimizer=small, batch=lambda x, _: x.bfloat16())
    found = habits(in_half.run(tmp_path))["parameters-unchanged"]
    assert found.severity == "warning" and "lost when the sum is rounded" in found.sentence
    assert "inside.0.weight" in found.sentence and found.evidence["at_rate_zero"] == 0
    large = Loop(batch_size=8, model=Net().bfloat16(), optimizer=sgd, batch=lambda x, _: x.bfloat16())
    left = habits(large.run(tmp_path)).get("parameters-unchanged")
    assert left is None or left.evidence["parameters"] < found.evidence["parameters"]  # type: ignore[operator]


def test_43_a_group_without_a_learning_rate(tmp_path: Path):
    def groups(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:-2]}, {"params": parameters[-2:], "lr": 0.0}], lr=0.1)

    found = only(Loop(batch_size=8, optimizer=groups).run(tmp_path), "parameters-unchanged")
    assert (found.evidence["parameters"], found.evidence["at_rate_zero"]) == (2, 2)
    assert "head.weight, head.bias. 2 of them are in a group with lr=0." in found.sentence


def test_43_an_optimizer_of_another_model(tmp_path: Path):
    copied = Loop(batch_size=8, optimizer=lambda parameters: sgd([nn.Parameter(p.detach()) for p in parameters]))
    model, optimizer = copied.model, sgd(list(copy.deepcopy(copied.model).parameters()))
    with stepscope.watch(steps=(4, 10), runs=tmp_path, quiet=True) as watched:
        for _ in range(15):
            model(torch.randn(8, 64)).backward()
            optimizer.step()
            model.zero_grad()
    assert watched.run is not None
    assert "No optimizer holds them" in habits(watched.run)["parameters-unchanged"].sentence


@pytest.mark.parametrize("held", [True, False], ids=["rises from 0", "is 0 for the first hundred steps"])
def test_43_a_warm_up_of_the_learning_rate_is_no_mistake(tmp_path: Path, held: bool):
    model = Net()
    optimizer = sgd(list(model.parameters()))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 100) if held else step * 1e-12)
    with stepscope.watch(model, optimizer, steps=(4, 10), runs=tmp_path, quiet=True) as watched:
        for _ in range(15):
            model(torch.randn(8, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
    assert watched.run is not None and "parameters-unchanged" not in habits(watched.run)


def test_43_a_bias_whose_gradient_is_0_by_design_and_of_another_models_loss_is_not(tmp_path: Path):
    """The bias of a critic's last layer: what is real and what is made weigh it alike."""
    maker, critic = nn.Linear(8, 64), nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
    one, other = sgd(list(maker.parameters())), sgd(list(critic.parameters()))
    with stepscope.watch(steps=(4, 10), runs=tmp_path, quiet=True) as watched:
        for _ in range(15):
            made = maker(torch.randn(8, 8))
            other.zero_grad()
            (critic(torch.randn(8, 64)).mean() - critic(made.detach()).mean()).backward()
            other.step()
            one.zero_grad()
            critic(made).mean().backward()
            one.step()
    assert watched.run is not None
    assert watched.run.evidence.habits is not None and "parameters-unchanged" not in habits(watched.run)


@pytest.mark.parametrize("fused", [False, True])
def test_43_updates_that_a_scaler_leaves_out_are_no_mistake(tmp_path: Path, fused: bool):
    """The step of a fused optimizer is called all the same."""
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with stepscope.watch(model, optimizer, steps=(4, 10), runs=tmp_path, quiet=True) as watched:
        for _ in range(15):
            one_is_infinite = (model.head.bias * 1e30).sum() * 1e30
            scaler.scale(model(torch.randn(8, 64)) + one_is_infinite).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watched.run is not None and not {"parameters-unchanged", "no-gradient"} & habits(watched.run).keys()


class Checkpointed(Net):
    """A model that runs its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(lambda x, block=block: x + block(x).relu(), x, use_reentrant=False)
        return self.head(x).square().mean()


def test_44_checkpointing_beside_free_memory(tmp_path: Path):
    run = Loop(model=Checkpointed(), micro_batches=2).run(tmp_path)
    blocks, others = 4 * 256 * 256, 64 * 256 + 256 * 8
    share = only(run, "checkpointing-not-needed").evidence["share"]
    assert share == pytest.approx(blocks / (blocks + others)), "by the products of the four blocks"
    known = run.evidence.habits
    assert known is not None and known.again_flops == 2 * 2 * 64 * blocks
    # A checkpointed block runs its product and its relu again, and perhaps their sum, which backward does not need.
    assert 2 * 4 * 2 * 64 * 256 * 4 <= known.again_bytes <= 2 * 4 * 3 * 64 * 256 * 4
    full = msgspec.structs.replace(known, free_bytes=known.again_bytes)
    evidence = msgspec.structs.replace(run.evidence, habits=full)
    assert "checkpointing-not-needed" not in habits(msgspec.structs.replace(run, findings=check_run(
        msgspec.structs.replace(run, evidence=evidence))))  # fmt: skip


def test_33_losses_kept_with_their_graphs(tmp_path: Path):
    history: list[Tensor] = []
    keeping = Loop(batch_size=8, after_backward=lambda _, loss: history.append(loss))
    assert only(keeping.run(tmp_path), "graph-kept-alive").evidence["graphs"] == 2
    numbers = Loop(batch_size=8, after_backward=lambda _, loss: history.append(loss.detach()))
    assert "graph-kept-alive" not in habits(numbers.run(tmp_path))


def test_34_eval_mode_while_training(tmp_path: Path):
    model = Net()
    model.inside.eval()
    found = only(Loop(batch_size=8, model=model).run(tmp_path), "eval-while-training")
    assert "inside.1, inside.3" in found.sentence and found.evidence["modules"] == 2
    assert only(Loop(batch_size=8, model=Net().eval()).run(tmp_path), "eval-while-training")
    model.inside.requires_grad_(False)
    assert "eval-while-training" not in habits(Loop(batch_size=8, model=model).run(tmp_path)), "frozen, so meant"


class Outside(Net):
    """A model whose third block leaves autocast."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        with torch.autocast("cpu", enabled=False):
            x = x + self.blocks[2](x.float())
        return self.head(self.blocks[0](x)).square().mean() + sum(block(x).mean() for block in self.blocks[1::2])


def test_35_products_in_fp32_beside_others_in_bf16(tmp_path: Path):
    found = only(Loop(batch_size=8, model=Outside(), autocast=True).run(tmp_path), "fp32-beside-half")
    flops = {"inside.0": 64 * 256, "blocks": 256 * 256, "head": 256 * 8}
    share = flops["blocks"] / (flops["inside.0"] + 4 * flops["blocks"] + flops["head"])
    assert found.evidence["share"] == pytest.approx(share) and found.evidence["first"] == "blocks.2"
    assert "others took bfloat16" in found.sentence


class DropsAttention(Net):
    """A model whose attention drops weights. On a CPU that is PyTorch's math kernel, which leaves 16 bits by design."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)[None, None]
        x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return self.head(x).square().mean() + sum(block(x).mean() for block in self.blocks)


def test_35_attention_in_fp32_by_design_is_no_fp32_by_mistake(tmp_path: Path):
    assert not habits(Loop(batch_size=8, model=DropsAttention(), autocast=True).run(tmp_path)).get("fp32-beside-half")


def test_37_each_micro_batch_synchronises(tmp_path: Path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Net())
        found = only(Loop(batch_size=8, model=model, micro_batches=3).run(tmp_path), "micro-batches-synchronised")
        assert (found.evidence["micro_batches"], found.evidence["synchronised"]) == (3, 2)

        def in_the_last(of: nn.Module, last: bool) -> None:
            vars(of)["require_backward_grad_sync"] = last  # what no_sync() sets

        right = Loop(batch_size=8, model=model, micro_batches=3, last_micro_batch=in_the_last)
        assert "micro-batches-synchronised" not in habits(right.run(tmp_path))
    finally:
        torch.distributed.destroy_process_group()


def test_38_an_optimizer_that_loops(tmp_path: Path):
    def looping(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, foreach=False)

    found = only(Loop(batch_size=8, optimizer=looping).run(tmp_path), "optimizer-loops")
    tensors = len(list(Net().parameters()))
    assert found.evidence["tensors"] == tensors and (found.evidence["operators"] or 0) >= tensors  # type: ignore[operator]


def test_40_graph_breaks_and_recompilations_with_their_lines(tmp_path: Path):
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            print(end="")
            return super().forward(x)

    model = torch.compile(Broken(16), backend="aot_eager", dynamic=False)
    loop = Loop(batch_size=8, model=model, batch=lambda x, i: x[: 5 if i % 2 else 8])  # type: ignore[arg-type]
    sentence = habits(loop.run(tmp_path))["compile-fallback"].sentence
    line = Broken.forward.__code__.co_firstlineno
    assert f"at hostile/test_habits.py:{line + 1}; " in sentence or f"at hostile/test_habits.py:{line + 1})" in sentence
    assert "It recompiled" in sentence and "size mismatch" in sentence
    reset_compilation()


def test_17_more_flops_than_the_device_has(tmp_path: Path):
    run = Loop(batch_size=8).run(tmp_path)
    per_row = 64 * 256 + 4 * 256 * 256 + 256 * 8
    assert run.work["forward"].flops == 2 * 8 * per_row
    assert run.work["backward"].flops == 2 * 8 * (2 * per_row - 64 * 256), "the input needs no gradient"
    spec = overridden_spec("a made-up device", "fp32", 1e3)
    assert "impossible-rate" in {f.kind for f in check_run(msgspec.structs.replace(run, device_spec=spec))}


def test_39_shapes_that_change(tmp_path: Path):
    found = only(Loop(batch_size=8, batch=lambda x, i: x[: 3 + i % 4]).run(tmp_path), "shapes-change")
    assert found.evidence["shapes"] == 3
    whole_but_the_last = Loop(batch_size=8, batch=lambda x, i: x[: 5 if i % 3 else 8])
    assert "shapes-change" not in habits(whole_but_the_last.run(tmp_path))


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.unused = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(3, 3)

    def forward(self, x):
        x = self.drop(self.a(x))
        return (x * 2 if self.mistaken and x.mean().item() > 9 else x).square().mean()

def make(mistaken=False):
    model = Net()
    model.mistaken = mistaken
    model.drop.train(not mistaken)
    model.unused.requires_grad_(mistaken)
    return model, torch.randn(4, 8)

def make_mistaken():
    return make(True)
"""


@pytest.mark.parametrize("mistaken", [True, False])
def test_a_module_of_a_factory_is_looked_at_too(tmp_path: Path, mistaken: bool):
    (tmp_path / "mine.py").write_text(FACTORY)
    factory = f"{tmp_path}/mine.py:{'make_mistaken' if mistaken else 'make'}"
    workload = FactoryWorkload(model=UserModel(name="not known yet"), factory=factory)
    step, _ = make_user_step(workload, torch.device("cpu"))
    assert not isinstance(step, UserStep)
    run = make_run(evidence=Evidence(habits=step_habits(step, torch.device("cpu"))))
    found = {finding.kind: finding for finding in check_run(run) if finding.kind in HABITS}
    assert set(found) == ({"host-waits", "no-gradient", "eval-while-training"} if mistaken else set())
    if mistaken:
        assert "mine.py:12 (.item())" in found["host-waits"].sentence
        assert "unused.weight, unused.bias" in found["no-gradient"].sentence


@pytest.mark.gpu
def test_30_36_what_waits_for_a_gpu(tmp_path: Path):
    """Each line by PyTorch's own word, and each copy from memory that is not pinned; nothing where nothing waits."""

    def found(read: Callable[[Tensor], object], *, pinned: bool, looping: bool = False) -> dict[str, Finding]:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False if looping else None)
        batch = torch.randn(512, 64)
        batch = batch.pin_memory() if pinned else batch
        with stepscope.watch(model, optimizer, steps=(4, 12), runs=tmp_path, quiet=True) as watched:
            for _ in range(18):
                loss = model(batch.cuda(non_blocking=True) if pinned else batch.cuda())
                loss.backward()
                read(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert watched.run is not None and watched.run.evidence.notes == ()
        assert watched.run.work["forward"].flops
        return {kind: each for kind, each in habits(watched.run).items() if kind != "rest-is-large"}

    def reads(loss: Tensor) -> float:
        return loss.item()

    assert found(lambda loss: None, pinned=True) == {}
    waits = found(reads, pinned=True)
    assert set(waits) == {"host-waits"} and waits["host-waits"].severity == "warning"
    assert f"at hostile/test_habits.py:{reads.__code__.co_firstlineno + 1} (.item())" in waits["host-waits"].sentence
    copies = found(lambda loss: None, pinned=False)
    assert set(copies) == {"host-waits", "batch-not-pinned"}
    assert f"at hostile/test_habits.py:{found.__code__.co_firstlineno + 7}" in copies["batch-not-pinned"].sentence
    assert set(found(lambda loss: None, pinned=True, looping=True)) == {"optimizer-loops"}
