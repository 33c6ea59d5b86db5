"""Tune the FlashAttention kernels on this GPU for calls of given shapes; print what is kept.

    python benchmarks/flash_tune.py 1,16,16384,128 4,12,1024,64 [--dtype bf16] [--full] [--seconds 60]

Each shape is batch,heads,sequence,head_dim. Without shapes, what was kept before is printed. Calls take the choices
from then on; they lie in $STEPSCOPE_CACHE, else in stepscope/ in the user's directory of caches.
"""

import argparse
import sys
from collections.abc import Sequence

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.units import parse_seconds

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_shape(text: str) -> tuple[int, ...]:
    """`1,16,16384,128`: batch, heads, sequence, head_dim."""
    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise InputError(f"a shape is batch,heads,sequence,head_dim, as in 1,16,16384,128, not {text!r}")
    return tuple(map(int, sizes))


def main(words: Sequence[str] | None = None) -> int:
    """Parse, tune, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument(
        "--seconds", type=lambda text: parse_seconds(text, "--seconds"), default=60, help="of each shape"
    )
    try:
        arguments = parser.parse_args(words)
        shapes = [parse_shape(text) for text in arguments.shapes]
    except StepscopeError as error:
        print(error, file=sys.stderr)
        return error.exit_code

    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        print("no NVIDIA GPU on this machine: there is nothing to tune", file=sys.stderr)
        return 2

    from stepscope.kernels.flash.tune import tune  # noqa: PLC0415
    from stepscope.kernels.flash.tuning_cache import device_name, kept_choices, kept_path  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        for shape in shapes:
            q, k, v = (torch.randn(shape, device=device).to(getattr(torch, DTYPES[arguments.dtype])) for _ in range(3))
            print(tune(q, k, v, causal=not arguments.full, seconds=arguments.seconds), flush=True)
    except StepscopeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not shapes:
        print("\n".join(map(str, kept_choices(device_name(device)).values())) or "nothing is kept: name shapes to tune")
    print(f"kept in {kept_path(device_name(device)) or 'no file: there is no home directory'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
