"""`fit` of a user's own module: tensors that are views, hooks, optimizers and losses of the user's, and what stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stepscope
from stepscope.core.errors import InputError
from stepscope.core.workloads import FactoryWorkload
from tests.command import stepscope as command

pytestmark = pytest.mark.slow

WIDTH = 256


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def peak(module: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = square, **asked: Any) -> int:
    return stepscope.fit(module, batch, loss, **asked).peak_bytes


def test_of_a_view_and_of_an_expanded_batch_the_elements_count():
    """As `.to` copies them to a device."""
    rows = peak(net(), torch.randn(8, WIDTH))
    assert peak(net(), torch.randn(4096, WIDTH)[100:108]) == rows
    assert peak(net(), torch.randn(1, WIDTH).expand(8, WIDTH)) == rows
    whole = torch.randn(16, 64, WIDTH)
    shared, apart = nn.ModuleList(), nn.ModuleList()
    for row in whole:
        for modules, buffer in ((shared, row), (apart, row.clone())):
            modules.append(nn.Identity())
            modules[-1].register_buffer("table", buffer)
    assert peak(nn.Sequential(net(), *shared), torch.randn(8, WIDTH)) == peak(
        nn.Sequential(net(), *apart), torch.randn(8, WIDTH)
    )


@pytest.mark.parametrize("rows", [(8, 8, 8, 2048), (8, 2048, 8), (2048, 8, 8), (8, 2048)])
def test_of_batches_that_differ_the_largest_counts(rows: tuple[int, ...]):
    found = stepscope.fit(net(), [torch.randn(n, WIDTH) for n in rows], square)
    others = 4 * WIDTH * (sum(rows) - 2048)  # which lie on the device, too
    assert found.peak_bytes == pytest.approx(peak(net(), torch.randn(2048, WIDTH)) + others, rel=1e-3)
    assert isinstance(found.workload, FactoryWorkload)
    (given,) = found.workload.model.inputs.values()
    assert given.shape == (rows[0], WIDTH), "a workload is named by its first batch"


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "NAdam"])
def test_an_optimizer_of_the_users_own_updates_all_together_as_on_a_gpu(kind: str):
    def with_(**choices: Any) -> int:
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
        made = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, **made, **choices)
        found = peak(module, torch.randn(8, WIDTH), optimizer=optimizer)
        assert optimizer.param_groups[0]["foreach"] is choices.get("foreach"), "the user's own stays as it was"
        return found

    assert with_() == with_(foreach=True) >= with_(foreach=False)


class Masked(nn.Module):
    """Changes its batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = -100
        logits = self.head(self.embedding(ids.clamp_(max=20)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_batch_is_not_written_to():
    ids, labels = torch.arange(48).view(4, 12), torch.arange(48).view(4, 12) % 5
    before = ids.clone(), labels.clone()
    stepscope.fit(Masked(), (ids, labels))
    assert torch.equal(ids, before[0]) and torch.equal(labels, before[1])


def test_a_loss_that_reads_the_model_itself_is_refused_and_leaves_its_gradients(tmp_path: Path):
    module, batch = net(), torch.randn(8, WIDTH)
    module[0].weight.grad = kept = torch.zeros(WIDTH, WIDTH)

    def decayed(out: Tensor) -> Tensor:
        return out.mean() + sum(parameter.square().sum() for parameter in module.parameters())

    for asked in (
        lambda: stepscope.fit(module, batch, decayed),
        lambda: stepscope.run(module, batch, decayed, device="cpu", steps=2, warmup=1, profile=False, runs=tmp_path),
    ):
        with pytest.raises(InputError, match="the loss of Sequential reads parameters of the model itself"):
            asked()
        assert module[0].weight.grad is kept and not kept.any() and module[2].weight.grad is None


FILE = """
import torch
from torch import nn

class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.net.weight.scale = 2.0
    def forward(self, x):
        (slope,) = torch.autograd.grad((self.net(x) * self.net.weight.scale).tanh().sum(), x, create_graph=True)
        return slope.square().mean()

def slopes():
    return Slopes(), torch.randn(64, 8, requires_grad=True)

def hooked(on=1):
    layers = [nn.Linear(256, 256, bias=False) for _ in range(8)]
    def update(parameter):
        parameter.grad = None
    for layer in layers if on else ():
        layer.weight.register_post_accumulate_grad_hook(update)
    return nn.Sequential(*layers), torch.randn(8, 256), lambda out: out.mean()

def lazy():
    return nn.Sequential(nn.LazyLinear(4)), torch.randn(8, 8), lambda out: out.mean()

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 64), nn.Embedding(256, 64)
    def forward(self, ids):
        return (self.words(ids) + self.places.weight[: ids.shape[1]]).square().mean()

def text(batch_size=4, seq_len=64):
    return Positions(), torch.zeros(batch_size, seq_len, dtype=torch.long)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(FILE)
    return path


def test_inputs_with_gradients_attributes_and_hooks_of_parameters_are_as_the_user_made_them(file: Path):
    assert stepscope.fit(module=f"{file}:slopes").peak_bytes > 0
    kept, freed = (stepscope.fit(module=f"{file}:hooked", arguments={"on": on}).estimate.categories for on in (0, 1))
    assert kept["gradients"] > freed.get("gradients", 0)


def test_parameters_without_a_shape_are_one_line(file: Path):
    for verb in ("fit", "run"):
        done = command(verb, "--module", f"{file}:lazy")
        assert done.returncode == 2 and done.stderr.strip().endswith(
            ":lazy has parameters without a shape yet, as 0.weight: call it with a batch before"
        )


def test_a_search_beyond_a_models_positions_writes_nothing_beside_its_answer(file: Path):
    done = command("fit", "--module", f"{file}:text", "--memory", "1GiB")
    assert (
        done.returncode == 0
        and "Traceback" not in done.stderr
        and "the longest sequence that fits is 256" in (" ".join(done.stdout.split()))
    )


def test_where_no_sequence_of_so_many_tokens_fits_the_largest_batch_is_said(file: Path):
    found = stepscope.fit(module=f"{file}:text", memory="72MiB")
    largest = found.largest_batch
    assert largest
    more = command("fit", "--module", f"{file}:text", "--arg", f"batch_size={largest + 1}", "--memory", "72MiB")
    assert f"The largest batch that fits is {largest:,}" in " ".join(more.stdout.split())


class Sums(nn.Module):
    """Two layers of one input in numbered blocks, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 512, bias=False) for _ in range(2))
        self.head = nn.Linear(512, WIDTH, bias=False)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        first, second = (checkpoint(block, x, use_reentrant=False) if again else block(x) for block in self.blocks)
        return self.head(first + second)


def test_operands_in_blocks_of_a_module_by_hand():
    """128 rows: both blocks keep one input of 128 x 256 numbers in the format, beside the batch; the head keeps its own
    in 16 bits. Blocks have two products each, since the batch has no gradient, and the head three."""
    rows, u = torch.randn(128, WIDTH, dtype=torch.bfloat16), 2 * 128 * WIDTH * 512
    asked: Any = {"recipe": ["mxfp8", "nvfp4"], "device": "B200", "dtype": "bf16-pure"}
    found = stepscope.fit(Sums(), rows, square, **asked)
    cells: Any = found.answer.tables[0].rows
    plain, mxfp8, nvfp4 = ((row[3], row[-1]) for row in cells)
    assert mxfp8[0] - plain[0] == 128 * WIDTH * 33 / 32 and nvfp4[0] - plain[0] == 128 * WIDTH * 9 / 16 + 512
    assert [plain[1], nvfp4[1]] == pytest.approx([7 * u / 2.25e15, 4 * u / 9e15 + 3 * u / 2.25e15])
    again = stepscope.fit(Sums(), (rows, True), square, **asked, accumulation=4)
    assert again.answer.tables[0].rows[1][-1] == pytest.approx(6 * u / 4.5e15 + 3 * u / 2.25e15), "with what runs again"
    with pytest.raises(
        InputError, match=r"no linear layer of Sums.*mxfp8 \(blocks.0: blocks of 32 do not divide 100\)"
    ):
        stepscope.fit(Sums(), rows[:100], square, **asked)
    with pytest.raises(InputError, match="not of fp32's: choose dtype bf16"):
        stepscope.fit(Sums(), rows, square, recipe="mxfp8", dtype="fp32")


def test_products_in_blocks_take_the_librarys_workspace_too():
    """32 MiB for forward's thread and as much for backward's, where no product stays in 16 bits."""
    rows = torch.randn(128, WIDTH, dtype=torch.bfloat16)
    layer = nn.Linear(WIDTH, 512, bias=False)
    peaks = stepscope.fit(layer, rows, square, recipe=["mxfp8", "fp8-block"], dtype="bf16-pure").by_recipe
    assert all(64 * 2**20 < peak < 66 * 2**20 for peak in peaks.values()) and len(peaks) == 2


def test_a_device_that_multiplies_blocks_of_no_rows_does_not_lack_them():
    found = stepscope.fit(nn.Linear(WIDTH, 512), torch.empty(0, WIDTH), square, recipe="mxfp8", device="B200")
    assert "does not multiply" not in str(found.answer.lead) and found.answer.tables[0].rows[1][-1] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16-pure"])
def test_rms_norm_is_one_kernel_as_on_a_gpu(dtype: Any):
    """It keeps its input, as LayerNorm does, and of each of 128 rows one number of fp32 where LayerNorm keeps two."""
    rows = torch.randn(128, WIDTH, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    kept: list[int] = []
    for norm in (nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH)):
        found: Any = stepscope.fit(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH)), rows, square, dtype=dtype)
        kept.append(found.estimate.memory.saved_for_backward)
    assert kept[0] - kept[1] == 128 * 4
