"""Tests the categories of memory without notes: optimizer state, gradients and frozen quantised weights, by stacks.

Each history has four parameters of 8 MiB without a stack, and two steps with their gradients and activations.
"""

from typing import Any

import polars as pl
import pytest
from benchmarks.recording_allocator import MIB, RecordingAllocator

from stepscope.allocations.explain import Explained, explain
from stepscope.allocations.snapshot import snapshot_from

SITE = "/env/lib/python3.12/site-packages"
Frames = list[dict[str, Any]]


def stack(*frames: str) -> Frames:
    """Frames from `file:name`, innermost first."""
    return [
        {"filename": file, "name": name, "line": 20 + i}
        for i, (file, _, name) in enumerate(frame.partition(":") for frame in frames)
    ]


MAIN = "/home/u/train.py:<module>"
WRAPPER = f"{SITE}/torch/optim/optimizer.py:wrapper"
CALL = f"{SITE}/torch/nn/modules/module.py:_call_impl"
FORWARD = stack("/home/u/model.py:forward", CALL, MAIN)
ENGINE = stack("??:torch::autograd::Engine::thread_main", "thread48.o:execute_native_thread_routine")
ZERO_GRAD = stack(f"{SITE}/torch/optim/optimizer.py:zero_grad", MAIN)
APPLY = f"{SITE}/torch/nn/modules/module.py:_apply"


class History:
    """The allocator of the step, and what each block of before the history was made by."""

    def __init__(self) -> None:
        self.allocator = RecordingAllocator(recording=False)
        self.made_by: dict[int, Frames] = {}

    def malloc(self, mib: int, frames: Frames, **more: Any) -> int:
        self.allocator.about = {"frames": frames}
        address = self.allocator.malloc(mib * MIB, **more)
        if not self.allocator.recording:
            self.made_by[address] = frames
        return address

    def free(self, address: int, frames: Frames) -> None:
        self.allocator.about = {"frames": frames}
        self.allocator.free(address)

    def step(self) -> None:
        """A step up to its optimizer's turn, whose gradients stay until `zero`."""
        kept = [self.malloc(4, FORWARD) for _ in range(4)]
        self.gradients = []
        for activation in reversed(kept):
            self.gradients.append(self.malloc(8, ENGINE))
            self.free(activation, [])

    def zero(self) -> None:
        for gradient in self.gradients:
            self.free(gradient, ZERO_GRAD)

    def explained(self, annotations: list[dict[str, Any]] | None = None) -> Explained:
        content = self.allocator.snapshot(external_annotations=annotations or [])
        for segment in content["segments"]:
            for block in segment["blocks"]:
                block["frames"] = self.made_by.get(block["address"], [])
        found = explain(snapshot_from(content, "s"))
        found.self_check()
        assert not found.replay.faults
        return found


def held(found: Explained) -> dict[str, int]:
    """MiB by category at the end."""
    alive = found.alive(len(found.snapshot.events) - 1)
    by_category = alive.group_by("category").agg(pl.col("requested").sum())
    return {category: size // MIB for category, size in by_category.iter_rows()}


def before(*frames: str, low: bool = True, states: int = 2) -> Explained:
    """A history that begins when an optimizer's states exist, at addresses before or after the parameters'."""
    history = History()
    owners = [*(stack(*frames) for _ in range(4 * states)), *([] for _ in range(4))]
    for owner in owners if low else reversed(owners):
        history.malloc(8, owner)
    history.allocator.start()
    for _ in range(2):
        history.step()
        history.zero()
    return history.explained()


OPTIMIZERS = {
    "a class of one's own": ("/home/u/train.py:step", WRAPPER, MAIN),
    "a helper of it": ("/home/u/low_rank.py:project", "/home/u/galore.py:step", WRAPPER, MAIN),
    "under no_grad": ("/home/u/x.py:step", f"{SITE}/torch/utils/_contextlib.py:decorate_context", WRAPPER, MAIN),
    "no subclass, in optim.py": ("/home/u/optim.py:step", MAIN),
    "no subclass, in a folder": ("/home/u/optimizers/mine.py:step", MAIN),
    "muon": ("/home/u/muon.py:step", MAIN),
    "apex": (f"{SITE}/apex/optimizers/fused_adam.py:step", MAIN),
    "deepspeed": (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:step", MAIN),
    "transformers": (f"{SITE}/transformers/optimization.py:step", MAIN),
    "bitsandbytes": (f"{SITE}/bitsandbytes/optim/optimizer.py:get_state_buffer",
                     f"{SITE}/bitsandbytes/optim/optimizer.py:init_state", WRAPPER, MAIN),
    "loaded": (f"{SITE}/torch/optim/optimizer.py:_process_value_according_to_param_policy", MAIN),
    "a class in the script, no subclass": ("/home/u/train.py:step", MAIN),
    "a script named after it": ("/home/u/train_muon.py:step", WRAPPER, "/home/u/train_muon.py:<module>"),
    "such a script, no subclass": ("/home/u/train_adamw.py:step", "/home/u/train_adamw.py:<module>"),
    "update": ("/home/u/optim.py:update", MAIN),
    "made with it": ("/home/u/my_adam.py:__init__", MAIN),
    "a function of the script": ("/home/u/train.py:adamw_update", "/home/u/train.py:train", MAIN),
    "a function of the script for all": ("/home/u/train.py:optimizer_step", MAIN),
}  # fmt: skip


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_state_of_before_the_history(case: str, low: bool):
    found = before(*OPTIMIZERS[case], low=low)
    assert held(found) == {"parameters": 32, "optimizer state": 64}
    sites = {row["site"]: row["category"] for row in found.alive(-1).iter_rows(named=True)}
    assert sites["before the history"] in {"parameters", "saved for backward"}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_state_that_the_history_makes(case: str):
    """The first step makes it, and scratch that dies within the step is a temporary."""
    history = History()
    for _ in range(4):
        history.malloc(8, [])
    history.allocator.start()
    for n in range(2):
        history.step()
        if not n:
            for _ in range(8):
                history.malloc(8, stack(*OPTIMIZERS[case]))
        scratch = history.malloc(8, stack(*OPTIMIZERS[case]))
        history.free(scratch, stack(*OPTIMIZERS[case]))
        history.zero()
    found = history.explained()
    assert held(found) == {"parameters": 32, "optimizer state": 64}
    assert set(found.allocations["category"]) <= {
        "parameters", "optimizer state", "gradients", "saved for backward", "temporaries"
    }  # fmt: skip
    assert (found.allocations["category"] == "temporaries").sum() == 2


@pytest.mark.parametrize("frames", [
    ("/home/u/trainer.py:train_step", MAIN), ("/home/u/trainer.py:step", MAIN), ("/home/u/optimized.py:step", MAIN),
])  # fmt: skip
def test_what_a_trainer_makes_in_its_step_is_no_state(frames: tuple[str, ...]):
    """A buffer of a size that no parameter has, kept by a trainer's own `step`."""
    history = History()
    for owner in ([], [], [], [], stack(*frames)):
        history.malloc(8 if not owner else 6, owner)
    history.allocator.start()
    for _ in range(2):
        history.step()
        history.zero()
    found = held(history.explained())
    assert found["parameters"] == 32 and "optimizer state" not in found


@pytest.mark.parametrize("begun", ["before", "within"])
@pytest.mark.parametrize("frames", [
    ("/home/u/train_muon.py:__init__", "/home/u/train_muon.py:<module>"), ("/home/u/optim/model.py:__init__", MAIN),
    ("/home/u/adamw.py:init_weights", "/home/u/adamw.py:<module>"), ("/home/u/optimizers/model.py:init_weights", MAIN),
])  # fmt: skip
def test_a_model_that_is_made_near_an_optimizer_is_none(frames: tuple[str, ...], begun: str):
    """A script named after its optimizer, and a folder of that name, may hold the model, too."""
    history = History()
    state = stack(f"{SITE}/torch/optim/adamw.py:_init_group", WRAPPER, MAIN)
    if begun == "within":
        history.allocator.start()
    for _ in range(4):
        history.malloc(8, stack(*frames))
    if begun == "before":
        for _ in range(8):
            history.malloc(8, state)
        history.allocator.start()
    for n in range(2):
        history.step()
        for _ in range(8 if begun == "within" and not n else 0):
            history.malloc(8, state)
        history.zero()
    assert held(history.explained()) == {"parameters": 32, "optimizer state": 64}


@pytest.mark.parametrize("own_thread", [True, False])
@pytest.mark.parametrize("annotated", [True, False])
def test_what_a_closure_computes_is_not_the_optimizers(annotated: bool, own_thread: bool):
    """Forward and backward inside `step`, as LBFGS and Lightning have it; the state beside them is. annotated: with
    the range that PyTorch puts round it all. own_thread: autograd's, of which a stack of Python shows nothing."""
    inside = ("/home/u/train.py:closure", f"{SITE}/torch/optim/lbfgs.py:step", WRAPPER, MAIN)
    history = History()
    for _ in range(4):
        history.malloc(8, [])
    history.allocator.start()
    ranges: list[tuple[int, int]] = []
    for n in range(2):
        begun = history.allocator.time_us = history.allocator.time_us + 10
        kept = [history.malloc(4, stack("/home/u/model.py:forward", CALL, *inside)) for _ in range(4)]
        kept.append(history.malloc(2, stack(f"{SITE}/torch/nn/functional.py:cross_entropy", *inside)))
        gradients = []
        for activation in reversed(kept[:4]):
            frames = [] if own_thread else stack(f"{SITE}/torch/autograd/graph.py:_engine_run_backward", *inside)
            gradients.append(history.malloc(8, frames))
            history.free(activation, [])
        history.free(kept[4], [])
        for _ in range(4 if not n else 0):
            history.malloc(8, stack(f"{SITE}/torch/optim/lbfgs.py:step", WRAPPER, MAIN))
        ranges.append((begun, history.allocator.time_us))
        history.allocator.time_us += 10
        for gradient in gradients:
            history.free(gradient, ZERO_GRAD)
    name = "Optimizer.step#LBFGS.step"
    found = history.explained([
        {"stage": stage, "name": name, "device": 0, "time_us": at}
        for both in ranges for stage, at in zip(("START", "END"), both, strict=True)
    ] if annotated else [])  # fmt: skip
    assert held(found) == {"parameters": 32, "optimizer state": 32}
    counts = dict(found.allocations.group_by("category").len().iter_rows())
    assert counts["gradients"] == 8 and counts["saved for backward"] == 10


def test_an_optimizer_that_backward_calls():
    """A hook on each gradient steps its parameter: what it keeps is state all the same."""
    hook = ("/home/u/mine.py:step", WRAPPER, "/home/u/train.py:hook",
            f"{SITE}/torch/autograd/graph.py:_engine_run_backward")  # fmt: skip
    assert held(before(*hook, MAIN)) == {"parameters": 32, "optimizer state": 64}


def test_gradients_and_state_by_their_stacks_where_a_history_has_no_backward():
    """Sixteen alike: stacks say that four are gradients and eight state, so four are parameters."""
    history = History()
    first, second = (stack(f"/home/u/optim.py:{name}", WRAPPER) for name in ("step", "second"))
    for frames in (first, [], ENGINE, second):
        for _ in range(4):
            history.malloc(8, frames)
    history.allocator.start()
    history.free(history.malloc(3, FORWARD), FORWARD)
    assert held(history.explained()) == {"parameters": 32, "gradients": 32, "optimizer state": 64}


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_by_their_stacks_and_state_without(trains: bool):
    """The model was moved to the device while stacks were kept, its optimizer's state made while they were not."""
    history = History()
    for frames, count in (([], 8), (stack(APPLY, f"{SITE}/torch/nn/modules/module.py:to", MAIN), 4)):
        for _ in range(count):
            history.malloc(8, frames)
    history.allocator.start()
    for _ in range(2):
        if trains:
            history.step()
            history.zero()
        else:
            history.free(history.malloc(3, FORWARD), FORWARD)
    assert held(history.explained()) == {"parameters": 32, "optimizer state": 64}


def test_equal_layers_are_no_state_where_stacks_show_inference_alone():
    """Six weights of one size, of a model that only runs forward: no third of them is Adam's."""
    history = History()
    for _ in range(6):
        history.malloc(8, [])
    history.allocator.start()
    for _ in range(3):
        history.free(history.malloc(3, FORWARD), FORWARD)
    assert held(history.explained()) == {"there before": 48}


QUANTISERS = {
    "bitsandbytes": (f"{SITE}/bitsandbytes/functional.py:quantize_4bit", f"{SITE}/bitsandbytes/nn/modules.py:_quantize",
                     f"{SITE}/bitsandbytes/nn/modules.py:to", APPLY, f"{SITE}/torch/nn/modules/module.py:to", MAIN),
    "from_pretrained": (f"{SITE}/bitsandbytes/functional.py:quantize_4bit",
                        f"{SITE}/transformers/modeling_utils.py:from_pretrained", MAIN),
    "hqq": (f"{SITE}/hqq/core/quantize.py:quantize", MAIN),
    "torchao": (f"{SITE}/torchao/quantization/quant_api.py:quantize_", MAIN),
}  # fmt: skip


@pytest.mark.parametrize("begun", ["before", "within"])
@pytest.mark.parametrize("case", QUANTISERS)
def test_a_frozen_quantised_base(case: str, begun: str):
    """QLoRA: the base of 100 MiB is quantised while it is loaded; products spread its weights out again, and free
    them. The rest of the model is moved to the device."""
    history = History()
    adapters = [history.malloc(8, []) for _ in range(4)] if begun == "before" else []
    if begun == "within":
        history.allocator.start()
    for _ in range(10):
        history.malloc(10, stack(*QUANTISERS[case]))
    history.malloc(6, stack(APPLY, f"{SITE}/torch/nn/modules/module.py:to", MAIN))
    adapters = adapters or [history.malloc(8, stack(APPLY, MAIN)) for _ in range(4)]
    if begun == "before":
        history.allocator.start()
    for _ in range(2):
        spread = history.malloc(40, stack(f"{SITE}/bitsandbytes/functional.py:dequantize_4bit", CALL, MAIN))
        history.free(spread, FORWARD)
        history.step()
        history.zero()
    assert held(history.explained()) == {"frozen quantised weights": 100, "parameters": 38}
