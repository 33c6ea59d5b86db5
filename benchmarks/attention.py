"""How fast is attention beside what PyTorch offers? Forward and backward of `flash` and its rivals, in one run.

    python benchmarks/attention.py [--seconds 100] [--json FILE] [--only flash sdpa-cudnn] [--shape 4,12,1024,64,causal]
    python benchmarks/attention.py --show FILE...        # a table of results kept with --json

Each implementation is first held against float64 attention, on small calls with odd lengths, whose scores are of the
size 1, rise, fall, and lie hundreds off, and on the very shape that is timed: one that is further off than twice
PyTorch's own gets no time. Then the implementations of a shape take turns, pass by pass, on the same random numbers;
before each pass the L2 cache is overwritten, for as long as the host needs to issue the pass, so that times are the
device's own. Medians with 95 % intervals, by events in the stream. With --json the results are kept as they come; when
the seconds are over, the rest is not measured and said to be so.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepscope.core.attention_call import (
    CONVENTION,
    AttentionCell,
    AttentionShape,
    AttentionTiming,
    AttentionTimings,
    call_flops,
    decode_timings,
)
from stepscope.core.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_INPUT,
    InputError,
    StepscopeError,
    choose,
)
from stepscope.core.files import json_document
from stepscope.core.parts import Attention, TensorDtype
from stepscope.core.run_directory import write_atomically
from stepscope.core.samples import Samples
from stepscope.core.units import parse_seconds
from stepscope.questions.attention_answer import arrange, flops_per_s

OURS: Attention = "flash"
RIVALS: dict[TensorDtype, tuple[Attention, ...]] = {
    "bf16": ("sdpa-flash", "sdpa-cudnn", "flex"),
    "fp16": ("sdpa-flash", "sdpa-cudnn", "flex"),
    "fp32": ("sdpa-efficient", "flex"),
}
SHAPES = (
    "1,16,16384,64,causal",
    "1,16,16384,128,causal",
    "2,16,8192,128,full",
    "4,12,1024,64,causal",
    "2,16,8192,64,full",
    "4,16,2048,128,causal",
    "8,1,4096,64,causal,fp32",
    "8,1,16384,128,causal,fp32",
)
SHAPES_ON_CPU = ("1,2,128,64,causal,fp32", "1,2,128,32,full,bf16")


def parse_shape(text: str) -> tuple[AttentionShape, TensorDtype]:
    """`1,16,16384,64,causal,bf16`: batch, heads, sequence, head_dim, causal or full, and a dtype (bf16 without one)."""
    words = [word.strip() for word in text.split(",")]
    masks = {"causal": True, "full": False}
    dtypes: dict[str, TensorDtype] = {name: name for name in RIVALS}
    try:
        batch, heads, sequence, head_dim = (int(word) for word in words[:4])
        causal = masks[words[4]]
        dtype = dtypes[words[5]] if len(words) > 5 else "bf16"
    except (ValueError, KeyError, IndexError):
        raise InputError(f"cannot read --shape {text!r}: write batch,heads,seq,head_dim,causal|full[,dtype]") from None
    if min(batch, heads, sequence, head_dim) < 1 or len(words) > 6:
        raise InputError(f"cannot read --shape {text!r}: write sizes above zero, as in {SHAPES[0]}")
    shape = AttentionShape(
        batch=batch, heads=heads, key_heads=heads, queries=sequence, keys=sequence, head_dim=head_dim, causal=causal
    )
    return shape, dtype


def race(arguments: argparse.Namespace) -> AttentionTimings:
    """Measure every shape; what there is is kept after each."""
    from stepscope.questions.attention import measure_grid  # noqa: PLC0415
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415

    began_s = time.monotonic()
    device = resolve_device(arguments.device)
    on_gpu = device.type == "cuda"
    for name in arguments.only or ():
        choose(name, (OURS, *dict.fromkeys(rival for rivals in RIVALS.values() for rival in rivals)), "name of --only")
    groups: list[list[AttentionCell]] = []
    for text in arguments.shape or (SHAPES if on_gpu else SHAPES_ON_CPU):
        shape, dtype = parse_shape(text)
        names: tuple[Attention, ...] = (OURS, *RIVALS[dtype])
        if arguments.only:
            names = tuple(name for name in names if name in arguments.only)
        groups.append([AttentionCell(implementation=name, dtype=dtype, shape=shape) for name in names])
    told = 0

    def tell(timings: AttentionTimings) -> None:
        nonlocal told
        if arguments.json is not None:
            write_atomically(json_document(timings).encode(), arguments.json)
        rows, told = timings.timings[told:], len(timings.timings)
        if rows:
            words = ", ".join(f"{row.cell.implementation} {brief(row)}" for row in rows)
            cell = rows[0].cell
            sys.stderr.write(f"{time.monotonic() - began_s:5.1f} s  {cell.shape}, {cell.dtype}: {words}\n")

    return measure_grid(
        [group for group in groups if group],
        device=str(device),
        seconds=arguments.cell_seconds,
        steps=None,
        launches="hidden",
        budget_s=arguments.seconds,
        workers=arguments.workers if arguments.workers is not None else (os.cpu_count() or 1) - 2,
        every_shape=True,
        on_rows=tell,
    )[0]


def check_place(file: Path | None) -> None:
    """Raises OSError where the results cannot be kept, before anything is measured."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass


def brief(row: AttentionTiming) -> str:
    """Forward and backward in ms, or what became of it."""
    both = row.both
    return f"{(both.median_s or 0) * 1e3:.3f} ms" if both else f"{row.outcome} ({row.reason})"


HEADS = (
    "batch, heads, seq, head_dim", "dtype", "implementation", "forward ms", "95 %, one process",
    "forward+backward ms", "95 %, one process", "TFLOP/s forward", "TFLOP/s both", "of the ceiling", "over flash",
)  # fmt: skip


def rows_of(timings: AttentionTimings) -> list[tuple[str, ...]]:
    """A row for each cell in the order of measuring. `over flash`: its forward+backward over ours."""
    ours = {(r.cell.shape, r.cell.dtype): r.both for r in timings.timings if r.cell.implementation == OURS}
    rows: list[tuple[str, ...]] = []
    study = arrange(timings)
    for row in timings.timings:
        cell, both = row.cell, row.both
        name = (str(cell.shape), cell.dtype, cell.line)
        if both is None or row.forward is None or not both.median_s or not row.forward.median_s:
            rows.append((*name, row.outcome, *[""] * 7))
            continue
        rate, share, own = flops_per_s(row), study.share(row), ours.get((cell.shape, cell.dtype))
        ratio = own.speedup_over(both) if own else None
        rows.append((
            *name, f"{row.forward.median_s * 1e3:.3f}", interval_of(row.forward), f"{both.median_s * 1e3:.3f}",
            interval_of(both), f"{call_flops(cell.shape) / row.forward.median_s / 1e12:.4g}",
            f"{(rate or 0.0) / 1e12:.4g}", f"{share * 100:.0f} %" if share else "",
            f"{ratio.value:.2f}" if ratio else "",
        ))  # fmt: skip
    return rows


def interval_of(samples: Samples) -> str:
    """In ms."""
    interval = samples.interval()
    return f"{interval.low * 1e3:.3f} to {interval.high * 1e3:.3f}" if interval else "cannot be told"


def render_markdown(timings: AttentionTimings) -> str:
    """The result as a Markdown table, and what must be said of it."""
    lines = [timings.environment.described, ""]
    lines += ["| " + " | ".join(row) + " |" for row in (HEADS, ("---",) * len(HEADS), *rows_of(timings))]
    lines += ["", f"- {timings.created}; {timings.seconds:g} s a cell, those of a shape in turns; random data."]
    shown = [str(row.cell) for row in timings.timings if row.launches == "shown"]
    if timings.launches == "hidden":
        lines.append("- Before each pass the L2 cache is overwritten while the host issues the pass.")
        lines += [f"- The launches of {name} show all the same." for name in shown]
    lines.append(f"- TFLOP/s: {CONVENTION}.")
    if timings.ceilings:
        rates = ", ".join(f"{dtype} {rate / 1e12:.4g} TFLOP/s" for dtype, rate in timings.ceilings.items())
        lines.append(f"- Ceilings, the best matrix product measured here: {rates}.")
    checked = [row.checked for row in timings.timings if row.both]
    if checked:
        least, most = min(checked), max(checked)
        calls = f"{least} to {most} calls" if least != most else f"{most} call{'s' if most != 1 else ''}"
        lines.append(f"- Each time is of an implementation that the gate saw right, on {calls}.")
    if timings.interpreted:
        lines.append(f"- Triton's interpreter ran {', '.join(timings.interpreted)}, in Python: no times of the kernel.")
    lines += [f"- {row.cell}: {row.outcome}; {row.reason}" for row in timings.timings if row.reason]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--seconds", type=lambda text: parse_seconds(text, "--seconds"), default=100, help="for all of it"
    )
    parser.add_argument(
        "--cell-seconds", type=lambda text: parse_seconds(text, "--cell-seconds", zero=True), default=0.4,
        help="for each implementation on each shape",
    )  # fmt: skip
    parser.add_argument("--shape", action="append", help="as 1,16,16384,64,causal,bf16; may be repeated")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these implementations")
    parser.add_argument("--workers", type=int, help="processes that compile ahead (all cores but two; none on a CPU)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    try:
        arguments = parser.parse_args(words)
        if arguments.workers is not None and arguments.workers < 0:
            raise InputError(f"--workers is {arguments.workers}: write 0, for none, or more")
        if arguments.show:
            kept = [decode_timings(path.read_bytes(), str(path)) for path in arguments.show]
            sys.stdout.write("\n".join(render_markdown(timings) for timings in kept))
            return 0
        check_place(arguments.json)
        timings = race(arguments)
    except StepscopeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"cannot open {error.filename}: {error.strerror or error}\n")
        return EXIT_WRONG_INPUT
    sys.stdout.write(render_markdown(timings))
    outcomes = {row.outcome for row in timings.timings}
    if "interrupted" in outcomes:
        return EXIT_INTERRUPTED
    if outcomes <= {"not supported"}:
        sys.stderr.write("nothing was measured: choose other --only, --shape or --device\n")
        return EXIT_WRONG_INPUT
    return EXIT_CHECK_FAILED if "wrong" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
