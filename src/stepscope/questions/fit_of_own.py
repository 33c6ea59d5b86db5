"""Whether a step of the user's own module fits: its code runs with the user's rights, in a process of its own."""

from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.estimate import DeviceType
from stepscope.allocations.prediction.fit import Budget
from stepscope.allocations.prediction.own_fit import OwnFit, decode_own_fit
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.user_code import answer_apart, ask_apart


class _Request(msgspec.Struct, frozen=True):
    workload: FactoryWorkload
    budgets: tuple[Budget, ...]
    device_type: DeviceType
    search: bool


def fit_of_own(
    workload: FactoryWorkload, budgets: Sequence[Budget], device_type: DeviceType = "cuda", *, search: bool = True
) -> OwnFit:
    """The prediction of a step, with a verdict for each budget; with `search` also what would make it fit, and the
    largest batch. Raises InputError for what cannot be predicted."""
    what = f"{'--model' if workload.factory.endswith('.json') else '--module'} {workload.factory}"
    request = msgspec.json.encode(_Request(workload, tuple(budgets), device_type, search)).decode()
    return decode_own_fit(ask_apart(__name__, request, what=what), what)


def main(request: str) -> str:
    """The prediction as JSON, for `fit_of_own`."""
    from stepscope.engine.own_fit import fit_own

    asked = msgspec.json.decode(request, type=_Request)
    return msgspec.json.encode(fit_own(asked.workload, asked.budgets, asked.device_type, search=asked.search)).decode()


if __name__ == "__main__":
    answer_apart(main)
