"""Linear layers whose three products take operands of 8 bits: forward, and both of backward.

    y  = x w^T        x, w in e4m3
    dx = dy w         dy in e5m2 scaled by tensor, in e4m3 scaled by row; w in e4m3
    dw = dy^T x

Eight bits reach from 2^-9 to 448 (e4m3) or from 2^-16 to 57344 (e5m2), so each operand is divided by a scale that takes
its largest magnitude to the end of that range, and the product is multiplied by both (Micikevicius et al. 2022,
arXiv:2209.05433, section 3.1). By tensor one scale serves a whole operand; by row each row of the left operand and each
column of the right one has its own, so that an outlier costs its neighbours nothing. Scales are of the operand itself
and of this step: nothing is remembered. Sums are kept in more bits, and results are bf16.

On a GPU, what is scaled by tensor is cast by kernels in Triton (kernels/eight_bits.py), each operand in the two
layouts that the products take; elsewhere, and by row, PyTorch's operators cast. Both give the same bits. Kept for
backward are operands in 16 bits, and scales: an operand of 8 bits would be kept by each layer that takes it, where
query, key and value share one of 16.

Weights stay bf16 (training/optimizer.py). Embeddings, the head, norms and attention are not touched.

Below stand the formats of blocks (core/float_formats.py), simulated: operands are rounded to numbers of the format,
which fp32 holds, and multiplied in fp32. Where a GPU has the product itself, `study formats --device cuda` compares.
"""

import contextlib
import functools
import importlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

from stepscope.core.attention_support import triton_fault
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS, BlockFormat, FloatFormat, ScaleRule
from stepscope.core.precisions import check_scaled_layers, check_scaled_rows, takes_scaled
from stepscope.recording.precision import scaled_mm
from stepscope.recording.step import Recorder

By = Literal["tensor", "row"]

_SMALLEST = torch.finfo(torch.float32).tiny
"""A scale is at least this, so that an operand of zeros divides by no zero."""

_END_OF_E4M3, _END_OF_E5M2 = torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float8_e5m2).max

_kernels: ModuleType | None = None
"""kernels/eight_bits.py, once a layer needs it: it imports Triton, which takes its time."""


def scale_products(parts: Sequence[nn.Module], by: By, dtype: str) -> None:
    """Let the linear layers in these modules multiply in 8 bits, in place; their parameters and names stay.

    Layers whose sizes are no multiples of 16 stay as they are. Raises InputError where no layer is left.
    """
    linears = [module for part in parts for module in part.modules() if type(module) is nn.Linear]
    scaled = [one for one in linears if takes_scaled(one.in_features, one.out_features)]
    check_scaled_layers(len(scaled), dtype)
    for module in scaled:
        setattr(module, "__class__", ScaledLinear)  # noqa: B010  (types know no such change)
        setattr(module, "by", by)  # noqa: B010
        kernels = by == "tensor" and module.weight.is_cuda and triton_fault("cuda") is None
        setattr(module, "kernels", kernels and _load() is not None)  # noqa: B010


def cast_as_on_a_gpu(model: nn.Module) -> None:
    """Let scaled layers of fake tensors, which stand for those of a GPU, allocate what the kernels there do.

    Raises InputError where Triton, with which they are defined, is missing.
    """
    layers = [module for module in model.modules() if type(module) is ScaledLinear and module.by == "tensor"]
    if layers and triton_fault("cuda") is not None:
        raise InputError(
            "products of 8 bits cannot be run on fake tensors without Triton: install it, or use the formulas"
        )
    for layer in layers:
        layer.kernels = _load() is not None


def _load() -> ModuleType:
    global _kernels  # noqa: PLW0603  (a compiler follows a name of the module, and no cache)
    _kernels = importlib.import_module("stepscope.kernels.eight_bits")
    return _kernels


def plain_products(model: nn.Module) -> None:
    """Undo `scale_products`: the linear layers multiply in the dtype of what they are given again."""
    for module in model.modules():
        if type(module) is ScaledLinear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010  (types know no such change)


class ScaledLinear(nn.Linear):
    """x w^T + bias with operands of 8 bits, forward and backward."""

    by: By
    kernels: bool
    """Whether the kernels cast, and not PyTorch's operators."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        check_scaled_rows(rows.shape[0])
        x, weight = rows.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        product: Tensor = (
            _ProductsByKernels.apply(x, weight) if self.kernels else _ScaledProducts.apply(x, weight, self.by)
        )  # pyright: ignore[reportAssignmentType]
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _ScaledProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: By) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return scaled_product(x, weight.t(), by, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous()
        wide = torch.float8_e5m2 if ctx.by == "tensor" else torch.float8_e4m3fn
        dx = scaled_product(dy, weight, ctx.by, left=wide) if ctx.needs_input_grad[0] else None
        dw = scaled_product(dy.t(), x, ctx.by, left=wide) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _ProductsByKernels(torch.autograd.Function):
    """The product of a layer by kernels, with a scale for each tensor: x (R, K), weight (N, K) to (R, N) in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert _kernels is not None
        scale_x, scale_w = _kernels.scale_of(x, _END_OF_E4M3), _kernels.scale_of(weight, _END_OF_E4M3)
        small_x = _kernels.cast_layouts(x, scale_x, torch.float8_e4m3fn)[0]
        small_w = _kernels.cast_layouts(weight, scale_w, torch.float8_e4m3fn)[0]
        ctx.save_for_backward(x, weight, scale_x, scale_w)
        return scaled_mm(small_x, small_w.t(), scale_x, scale_w, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        assert _kernels is not None
        x, weight, scale_x, scale_w = ctx.saved_tensors
        dy = gradients[0].contiguous()
        for_x, for_weight = ctx.needs_input_grad
        scale = _kernels.scale_of(dy, _END_OF_E5M2)
        along, across = _kernels.cast_layouts(dy, scale, torch.float8_e5m2, along=for_x, across=for_weight)
        dx = dw = None
        if for_x:
            dx = scaled_mm(along, _turned(weight, scale_w).t(), scale, scale_w)
        del along
        if for_weight:
            dw = scaled_mm(across, _turned(x, scale_x).t(), scale, scale_x)
        return dx, dw


def _turned(operand: Tensor, scale: Tensor) -> Tensor:
    """The transpose of an operand (R, K) in e4m3, row-major."""
    assert _kernels is not None
    return _kernels.cast_layouts(operand, scale, torch.float8_e4m3fn, along=False, across=True)[1]


def scaled_product(
    a: Tensor, b: Tensor, by: By, *, left: torch.dtype = torch.float8_e4m3fn, fast: bool = False
) -> Tensor:
    """a (R, K) b (K, N) as bf16 (R, N), with operands cast to 8 bits: a to `left`, b to e4m3.

    by: `tensor`, or `row`: a scale for each row of a and each column of b. fast: whether Tensor Cores may add up in
    fewer bits than fp32 has, as suits activations and not gradients.
    """
    of_a, of_b = (1, 0) if by == "row" else (None, None)
    small_a, scale_a = _scaled(a, left, of_a)
    small_b, scale_b = _scaled(b, torch.float8_e4m3fn, of_b)
    # The product takes rows of a and columns of b that lie together.
    return scaled_mm(small_a.contiguous(), small_b.t().contiguous().t(), scale_a, scale_b, fast=fast)


def _scaled(tensor: Tensor, dtype: torch.dtype, over: int | None) -> tuple[Tensor, Tensor]:
    """The tensor in 8 bits, and what it is to be multiplied by: of all of it, or of the slices along `over`."""
    largest = tensor.abs().amax() if over is None else tensor.abs().amax(dim=over, keepdim=True)
    end = torch.finfo(dtype).max
    # Times the end's inverse, which is what a GPU makes of a division by a number.
    scale = (largest.float() * (1 / end)).clamp(min=_SMALLEST)
    # One copy in fp32, divided in place: rounded, the largest may be just above the end, which casts to no number.
    return tensor.to(torch.float32, copy=True).div_(scale).clamp_(-end, end).to(dtype), scale


# Tensors rounded to numbers of few bits in blocks.


_EXPONENT, _FIRST_EXPONENT = 0x7F800000, 127
"""The bits of fp32's exponent, and its bias."""
_AT_ONCE = 1 << 14
"""Elements that are rounded together on a CPU, whose caches they fit: fewer than PyTorch shares among threads (32,768),
which would wait for each other at every operator. On two busy cores that took five times the processor time."""


def round_to(values: Tensor, number: FloatFormat, *, stochastic: bool = False) -> Tensor:
    """fp32 values at numbers of a format of 8 bits or fewer: the nearest, ties to even, or by chance one of the two
    beside; beyond the largest, the largest. NaN stays. Zeros keep their sign."""
    values = values.clamp(-number.largest, number.largest)
    # A power of two in whose binade the last place of fp32 is the spacing of the format at this value.
    shift, least = 23 - number.significand_bits, number.smallest_exponent + _FIRST_EXPONENT
    anchors = (values.view(torch.int32) & _EXPONENT).clamp_(min=least << 23).add_(shift << 23).view(torch.float32)
    if stochastic:
        spacing = anchors.mul_(2.0**-23)
        steps = values.abs().div_(spacing)
        whole = steps.floor()
        # Chance is added to what is left alone: fp32 rounds 3 + 0.99999994 to 4, beyond a largest of 3 steps.
        whole.add_(torch.rand_like(values).add_(steps.sub_(whole)).floor_())
        return whole.mul_(spacing).copysign_(values)
    return values.abs().add_(anchors).sub_(anchors).copysign_(values)


def round_blocks(
    values: Tensor, form: BlockFormat, *, weight: bool = False, rule: ScaleRule = "floor", stochastic: bool = False
) -> Tensor:
    """Values (..., K) as the numbers that they become in blocks along K: fp32, of their shape.

    weight: whether they are a weight, whose blocks may have several rows. rule: of a scale that is a power of two. A
    last block may be shorter. Zeros stay zeros. A block with NaN or an infinity becomes NaN, and so does the tensor
    where it has a scale, too: the standards leave both open.
    """
    if values.numel() == 0:
        return values.float()
    tiles, undo = _tiles(values, form, weight)
    element = FORMATS[form.element]
    of_tensor = None
    if form.tensor_scale:
        end = FORMATS[form.scale].largest * element.largest
        of_tensor = (tiles.abs().amax() / end).clamp(min=_SMALLEST)
    work = functools.partial(
        _round_tiles, form=form, element=element, of_tensor=of_tensor, rule=rule, stochastic=stochastic
    )
    each = tiles[0].numel()
    if tiles.device.type != "cpu" or tiles.numel() <= _AT_ONCE or torch.compiler.is_compiling():
        return undo(work(tiles))
    rounded = torch.empty_like(tiles)
    for start in range(0, len(tiles), max(1, _AT_ONCE // each)):
        part = slice(start, start + max(1, _AT_ONCE // each))
        rounded[part] = work(tiles[part])
    return undo(rounded)


def _tiles(values: Tensor, form: BlockFormat, weight: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The values in fp32 as (tiles of rows, rows, tiles, elements), filled up with zeros; and the way back."""
    matrix = values.float().reshape(-1, values.shape[-1]).contiguous()
    rows, columns = matrix.shape
    high = (form.rows or rows) if weight or form.square else 1
    wide = form.size or columns
    matrix = F.pad(matrix, (0, -columns % wide, 0, -rows % high)) if columns % wide or rows % high else matrix
    tiles = matrix.view(matrix.shape[0] // high, high, -1, wide)

    def undo(rounded: Tensor) -> Tensor:
        return rounded.view(matrix.shape)[:rows, :columns].reshape(values.shape)

    return tiles, undo


def _round_tiles(
    tiles: Tensor,
    *,
    form: BlockFormat,
    element: FloatFormat,
    of_tensor: Tensor | None,
    rule: ScaleRule,
    stochastic: bool,
) -> Tensor:
    largest = tiles.abs().amax((1, 3), keepdim=True)
    if form.powers_of_two:
        return _by_powers(tiles, largest, element, rule, stochastic)
    if of_tensor is None:
        scale = (largest * (1 / element.largest)).clamp(min=_SMALLEST)
        return round_to(tiles / scale, element, stochastic=stochastic).mul_(scale)
    scale = round_to(largest / element.largest / of_tensor, FORMATS[form.scale]) * of_tensor
    # A scale may round to zero; what it scales then becomes zero, too.
    return round_to(tiles / torch.where(scale == 0, math.inf, scale), element, stochastic=stochastic).mul_(scale)


def _by_powers(tiles: Tensor, largest: Tensor, element: FloatFormat, rule: ScaleRule, stochastic: bool) -> Tensor:
    bits = largest.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - element.significand_bits))
    power = (bits >> 23) - _FIRST_EXPONENT - element.largest_exponent
    if rule == "up":
        power = power + (largest > element.largest * _power_of_two(power))
    # What is not finite has no power of two, and a scale of NaN.
    finite = largest.isfinite()

    def rounded(power: Tensor) -> Tensor:
        scale = torch.where(finite, _power_of_two(power), math.nan)
        return round_to(tiles * _power_of_two(-power), element, stochastic=stochastic).mul_(scale)

    if rule != "square":
        return rounded(power)
    choices = torch.stack([rounded(power + move) for move in (-1, 0, 1)])
    # In units of the scale: the squares of small numbers would vanish in fp32.
    errors = (choices - tiles).mul_(_power_of_two(-power)).square_().sum((2, 4), keepdim=True)
    best = errors.argmin(0, keepdim=True).expand(1, *tiles.shape)
    return choices.gather(0, best).squeeze(0)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, of integers that are brought to -127 ... 127, as e8m0 has them."""
    exponent = exponent.clamp(-_FIRST_EXPONENT, _FIRST_EXPONENT)
    # 2^-127 is subnormal in fp32: half of its smallest normal number.
    return ((exponent + _FIRST_EXPONENT) << 23).clamp_(min=1 << 22).view(torch.float32)


# Operands in blocks as PyTorch's product on a GPU takes them: codes, and scales in cuBLASLt's layouts.


MULTIPLIED_ON = {
    "fp8-tensor": ((8, 9), True),
    "fp8-row": ((8, 9), True),
    "fp8-block": ((9, 0), False),
    "mxfp8": ((10, 0), True),
    "nvfp4": ((10, 0), True),
}
"""The formats that `torch.nn.functional.scaled_mm` multiplies, with the compute capability from which it does so, and
whether later ones do, too (ScaledBlas.cpp)."""

_SCALED_BY = {
    "fp8-tensor": ("TensorWise", "TensorWise"),
    "fp8-row": ("RowWise", "RowWise"),
    "fp8-block": ("BlockWise1x128", "BlockWise128x128"),
    "mxfp8": ("BlockWise1x32", "BlockWise1x32"),
    "nvfp4": ("BlockWise1x16", "BlockWise1x16"),
}
"""How it names the scales of the left and of the right operand."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes of e2m1 without a sign, in their order."""


def product_fault(form: BlockFormat, device: torch.device) -> str | None:
    """What a device lacks that multiplies operands of this format, in words; None where it has all."""
    first, later = MULTIPLIED_ON[form.name]
    here = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if here is not None and (here == first or (later and here > first)):
        return None
    needs = f"a GPU of compute capability {first[0]}.{first[1]}{' or later' if later else ''}"
    return f"it takes {needs}" + ("" if here is None else f", and this one has {here[0]}.{here[1]}")


@dataclass(frozen=True, kw_only=True)
class BlockOperand:
    """A matrix (R, K) of finite numbers in blocks along K, of sizes that blocks divide."""

    form: BlockFormat
    codes: Tensor
    """(R, K) in e4m3; or (R, K / 2) pairs of numbers of e2m1, of which the low bits hold the first."""
    scales: Tensor
    """(rows of blocks, blocks of a row), in the dtype of the format's scales."""
    of_tensor: Tensor | None

    @classmethod
    def of(cls, values: Tensor, form: BlockFormat, *, weight: bool = False) -> "BlockOperand":
        """The matrix by PyTorch's own casts, which `round_blocks` does not use. MX scales are those of `floor`."""
        tiles, undo = _tiles(values, form, weight)
        element, of_tensor = FORMATS[form.element], None
        largest = tiles.abs().amax((1, 3), keepdim=True)
        if form.powers_of_two:
            power = ((largest.view(torch.int32) >> 23) - _FIRST_EXPONENT - element.largest_exponent).clamp(min=-127)
            scales = (power + _FIRST_EXPONENT).to(torch.uint8).view(torch.float8_e8m0fnu)
            small = tiles * _power_of_two(-power)
        elif form.tensor_scale:
            of_tensor = (largest.amax() / (FORMATS[form.scale].largest * element.largest)).clamp(min=_SMALLEST)
            scales = (largest / element.largest / of_tensor).to(torch.float8_e4m3fn)
            of_block = scales.float() * of_tensor
            small = tiles / torch.where(of_block == 0, math.inf, of_block)
        else:
            scales = (largest * (1 / element.largest)).clamp(min=_SMALLEST)
            small = tiles / scales
        small = undo(small.clamp(-element.largest, element.largest))
        codes = small.to(torch.float8_e4m3fn) if form.element == "fp8-e4m3" else _pairs(round_to(small, element))
        return cls(form=form, codes=codes, scales=scales.view(scales.shape[0], scales.shape[2]), of_tensor=of_tensor)

    def numbers(self) -> Tensor:
        """What the codes and their scales stand for, in fp32."""
        codes, scales = self.codes, self.scales.float()
        if self.form.element == "fp8-e4m3":
            values = codes.float()
        else:
            both = codes.view(torch.uint8).long()
            signed = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=codes.device)
            values = signed[torch.stack([both & 15, both >> 4], 2)].view(codes.shape[0], -1)
        rows, columns = (values.shape[i] // scales.shape[i] for i in (0, 1))
        scales = scales if self.of_tensor is None else scales * self.of_tensor
        return values * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    def laid_out(self, *, left: bool) -> Tensor:
        """The scales as the product takes them of its left or its right operand: of blocks of a row the scales of one
        column lie together. Those of MX and NVFP4 lie in tiles of 128 x 4, of which 32 rows take 16 places each."""
        if self.scales.dtype == torch.float32:
            return self.scales.t().contiguous().t() if left else self.scales.t()
        rows, columns = self.scales.shape
        codes = F.pad(self.scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
        tiles = codes.view(len(codes) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
        return tiles.reshape(-1).view(self.scales.dtype)


def _pairs(numbers: Tensor) -> Tensor:
    """Numbers of e2m1 (R, K) as their codes, two in a byte."""
    codes = torch.bucketize(numbers.abs(), torch.tensor(_E2M1, device=numbers.device)) + 8 * numbers.signbit()
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.float4_e2m1fn_x2)


def block_product(a: BlockOperand, b: BlockOperand, *, fast: bool = False) -> Callable[[], Tensor]:
    """The call that gives a (R, K) b^T, of b (N, K), as bf16 (R, N): the library's on a GPU; on a CPU, which has none,
    in fp32 of what the operands stand for. fast: as of `scaled_product`. The number of blocks in a row is to be a
    multiple of 4."""
    if a.codes.device.type == "cpu":
        return lambda: _in_fp32(a.numbers(), b.numbers(), torch.bfloat16)
    return librarys_product(a, b, fast=fast)


def librarys_product(a: BlockOperand, b: BlockOperand, *, fast: bool = False) -> Callable[[], Tensor]:
    """PyTorch's own call of `block_product`, wherever the operands are."""
    right, scale_a, scale_b = b.codes.t(), a.laid_out(left=True), b.laid_out(left=False)
    by_a, by_b = (getattr(ScalingType, name) for name in _SCALED_BY[a.form.name])
    swizzle = SwizzleType.NO_SWIZZLE if a.scales.dtype == torch.float32 else SwizzleType.SWIZZLE_32_4_4

    def call() -> Tensor:
        product = F.scaled_mm(
            a.codes, right, scale_a, by_a, scale_b, by_b, swizzle_a=swizzle, swizzle_b=swizzle,
            output_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip
        if a.of_tensor is None or b.of_tensor is None:
            return product
        return product * (a.of_tensor * b.of_tensor).to(product.dtype)

    return call


@dataclass(eq=False)
class BlockLoss:
    """What tensors lose in blocks, added up."""

    form: BlockFormat
    _counts: Tensor | None = None

    def seen(self, before: Tensor, after: Tensor) -> None:
        """Count a tensor (rows, K): elements that were not zero, and of them those that are now; their blocks."""
        if before.numel() == 0:
            return
        there, gone = before != 0, (before != 0) & (after == 0)
        size = self.form.size or before.shape[1]
        in_blocks = [F.pad(each, (0, -each.shape[1] % size)).reshape(-1, size).any(1).sum() for each in (there, gone)]
        counts = torch.stack([there.sum(), gone.sum(), *in_blocks]).double()
        self._counts = counts if self._counts is None else self._counts + counts

    @property
    def shares(self) -> tuple[float, float]:
        """The share of the elements that become zero, and of the blocks in which one does."""
        if self._counts is None:
            return 0.0, 0.0
        there, gone, blocks, losing = self._counts.tolist()
        return gone / max(1, there), losing / max(1, blocks)


# Linear layers whose three products take such operands, whoever wrote the model.


Product = Literal["forward", "input", "weight"]
PRODUCTS: tuple[Product, ...] = ("forward", "input", "weight")
"""The products of a layer: y = x w^T, dx = dy w, and dw = dy^T x."""

_ROTATED = 16
"""Numbers that a rotation mixes (arXiv:2509.25149, section 4.2)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the products of a linear layer take operands in blocks, each along the dimension that is summed over.

    An operand of two products is rounded for each, from the numbers that it has, as hardware rounds what it turns.
    """

    form: BlockFormat
    products: tuple[Product, ...] = PRODUCTS
    """The others are as they were."""
    rule: ScaleRule = "floor"
    stochastic: bool = False
    """Whether gradients are rounded by chance."""
    rotate: bool = False
    """Whether a random Hadamard matrix turns both operands of the weight's gradient, whose product undoes it."""
    seen: Callable[[Tensor, Tensor], None] | None = None
    """Is told each operand (rows, K), before and after."""

    def rounded(self, operand: Tensor, *, weight: bool = False, gradient: bool = False) -> Tensor:
        """An operand (rows, K) in blocks along K, in fp32."""
        by_chance = self.stochastic and gradient
        result = round_blocks(operand, self.form, weight=weight, rule=self.rule, stochastic=by_chance)
        if self.seen is not None:
            self.seen(operand, result)
        return result


@contextlib.contextmanager
def block_products(model: nn.Module, recipe_of: Callable[[str], Recipe | None]) -> Iterator[None]:
    """While open, the linear layers of a model's forward multiply by the recipe of their module, by its path; where
    that is None, as they are. Their backward does so, too, also later.

    Linear are `F.linear`, and `torch.addmm` with a parameter; products of other operators stay as they are, and so do
    those of complex numbers and of quantised weights.
    """

    def product(path: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        recipe = recipe_of(path) if takes_blocks(input, weight) else None
        return None if recipe is None else _linear(recipe, input, weight, bias)

    with linears_replaced(model, product):
        yield


@contextlib.contextmanager
def linears_replaced(
    model: nn.Module, product: Callable[[str, Tensor, Tensor, Tensor | None], Tensor | None]
) -> Iterator[None]:
    """While open, linear layers are what `product` makes of the path of their module, their input, weight and bias; as
    they are where it is None.

    They are found where they are called: a mode would miss those that a checkpoint runs again in backward, whose call
    a mode itself turns off.
    """
    linear, addmm = F.linear, torch.addmm
    with _running(model) as running, contextlib.ExitStack() as undo:

        def our_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            made = product(running(), input, weight, bias)
            return linear(input, weight, bias) if made is None else made

        def our_addmm(*args: Any, **kwargs: Any) -> Tensor:
            made = None
            if len(args) == 3 and not kwargs and isinstance(args[2], nn.Parameter):
                made = product(running(), args[1], args[2].t(), args[0])
            return addmm(*args, **kwargs) if made is None else made

        # What is compiled already calls them as they are: they do something else in each run.
        left_alone: Callable[[Any], Any] = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda f: f
        for place, name, function in ((F, "linear", our_linear), (torch, "addmm", our_addmm)):
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, left_alone(function))
        yield


@contextlib.contextmanager
def _running(model: nn.Module) -> Iterator[Callable[[], str]]:
    """While open, tells the path of the module whose forward runs."""
    running: list[str] = []

    def leave(*_: object) -> None:
        running.pop()

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield lambda: running[-1] if running else ""


def takes_blocks(input: Tensor, weight: Tensor) -> bool:
    """Whether blocks can take the place of a linear layer's operands: plain tensors of floating numbers."""
    return input.is_floating_point() and not _is_quantised(weight)


def _is_quantised(weight: Tensor) -> bool:
    """Whether a weight is no plain tensor of floating numbers."""
    return is_traceable_wrapper_subclass(weight) or not weight.is_floating_point()


def _block_of(path: str) -> int | None:
    """The number of the block that a module is in."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def first_and_last(paths: Sequence[str]) -> set[str]:
    """The paths of the linear layers that recipes leave alone: those outside of numbered blocks, and those in the first
    and the last block where there are more than two; where those are none, the first and the last layer."""
    numbers = {path: _block_of(path) for path in paths}
    known = [number for number in numbers.values() if number is not None]
    ends = (None, min(known), max(known)) if len(set(known)) > 2 else (None,)
    return {path for path, number in numbers.items() if known and number in ends} or {paths[0], paths[-1]}


def _linear(recipe: Recipe, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = _dtype_of(input)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1]).to(dtype)
    product: Tensor = _BlockProducts.apply(rows, weight.to(dtype), recipe)  # pyright: ignore[reportAssignmentType]
    product = product.view(*input.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias.to(dtype)


class _BlockProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        if torch._C._current_graph_task_id() != -1:  # a checkpoint runs it again: these operands have been counted
            recipe = replace(recipe, seen=None)
        if "forward" in recipe.products:
            return _in_fp32(recipe.rounded(x), recipe.rounded(weight, weight=True), x.dtype)
        return _in_fp32(x, weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), recipe, dy = ctx.saved_tensors, ctx.recipe, gradients[0]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            left, right = dy, weight.t()
            if "input" in recipe.products:
                left, right = recipe.rounded(left, gradient=True), recipe.rounded(right, weight=True)
            dx = _in_fp32(left, right, x.dtype)
        if ctx.needs_input_grad[1]:
            left, right = dy.t(), x.t()
            if "weight" in recipe.products:
                if recipe.rotate:
                    left, right = _rotated(left, right)
                left, right = recipe.rounded(left, gradient=True), recipe.rounded(right)
            dw = _in_fp32(left, right, weight.dtype)
        return dx, dw, None


def _in_fp32(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (R, K) b^T, of b (N, K), as (R, N) in a dtype, added up in fp32."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t()).to(dtype)


def _rotated(*operands: Tensor) -> list[Tensor]:
    """Operands (rows, K), filled up with zeros, with every 16 numbers of a row turned by one orthogonal matrix."""
    step = torch.ones(1, 1, device=operands[0].device)
    while len(step) < _ROTATED:
        step = torch.cat([torch.cat([step, step], 1), torch.cat([step, -step], 1)])
    signs = torch.randint(2, (_ROTATED, 1), device=step.device) * 2 - 1
    turn = step * signs / math.sqrt(_ROTATED)
    turned: list[Tensor] = []
    for operand in operands:
        filled = F.pad(operand.float(), (0, -operand.shape[1] % _ROTATED)).contiguous()
        turned.append(_in_fp32(filled.view(-1, _ROTATED), turn.t(), torch.float32).view(filled.shape))
    return turned


# Their sizes alone, to predict memory: nothing is rounded or multiplied, and what a GPU that multiplies such blocks
# would make is made and kept.


@dataclass(eq=False)
class OperandSizes(Recorder):
    """Linear layers of a model in blocks of a format, as tensors of bytes, for a step on fake tensors.

    A layer keeps its input in the format, laid out as the weight's gradient takes it; layers of one input keep it once.
    All other operands are there for a product alone (`allocations/prediction/estimate.py`).
    """

    form: BlockFormat
    taken: set[str] = field(default_factory=set[str])
    """Paths of the modules whose products take such operands."""
    left: dict[str, str] = field(default_factory=dict[str, str])
    """Why others do not, by path."""
    flops: int = 0
    """FLOPs of the last step's products in blocks, with those that are computed again."""
    _last: tuple["weakref.ref[Any]", tuple[int, ...], TensorWeakRef] | None = None
    """The storage and the shape of the input that was last kept, and it in the format."""

    def step_begins(self) -> None:
        self.flops = 0

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator["OperandSizes"]:
        """While open, linear layers in numbered blocks of the model, or all without such blocks, are of these sizes."""
        is_numbered = any(_block_of(path) is not None for path, _ in model.named_modules())

        def product(path: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
            if is_numbered and _block_of(path) is None:
                return None
            if (why := self._unlike(input, weight)) is not None:
                self.left[path] = why
                return None
            self.taken.add(path)
            return self._linear(input, weight, bias)

        with linears_replaced(model, product):
            yield self

    def _unlike(self, input: Tensor, weight: Tensor) -> str | None:
        """Why the products of a layer cannot take operands in blocks, in words; None where they can."""
        if _is_quantised(weight):
            return "its weight is quantised"
        if (bits := 8 * _dtype_of(input).itemsize) != 16:
            return f"its operands have {bits} bits"
        sizes = (*weight.shape, input.numel() // max(1, input.shape[-1]))
        return self.form.unfit(*sizes)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype, rows = _dtype_of(input), input.reshape(-1, input.shape[-1])
        product: Tensor = _SizedProducts.apply(rows, weight, self, dtype)  # pyright: ignore[reportAssignmentType]
        product = product.view(*input.shape[:-1], weight.shape[0])
        return product if bias is None else product + bias.to(dtype)

    def bytes_of(self, like: Tensor, rows: int, columns: int, *, weight: bool = False) -> Tensor:
        """An operand (rows, columns) in blocks along its columns."""
        return like.new_empty(self.form.bytes_of(rows, columns, weight=weight), dtype=torch.uint8)

    @staticmethod
    def product(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """What a product returns: one of nothing, of no FLOPs, for which the library's workspace is there, too."""
        return like.new_empty(rows, 0, dtype=dtype) @ like.new_empty(0, columns, dtype=dtype)

    def kept(self, x: Tensor) -> Tensor:
        """An input (rows, K) in the format, as the weight's gradient takes it: the one that is kept already, if any."""
        storage = x.untyped_storage()
        if self._last is not None and self._last[0]() is storage and self._last[1] == tuple(x.shape):
            before = self._last[2]()
            if before is not None:
                return before
        made = self.bytes_of(x, x.shape[1], x.shape[0])
        self._last = weakref.ref(storage), tuple(x.shape), TensorWeakRef(made)
        return made


def _dtype_of(input: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies."""
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype


class _SizedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: OperandSizes, dtype: torch.dtype) -> Tensor:
        (rows, inner), outer = x.shape, weight.shape[0]
        sizes.flops += 2 * rows * inner * outer
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(sizes.kept(x))
        ctx.of = sizes, x.dtype, weight.dtype, dtype, (rows, inner, outer)
        _operands = sizes.bytes_of(x, rows, inner), sizes.bytes_of(x, outer, inner, weight=True)
        return sizes.product(x, rows, outer, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        sizes, of_x, of_weight, dtype, (rows, inner, outer) = ctx.of
        (dy,), dx, dw = gradients, None, None
        along = across = turned = None
        if ctx.needs_input_grad[0]:
            along, turned = sizes.bytes_of(dy, rows, outer), sizes.bytes_of(dy, inner, outer, weight=True)
        if ctx.needs_input_grad[1]:
            _kept, across = ctx.saved_tensors, sizes.bytes_of(dy, outer, rows)
        if ctx.needs_input_grad[0]:
            sizes.flops += 2 * rows * inner * outer
            dx = sizes.product(dy, rows, inner, dtype).to(of_x)
        del along, turned
        if ctx.needs_input_grad[1]:
            sizes.flops += 2 * rows * inner * outer
            dw = sizes.product(dy, outer, inner, dtype).to(of_weight)
        del across
        return dx, dw, None, None
