"""Categories without notes, against the notes of the same steps: recorded on a CPU, replayed on a GPU's allocator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.allocations.explain import CERTAINTIES, Explained, categories_of, explain
from stepscope.allocations.replay import BEFORE
from stepscope.allocations.snapshot import snapshot_from
from tests.allocations.recorded_steps import record, without_notes
from tests.conftest import at_length

pytestmark = pytest.mark.slow

WITHIN = 0.03
TOLD = ("parameters", "optimizer state", "gradients", "saved for backward", "cast copies")
VOCABULARY, WIDTH = 384, 96

Parameters = Any
Make = Callable[[Parameters], torch.optim.Optimizer]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """A GPT-2, whose head and embedding are one tensor."""
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def loss_of(model: nn.Module, ids: Any) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def loss_in_bf16(model: nn.Module, ids: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, ids)


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


CASES: dict[str, tuple[Callable[[], nn.Module], Make, dict[str, Any]]] = {
    "llama": (llama, adamw, {}),
    "gpt2, tied": (gpt2, adamw, {}),
    "one step": (llama, adamw, {"steps": 1}),
    "fused": (llama, lambda ps: torch.optim.AdamW(ps, fused=True), {}),
    "foreach": (gpt2, lambda ps: torch.optim.Adam(ps, foreach=True), {}),
    "gradients stay": (llama, adamw, {"set_to_none": False}),
    "sgd": (llama, lambda ps: torch.optim.SGD(ps, lr=0.1), {}),
    "momentum": (gpt2, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), {}),
    "two micro-batches": (llama, adamw, {"micro_batches": 2}),
    "begun before backward": (llama, adamw, {"begin": "backward"}),
    "begun before the optimizer": (llama, adamw, {"begin": "optimizer"}),
    "state made in the history": (llama, adamw, {"warm": 0}),
}


AT_LENGTH = ("one step", "foreach", "momentum", "begun before backward")
"""What is much like another case."""


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in AT_LENGTH), *at_length(*AT_LENGTH)])
def test_categories_are_those_of_the_notes(case: str, tmp_path: Path):
    make, optimize, choices = CASES[case]
    model = make()
    compare(record(tmp_path, model, optimize(model.parameters()), batch(), loss_of, **choices))


def test_under_autocast(tmp_path: Path):
    model = llama()
    compare(record(tmp_path, model, adamw(model.parameters()), batch(), loss_in_bf16))


def test_without_stacks_sizes_tell_what_stays(tmp_path: Path):
    model = llama()
    snapshot = record(tmp_path, model, adamw(model.parameters()), batch(), loss_of)
    true, found = both(snapshot, "none")
    for category in ("parameters", "optimizer state"):
        assert held(found, BEFORE)[category] == pytest.approx(held(true, BEFORE)[category], rel=WITHIN), category


def test_what_nothing_tells_was_there_before(tmp_path: Path):
    """Without a stack and without a state, nothing says that what stays are parameters."""
    model = llama()
    snapshot = record(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), batch(), loss_of)
    true, found = both(snapshot, "none")
    assert held(found, BEFORE)["there before"] == sum(
        held(true, BEFORE)[category] for category in ("parameters", "inputs")
    )
    assert set(found.alive(BEFORE)["sure"]) == {"guess"}


def batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 24))


def both(snapshot: dict[str, Any], *stacks: str) -> list[Explained]:
    """The snapshot explained by its notes, and by evidence with each of these stacks."""
    true = explain(snapshot_from(snapshot, "s"))
    found = [explain(snapshot_from(without_notes(snapshot, each), "s")) for each in stacks]
    for one in (true, *found):
        one.self_check()
    assert true.noted and not any(one.noted for one in found)
    assert all(set(one.allocations["sure"]) <= set(CERTAINTIES) for one in found)
    return [true, *found]


def held(explained: Explained, event: int) -> dict[str, int]:
    return {str(category): count for category, count in categories_of(explained.alive(event)).items()}


def compare(snapshot: dict[str, Any]) -> None:
    """At the start, the peak and the end, with stacks of C++ and without them."""
    kinds = ("all", "python")
    true, *by_evidence = both(snapshot, *kinds)
    for stacks, found in zip(kinds, by_evidence, strict=True):
        for event in (BEFORE, true.peak_event, len(true.snapshot.events) - 1):
            expected, told = held(true, event), held(found, event)
            for category in TOLD:
                assert told[category] == pytest.approx(expected[category], rel=WITHIN, abs=4096), (stacks, event)
