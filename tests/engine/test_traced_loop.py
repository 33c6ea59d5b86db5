"""Predictions for other sizes from a loop that was watched: they equal those of a factory of the same step."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepscope
from stepscope.app.verbs.fit import Fitted
from stepscope.core.errors import InputError
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.fake_module import fit_module
from stepscope.engine.traced_loop import TRACED_FILE, _terms
from stepscope.training.user_module.module_step import UserModule

HEADS, WIDTH, WORDS, LONGEST = 2, 32, 96, 256


class Attends(nn.Module):
    """A causal language model of one block, which returns its logits and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        heads = self.joint(x).view(*tokens.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        logits = self.out(x + y.transpose(1, 2).flatten(2))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(batch_size: int, seq_len: int) -> Tensor:
    return torch.randint(WORDS, (batch_size, seq_len), generator=torch.Generator().manual_seed(0))


def watched(runs: Path, model: nn.Module, call: Callable[[], Any], steps: int = 12) -> Path:
    """The directory of the run of a loop that keeps what the model returned until its next call."""
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.get_rng_state()
    with stepscope.watch(steps=(2, 3), runs=runs, quiet=True) as watch:
        for _ in range(steps):
            output = call()
            loss = output[1] if isinstance(output, tuple) else output
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.directory is not None and torch.equal(torch.get_rng_state(), before)
    assert gc.get_freeze_count(), "what a script had set aside, as conftest.py has, stays so"
    return watch.directory


@pytest.fixture(scope="module")
def attends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, batch = Attends(), tokens(4, 64)
    return watched(tmp_path_factory.mktemp("runs"), model, lambda: model(batch, batch))


def made_anew(batch_size: int, seq_len: int, dtype: Any) -> dict[str, int | None]:
    """The peaks of the same step by a factory's way, at these sizes."""
    held: list[Any] = []

    def loss(output: Any) -> Any:
        held[:] = [output]
        return output

    def make() -> UserModule:
        model, batch = Attends(), tokens(batch_size, seq_len)
        optimizer = torch.optim.AdamW(model.parameters())
        return UserModule(name="it", module=model, batches=[(batch, batch.clone())], loss=loss, optimizer=optimizer)

    workload = FactoryWorkload(model=UserModel(name=""), factory="", dtype=dtype)
    (fit,) = fit_module(workload, (), module=make)
    return peaks(fit)


def peaks(found: Any) -> dict[str, int | None]:
    memory = found.estimate.memory
    return {name: getattr(memory, f"{name}_peak") for name in ("forward", "backward", "optimizer", "reserved")}


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "dtype"), [(4, 64, "fp32"), (12, 200, "fp32"), (3, 256, "bf16"), (32, 40, "bf16-pure")]
)
def test_a_watched_loop_is_predicted_at_other_sizes_to_the_byte(
    attends: Path, batch_size: int, seq_len: int, dtype: Any
):
    found = stepscope.fit(run=attends, batch_size=batch_size, seq_len=seq_len, dtype=dtype)
    assert peaks(found) == made_anew(batch_size, seq_len, dtype)
    assert (found.workload.batch_size, found.workload.seq_len, found.workload.dtype) == (batch_size, seq_len, dtype)


def test_a_watched_loop_gives_a_table_the_largest_sizes_and_a_bound(attends: Path):
    table = stepscope.fit(run=attends, seq_len=[64, 128, 256], device=["4090", "T4"])
    assert [one.workload.seq_len for one in table.steps] == [64, 64, 128, 128, 256, 256]
    assert table.peak_bytes == table.steps[-1].peak_bytes
    found = stepscope.fit(run=attends, batch_size=16, seq_len=256, memory="70MiB")  # of which cuBLAS takes 64
    assert isinstance(found, Fitted) and found.fits is False and found.largest_batch
    at_most, beyond = (
        stepscope.fit(run=attends, batch_size=found.largest_batch + more, seq_len=256, memory="70MiB")
        for more in (0, 1)
    )
    assert at_most.fits and not beyond.fits
    longest = stepscope.fit(run=attends, memory="1GiB")
    assert longest.longest_sequence == LONGEST and longest.verdict is not None
    assert longest.verdict.longest_is_the_models  # its table of places has no more rows
    odd = stepscope.fit(run=attends, seq_len=100)
    assert odd.verdict is None and peaks(odd) == peaks(stepscope.fit(run=attends, seq_len=104))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 257}, "the model has 256 positions, and seq_len is 257"),
        ({"dtype": "fp16"}, "was traced in fp32, bf16, bf16-pure, and not in fp16"),
        ({"batch_size": 0}, "batch_size is 0: give a multiple of 1"),
    ],
)
def test_what_a_watched_loop_cannot_say_is_said(attends: Path, changes: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        stepscope.fit(run=attends, **changes)


def test_a_loop_that_cannot_be_traced_says_why(tmp_path: Path):
    model = nn.Linear(16, 4)
    directory = watched(tmp_path, model, lambda: F.mse_loss(model(torch.ones(8, 16)), torch.zeros(8, 4)))
    with pytest.raises(InputError, match="outside of the model, and not returned by its forward: give a factory"):
        stepscope.fit(run=directory, batch_size=16)
    (directory / TRACED_FILE).unlink()
    with pytest.raises(InputError, match="its watch left none"):
        stepscope.fit(run=directory, seq_len=16)
    (directory / TRACED_FILE).write_bytes(b"nothing")
    with pytest.raises(InputError, match="is damaged"):
        stepscope.fit(run=directory)


class Interrupted(nn.Linear):
    """Ctrl-C comes while it runs on fake tensors."""

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor:
            raise KeyboardInterrupt
        return super().forward(input).square().mean()


def test_ctrl_c_while_a_with_block_traces_stops_the_script_and_keeps_the_run(tmp_path: Path):
    model = Interrupted(16, 4)
    with pytest.raises(KeyboardInterrupt):
        watched(tmp_path, model, lambda: model(torch.ones(8, 16)))
    [directory] = [path.parent for path in tmp_path.glob("**/" + TRACED_FILE)]
    assert stepscope.show(directory).run.status == "done"
    with pytest.raises(InputError, match="it was interrupted while its model was traced"):
        stepscope.fit(run=directory, batch_size=16)


def test_what_an_allocation_is_of_the_batch_and_the_sequence():
    points = [(8, 64), (14, 24), (4, 40)]
    shifted = tuple(4 * b * (s - 1) * 100 for b, s in points)
    rows = tuple(4 * b * 2 * (-(-s // 32) * 32) for b, s in points)  # padded to 32, as the efficient kernel keeps them
    for nbytes, batch_size, seq_len, expected in (
        ((4096,) * 3, 5, 72, 4096),
        (shifted, 5, 72, 4 * 5 * 71 * 100),
        (rows, 5, 72, 4 * 5 * 2 * 96),
    ):
        terms = _terms(nbytes, points, "aten.x")
        assert sum(term.at(batch_size, seq_len) for term in terms) == expected
    with pytest.raises(InputError, match="is no sum of terms"):
        _terms((100, 3001, 77), points, "aten.x")
