"""How many warm-up steps does a measurement need? The same workload after 0, 1, 2 and 5 of them, in fresh processes."""

from stepscope.core.run import Settings
from stepscope.core.workload import Workload
from stepscope.engine.plan import Cell

WARMUPS = (0, 1, 2, 5)


def warmup_cells(workload: Workload, steps: int = 10, warmups: tuple[int, ...] = WARMUPS) -> tuple[Cell, ...]:
    """One cell for each number of warm-up steps; nothing else differs."""
    return tuple(
        Cell(
            workload=workload,
            settings=Settings(
                warmup_floor=n, warmup_cap=n, steps_floor=steps, steps_cap=steps, seconds=0, profile=False
            ),
        )
        for n in warmups
    )
