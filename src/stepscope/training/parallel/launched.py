"""A rank's process, as `launching.py` starts it: it reads a Call on stdin, and tells its stages on a pipe."""

import contextlib
import os
import sys

import msgspec

from stepscope.core import interrupts
from stepscope.core.errors import InputError, StepscopeError, named_line
from stepscope.core.interrupts import end_with_stdin, leave
from stepscope.training.parallel.launching import Call, Word, run_call


def main() -> int:
    """Run the call on stdin. Exit code 0 when its value was told."""
    interrupts.install(even_if_ignored=True)
    words = int(sys.argv[1])
    os.set_inheritable(words, False)
    call = msgspec.json.decode(sys.stdin.readline(), type=Call)
    end_with_stdin()

    def say(word: Word) -> None:
        data = msgspec.json.encode(word) + b"\n"
        with contextlib.suppress(OSError):  # a starter that died closes the lifeline
            while data:
                data = data[os.write(words, data) :]

    def tell(stage: str, part: bytes = b"") -> None:
        say(Word(stage=stage, part=msgspec.Raw(part)) if part else Word(stage=stage))

    tell("meeting the others")
    try:
        (value,), threads = run_call(call, tell)
    except Exception as error:
        wrong = isinstance(error, InputError)
        say(Word(error=named_line(error), wrong_input=wrong))
        return error.exit_code if isinstance(error, StepscopeError) else 1
    say(Word(value=msgspec.Raw(value), threads=threads))
    return 0


if __name__ == "__main__":
    leave(interrupts.exit_code(main()))
