"""The floor of a run: its model, AdamW, and as many steps as the newest run in a folder took. Nothing is timed."""

import sys
from pathlib import Path

import msgspec
import torch
from torch.nn.functional import cross_entropy

from stepscope.core.model_config import configure
from stepscope.training.transformer import Transformer

run = msgspec.json.decode(max(Path(sys.argv[1]).glob("*/run.json")).read_bytes())
samples, evidence, workload = run["samples"]["step"], run["evidence"], run["workload"]
recorded = sum(evidence.get(name) is not None for name in ("observation", "operators", "profile"))
model = Transformer(configure(workload["model"]["name"]), max_seq_len=workload["seq_len"])
model.initialise()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(model.config.vocabulary, (workload["batch_size"], workload["seq_len"] + 1))
for _ in range(len(samples["warmup_s"]) + len(samples["values_s"]) + recorded):
    cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
