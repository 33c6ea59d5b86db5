"""Attention over packed documents by name: who takes it, who refuses it, and what the gate sees of mistakes."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.core.attention_support import find_fault, resolve_attention
from stepscope.core.errors import InputError
from stepscope.core.parts import ATTENTIONS, Attention, AttentionCall
from stepscope.training.attention.gate import check_attention_implementation, packed_shapes
from stepscope.training.attention.inputs import attend
from stepscope.training.attention.written_out import reference

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LENGTHS = (5, 0, 21, 7, 1)
BORDERS = torch.tensor([0, 5, 5, 26, 33, 34], dtype=torch.int32)
"""Two rows of 17: the first ends inside the document of 21, whose other 9 are a document of the second."""
PIECES = ((0, 0, 5), (0, 5, 17), (1, 0, 9), (1, 9, 16), (1, 16, 17))
"""Row, first and after of each document."""

HERE: list[Attention] = [
    name
    for name, record in ATTENTIONS.items()
    if record.documents and record.compiler is None and "cpu" in record.device_types
]


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, heads, 17, 16, generator=generator) for heads in (4, 2, 2)]


def document_by_document(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = torch.full_like(q, float("nan"))
    for row, first, after in PIECES:
        piece = (slice(row, row + 1), slice(None), slice(first, after))
        out[piece] = reference(q[piece], k[piece], v[piece], **options)
    return out


@pytest.mark.parametrize("name", [*HERE, "auto"])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": False, "window": 3}])
def test_documents_are_as_by_themselves(name: Attention, options: dict[str, Any]):
    tensors = [t.double().requires_grad_() for t in drawn()]
    found = attend(name, *tensors, cu_seqlens=BORDERS, **options)
    expected = document_by_document(*tensors, **options)
    gradient = torch.randn_like(expected)
    for got, true in zip(
        (found, *torch.autograd.grad(found, tensors, gradient)),
        (expected, *torch.autograd.grad(expected, tensors, gradient)),
        strict=True,
    ):
        assert torch.allclose(got, true, atol=1e-12)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "window": 3}])
def test_flex_makes_a_mask_of_them(options: dict[str, Any]):
    tensors = drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        found = attend("flex", *tensors, cu_seqlens=BORDERS, **options)
    assert torch.allclose(found, document_by_document(*tensors, **options), atol=1e-5)


def test_who_takes_none_refuses_them_in_a_line():
    q, k, v = drawn()
    refusing = [name for name, record in ATTENTIONS.items() if not record.documents]
    assert refusing == ["sdpa-flash", "unsafe", "chunked", "flash-tiled"]
    for name in refusing:
        with pytest.raises(
            InputError, match=f"attention {name} takes no documents in one row: choose one of reference"
        ):
            attend(name, q, k, v, causal=True, cu_seqlens=BORDERS)
    call = AttentionCall(device_type="cuda", dtype="bf16", head_dim=64, documents=True)
    assert find_fault("sdpa-flash", call, here=lambda *_: None) == "takes no documents in one row"
    assert resolve_attention("auto", call, here=lambda *_: None) == "flash"
    without_triton = resolve_attention("auto", call, here=lambda name, _: "is not there" if name == "flash" else None)
    assert without_triton == "sdpa-cudnn"


def test_wrong_borders_are_refused():
    q, k, v = drawn()
    with pytest.raises(InputError, match="cu_seqlens goes from 0 to 33, and the batch has 34 tokens"):
        attend("reference", q, k, v, causal=True, cu_seqlens=BORDERS[:-1])
    with pytest.raises(InputError, match="documents are of self-attention: 17 queries and 16 keys"):
        attend("reference", q, k[:, :, :16], v[:, :, :16], causal=True, cu_seqlens=BORDERS)


@pytest.mark.parametrize("name", HERE)
def test_the_gate_passes_them(name: Attention):
    report = check_attention_implementation(name, device=CPU, dtypes=("fp32", "bf16"), shapes=packed_shapes())
    report.require()
    assert {verdict.outcome for verdict in report.verdicts} == {"passed"}


def _forgets_documents(q: Tensor, k: Tensor, v: Tensor, *, bounds: Tensor, **options: Any) -> Tensor:
    return reference(q, k, v, **options)


def _forgets_rows(q: Tensor, k: Tensor, v: Tensor, *, bounds: Tensor, **options: Any) -> Tensor:
    return reference(q, k, v, bounds=bounds[:, :1].expand_as(bounds), **options)


def _one_key_too_many(q: Tensor, k: Tensor, v: Tensor, *, bounds: Tensor, **options: Any) -> Tensor:
    return reference(q, k, v, bounds=bounds - torch.tensor([1, 0]).view(2, 1, 1), **options)


def _one_key_too_few(q: Tensor, k: Tensor, v: Tensor, *, bounds: Tensor, **options: Any) -> Tensor:
    position = torch.arange(bounds.shape[2])
    return reference(q, k, v, bounds=torch.stack([bounds[0], (bounds[1] - 1).maximum(position + 1)]), **options)


@pytest.mark.parametrize("mistaken", [_forgets_documents, _forgets_rows, _one_key_too_many, _one_key_too_few])
def test_the_gate_sees_mistakes_at_borders(mistaken: Any):
    report = check_attention_implementation(
        "reference", device=CPU, dtypes=("fp32", "bf16"), shapes=packed_shapes(), function=mistaken
    )
    assert {verdict.dtype for verdict in report.failures} == {"fp32", "bf16"}
