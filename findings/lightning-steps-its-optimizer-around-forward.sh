#!/bin/sh
# lightning 2.6.6 with torch 2.13.0 (CPU, Python 3.11): with automatic optimization Trainer calls
# optimizer.step(closure), and the closure is forward and backward. A step pre-hook of the optimizer is called before
# forward, and a clock round optimizer.step measures the whole step.
#
# Seen (what is called in a step, in its order):
#   pre-hook, forward, backward, post-hook
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 lightning==2.6.6
cd "$place"
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import logging
import sys

import lightning
import torch

called = []


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        called.append("forward")
        return self.layer(batch).sum()

    def on_after_backward(self):
        called.append("backward")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: called.append("pre-hook"))
        optimizer.register_step_post_hook(lambda *_: called.append("post-hook"))
        return optimizer


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_steps=1, accelerator="cpu", **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2))
print(", ".join(called))
sys.exit(0 if called == ["pre-hook", "forward", "backward", "post-hook"] else 1)
PY
