"""A snapshot is a pickle, and a pickle is a program: only plain data is read, and nothing else ever runs."""

import copyreg
import gzip
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recording_allocator import RecordingAllocator

from stepscope.allocations import plain_pickle
from stepscope.allocations.plain_pickle import read_plain_pickle
from stepscope.core.errors import InputError

pytestmark = pytest.mark.slow


class Runs:
    """Unpickled, calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def snapshot() -> dict[str, Any]:
    allocator = RecordingAllocator()
    allocator.free(allocator.malloc(1000))
    return allocator.snapshot()


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()  # SHORT_BINUNICODE


def planted(mark: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that would leave a file, by how they reach for the outside; and the name they ask for."""
    command = f"touch {mark}"
    system = f"{os.system.__module__}.system"
    call = text(command) + b"\x85R."  # TUPLE1 REDUCE
    return {
        "reduce": (pickle.dumps({**snapshot(), "more": Runs(os.system, command)}), system),
        "reduce-protocol-0": (pickle.dumps(Runs(os.system, command), protocol=0), system),
        "reduce-first": (pickle.dumps([Runs(os.system, command), snapshot()]), system),
        "eval": (pickle.dumps(Runs(eval, f"open({str(mark)!r}, 'w')")), "builtins.eval"),
        "global": (b"cos\nsystem\n" + call, "os.system"),
        "stack-global": (b"\x80\x04" + text("os") + text("system") + b"\x93" + call, "os.system"),
        "by-memo": (
            b"\x80\x04" + text("os") + b"\x94" + text("system") + b"\x94" + b"0" + b"0h\x00h\x01\x93" + call,
            "os.system",
        ),
        "inst": (b"(" + text(command) + b"ios\nsystem\n.", "os.system"),
        "obj": (b"(cos\nsystem\n" + text(command) + b"o.", "os.system"),
        "newobj": (b"\x80\x02cbuiltins\nobject\n)\x81.", "builtins.object"),
        "build": (b"\x80\x02csubprocess\nPopen\n)\x81}(" + text("args") + text(command) + b"ub.", "subprocess.Popen"),
        "torch": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "torch._utils._rebuild_tensor_v2"),
        "nested-name": (b"\x80\x04" + text("os") + text("path.join") + b"\x93.", "os.path.join"),
        "persistent": (b"Pmodule\n.", "the persistent object 'module'"),
        "binary-persistent": (text("0") + b"Q.", "the persistent object '0'"),
    }


@pytest.mark.parametrize("how", list(planted(Path("mark"))))
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_what_would_run_is_refused_by_name(tmp_path: Path, how: str, packed: bool):
    mark = tmp_path / "mark"
    program, name = planted(mark)[how]
    file = tmp_path / "s.pickle"
    file.write_bytes(gzip.compress(program) if packed else program)
    with pytest.raises(InputError, match="nothing of it was run") as refused:
        read_plain_pickle(file)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert not mark.exists()


def test_the_plants_would_run(tmp_path: Path):
    """With Python's own unpickler they do: else the test above would show nothing."""
    mark = tmp_path / "mark"
    for how in ("reduce", "reduce-protocol-0", "global", "stack-global", "by-memo", "inst", "obj"):
        pickle.loads(planted(mark)[how][0])
        assert mark.exists(), how
        mark.unlink()


def test_extension_codes_are_refused(tmp_path: Path):
    """A code that some library registered stands for a name."""
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x02\x82\xf0)R.")
    with pytest.raises(InputError, match="unregistered extension code"):
        read_plain_pickle(file)
    copyreg.add_extension("os", "system", 0xF0)
    try:
        with pytest.raises(InputError, match=r"os\.system"):
            plain_pickle._load(file)  # here, where the code is registered, and not in a process of its own
    finally:
        copyreg.remove_extension("os", "system", 0xF0)


BROKEN = {
    "empty": b"",
    "text": b"hello, this is no pickle",
    "zeros": bytes(1000),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "json": b'{"segments": []}',
    "no end": b"\x80\x04}",
    "calls a text": b"\x80\x04" + text("a") + text("b") + b"\x85R.",
    "builds on a list": b"\x80\x02]}b.",
    "makes an object of a number": b"\x80\x02K\x01)\x81.",
    "a list as a key": b"\x80\x04}]K\x01s.",
    "nothing on the stack": b"\x80\x04R.",
    "no such memo": b"\x80\x04h\x05.",
    "protocol 9": b"\x80\x09.",
    "long text, cut": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x",
    "long bytes, cut": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x",
    "long frame, cut": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"}.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "broken gzip": gzip.compress(pickle.dumps({}))[:-12] + bytes(12),
    "cut gzip": gzip.compress(os.urandom(5000))[:100],
    "gzip of nothing": gzip.compress(b""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_one_line(tmp_path: Path, what: str):
    file = tmp_path / "s.pickle"
    file.write_bytes(BROKEN[what])
    with pytest.raises(InputError) as said:
        read_plain_pickle(file)
    assert str(said.value).startswith(f"{file}: ") and "\n" not in str(said.value)


def test_cut_anywhere(tmp_path: Path, share: float):
    whole = pickle.dumps(snapshot())
    file = tmp_path / "s.pickle"
    for length in range(0, len(whole), 7 if share == 1 else 29):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError):
            read_plain_pickle(file)


def test_deep_nesting_is_data_like_any(tmp_path: Path):
    """The interpreter's stack is not what holds it."""
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert isinstance(read_plain_pickle(file), list)


def test_a_gzip_bomb_is_bounded(tmp_path: Path):
    """What gzip makes a thousandth of is no snapshot, however much room there is."""
    file = tmp_path / "s.pickle.gz"
    file.write_bytes(gzip.compress(b"\x80\x04" + b"]0" * (16 << 20) + b"N."))
    with pytest.raises(InputError, match=r"unpacks to more than 2\d\.\d+ MiB"):
        read_plain_pickle(file)


def test_more_memory_than_its_bytes_can_need_is_refused_early(tmp_path: Path):
    """An empty list is a byte of pickle and seventy bytes of Python: 3 MB of gzip came to 10.7 GB."""
    file = tmp_path / "s.pickle.gz"
    file.write_bytes(gzip.compress(b"\x80\x04(" + b"]" * (64 << 20) + b"l."))
    # In a process of its own: the mark is the highest of all children that a process ever had.
    code = """
        import resource, sys
        from pathlib import Path
        from stepscope.core.errors import InputError
        from stepscope.allocations.plain_pickle import read_plain_pickle
        try:
            read_plain_pickle(Path(sys.argv[1]))
        except InputError as error:
            print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, error)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_kib, said = done.stdout.split(maxsplit=1)
    assert "more memory than" in said
    assert int(peak_kib) < 1 << 20


@pytest.mark.long
def test_what_would_be_hashed_for_years_is_ended(tmp_path: Path):
    """A tuple that holds another twice, two hundred deep: its hash visits it 2^200 times, deaf to Ctrl-C."""
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x04\x8f(K\x01" + b"2\x86" * 200 + b"\x90.")
    with pytest.raises(InputError, match="takes longer than"):
        read_plain_pickle(file)


def test_a_table_of_64_gib_is_not_made(tmp_path: Path):
    """LONG_BINPUT with the index 2**32 - 1 has the unpickler make room for that many. In a process of its own."""
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")
    program = (
        "import re, sys, resource\nfrom pathlib import Path\n"
        "from stepscope.core.errors import InputError\n"
        "from stepscope.allocations.plain_pickle import read_plain_pickle\n"
        "try:\n    read_plain_pickle(Path(sys.argv[1]))\nexcept InputError as error:\n    print(error)\n"
        # Of this program alone: what getrusage says begins with the size of the process that started it.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) < 1 << 20)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True", "True"], done.stdout


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_of_every_protocol_is_read(tmp_path: Path, protocol: int):
    data = {**snapshot(), "numbers": [0, -1, 2**70, 1.5, True, None], "texts": ("ü", "x" * 300)}
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps(data, protocol=protocol))
    read: Any = read_plain_pickle(file)
    assert read["segments"] == data["segments"] and read["numbers"] == data["numbers"]


def test_no_opcode_reaches_out_unseen():
    """Every opcode of this Python's pickle that can name something outside is among those planted above."""
    reaching = {op.name for op in pickletools.opcodes if {"GLOBAL", "INST", "EXT", "PERS"} & set(op.name.split("_"))}
    reaching |= {op.name for op in pickletools.opcodes if op.name.startswith(("EXT", "PERS", "BINPERS"))}
    assert reaching == {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
    programs = [program for program, _ in planted(Path("mark")).values()]
    used = {op.name for program in programs for op, _, _ in pickletools.genops(io.BytesIO(program))}
    assert {"GLOBAL", "STACK_GLOBAL", "INST", "PERSID", "BINPERSID", "REDUCE", "BUILD", "OBJ", "NEWOBJ"} <= used


def test_no_file_and_no_regular_file(tmp_path: Path):
    for path in (tmp_path / "none.pickle", Path("/dev/null"), tmp_path):
        with pytest.raises(InputError, match=r"no such file|not a file"):
            read_plain_pickle(path)
