#!/bin/sh
# transformers 5.23.0 (torch 2.13.0, accelerate 1.15.0, Python 3.11): Trainer counts FLOPs as 6 x tokens x parameters without embeddings
# (`total_flos`). Where head and embedding are one weight it is taken for the embedding, so that the head's product is
# not counted; with weights of their own it is. The products that run are the same.
#
# Seen:
#   Trainer's FLOPs of one batch: 69,341,184 untied, 7,901,184 tied; the head's: 61,440,000
#   products of forward alike: True
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys
import tempfile

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

width, vocabulary, tokens = 64, 5000, 32

def counted(tied):
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=vocabulary, tie_word_embeddings=tied,
    ))
    batch = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(folder, report_to="none", use_cpu=True))
        return trainer.floating_point_ops(batch), counter.get_total_flops()

(untied, run_untied), (tied, run_tied) = counted(False), counted(True)
head = 6 * tokens * width * vocabulary
print(f"Trainer's FLOPs of one batch: {untied:,} untied, {tied:,} tied; the head's: {head:,}")
print("products of forward alike:", run_untied == run_tied)
sys.exit(0 if untied - tied == head and run_untied == run_tied else 1)
PY
