"""The workload of a run that is known to be of the textbook's model."""

from stepscope.core.run import Run
from stepscope.core.workloads import TextbookWorkload


def textbook(run: Run) -> TextbookWorkload:
    """The run's workload, whose model has sizes."""
    assert run.workload.sizes is not None
    return run.workload
