"""A whole step captured into CUDA graphs, one for each phase, and replayed: the host then launches each phase at once.

    three steps run as they are (allocations, tables of optimizers, what compilers make)   eager
    one step is captured, phase by phase, into one pool of memory                          captured, then replayed
    every later step replays the phases in their order                                     replayed

The phases stay phases, so a step is timed as any other. Between them nothing runs on the host but the replay itself.
What a graph reads must stay where it was: the batch is copied into one place, and the optimizer counts its updates on
the device. PyTorch moves the states of its random generators with each replay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stepscope.core.errors import InputError, StepscopeError, named_line
from stepscope.core.workload import GRAPH_WARMUP
from stepscope.recording.device import is_out_of_memory
from stepscope.recording.step import Phase


class StepGraphs:
    """The phases of a step, of which each is run as it is at first, then captured, then replayed."""

    def __init__(self, phases: Sequence[Phase], batch: Any, device: torch.device) -> None:
        """batch: the first one, whose shapes the others have."""
        self._device = device
        self._place = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(phases)
        self._runs = [0] * len(phases)
        self.phases = tuple(
            Phase(name=phase.name, run=self._run_of(i, phase.name, phase.run)) for i, phase in enumerate(phases)
        )

    @property
    def captured(self) -> bool:
        """Whether every phase is."""
        return all(graph is not None for graph in self._graphs)

    def take(self, batch: Any) -> Any:
        """Copy a batch to the place that the graphs read, and give that place. Raises InputError for other shapes."""
        given, places = pytree.tree_leaves(batch), pytree.tree_leaves(self._place)
        for value, place in zip(given, places, strict=True):
            if isinstance(place, Tensor):
                if value.shape != place.shape:
                    raise InputError(
                        f"--graph step replays one shape, and a batch has {tuple(value.shape)} where the first had "
                        f"{tuple(place.shape)}: leave it out"
                    )
                place.copy_(value, non_blocking=True)
        return self._place

    def _run_of(self, i: int, name: str, run: Callable[[], object]) -> Callable[[], None]:
        def replayed() -> None:
            graph = self._graphs[i]
            if graph is not None:
                graph.replay()
            else:
                self._first(i, name, run)

        return replayed

    def _first(self, i: int, name: str, run: Callable[[], object]) -> None:
        """Run a phase on the stream that will be captured, or capture and replay it."""
        self._runs[i] += 1
        current = torch.cuda.current_stream(self._device)
        if self._runs[i] < GRAPH_WARMUP:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            return
        if i == 0:
            # What the eager steps leave in the allocator's cache is not the pool's to take.
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, as a compiler's or a sampler's, may go on with what a capture forbids.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):  # fmt: skip
                run()
        except StepscopeError:
            raise
        except Exception as error:  # whatever a step does that a graph cannot hold
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{name} cannot be captured into a CUDA graph: {named_line(error)}; leave out --graph step"
            ) from error
        self._pool = graph.pool()
        self._graphs[i] = graph
        graph.replay()
