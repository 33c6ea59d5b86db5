"""What does each graph break and each recompilation of a user's module cost? Measured in a process of its own."""

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.core.run import Settings
from stepscope.core.study_results import CompilePrices
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.user_code import answer_apart, ask_apart


class _Request(msgspec.Struct, frozen=True):
    workload: FactoryWorkload
    device: str
    settings: Settings
    timed: bool
    backend: str


def compile_prices(
    workload: FactoryWorkload, device: str = "auto", settings: Settings | None = None, *, backend: str = "inductor"
) -> CompilePrices:
    """The prices; without settings nothing is timed, and pieces and bytes are counted alone.

    Raises InputError for a factory that gives no module, and for a step that cannot be compiled.
    """
    what = f"{'--model' if workload.factory.endswith('.json') else '--module'} {workload.factory}"
    request = _Request(workload, device, settings or Settings(), settings is not None, backend)
    found = ask_apart(__name__, msgspec.json.encode(request).decode(), what=what)
    return msgspec.json.decode(found, type=CompilePrices)


def main(request: str) -> str:
    """The prices as JSON, for `compile_prices`."""
    from stepscope.questions.steps import step_of
    from stepscope.recording.compilation import Pricing
    from stepscope.recording.device import resolve_device
    from stepscope.recording.environment import read_environment
    from stepscope.recording.precision import matmul_precision
    from stepscope.training.training_step import AssembledStep

    asked = msgspec.json.decode(request, type=_Request)
    device = resolve_device(asked.device)
    eager = msgspec.structs.replace(asked.workload, compile="eager")

    def make() -> AssembledStep:
        return step_of(eager, device)

    # What the module prints in each of some hundred steps tells nothing.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), matmul_precision(eager.dtype):
        pricing = Pricing(make, device, settings=asked.settings if asked.timed else None, backend=asked.backend)
        clean, breaks = pricing.breaks()
        dynamic = pricing.dynamic()
    prices = CompilePrices(
        module=type(make().model).__name__, as_it_is=pricing.as_it_is, clean=clean, breaks=breaks,
        recompilations=pricing.recompilations, gave_up_at=pricing.gave_up_at, steps=pricing.steps, dynamic=dynamic,
        environment=read_environment(device), date=datetime.now(UTC).date().isoformat(),
    )  # fmt: skip
    return msgspec.json.encode(prices).decode()


if __name__ == "__main__":
    answer_apart(main)
