"""The type that a decoded name is, and the parting of a C++ name into function and template arguments."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int32"]
Unit = Literal["tensor core", "cuda core"]
Library = Literal[
    "cuBLAS", "CUTLASS", "cuDNN", "Triton", "ATen", "NCCL", "FlashAttention", "xFormers", "CUB", "Thrust", "Tensile",
    "MIOpen", "Composable Kernel", "Apex", "Transformer Engine",
]  # fmt: skip

NAME_LIMIT = 4096
"""Characters of a name that are looked at. What says something stands near the front; a hostile name may be huge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelName:
    """A kernel's name decoded. What the name does not say is None or empty, never guessed."""

    name: str
    function: str
    """The function with its namespaces, without return type, template arguments and parameters."""
    arguments: str = ""
    """The template arguments, as written."""
    operation: str = ""
    """What runs: the function without namespaces, or what a wrapper such as cutlass::Kernel2 is instantiated with."""
    library: Library | None = None
    architecture: str | None = None
    """The GPU architecture that the kernel was written for: sm80, gfx942."""
    input_dtype: Dtype | None = None
    """The type in which products are taken, or elements read: tf32 where fp32 operands are rounded to it."""
    accumulate_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    transposes: Literal["nn", "nt", "tn", "tt"] | None = None
    """Whether A and B are transposed (t) or not (n), as column-major operands, in the terms of BLAS."""
    tile: tuple[int, int, int | None] | None = None
    """What a thread block works on at a time: M, N, K of a product; queries and keys of attention."""
    cluster: tuple[int, int] | None = None
    """Thread blocks that work together and share what they load, along M and N."""
    stages: int | None = None
    """Tiles of K held in shared memory at once: one in use, the others on their way."""
    split_k: bool = False
    """Whether the K of one tile is divided among several thread blocks."""
    second_pass: bool = False
    """Whether the kernel only adds up the partial results of a split product."""
    sliced_k: int | None = None
    """Slices of K within one thread block."""
    unit: Unit | None = None
    schedule: tuple[str, ...] = ()
    head_dim: int | None = None
    """The largest head dimension that the kernel takes; smaller ones are padded."""


_BRACKETS = re.compile(r"[<(){}\[\]]|(?<!-)>")  # an arrow closes nothing
_OPENS = {">": "<", ")": "(", "}": "{", "]": "["}
_ANONYMOUS = "(anonymous namespace)"
_MARK = "\x00"  # stands for the anonymous namespace, whose brackets are none


class NameParts(NamedTuple):
    function: str
    arguments: str
    complete: bool
    """Whether the template arguments came to their end."""


def split_name(name: str) -> NameParts:
    """Function and template arguments of a C++ name, mangled or not, cut off or not; other names come back whole."""
    text = name[:NAME_LIMIT].strip()
    if text.startswith("_Z") and (mangled := _split_mangled(text)):
        return mangled
    # CUDA kernels return void, and demanglers say so of templates only. Nsight Systems writes <unnamed>.
    text = text.removeprefix("void ").replace(_ANONYMOUS, _MARK).replace("<unnamed>", _MARK)
    pieces: list[str] = []
    arguments: list[str] = []
    open_brackets: list[str] = []
    start = inside = 0
    for match in _BRACKETS.finditer(text):
        bracket, at = match[0], match.start()
        if bracket not in _OPENS:
            if not open_brackets:
                pieces.append(text[start:at])
                start = len(text)
                if bracket == "(":  # the parameters begin
                    break
                inside = at + 1
            open_brackets.append(bracket)
        elif open_brackets and _OPENS[bracket] == open_brackets[-1]:  # else a comparison
            open_brackets.pop()
            if not open_brackets:
                if bracket == ">":
                    arguments.append(text[inside:at])
                start = at + 1
    else:
        if open_brackets and open_brackets[0] == "<":  # cut off within the template arguments
            arguments.append(text[inside:])
    pieces.append(text[start:])
    function = "".join(pieces).strip() or text
    written = ", ".join(arguments)
    return NameParts(function.replace(_MARK, _ANONYMOUS), written.replace(_MARK, _ANONYMOUS), not open_brackets)


_IDENTIFIER = re.compile(r"[KV]*(?:(St)|(\d{1,4}))")


def _split_mangled(text: str) -> NameParts | None:
    """The names in an Itanium-mangled function name, as far as they are spelt out."""
    parts: list[str] = []
    nested = text.startswith("_ZN")
    at = 3 if nested else 2
    while match := _IDENTIFIER.match(text, at):
        at = match.end()
        if match[1]:
            parts.append("std")
            continue
        part, at = text[at : at + int(match[2])], at + int(match[2])
        parts.append(_ANONYMOUS if part.startswith("_GLOBAL__N") else part)
        if not nested:
            break
    if not parts:
        return None
    arguments = text[at + 1 :] if text[at : at + 1] == "I" else ""
    if length := re.match(r"\d{1,4}", arguments):  # a type spelt out: what a wrapper is instantiated with
        arguments = arguments[length.end() : length.end() + int(length[0])]
    return NameParts("::".join(parts), arguments, not arguments)
