"""Is what `fit` predicts true? Predicted beside measured, for architectures that people train.

    python benchmarks/fit_truth.py FILE.json [--only falcon,roberta] [--dtypes bf16,fp32] [--jobs 6]
    python benchmarks/fit_truth.py --show FILE.json [OLDER.json]

Each is predicted by `fit`, on fake tensors, and measured by a plain loop: a factory, AdamW, autocast where bf16 is
asked for, and PyTorch's own counters. The peak is the highest of four steps, the first among them. Then the loop runs
again with a limit: the smallest memory of which `fit` says that the step fits, which PyTorch enforces on what its
allocator reserves (`torch.cuda.set_per_process_memory_fraction`), once with the allocator's usual settings and once
with expandable segments. Weights are random, and nothing is downloaded; the architectures of transformers need it
installed. No mend was made for those of HELD_BACK: nobody looked into their blocks.
"""

import argparse
import concurrent.futures
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
import typing
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from stepscope.allocations.prediction.fit import budget_of_memory
from stepscope.core.errors import StepscopeError
from stepscope.core.precisions import Dtype
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.questions.fit_apart import fit_apart

TOKENS, LABELLED, PICTURES, SPEECH, PAIRS, SEQ2SEQ = "tokens", "labelled", "pictures", "speech", "pairs", "seq2seq"
_DECODER = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 4}
_GPT = {"vocab_size": 16384, "n_embd": 768, "n_layer": 8, "n_head": 12, "n_positions": 1024}
_ENCODER = {**_DECODER, "intermediate_size": 3072}
_PICTURE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": 1000,
}
_SPEECH = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 32,
}
_TOWERS = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}

MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, int]]] = {
    # name: the class of transformers, its configuration, the kind of batch, and the batch's sizes
    "llama": ("LlamaForCausalLM", _GROUPED, TOKENS, {}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 64}, TOKENS, {}),
    "gpt2": ("GPT2LMHeadModel", _GPT, TOKENS, {}),
    "gpt-neox": ("GPTNeoXForCausalLM", _DECODER, TOKENS, {}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {"vocab_size": 16384, "hidden_size": 768, "num_layers": 8, "num_heads": 12, "max_position_embeddings": 1024,
         "attention_types": [[["global", "local"], 4]]}, TOKENS, {},
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 64}, TOKENS, {}),
    "falcon": ("FalconForCausalLM", {**_DECODER, "num_kv_heads": 12, "alibi": False}, TOKENS, {}),
    "nemotron": ("NemotronForCausalLM", _GROUPED, TOKENS, {}),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 256}, TOKENS, {}),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "pad_token_id": 0}, TOKENS, {}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 64, "sliding_window": 256}, TOKENS, {}),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 64, "sliding_window": 256}, TOKENS, {}),
    "olmo2": ("Olmo2ForCausalLM", {**_GROUPED, "pad_token_id": 0}, TOKENS, {}),
    "opt": (
        "OPTForCausalLM", {**_DECODER, "ffn_dim": 3072, "word_embed_proj_dim": 768, "pad_token_id": 1}, TOKENS, {},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 16384, "hidden_size": 768, "n_layer": 8, "n_head": 12}, TOKENS, {}),
    "mpt": (
        "MptForCausalLM", {"vocab_size": 16384, "d_model": 768, "n_heads": 12, "n_layers": 8, "max_seq_len": 1024},
        TOKENS, {},
    ),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, TOKENS, {}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**_GROUPED, "head_dim": 64, "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2},
        TOKENS, {},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**_GROUPED, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 768,
         "sliding_window": 128}, TOKENS, {},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**_DECODER, "num_key_value_heads": 12, "moe_intermediate_size": 512, "n_routed_experts": 8, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "q_lora_rank": 384,
         "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}, TOKENS, {},
    ),
    "mamba": (
        "MambaForCausalLM", {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 4}, TOKENS, {"length": 64},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 4, "num_heads": 16, "head_dim": 64,
         "n_groups": 1, "chunk_size": 64, "state_size": 64}, TOKENS, {"length": 256},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        {"vocab_size": 16384, "hidden_size": 768, "lru_width": 768, "intermediate_size": 4096, "num_hidden_layers": 3,
         "num_attention_heads": 12, "num_key_value_heads": 1, "attention_window_size": 256}, TOKENS, {"length": 128},
    ),
    "bert": ("BertForMaskedLM", _ENCODER, TOKENS, {}),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 1}, TOKENS, {}),
    "deberta": (
        "DebertaForMaskedLM", {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, TOKENS, {},
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 256,
         "norm_rel_ebd": "layer_norm", "share_att_key": True}, TOKENS, {},
    ),
    "albert": ("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 128}, TOKENS, {}),
    "electra": ("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 256}, TOKENS, {}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**_ENCODER, "local_attention": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "cls_token_id": 1, "sep_token_id": 2}, TOKENS, {},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 16384, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 12,
         "decoder_start_token_id": 0}, SEQ2SEQ, {},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {"vocab_size": 16384, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}, SEQ2SEQ, {},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 16384, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
         "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "num_mel_bins": 80,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        "spectrogram", {"length": 3000, "targets": 128},
    ),
    "vit": ("ViTForImageClassification", _PICTURE, PICTURES, {}),
    "dinov2": ("Dinov2ForImageClassification", {**_PICTURE, "patch_size": 14}, PICTURES, {}),
    "beit": ("BeitForImageClassification", {**_PICTURE, "use_relative_position_bias": True}, PICTURES, {}),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 224, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "num_labels": 1000},
        PICTURES, {},
    ),
    "convnext": ("ConvNextForImageClassification", {"num_labels": 1000}, PICTURES, {}),
    "segformer": ("SegformerForSemanticSegmentation", {"num_labels": 20}, "segments", {}),
    "resnet-50": ("ResNetForImageClassification", {"num_labels": 1000}, PICTURES, {}),
    "wav2vec2": (
        "Wav2Vec2ForCTC", {**_SPEECH, "ctc_loss_reduction": "mean", "conv_dim": [512] * 7}, SPEECH, {"length": 48000},
    ),
    "hubert": ("HubertForCTC", {**_SPEECH, "ctc_loss_reduction": "mean"}, SPEECH, {"length": 48000}),
    "audio-spectrogram": (
        "ASTForAudioClassification",
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_labels": 100, "max_length": 512}, "audio-classes", {"length": 512},
    ),
    "clip": (
        "CLIPModel",
        {"text_config": {**_TOWERS, "vocab_size": 16384, "max_position_embeddings": 77, "pad_token_id": 1,
                         "bos_token_id": 0, "eos_token_id": 2},
         "vision_config": {**_TOWERS, "image_size": 224, "patch_size": 16}}, PAIRS, {"length": 77},
    ),
    "siglip": (
        "SiglipModel",
        {"text_config": {**_TOWERS, "vocab_size": 16384, "max_position_embeddings": 64, "pad_token_id": 1,
                         "bos_token_id": 0, "eos_token_id": 2},
         "vision_config": {**_TOWERS, "image_size": 224, "patch_size": 16}}, PAIRS, {"length": 64},
    ),
}  # fmt: skip
HELD_BACK = (
    "gptj",
    "olmo2",
    "mpt",
    "deepseek-v3",
    "electra",
    "albert",
    "bart",
    "segformer",
    "hubert",
    "siglip",
    "lstm",
)
"""Architectures into whose blocks nobody looked while the prediction was mended, but for the LSTM in the end."""
PATH = str(Path(__file__).resolve())


def architecture(
    name: str, batch: int = 16, length: int = 512, targets: int = 128
) -> tuple[nn.Module, dict[str, Tensor] | tuple[Tensor, ...]] | tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A model of random weights, its batch, and its loss where it does not work that out: a factory for `fit`."""
    torch.manual_seed(0)
    if name in PLAIN:
        return PLAIN[name](batch)
    kind, configuration, inputs, sizes = MODELS[name]
    made = getattr(importlib.import_module("transformers"), kind)
    config = made.config_class(**configuration)
    sizes = {"length": length, "targets": targets, **sizes}
    return made(config), _batch(inputs, config, batch, **sizes)


def _batch(inputs: str, config: Any, batch: int, length: int, targets: int) -> dict[str, Tensor]:
    """A batch of the kind that a model takes, with labels."""
    vocabulary = getattr(config, "vocab_size", 16384)

    def tokens(count: int) -> Tensor:
        return torch.randint(3, vocabulary, (batch, count))

    pictures, classes = torch.randn(batch, 3, 224, 224), torch.randint(0, 20, (batch,))
    if inputs == TOKENS:
        ids = tokens(length)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return {
        SEQ2SEQ: lambda: {"input_ids": tokens(length), "labels": tokens(targets)},
        PICTURES: lambda: {"pixel_values": pictures, "labels": classes},
        "segments": lambda: {"pixel_values": pictures, "labels": torch.randint(0, 20, (batch, 224, 224))},
        SPEECH: lambda: {"input_values": torch.randn(batch, length), "labels": torch.randint(1, 32, (batch, 40))},
        "spectrogram": lambda: {"input_features": torch.randn(batch, 80, length), "labels": tokens(targets)},
        "audio-classes": lambda: {"input_values": torch.randn(batch, length, 128), "labels": classes},
        PAIRS: lambda: {"input_ids": torch.randint(3, 16384, (batch, length)), "pixel_values": pictures,
                        "return_loss": torch.tensor(True)},
    }[inputs]()  # fmt: skip


class DiT(nn.Module):
    """Transformer blocks on patches, modulated by the time's embedding (Peebles and Xie 2023)."""

    def __init__(
        self, width: int = 768, blocks: int = 8, heads: int = 12, patches: int = 256, channels: int = 16
    ) -> None:
        super().__init__()
        self.heads, channels = heads, 16
        self.patch, self.place = nn.Linear(channels, width), nn.Parameter(torch.zeros(1, patches, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norms": nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)),
                    "modulation": nn.Linear(width, 6 * width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(blocks)
        )
        self.end = nn.Linear(width, channels)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        x, width = self.patch(noisy) + self.place, self.place.shape[-1]
        rates = torch.exp(torch.arange(width // 2, device=x.device) * (-math.log(1e4) / (width // 2)))
        angles = times[:, None] * rates
        c = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        for block in typing.cast("list[Any]", [*self.blocks]):
            shift, scale, gate, shift2, scale2, gate2 = block["modulation"](F.silu(c))[:, None].chunk(6, -1)
            y = block["norms"][0](x) * (1 + scale) + shift
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in block["qkv"](y).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + gate * block["out"](y)
            x = x + gate2 * block["mlp"](block["norms"][1](x) * (1 + scale2) + shift2)
        return self.end(x)


class AttentiveUNet(nn.Module):
    """Residual convolutions with attention at the smaller sizes, as diffusion models have them (Ho et al. 2020)."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256), heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.begin = nn.Conv2d(3, widths[0], 3, padding=1)
        places = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self._residual(a, b) for a, b in places)
        self.middle, self.qkv = self._residual(widths[-1], widths[-1]), nn.Conv2d(widths[-1], 3 * widths[-1], 1)
        self.up = nn.ModuleList(self._residual(2 * b, a) for a, b in reversed(places))
        self.end = nn.Conv2d(widths[0], 3, 3, padding=1)

    @staticmethod
    def _residual(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.GroupNorm(8, a),
            nn.SiLU(),
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(8, b),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Conv2d(b, b, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.begin(x), []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        q, k, v = (t.flatten(2).unflatten(1, (self.heads, -1)).mT for t in self.qkv(x).chunk(3, 1))
        x = x + F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2).view_as(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.end(x)


class LowRank(nn.Module):
    """A frozen product with a low-rank one beside it (LoRA, Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + F.linear(F.linear(F.dropout(x, 0.05), self.a), self.b)


class Attending(nn.Module):
    """A causal decoder whose attention is FlexAttention, PyTorch's `varlen_attn`, or few learned queries of all
    positions (Jaegle et al. 2021), with grouped keys; its logits are [batch, length, vocabulary]."""

    def __init__(self, kind: str, layers: int = 6, width: int = 768, latents: int = 64) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(16384, width), nn.Linear(width, 16384)
        self.q, self.kv, self.out, self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(layers))
            for a, b in ((width, width), (width, 512), (width, width), (width, 4 * width), (4 * width, width))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.latents = nn.Parameter(torch.randn(latents, width)) if kind == "pooled" else None
        self.flex: Any = torch.compile(flex_attention)

    def forward(self, ids: Tensor) -> Tensor:
        known = x = self.embed(ids)
        if self.latents is not None:
            x = self.latents.expand(len(ids), -1, -1)
        norms = zip(self.norms[::2], self.norms[1::2], strict=True)
        for q, kv, out, up, down, (first, second) in zip(
            self.q, self.kv, self.out, self.up, self.down, norms, strict=True
        ):
            context = known if self.latents is not None else first(x)
            x = x + out(self.attend(q(first(x)), *kv(context).chunk(2, -1)))
            x = x + down(F.gelu(up(second(x))))
        return self.head(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of 12 heads of queries and 4 of keys; q, k, v and the output are [batch, length, width]."""
        (batch, queries, width), keys = q.shape, k.shape[1]
        heads = [t.unflatten(-1, (-1, 64)) for t in (q, k, v)]
        if self.kind == "varlen":
            borders = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * queries
            packed = [t.repeat_interleave(12 // t.shape[2], 2).flatten(0, 1).to(torch.bfloat16) for t in heads]
            packed_q, packed_k, packed_v = packed
            made: Any = varlen_attn(packed_q, packed_k, packed_v, borders, borders, queries, keys, window_size=(-1, 0))
            return made.reshape(batch, queries, width).to(q.dtype)
        mask = None if self.kind == "pooled" else create_block_mask(_causal, None, None, queries, keys, q.device)
        made = self.flex(*(t.transpose(1, 2) for t in heads), block_mask=mask, enable_gqa=True)
        return made.transpose(1, 2).flatten(2)


class Normed(nn.Module):
    """Products of RMSNorm's outputs, each added to its input."""

    def __init__(self, width: int = 1024, layers: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.products = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


class Recurrent(nn.Module):
    """An LSTM as a language model, by cuDNN's kernels."""

    def __init__(self, vocabulary: int = 16384, width: int = 768) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 3, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0]).flatten(0, 1)


class TorchEncoder(nn.Module):
    """PyTorch's own encoder, pre-norm, with a causal mask as a tensor."""

    def __init__(self, vocabulary: int = 16384, width: int = 768, layers: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.embed, self.encoder = nn.Embedding(vocabulary, width), nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embed(ids), mask=mask)).flatten(0, 1)


class Mixer(nn.Module):
    """Products over patches and over channels in turns (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 512, layers: int = 8, patches: int = 196) -> None:
        super().__init__()

        def mlp(size: int, inner: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))

        self.stem = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.over_patches = nn.ModuleList(mlp(patches, 256) for _ in range(layers))
        self.over_channels = nn.ModuleList(mlp(width, 2048) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for i, (patches, channels) in enumerate(zip(self.over_patches, self.over_channels, strict=True)):
            x = x + patches(self.norms[2 * i](x).mT).mT
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def _dit(batch: int) -> Any:
    noisy, clean = torch.randn(batch, 256, 16), torch.randn(batch, 256, 16)
    return DiT(), (noisy, torch.rand(batch), clean), F.mse_loss


def _unet(batch: int) -> Any:
    return AttentiveUNet(), (torch.randn(batch, 3, 64, 64), torch.randn(batch, 3, 64, 64)), F.mse_loss


def _ids(model: nn.Module, batch: int) -> Any:
    ids = torch.randint(3, 16384, (batch, 512))
    return model, (ids, ids.flatten()), F.cross_entropy


def _lora(batch: int) -> Any:
    model: Any
    model, inputs, *_ = architecture("llama", batch)
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, LowRank(getattr(block.self_attn, name)))
    return model, inputs


def _attending(kind: str, batch: int) -> Any:
    """Its loss takes the logits as [batch, vocabulary, length], as PyTorch's documentation does: a view."""
    length = 64 if kind == "pooled" else 512
    of = Attending(kind), (torch.randint(3, 16384, (batch, 512)), torch.randint(3, 16384, (batch, length)))
    return *of, lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels)


def _compiled(batch: int, blocks: bool) -> Any:
    """PyTorch's encoder, compiled as a whole or block by block, with inductor's defaults."""
    model = TorchEncoder()
    if blocks:
        for layer in model.encoder.layers:
            layer.compile()
    else:
        model.compile()
    return _ids(model, batch)


PLAIN: dict[str, Any] = {
    "dit": _dit,
    "unet": _unet,
    "lstm": lambda batch: _ids(Recurrent(), batch),
    "torch-encoder": lambda batch: _ids(TorchEncoder(), batch),
    "mixer": lambda batch: (Mixer(), (torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))), F.cross_entropy),
    "lora": _lora,
    **{kind: functools.partial(_attending, kind) for kind in ("flex", "pooled", "varlen")},
    "rms-norm": lambda batch: (Normed(), tuple(torch.randn(2, 512 * batch, 1024)), F.mse_loss),
    "compiled": lambda batch: _compiled(batch, blocks=False),
    "compiled-blocks": lambda batch: _compiled(batch, blocks=True),
}
NAMES = [*MODELS, *PLAIN]


# Measured: a plain loop, in a process that was forked with its imports done.


def measured(name: str, dtype: str, limit: int | None, expandable: bool, closer: bool) -> dict[str, Any]:
    """Four steps of one architecture by a plain loop: what PyTorch's allocator counted.

    limit: bytes that the allocator may reserve. closer: also the blocks that were alive at the peak, which slows it.
    """
    warnings.simplefilter("ignore")
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    if closer:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
    model, inputs, *loss = architecture(name)
    model.to("cuda").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    batch: Any = (
        {k: v.to("cuda") for k, v in inputs.items()} if isinstance(inputs, dict) else [t.to("cuda") for t in inputs]
    )
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "peaks": [], "limit": limit}
    try:
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bf16"):
                value = loss[0](model(*batch[:-1]), batch[-1]) if loss else model(**batch).loss
            forward, saved = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            value.backward()
            backward = torch.cuda.max_memory_allocated()
            optimizer.step()
            optimizer.zero_grad()
            found["peaks"].append(torch.cuda.max_memory_allocated())
            found |= {"forward_peak": forward, "saved": saved, "backward_peak": backward, "loss": value.item()}
        found |= {"after": torch.cuda.memory_allocated(), "held": True}
    except torch.OutOfMemoryError:
        found["held"] = False
    found |= {"peak": max(found["peaks"], default=None), "reserved": torch.cuda.max_memory_reserved()}
    if closer:
        found["alive"] = _alive_at_peak(typing.cast("dict[str, Any]", torch.cuda.memory._snapshot()))
    return found


def _alive_at_peak(snapshot: dict[str, Any]) -> list[tuple[int, int, str]]:
    """The blocks that were alive at the peak: bytes, how many, and the innermost line outside PyTorch's allocator."""
    alive: dict[int, tuple[int, str]] = {}
    held, most, best = 0, 0, {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            frames = event.get("frames") or []
            place = " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames[:4])
            alive[event["addr"]] = (event["size"], place)
            held += event["size"]
            if held > most:
                most, best = held, dict(alive)
        elif event["action"] == "free_completed" and event["addr"] in alive:
            held -= alive.pop(event["addr"])[0]
    counted = Counter(best.values())
    return sorted(((n, count, place) for (n, place), count in counted.items()), key=lambda b: -b[0] * b[1])[:60]


def _forked(task: tuple[str, str, int | None, bool, bool]) -> dict[str, Any]:
    """`measured` in a child of this process, which has imported all and has not touched the GPU; failures as words."""
    context: Any = multiprocessing.get_context(START)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(theirs, task))
    try:
        _begin(child)
        theirs.close()
        return ours.recv() if ours.poll(180) else {"failure": "not ended after 180 s"}
    except EOFError:
        return {"failure": "its process ended without a word"}
    except RuntimeError as error:
        return {"failure": str(error)}
    finally:
        if child.pid:
            child.kill()
            child.join()


def _begin(child: Any) -> None:
    """Start it. filelock, which transformers imports, refuses a fork while another thread begins a process."""
    for attempt in range(100):
        try:
            with BEGINNING:
                child.start()
        except RuntimeError as error:
            if "fork" not in str(error) or attempt == 99:
                raise
            time.sleep(0.1)
        else:
            return


BEGINNING = threading.Lock()


def _work(answer: Any, task: tuple[str, str, int | None, bool, bool]) -> None:
    try:
        answer.send(measured(*task))
    except Exception as error:  # whatever a model raises: its row says it, and the others go on
        answer.send({"failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})


START = os.environ.get("START", "fork")

# Predicted.


def predicted(task: tuple[str, str], measured_peak: int | None) -> dict[str, Any]:
    """What `fit` says of one architecture on a GPU, and the smallest memory of which it says that the step fits, in
    steps of a hundredth of what was measured."""
    name, dtype = task
    workload = FactoryWorkload(
        factory=f"{PATH}:architecture",
        arguments={"name": name},
        model=UserModel(name=""),
        dtype=DTYPES[dtype],
        optimizer="adamw-foreach",
    )
    limits = [measured_peak * hundredths // 100 for hundredths in range(90, 150)] if measured_peak else []
    try:
        fits = fit_apart(workload, [budget_of_memory(limit) for limit in limits], "cuda", search=False)
    except StepscopeError as error:
        return {"failure": str(error)}
    first = fits[0]
    return {
        "peak": first.peak_bytes,
        "memory": msgspec.to_builtins(first.estimate.memory),
        "is_bound": first.is_bound,
        "unseen": msgspec.to_builtins(first.estimate.unseen),
        "smallest": next((limit for limit, fit in zip(limits, fits, strict=False) if fit.fits), None),
    }


DTYPES: dict[str, Dtype] = {"bf16": "bf16", "fp32": "fp32"}


def main() -> None:
    """Predict and measure each architecture, and write one document as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the document that is written, or gone on with")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--jobs", type=int, default=6, help="how many run side by side on the GPU")
    parser.add_argument("--predict-only", action="store_true", help="keep what was measured, and predict again")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="print a document's table, beside an older one's errors"
    )
    asked = parser.parse_args()
    if asked.show:
        shown = [json.loads(file.read_text()) for file in asked.show]
        print("\n".join(table(*shown[:2])))
        return
    if asked.out is None:
        parser.error("name the document that is to be written")
    document = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": {}}
    tasks = [(name, dtype) for name in asked.only.split(",") for dtype in asked.dtypes.split(",")]
    for name, dtype in tasks:
        document["rows"].setdefault(f"{name} {dtype}", {})

    def keep(task: tuple[str, str], said: dict[str, Any], key: str) -> None:
        document["rows"][" ".join(task)][key] = said
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(document, indent=1) + "\n")

    if not asked.predict_only:
        _measure(asked, tasks, keep)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as workers:
        peaks = {task: (document["rows"][" ".join(task)].get("measured") or {}).get("peak") for task in tasks}
        predictions = {workers.submit(predicted, task, peaks[task]): task for task in tasks}
        for done in concurrent.futures.as_completed(predictions):
            keep(predictions[done], done.result(), "predicted")
    if not asked.predict_only:
        document |= _circumstances()
        _within(asked, tasks, document["rows"], keep)
    print("\n".join(table(document)))


def _measure(asked: argparse.Namespace, tasks: list[tuple[str, str]], keep: Any) -> None:
    """Each by a plain loop, several side by side: their memory is the same."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked through CUDA, forked children could not use the GPU
    if importlib.util.find_spec("transformers") and START == "fork":
        for name in MODELS.values():
            getattr(importlib.import_module("transformers"), name[0])
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as workers:
        begun = {workers.submit(_forked, (*task, None, False, False)): task for task in tasks}
        for done in concurrent.futures.as_completed(begun):
            keep(begun[done], done.result(), "measured")


def _within(asked: argparse.Namespace, tasks: list[tuple[str, str]], rows: dict[str, Any], keep: Any) -> None:
    """Each again within the smallest memory that is said to be enough; those that were off also with a closer look."""
    begun: dict[Any, tuple[tuple[str, str], str]] = {}
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as workers:
        for task in tasks:
            row = rows[" ".join(task)]
            peak, smallest = (row.get("measured") or {}).get("peak"), (row.get("predicted") or {}).get("smallest")
            if not peak or not smallest:
                continue
            for key, expandable in (("within", False), ("within_expandable", True)):
                begun[workers.submit(_forked, (*task, smallest, expandable, False))] = (task, key)
            if abs(row["predicted"]["peak"] / peak - 1) > 0.003 and task[0] not in HELD_BACK:
                begun[workers.submit(_forked, (*task, None, False, True))] = (task, "closer")
        for done in concurrent.futures.as_completed(begun):
            keep(begun[done][0], done.result(), begun[done][1])


def _circumstances() -> dict[str, Any]:
    """The device and the versions."""
    names = ("stepscope", "torch", "transformers")
    query = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(), torch.backends.cudnn.version())"]
    device, _, cudnn = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().rpartition(" ")
    versions = {name: _version(name) for name in names} | {"cudnn": cudnn}
    return {"device": device, "versions": versions}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def error_of(row: dict[str, Any]) -> float | None:
    """How far the predicted peak is off, as a share of the measured one."""
    peak, said = (row.get("measured") or {}).get("peak"), (row.get("predicted") or {}).get("peak")
    return said / peak - 1 if peak and said else None


def table(document: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """The document as lines of text."""
    heads = (
        f"{'architecture':24}{'predicted B':>15}{'measured B':>15}{'error':>9}{'before':>9}{'fits in':>9}{'held':>12}"
    )
    lines: list[str] = [heads]
    judged: list[float] = []
    bounds: list[float] = []
    held: list[bool] = []
    for name, row in document["rows"].items():
        error, older = error_of(row), error_of({**row, **(before["rows"].get(name, {}) if before else {})})
        if error is None:
            why = (row.get("measured") or {}).get("failure") or (row.get("predicted") or {}).get("failure")
            lines.append(f"{name:24}{why}")
            continue
        is_bound = row["predicted"]["is_bound"]
        (bounds if is_bound else judged).append(error)
        limits = [row[key]["held"] for key in ("within", "within_expandable") if "held" in row.get(key, {})]
        held += limits
        words = {(): "", (True, True): "yes", (False, False): "no", (False, True): "expandable"}.get(
            tuple(limits), "default"
        )
        smallest = row["predicted"].get("smallest")
        said = f"{smallest / row['measured']['peak']:.2f}" if smallest else ""
        was = f"{100 * older:+.2f} %" if before and older is not None else ""
        lines.append(
            f"{name:24}{row['predicted']['peak']:>15,}{row['measured']['peak']:>15,}{100 * error:>+7.2f} %{was:>9}"
            f"{said:>9}{words and f'{words:>12}'}{'  a bound' if is_bound else ''}"
        )
    if judged:
        size = [abs(error) for error in judged]
        lines.append(
            f"{len(judged)} judged: median error {100 * statistics.median(size):.2f} %, from {100 * min(judged):+.2f} "
            f"to {100 * max(judged):+.2f} %; {len(bounds)} bounds; {sum(held)} of {len(held)} steps held."
        )
    versions = ", ".join(f"{name} {version}" for name, version in document.get("versions", {}).items() if version)
    return [*lines, f"{document.get('device')}, {versions}"]


if __name__ == "__main__":
    main()
