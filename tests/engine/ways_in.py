"""Steps that users bring to `fit`: adapters on frozen and quantised weights, blocks that checkpoint themselves, others'
optimizers and attention. `python -m tests.engine.ways_in FILE` measures each on a GPU."""

import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 4, 2, 1000


class Block(nn.Module):
    """A block of GPT-2's kind, which runs again in backward where it is told to."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpoints else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        heads = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attend(query, key, value).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of heads (B, H, S, D)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Model(nn.Module):
    """A language model of such blocks, whose forward returns the loss."""

    def __init__(self, block: type[Block] = Block, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 8 in fp32."""

    def __init__(self, base: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.base = base
        self.into, self.back = nn.Linear(inner, 8, bias=False), nn.Linear(8, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.back(self.into(x.float())).to(x.dtype)


def tokens(samples: int = 4, length: int = 256) -> Tensor:
    return torch.randint(VOCABULARY, (samples, length))


def adapters(checkpoints: bool = False) -> tuple[nn.Module, Tensor]:
    """Adapters written by hand on a frozen model in bf16."""
    block = type("Frozen", (Block,), {"checkpoints": checkpoints})
    model = Model(block).bfloat16().requires_grad_(False)
    model.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_(True))
    for each in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            base = getattr(each, name)
            setattr(each, name, Adapted(base, base.in_features, base.out_features))
    return model, tokens()


def peft(checkpoints: bool = False) -> tuple[nn.Module, Tensor]:
    """Adapters that peft makes."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    model = Model(type("Frozen", (Block,), {"checkpoints": checkpoints})).bfloat16()
    model.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_(True))
    layers = ["qkv", "out", "up", "down"]
    return get_peft_model(model, LoraConfig(r=8, lora_dropout=0.1, target_modules=layers)), tokens()


def quantised(checkpoints: bool = False, double: bool = True) -> tuple[nn.Module, Tensor]:
    """Adapters on weights of 4 bits by bitsandbytes. double: whether their scales are quantised, too."""
    import bitsandbytes  # pyright: ignore[reportMissingImports]

    model, batch = adapters(checkpoints)
    for part in [part for part in model.modules() if isinstance(part, Adapted)]:
        linear = part.base
        assert isinstance(linear, nn.Linear)
        of = {"compress_statistics": double, "quant_type": "nf4"}
        packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.bfloat16, **of)
        packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **of)
        packed.bias = linear.bias
        part.base = packed.to("cpu")  # which quantises them
    return model, batch


with warnings.catch_warnings(action="ignore"):  # that there is no CUDA
    CAST = torch.autocast("cuda", torch.bfloat16)


class Casting(nn.Module):
    """A model that casts by itself, by an object that is made before the step or in it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.model, self.before = Model(), before

    def forward(self, tokens: Tensor) -> Tensor:
        with CAST if self.before else torch.autocast("cuda", torch.bfloat16):
            return self.model(tokens)


def casting(before: bool = True) -> tuple[nn.Module, Tensor]:
    return Casting(before), tokens()


class Packed(Block):
    """A block with PyTorch's attention of sequences of several lengths in a row."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        samples, _, length, width = query.shape
        ends = torch.arange(0, samples * length + 1, length, dtype=torch.int32, device=query.device)
        query, key, value = (part.transpose(1, 2).reshape(-1, HEADS, width) for part in (query, key, value))
        out: Any = varlen_attn(query, key, value, ends, ends, length, length, window_size=(-1, 0))
        return out.view(samples, length, HEADS, width).transpose(1, 2)


def packed() -> tuple[nn.Module, Tensor]:
    return Model(Packed).bfloat16(), tokens()


def plain() -> tuple[nn.Module, Tensor]:
    """A model whose optimizer an option chooses."""
    return Model(), tokens()


def updated(name: str, library: str = "bitsandbytes") -> tuple[nn.Module, Tensor, None, torch.optim.Optimizer]:
    """The model of `plain` with an optimizer of this name from another library."""
    optim = importlib.import_module(f"{library}.optim")
    model, batch = plain()
    return model, batch, None, getattr(optim, name)(model.parameters())


attend_flexibly = torch.compile(flex_attention)


def flexible(compiled: bool, shared: int = 1, length: int = 256) -> tuple[nn.Module, Tensor]:
    """FlexAttention of a causal mask, as one kernel or as PyTorch runs it otherwise."""

    class Flexible(Block):
        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            length = query.shape[2]
            mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device=query.device)
            attend = attend_flexibly if compiled else flex_attention
            return attend(query, key[:, ::shared], value[:, ::shared], block_mask=mask, enable_gqa=shared > 1)

    return Model(Flexible).bfloat16(), tokens(length=length)
