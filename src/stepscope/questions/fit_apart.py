"""Whether a step of a user's module fits: its code runs with the user's rights, in a process of its own."""

import gc
import importlib
from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.estimate import DeviceType
from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit
from stepscope.core.errors import InputError
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.user_code import answer_apart, ask_apart


class _Request(msgspec.Struct, frozen=True):
    workload: FactoryWorkload
    budgets: tuple[Budget, ...]
    device_type: DeviceType
    search: bool


def fit_apart(
    workload: FactoryWorkload, budgets: Sequence[Budget], device_type: DeviceType = "cuda", *, search: bool = True
) -> list[Fit[FakeEstimate]]:
    """The prediction of a step for each budget, or of its peak alone where there is none; with `search` also what would
    make it fit, and the largest sizes. Raises InputError for what cannot be predicted."""
    what = f"{'--model' if workload.factory.endswith('.json') else '--module'} {workload.factory}"
    request = msgspec.json.encode(_Request(workload, tuple(budgets), device_type, search)).decode()
    try:
        return msgspec.json.decode(ask_apart(__name__, request, what=what), type=list[Fit[FakeEstimate]])
    except msgspec.DecodeError as error:
        raise InputError(f"{what} left no prediction: {error}") from error


def main(request: str) -> str:
    """The prediction as JSON, for `fit_apart`."""
    gc.disable()
    from stepscope.engine.fake_module import fit_module

    options = msgspec.json.decode(request, type=_Request)
    if options.workload.phase == "train":
        importlib.import_module("torch._dynamo")  # an optimizer's first update imports it
    # Each step that is tried ends with a collection: through all that is imported it would take longer than the step.
    gc.freeze()
    gc.enable()
    fits = fit_module(options.workload, options.budgets, options.device_type, search=options.search)
    return msgspec.json.encode(fits).decode()


if __name__ == "__main__":
    answer_apart(main)
