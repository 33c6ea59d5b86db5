"""Whether Python launched our kernels, and not C++ (kernels/native_library.py), which takes the host less time."""

_from_python: list[bool] = []


def launched_from_python() -> None:
    """Note that this process launches our kernels from Python."""
    _from_python.append(True)


def launcher() -> dict[str, str]:
    """What a run says of it beside its versions: nothing where kernels are launched from C++, or none of ours are."""
    return {"launcher": "Python"} if _from_python else {}
