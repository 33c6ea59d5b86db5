"""`stepscope.fit`: will it fit, and if not, what would make it fit. Nothing is run on real tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.app.api.running import check_one_model, given, gradients_kept, of_factory, of_object, textbook
from stepscope.app.api.shown import Shown, ShownAnswer, shown
from stepscope.core.errors import InputError
from stepscope.core.parts import Attention
from stepscope.core.precisions import Dtype
from stepscope.core.units import parse_bytes
from stepscope.core.workloads import Compile, Optimizer, Phase, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.allocations.prediction.estimate import MemoryEstimate
    from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit, Plan
    from stepscope.training.user_module.loading import Loaded
    from stepscope.training.user_module.module_step import UserModule


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """The predicted peak of a step, and whether it fits into the memory that was named."""

    workload: Workload
    """What is predicted: the model and how it runs."""
    estimate: "MemoryEstimate | FakeEstimate"
    """The peak, its parts by category, and the peaks of the phases, in bytes."""
    verdict: "Fit[MemoryEstimate] | Fit[FakeEstimate] | None"
    """Whether it fits, by how much, and what would make it fit; None where no memory was named."""
    answer: ShownAnswer
    """The peak by category, the verdict, and the plans."""

    @property
    def peak_bytes(self) -> int:
        """The most that PyTorch's allocator holds at once."""
        return self.estimate.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where no memory was named."""
        return self.verdict.fits if self.verdict is not None else None

    @property
    def plans(self) -> "tuple[Plan, ...]":
        """Changes that would make it fit, the cheapest first; none where it fits, or nothing helps."""
        return self.verdict.plans if self.verdict is not None else ()

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, in samples, 0 if none does; None where it is not looked for, as for the
        textbook's model."""
        return self.verdict.largest_batch if self.verdict is not None else None

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence that fits, in tokens, 0 if none does; None where it is not looked for, as for the
        textbook's model."""
        return self.verdict.longest_sequence if self.verdict is not None else None


def fit(
    model: "str | nn.Module | None" = None,
    batch: object = None,
    loss: "Callable[..., Any] | None" = None,
    *,
    module: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    dtype: Dtype | None = None,
    phase: Phase | None = None,
    attention: Attention | None = None,
    kernels: str | Mapping[str, str] | None = None,
    compile: Compile | None = None,
    optimizer: "Optimizer | torch.optim.Optimizer | None" = None,
    clip: float | None = None,
    checkpointing: str | None = None,
    accumulation: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocabulary: int | None = None,
    tied: bool | None = None,
) -> Fitted:
    """Predict the peak memory of a step on a GPU, say whether it fits, and what would make it fit. Needs no GPU.

        found = stepscope.fit("xl", seq_len=1024, memory="80GiB")                  # the textbook's model
        found = stepscope.fit(module="train.py:make", arguments={"width": 64}, memory="80GiB")
        found = stepscope.fit(net, batch, loss, memory="80GiB")                    # a module of your own
        found.fits, found.peak_bytes, found.largest_batch
        [plan.options for plan in found.plans]

    What is predicted, one of three:

    - model, the name of a preset of the textbook's model, as `stepscope models` lists them: tiny, small, medium, large,
      xl and larger ones (left out: small), with batch_size sequences (4) of seq_len tokens (512), an attention, and
      d_model, d_ff, layers, heads, kv_heads, vocabulary and tied in place of the preset's own, and kernels as in
      `stepscope.run`. It is computed by formula, and needs no PyTorch.
    - module, a factory as `--module` names it: "package.module:factory", "file.py:factory", or the config.json of a
      Hugging Face model; arguments are what it is called with. It runs in a process of its own. The longest sequence is
      looked for, too, where seq_len is an argument.
    - model, an nn.Module, with its batch and its loss, as `stepscope.run` takes them. It is copied in this process,
      once for each variant that is tried, and its sequences keep their length. optimizer may be one that holds its
      parameters.

    A module of your own runs on fake tensors, which have sizes and no values: operators whose output depends on values
    are counted at their largest or refused by name. A compiled step (compile) and a step of your own with phases are
    refused.

    memory: how much PyTorch may allocate, in bytes or as in "80GiB".
    device: a device by its name, as in "H100", whose datasheet says how much.
    dtype, phase, optimizer, clip, checkpointing, accumulation: as in `stepscope.run`, for any model.

    Without memory and device the peak alone is predicted.

    Raises InputError for a name that is not known, sizes that cannot be, what cannot be predicted, and where memory and
    device are both given.
    """
    said = given(
        seq_len=seq_len, batch_size=batch_size, dtype=dtype, phase=phase, attention=attention, kernels=kernels,
        compile=compile, optimizer=optimizer, clip=clip, checkpointing=checkpointing, accumulation=accumulation,
        d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary, tied=tied,
    )  # fmt: skip
    check_one_model(model, module, arguments, batch=batch, loss=loss, optimizer=optimizer)
    budget = _budget(memory, device)
    if module is not None:
        from stepscope.questions.fit_apart import fit_apart

        return _fitted(fit_apart(of_factory(module, arguments, said), [budget] if budget else [])[0])
    if model is None or isinstance(model, str):
        from stepscope.allocations.prediction.fit import fit as predict

        return _fitted(predict(textbook(model or "small", {"seq_len": 512, **said}), budget))
    workload, copied = of_object(model, batch, loss, said)
    from stepscope.engine.fake_module import fit_module

    with gradients_kept(model):
        budgets = [budget] if budget else []
        return _fitted(fit_module(workload, budgets, module=lambda: _module_of(copied()))[0])


def _fitted(fit: "Fit[MemoryEstimate] | Fit[FakeEstimate]") -> Fitted:
    from stepscope.allocations.prediction.answer import answer_fit

    return Fitted(fit.workload, fit.estimate, fit if fit.budget else None, shown(answer_fit(fit)))


def _module_of(loaded: "Loaded") -> "UserModule":
    if loaded.user_module is None:
        raise InputError(f"{loaded.name} is a step of its own, with phases: give its module and a batch")
    return loaded.user_module


def _budget(memory: int | str | None, device: str | None) -> "Budget | None":
    from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory

    if memory is not None and device is not None:
        raise InputError("memory and device both say how much there is: give one of them")
    if device is not None:
        return budget_of_device(device)
    if memory is None:
        return None
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    if size <= 0:
        raise InputError(f"memory is {memory}: give bytes above zero, or a size as in '80GiB'")
    return budget_of_memory(size)
