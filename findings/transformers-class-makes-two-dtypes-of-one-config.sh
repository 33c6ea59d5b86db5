#!/usr/bin/env bash
# Transformers 5.23.0: the same configuration gives parameters of another dtype by each of its two constructors.
# AutoModel...from_config(config) follows config.dtype; the class itself, LlamaForCausalLM(config), does not and makes
# fp32. Where the dtype stands in a part, as `text_config.dtype` in published multimodal configurations, the class makes
# that part in it and the rest in fp32: a model of two dtypes, whose own forward then fails. from_config makes the same
# file fp32 throughout.
#
# Seen with torch 2.13.0 (CPU build), transformers 5.23.0:
#   llama, dtype bfloat16, from_config: bfloat16
#   llama, dtype bfloat16, by its class: float32
#   llava, text_config.dtype bfloat16, from_config: float32
#   llava, text_config.dtype bfloat16, by its class: bfloat16, float32
#   its forward: RuntimeError
#
# Exits with 0 while this is so, and with 1 once it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {**SIZES, "num_key_value_heads": 1, "vocab_size": 67, "max_position_embeddings": 64}
VISION = {**SIZES, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}


def dtypes(model):
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))


def llama():
    return transformers.LlamaConfig(**TEXT, dtype="bfloat16")


def llava():
    text = {**TEXT, "model_type": "llama", "dtype": "bfloat16"}
    return transformers.LlavaConfig(text_config=text, vision_config=VISION)


whole = transformers.LlavaForConditionalGeneration(llava())
try:
    whole(input_ids=torch.ones(1, 4, dtype=torch.int64))
    forward = "runs"
except RuntimeError as error:
    forward = type(error).__name__
found = {
    "llama, dtype bfloat16, from_config": dtypes(transformers.AutoModelForCausalLM.from_config(llama())),
    "llama, dtype bfloat16, by its class": dtypes(transformers.LlamaForCausalLM(llama())),
    "llava, text_config.dtype bfloat16, from_config": dtypes(
        transformers.AutoModelForImageTextToText.from_config(llava())
    ),
    "llava, text_config.dtype bfloat16, by its class": dtypes(whole),
    "its forward": forward,
}
for name, seen in found.items():
    print(f"{name}: {seen}")
sys.exit(0 if [*found.values()] == ["bfloat16", "float32", "float32", "bfloat16, float32", "RuntimeError"] else 1)
PYTHON
