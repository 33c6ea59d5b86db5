"""Compiles the kernels for Hopper as their defaults have them, and of KINDS with those of whole heads, and writes what
came of it as JSON.

A process of its own: where Triton interprets its kernels, as the tests here do, it cannot compile Gluon's.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from stepscope.kernels.flash.configuration import Problem, default_backward, default_forward, hopper_columns
from stepscope.kernels.hopper.backward import STAGES, hopper_gradients, hopper_gradients_of_heads
from stepscope.kernels.hopper.forward import hopper_forward, hopper_forward_of_heads
from stepscope.kernels.hopper.launch import (
    _BACKWARD_REGISTERS,
    _MOST_TILES,
    _PRODUCER_REGISTERS,
    _WORKER_REGISTERS,
    BLOCK_M,
    BLOCK_N,
)

SEQ = 8192


def problem(head_dim: int, causal: bool, seq: int = SEQ) -> Problem:
    return Problem(
        capability=(9, 0), head_dim=head_dim, bytes_per_element=2, causal=causal, log2_queries=seq.bit_length() - 1
    )


def columns(head_dim: int) -> int:
    found = hopper_columns(head_dim)
    assert found is not None
    return found


def tile(rows: int, head_dim: int) -> str:
    block = [1, 1, rows, columns(head_dim)]
    return f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"


def said_by_ptxas(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(text)
        ptx.flush()
        return subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", ptx.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names)
               if signature[name].startswith("*") or name.endswith(("_batch", "_head", "_row"))}  # fmt: skip
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as told:
        knobs.nvidia.dump_ptxas_log = True
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    said = told.getvalue() or said_by_ptxas(built.asm["ptx"])  # Triton compiles nothing that its cache has
    return {
        "serialised": "wgmma.mma_async instructions are serialized" in said,
        "spill_store_bytes": int(said.split(" bytes spill stores")[0].split()[-1]),
        "shared_bytes": built.metadata.shared,
        "products": built.asm["ptx"].count("wgmma.mma_async"),
    }


KINDS = {"": {}, "window": {"WINDOW": True}, "documents": {"DOCUMENTS": True}, "capped": {"CAPPED": True}}
PLAIN = {"WINDOW": False, "DOCUMENTS": False, "CAPPED": False}


def forward(head_dim: int, causal: bool, kind: str = "") -> dict[str, Any]:
    chosen = default_forward(problem(head_dim, causal)).hopper
    assert chosen is not None
    types = {"Q": tile(64, head_dim), "OUT": tile(64, head_dim), "LOGSUMEXP": "*fp32", "scale_log2": "fp32"}
    types |= {"BOUNDS": "*i32", "SINKS": "*fp32", "cap": "fp32"}
    types |= {"K": tile(chosen.block_n, head_dim), "V": tile(chosen.block_n, head_dim)}
    constants = {
        "GROUP": 1, "BLOCK_N": chosen.block_n, "STAGES": chosen.stages, "CONSUMERS": chosen.consumers,
        "CAUSAL": causal, "EVEN_KEYS": True, "TURNS": chosen.turns, "LATE": chosen.late,
        "REGISTERS": _WORKER_REGISTERS[chosen.consumers],
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS, **PLAIN, "HAS_SINKS": kind == "capped", **KINDS[kind],
    }  # fmt: skip
    options = {"num_warps": 4} | ({"maxnreg": chosen.max_registers} if chosen.max_registers else {})
    return compiled(hopper_forward, types, constants, options)


def backward(head_dim: int, causal: bool, kind: str = "") -> dict[str, Any]:
    chosen = default_backward(problem(head_dim, causal)).hopper
    assert chosen is not None
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    half = [BLOCK_M, columns(head_dim) // 2]
    swizzled = gl.NVMMASharedLayout.get_default_for(half, gl.float32)
    types = {"Q": tile(BLOCK_M, head_dim), "GRADIENT": tile(BLOCK_M, head_dim)}
    types |= {"K": tile(BLOCK_N, head_dim), "V": tile(BLOCK_N, head_dim)}
    types |= {"STATISTICS": f"tensordesc<fp32[1, {BLOCK_M}],{flat!r}>"}
    types |= {"SUMS": f"tensordesc<fp32{half},{swizzled!r}>", "DK": "*bf16", "DV": "*bf16"}
    types |= {"PARTS": "*fp32", "BOUNDS": "*i32", "cap": "fp32"}
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    constants = {
        "GROUP": 1, "CAUSAL": causal, "EVEN_KEYS": True, "V_IN_REGISTERS": chosen.v_in_registers,
        "STAGES": STAGES, "REAL_COLUMNS": head_dim, "SPREAD": chosen.spread and not kind,
        "SHARED": chosen.share and not kind, "AHEAD": chosen.ahead, **PLAIN, **KINDS[kind],
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": _BACKWARD_REGISTERS}
    return compiled(hopper_gradients, types, constants, options)


def of_heads(pass_: str) -> dict[str, Any]:
    """The kernels of whole heads, of 512 positions."""
    chosen = default_forward(problem(64, False, 512)).hopper
    assert chosen is not None and chosen.heads
    types = {name: tile(64, 64) for name in ("Q", "GRADIENT")} | {"LOGSUMEXP": "*fp32", "scale_log2": "fp32"}
    if pass_ == "forward":
        types |= {"OUT": tile(64, 64), "K": tile(chosen.block_n, 64), "V": tile(chosen.block_n, 64)}
        constants = {
            "GROUP": 1, "STAGES": chosen.stages, "CONSUMERS": chosen.consumers, "EVEN_KEYS": True,
            "REGISTERS": _WORKER_REGISTERS[chosen.consumers], "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        }  # fmt: skip
        return compiled(hopper_forward_of_heads, types, constants, {"num_warps": 4})
    types |= {"K": tile(BLOCK_N, 64), "V": tile(BLOCK_N, 64), "scale": "fp32"}
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    types |= dict.fromkeys(("DQ", "DK", "DV"), "*bf16") | {"STATISTICS": f"tensordesc<fp32[1, {BLOCK_M}],{flat!r}>"}
    constants = {"TILES": _MOST_TILES, "EVEN_KEYS": True, "STAGES": STAGES}
    return compiled(hopper_gradients_of_heads, types, constants, {"num_warps": 4, "maxnreg": _BACKWARD_REGISTERS})


if __name__ == "__main__":
    found = {
        f"{pass_.__name__} {head_dim} {'causal' if causal else 'full'} {kind}".strip(): pass_(head_dim, causal, kind)
        for pass_ in (forward, backward)
        for head_dim in map(int, sys.argv[3:])
        for causal, kind in ((True, ""), (False, ""), *((True, kind) for kind in sys.argv[2].split(",") if kind))
    }
    if sys.argv[2]:
        found |= {f"{each} heads": of_heads(each) for each in ("forward", "backward")}
    Path(sys.argv[1]).write_text(json.dumps(found))
