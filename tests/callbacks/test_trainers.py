"""The callbacks in the real libraries, each skipped where its library is not installed."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stepscope.engine.watched_run import Watched
from stepscope.runs.live import read_live

pytestmark = pytest.mark.slow


def check(watched: Watched, *, model: str, accumulation: int, dtype: str, steps_of: str = "") -> None:
    run = watched.run
    assert watched.directory is not None and (live := read_live(watched.directory)) is not None
    assert (live.stage, live.step, live.steps_of) == ("over", 11 if steps_of else 13, steps_of)
    assert live.steps_left == (0 if steps_of else None)
    assert run is not None and run.status == "done"
    assert run.samples["step"].count == 5
    assert run.workload.model.name == model
    assert (run.workload.accumulation, run.workload.dtype) == (accumulation, dtype)
    for part in ("data", "forward", "backward", "optimizer"):
        assert min(run.samples[part].values_s) > 0, part


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (8,))
        return {"input_ids": tokens, "labels": tokens}


def test_hugging_faces_trainer(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'stepscope[frameworks]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'stepscope[frameworks]'")
    from stepscope.callbacks.huggingface import WatchCallback

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    callback = WatchCallback(runs=tmp_path / "runs", steps=(4, 9), quiet=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=11,
        report_to=[], use_cpu=True, disable_tqdm=True, bf16=True, save_strategy="no",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[callback]).train()
    assert callback.watched is not None
    check(callback.watched, steps_of="the Trainer", model="LlamaForCausalLM", accumulation=2, dtype="bf16")


def test_lightnings_trainer(tmp_path: Path):
    lightning = pytest.importorskip("lightning", reason="needs lightning: pip install 'stepscope[frameworks]'")
    from stepscope.callbacks.lightning import WatchCallback

    class Parts(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return (self.decoder(self.encoder(batch[0])) - batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = WatchCallback(runs=tmp_path / "runs", steps=(4, 9), quiet=True)
    trainer = lightning.Trainer(
        max_steps=11, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Parts(), DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=4))
    assert callback.watched is not None
    check(callback.watched, steps_of="Lightning", model="Parts", accumulation=1, dtype="fp32")


def test_accelerate(tmp_path: Path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'stepscope[frameworks]'")
    from stepscope.callbacks.accelerate import WatchTracker

    # Accelerate keeps one state in a process: a trainer that ran before has left its precision there.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    tracker = WatchTracker(runs=tmp_path / "runs", steps=(4, 9), quiet=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=tracker)
    accelerator.init_trackers("watched")
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters()), DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=4)
    )
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(batch) - batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    check(tracker.watched, model="Sequential", accumulation=2, dtype="fp32")
