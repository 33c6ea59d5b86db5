"""`stepscope kernel`: what a kernel's name says."""

from typing import Annotated

import typer

from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.document import json_document
from stepscope.core.errors import InputError


@verb(
    "kernel",
    "stepscope kernel ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
    "stepscope kernel sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3 --json",
)
def kernel(
    name: Annotated[str, typer.Argument(help="The kernel's name as a profiler shows it.")], *, shown: Presentation
) -> None:
    """Explain a kernel by its name: library, types, layout, tile, and which product of a step it is."""
    from stepscope.traces.kernels.explanation import answer_kernel, explain_kernel

    if not name.strip():
        raise InputError("the kernel's name is empty: give it as the profiler shows it, in quotes")
    # Bytes that are no text reach a program as surrogates, which JSON cannot hold.
    explanation = explain_kernel(name.encode(errors="replace").decode())
    shown.show(answer_kernel(explanation), document=lambda: json_document(explanation))
