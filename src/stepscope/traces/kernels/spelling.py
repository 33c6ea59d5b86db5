"""One spelling for kernels' names, which each profiler's demangler writes in its own way.

void k<4, f(T const&)::{lambda(float)#1}, std::array<char*, 2ul> >(int)                             Kineto
void k<(int)4, void f(T1)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(T1)  Nsight Systems
"""

import re

from stepscope.traces.kernels.names.name import split_name

_LAMBDA = re.compile(r"[\[{]lambda\(([^()]*)\)(?: \(instance (\d+)\)\]|#(\d+)\})")
_BRACKETS = re.compile(r"\([^()]*\)")
"""Parameter lists, which repeat the template arguments in either spelling, and casts of those."""
_DEEPEST = 16
_STEPS = (
    (re.compile(r"\(anonymous namespace\)|<unnamed>"), "{anonymous}"),
    (_LAMBDA, r"{lambda \1#\2\3}"),
    (re.compile(r"\bvoid (?=\w)"), ""),
    (re.compile(r"(?<![\w.])(\d+)(?:u?l{1,2}|u)(?!\w)"), r"\1"),
    (re.compile(r"(?<![\w.])true(?!\w)"), "1"),
    (re.compile(r"(?<![\w.])false(?!\w)"), "0"),
)


def one_spelling(name: str) -> str:
    """The kernel's function and template arguments, the same whichever profiler wrote the name."""
    function, arguments, _ = split_name(name)
    text = f"{function}<{arguments}>" if arguments else function
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    for _ in range(_DEEPEST):
        text, removed = _BRACKETS.subn("", text)
        if not removed:
            break
    return "".join(text.split())
