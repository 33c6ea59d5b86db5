"""What does torch.compile give? Forward and the full step of some models, eager and in modes of torch.compile."""

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from typing import Any

from stepscope.core.errors import InputError, choose
from stepscope.core.workloads import COMPILES
from stepscope.engine.plan import Cell
from stepscope.questions.compared_cells import Sizes, child_environment, compared_cells
from stepscope.questions.compile.answer import CompileCell

BASELINE = CompileCell.BASELINE
MODES: tuple[str, ...] = tuple(mode for mode in COMPILES if mode != BASELINE)


ON_GPU = Sizes(models=("small", "large", "2.7B"), seq_len=512, batch_size=4, dtypes=("bf16",))
ON_CPU = Sizes(models=("tiny",), seq_len=32, batch_size=1, dtypes=("fp32",))
"""Two minutes on two cores, nearly all of it a C++ compiler's."""


def check_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """The modes to set beside eager. Raises InputError for one that there is not."""
    if BASELINE in modes:
        raise InputError(f"--compile names what is set beside {BASELINE}, which is always measured: leave it out")
    for mode in modes:
        choose(mode, MODES, "compile mode")
    return tuple(modes)


def compile_cells(
    *, phases: Sequence[str], modes: Sequence[str], attentions: Sequence[str], **sizes: Any
) -> tuple[Cell, ...]:
    """Each combination of these and the sizes, as `compared_cells` takes them, eager and in every mode."""
    return compared_cells(phase=phases, attention=attentions, compile=[BASELINE, *modes], **sizes)


@contextlib.contextmanager
def cold_caches() -> Generator[None]:
    """Processes started in here compile from nothing, and what they leave on disk goes at the end.

    torch.compile finds code that an earlier process generated, on disk: the time of compiling would be that of reading.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-inductor-", ignore_cleanup_errors=True) as folder:
        wanted = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        with child_environment(wanted):
            yield
