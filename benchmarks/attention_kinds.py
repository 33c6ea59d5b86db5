"""What a window, packed documents, a softcap, sinks, ALiBi and a bias cost, beside PyTorch's ways to compute them.

    python benchmarks/attention_kinds.py OUT.json [--seq-len 16384] [--rounds 7] [--kinds "slopes,bias of heads"]
    python benchmarks/attention_kinds.py --show OUT.json

One row of causal attention in bf16, 16 heads of head_dim 64, then 8 of 128. `flash` is stepscope's as it comes,
`triton` the same without its kernels for Hopper, `flex` FlexAttention compiled with a mask of its blocks, `varlen`
PyTorch's attention of packed sequences, `efficient` its memory-efficient kernel with what is added to scores as a mask
in bf16. Trained slopes and biases have gradients; a bias of heads has (heads, seq, seq) numbers. Forward, and forward
with backward: the sides of a kind take turns, in rounds of ten calls by CUDA events, after a round of warm-up; the
median of the rounds. Results are set beside flash's.
"""

import argparse
import functools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stepscope.kernels.documents import document_bounds
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.attention import flash_attention

CALLS, WINDOW, SOFTCAP, DOCUMENTS = 10, 1024, 50.0, 16
SHAPES = ((64, 16), (128, 8))
KINDS = ("causal", f"window {WINDOW}", f"{DOCUMENTS} documents", f"softcap {SOFTCAP:g}", "sinks", "slopes")
TRAINED = ("trained slopes", "bias by distance", "bias of heads")
PACKED = KINDS[:3]
SIDES = ("flash", "triton", "flex", "varlen", "efficient")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Side:
    """One way to compute a kind, and its times."""

    attend: Attend
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    found: list[Tensor] = field(default_factory=list[Tensor])
    forward_ms: list[float] = field(default_factory=list[float])
    both_ms: list[float] = field(default_factory=list[float])


def borders(length: int, device: torch.device) -> Tensor:
    """Random documents of a row, the same again."""
    cuts = sorted(random.Random(0).sample(range(1, length), DOCUMENTS - 1))
    return torch.tensor([0, *cuts, length], dtype=torch.int32, device=device)


def arguments(kind: str, heads: int, length: int, device: torch.device) -> dict[str, Any]:
    """What flash_attention gets for a kind."""
    if kind in TRAINED:
        size = {TRAINED[1]: (heads, 2 * length - 1), TRAINED[2]: (heads, length, length)}.get(kind)
        added = (
            arguments("slopes", heads, length, device)["slopes"] if size is None else torch.randn(size, device=device)
        )
        return {"slopes" if size is None else "bias": added.requires_grad_()}
    return {
        KINDS[0]: {},
        KINDS[1]: {"window": WINDOW},
        KINDS[2]: {"bounds": document_bounds(borders(length, device), 1, length)},
        KINDS[3]: {"softcap": SOFTCAP},
        KINDS[4]: {"sinks": torch.linspace(-1, 2, heads, device=device)},
        KINDS[5]: {"slopes": torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)},
    }[kind]


def without_hopper(q: Tensor) -> AbstractContextManager[None]:
    """A context in which the kernels in Triton run."""
    forward = msgspec.structs.replace(tuning_cache.forward_configuration(q, causal=True), hopper=None)
    backward = msgspec.structs.replace(tuning_cache.backward_configuration(q, causal=True), hopper=None)
    return tuning_cache.forced(forward=forward, backward=backward)


def by_flex(given: dict[str, Any], length: int, device: torch.device) -> Attend:
    """FlexAttention of a kind that it has."""
    window, bounds = given.get("window", length), given.get("bounds")
    first = torch.zeros(1, length, dtype=torch.int32, device=device) if bounds is None else bounds[0]
    softcap, slopes, bias = given.get("softcap"), given.get("slopes"), given.get("bias")

    def mask(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i
        seen = seen if window == length else seen & (i - j < window)
        return seen if bounds is None else seen & (j >= first[b, i])

    def of_scores(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            return softcap * torch.tanh(score / softcap)
        if bias is not None:
            return score + (bias[h, j - i + length - 1] if bias.dim() == 2 else bias[h, i, j])
        return score if slopes is None else score - slopes[h] * (i - j)

    torch.compiler.reset()
    blocks = create_block_mask(mask, 1, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    chosen = None if softcap is None and slopes is None and bias is None else of_scores
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, score_mod=chosen)


def by_varlen(given: dict[str, Any], length: int, device: torch.device) -> Attend:
    """PyTorch's varlen_attn of a kind that it has."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (not in every release)

    rows = borders(length, device) if "bounds" in given else torch.tensor([0, length], dtype=torch.int32, device=device)
    window = (given.get("window", 0) - 1, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        out = varlen_attn(q, k, v, rows, rows, length, length, window_size=window)
        assert isinstance(out, Tensor)  # it returns more only where it is asked for more
        return out.transpose(0, 1)[None]

    return attend


def by_efficient(given: dict[str, Any], length: int, device: torch.device) -> Attend:
    """PyTorch's memory-efficient attention of what is added to scores."""
    position = torch.arange(length, device=device)
    distance = position - position[:, None]
    hidden = distance > 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "slopes" in given:
            added = -given["slopes"][:, None, None] * distance.abs()
        else:
            added = given["bias"] if given["bias"].dim() == 3 else given["bias"][:, distance + length - 1]
        mask = added.masked_fill(hidden, -torch.inf).to(q.dtype)[None]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def sides_of(kind: str, q: Tensor) -> tuple[dict[str, Side], list[Tensor]]:
    """The ways to compute a kind, and what it trains beside queries, keys and values."""
    _, heads, length, _ = q.shape
    given = arguments(kind, heads, length, q.device)
    ours = functools.partial(flash_attention, causal=True, **given)
    sides = {"flash": Side(ours), "triton": Side(ours, functools.partial(without_hopper, q))}
    if kind != "sinks":
        sides["flex"] = Side(by_flex(given, length, q.device))
    if kind in PACKED:
        sides["varlen"] = Side(by_varlen(given, length, q.device))
    if "slopes" in given or "bias" in given:
        sides["efficient"] = Side(by_efficient(given, length, q.device))
    return sides, [each for each in given.values() if isinstance(each, Tensor) and each.requires_grad]


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one of CALLS calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def measure(kind: str, head_dim: int, heads: int, length: int, rounds: int) -> dict[str, Any]:
    """One kind at one head_dim: every side's times, in turns, and how far its results are from flash's."""
    torch.manual_seed(0)
    size = (1, length, heads, head_dim)  # of a projection's output, as in a model
    q, k, v, gradient = (torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]

    def forward(side: Side) -> object:
        with torch.no_grad():
            return side.attend(q, k, v)

    def both(side: Side) -> list[Tensor]:
        out = side.attend(leaves[0], leaves[1], leaves[2])
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *trained], gradient)]

    (sides, trained), shown = sides_of(kind, q), {}
    for name, side in [*sides.items()]:
        try:
            with side.around():
                side.found = [each.double() for each in both(side)]
        except Exception as error:  # a kernel that its compiler refuses, or a release without it
            shown[name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            del sides[name]
    for turn in range(-1, rounds):
        for side in [*sides.values()][:: 1 if turn % 2 else -1]:
            with side.around():
                times = timed(lambda of=side: forward(of)), timed(lambda of=side: both(of))
            if turn >= 0:
                side.forward_ms.append(times[0])
                side.both_ms.append(times[1])
    for name, side in sides.items():
        pairs = zip(side.found, sides["flash"].found, strict=True)
        apart = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        shown[name] = {"apart": apart, "forward_ms": side.forward_ms, "both_ms": side.both_ms}
    return {"kind": kind, "head_dim": head_dim, "heads": heads, "sides": shown}


def main(out: Path, length: int, rounds: int, kinds: Sequence[str]) -> None:
    """Measure all, and write what there is after each row; rows of the same device, versions and settings are kept."""
    name, versions = torch.cuda.get_device_name(), {"torch": torch.__version__, "triton": triton.__version__}
    settings = {"device": name, "versions": versions, "seq_len": length, "calls": CALLS, "rounds": rounds}
    kept = json.loads(out.read_text()) if out.exists() else {}
    rows = kept["rows"] if all(kept.get(key) == value for key, value in settings.items()) else []
    document = {**settings, "rows": rows}
    for head_dim, heads in SHAPES:
        for kind in kinds:
            if any((row["kind"], row["head_dim"]) == (kind, head_dim) for row in rows):
                continue
            row = measure(kind, head_dim, heads, length, rounds)
            rows.append(row)
            out.write_text(json.dumps(document, indent=1) + "\n")
            print(line(row), flush=True)


def line(row: dict[str, Any], names: Sequence[str] = SIDES) -> str:
    """A row of the table, with a column for each of these sides."""
    cells = [row["kind"], str(row["head_dim"])]
    ours = statistics.median(row["sides"]["flash"]["both_ms"])
    for name in names:
        side = row["sides"].get(name, {})
        if not side.get("both_ms"):
            cells.append("refused" if "refused" in side else "")
            continue
        forward, both = (statistics.median(side[key]) for key in ("forward_ms", "both_ms"))
        times = f", {both / ours:.2f} times" if name != "flash" else ""
        cells.append(f"{forward:.3f}, {both:.3f}{times}")
    return f"| {' | '.join(cells)} |"


def show(path: Path) -> None:
    """The table of a document."""
    document = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    print(f"{document['device']}, {versions}; one row of {document['seq_len']:,} positions, bf16, causal")
    print("ms of forward, then of forward and backward; times flash's forward and backward\n")
    names = [name for name in SIDES if any(name in row["sides"] for row in document["rows"])]
    print(f"| kind | head_dim | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for row in document["rows"]:
        print(line(row, names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"among {', '.join(KINDS + TRAINED)}")
    options = parser.parse_args()
    if options.show:
        show(options.out)
    else:
        main(options.out, options.seq_len, options.rounds, options.kinds.split(","))
