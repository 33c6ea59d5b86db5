"""`bench`: any function beside its rivals, right or wrong by float64 first, then its time in turns."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError
from stepscope.core.files import read_named
from stepscope.core.options import CALLS, MEASURING, Argument, Option, Rule, verb
from stepscope.questions.bench_records import Bench, decode_bench, encode_bench


@dataclass(frozen=True, repr=False)
class Benched(Shown):
    """What a bench found."""

    bench: Bench
    """Verdicts first, then the times of what is right."""
    answer: ShownAnswer
    """Its tables, and what follows."""


def bench(
    functions: Mapping[str, Callable[..., Any]],
    *,
    shape: str | None = None,
    inputs: Callable[..., Any] | None = None,
    sizes: Mapping[str, Sequence[int] | int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    dtype: str = "fp32",
    backward: bool = True,
    seconds: float = 1.0,
    device: str = "auto",
    tell: Callable[[str], object] = lambda _: None,
) -> Benched:
    """Judge each function by float64, and time those that are right in turns.

        found = stepscope.bench({"mine": softmax, "torch": torch.softmax}, shape="4096x1024", arguments={"dim": -1})
        found                        # in a notebook: right or wrong, then who is faster and how sure that is
        found.bench.timings[0].forward.median_s

    functions: by name; the others are set beside the first. shape: tensors as in "2x8xNx64*3,mask=NxN:bool", with sizes
    by name. inputs: a factory in its place, which is called with the sizes, and with device and dtype where it takes
    them; it returns a tensor, a tuple of arguments, a dict of keyword arguments, or both. arguments: what is no tensor.
    reference: judges in float64; the second function where none is given. seconds: for each function and size.

    Raises InputError for inputs that cannot be made, and for a reference that float64 cannot run.
    """
    from stepscope.questions.bench_functions import asked_by_functions

    request = asked_by_functions(
        functions, reference=reference, shape=shape, inputs=inputs, sizes=sizes or {}, arguments=arguments or {},
        dtype=dtype, backward=backward, seconds=seconds,
    )  # fmt: skip
    return _shown(_measured(request, device, tell))


def _shown(result: Bench) -> Benched:
    from stepscope.questions.bench import answer_bench

    return Benched(result, shown_answer(answer_bench(result)))


def _measured(request: Any, device: str, tell: Callable[[str], object]) -> Bench:
    """The bench, with the ceilings of this device."""
    from stepscope.core.errors import StepscopeError
    from stepscope.questions.bench import reached_rates
    from stepscope.questions.bench_calls import run_bench
    from stepscope.recording.ceilings import ceilings_for
    from stepscope.recording.environment import resolve_device

    place = resolve_device(device)
    result = run_bench(request, place, tell=tell)
    if result.interrupted or not any(row.seconds for row in result.timings):
        return result
    try:
        ceilings = ceilings_for(place, (request.dtype,), tell, reached=reached_rates(result, request.dtype))
    except (StepscopeError, KeyboardInterrupt):  # what was measured stands without them
        return result
    matmul = ceilings.matmul_for(request.dtype)
    return msgspec.structs.replace(
        result,
        matmul_flops_s=matmul.rate if matmul is not None else None,
        copy_bytes_s=ceilings.copy.rate if ceilings.copy is not None else None,
    )


Against = Annotated[
    tuple[str, ...],
    Option(
        "A rival: spelled like the function, or an attention of stepscope. The first judges in float64.",
        metavar="FUNCTION",
        repeated=True,
    ),
]
Reference = Annotated[str | None, Option("What judges in float64, in place of the first rival.", metavar="FUNCTION")]
Shape = Annotated[
    str | None,
    Option("Tensors, as in 2x8x1024x64*3 or 4096xV,4096:int64<V; mask=NxN:bool goes by name.", CALLS, metavar="SHAPES"),
]
Inputs = Annotated[
    str | None,
    Option("A factory of inputs, in place of --shape: called with sizes, device and dtype.", CALLS, metavar="FACTORY"),
]
Size = Annotated[
    tuple[str, ...], Option("Values of a size, as in N=1024,2048.", CALLS, metavar="NAME=N,...", repeated=True)
]
Arg = Annotated[
    tuple[str, ...],
    Option("An argument that is no tensor, as in is_causal=true.", CALLS, metavar="NAME=VALUE", repeated=True),
]
Dtype = Annotated[str | None, Option("", CALLS, choices=("fp32", "bf16", "fp16"))]
Preset = Annotated[
    str | None, Option("Inputs and rivals of a question that many ask.", CALLS, choices=("cs336-attention",))
]
ForwardOnly = Annotated[bool, Option("Leave backward out.", CALLS)]
Seconds = Annotated[float, Option("How long each function is timed on each size.", MEASURING, least=0)]


@verb(
    "bench",
    "stepscope bench kernels.py:softmax --against torch.softmax --arg dim=-1 --shape Nx1024 --size N=1024,8192",
    "stepscope bench kernels.py:flash --preset cs336-attention",
    conflicts=(
        Rule("conflict", ("--shape", "--inputs"), "{} both say what to call the function with: leave one out"),
        Rule("conflict", ("--preset", "--inputs"), "{} both say what to call the function with: leave one out"),
        Rule("alone", ("--from",)),
    ),
    dtype="fp32, or the preset's",
)
def command(
    function: Annotated[
        str | None,
        Argument("path/file.py:name, package.module:name or package.module.name.", metavar="FUNCTION"),
    ] = None,
    *,
    against: Against = (),
    reference: Reference = None,
    shape: Shape = None,
    inputs: Inputs = None,
    size: Size = (),
    arg: Arg = (),
    dtype: Dtype = None,
    preset: Preset = None,
    forward_only: ForwardOnly = False,
    seconds: Seconds = 1.0,
    device: str,
    from_: Path | None,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Judge a function of your own by float64, and time it beside its rivals: a kernel, a layer, an attention.

    Its outputs and gradients are held against the reference in float64, on the inputs that are timed and on odd
    lengths, views, large and tiny numbers and fully masked rows. What is wrong has no time. Times are taken in turns.
    """
    if from_ is not None:
        result = decode_bench(read_named(from_), str(from_))
    else:
        if function is None:
            raise InputError("bench needs a function: stepscope bench mine.py:softmax --shape 4096x1024")
        if not Path("/dev/nvidiactl").exists():
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
        from stepscope.core.user_model import parse_arguments
        from stepscope.engine.request import Stage
        from stepscope.questions.bench_functions import asked_by_name

        arguments = {
            name: values[0] if len(values) == 1 else list(values) for name, values in parse_arguments(arg).items()
        }
        with stdout_kept_clean(), progress() as tell:
            request = asked_by_name(
                function, against, reference=reference, preset=preset, shape=shape, inputs=inputs, sizes=size,
                arguments=arguments, dtype=dtype, backward=not forward_only, seconds=seconds,
            )  # fmt: skip
            result = _measured(request, device, lambda words: tell(Stage(name=words)))
    from stepscope.questions.bench import answer_bench

    shown.show(answer_bench(result), document=lambda: encode_bench(result).decode(), save=save)
    if from_ is not None:
        return EXIT_DONE
    if result.interrupted:
        return EXIT_INTERRUPTED
    function = next(iter(result.functions))
    failed = any(row.function == function and row.outcome == "failed" for row in result.timings)
    return EXIT_CHECK_FAILED if failed or result.wrong(function) else EXIT_DONE
