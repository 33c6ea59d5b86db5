"""The study of autocast with the user's own module, which runs with the user's rights in a process of its own."""

from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.engine.own_code import answer_apart, ask_apart


def autocast_of_own(module: str, dtype: str, device: str, rules: str | None) -> Answer:
    """What `study_autocast` answers of a module that is named `package.module:factory`."""
    what = f"--module {module}"
    return decode_answer(ask_apart(__name__, module, dtype, device, rules or "", what=what), what)


def main(module: str, dtype: str, device: str, rules: str) -> str:
    """The answer as JSON, for `autocast_of_own`."""
    from stepscope.numerics.autocast.study import study_autocast  # noqa: PLC0415  (torch: only the child needs it)

    return encode_answer(study_autocast(own=module, dtype=dtype, device=device, rules=rules or None))


if __name__ == "__main__":
    answer_apart(main)
