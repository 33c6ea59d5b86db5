"""Runs a function on several ranks of this machine, each a fresh process, and brings home what each returns.

    launch("stepscope.training.parallel.collectives:time_collectives", plan, ranks=2, device="cpu")

The function is named by its module, since another process imports it. It takes its argument as JSON, its Ranks, its
device, and a function to which it tells its stage. Every wait ends: a rank that dies takes the others with it, and so
does one that says nothing for too long. When this process dies, however it dies, the lifeline of each rank closes, and
the rank ends itself.

Why not torchrun's agent: its ranks have no such lifeline, and it tells of a failure in a block of lines. It would add
the ranks' meeting place, here a file, so that no port can be in use; and restarts, which no measurement wants. In a job
that torchrun or srun started, this process is a rank already.
"""

import contextlib
import importlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stepscope.core import interrupts
from stepscope.core.environment import RankPlace, check_processes, place_in_job
from stepscope.core.errors import InputError, StepscopeError, middle_cut, named_line, printable
from stepscope.core.interrupts import end_with_stdin, leave
from stepscope.core.units import counted

# What a rank's process is asked to run, and what it tells its starter.


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is asked to run, where, and as whom."""

    function: str
    argument: msgspec.Raw
    device: str
    place: RankPlace


class Say(Protocol):
    """Tells the starter of a rank its stage, and beside it what it knows already, as JSON."""

    def __call__(self, stage: str, part: bytes = b"") -> object: ...


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells its starter, a line each: a stage that begins, or its end."""

    stage: str = ""
    part: msgspec.Raw = msgspec.Raw()
    """What the function knows already, as JSON: kept where ranks end before they return a value."""
    value: msgspec.Raw = msgspec.Raw()
    """What the function returned, as JSON: the last word."""
    threads: int | None = None
    error: str = ""
    """Why it failed, in a line: the last word."""
    wrong_input: bool = False
    """Whether the error is the user's to mend, and the same on all ranks."""


def run_call(call: Call, say: Say, *, gather: bool = False) -> tuple[list[bytes], int | None]:
    """What the function returns here, as JSON, or on all ranks with `gather`; and the CPU threads of this rank."""
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415  (torch, after the lifeline)
    from stepscope.training.making import join  # noqa: PLC0415

    device = resolve_device(call.device, call.place)
    ranks = join(call.place, device)
    say("begin")
    if gather:  # somebody else started the ranks, each with words of its own
        calls = ranks.gathered((call.function, bytes(call.argument)))
        other = next((rank for rank, one in enumerate(calls) if one != calls[0]), None)
        if other is not None:
            raise InputError(f"rank {other} is asked for something else than rank 0: give all the same options")
    module, _, name = call.function.partition(":")
    value = msgspec.json.encode(
        getattr(importlib.import_module(module), name)(bytes(call.argument), ranks, device, say)
    )
    values: list[bytes] = ranks.gathered(value) if gather else [value]
    ranks.barrier()  # the first rank's process holds what the others still talk through
    ranks.part()  # not where this rank failed: its process ends, and nothing may delay its word
    return values, ranks.threads


SILENT_S = 600.0
"""How long all ranks may say nothing before they are taken to hang."""
_MEET_S = 120.0
"""The same until all have met."""
_LAST_WORDS_S = 2.0
"""How long the others' ends are listened to when one rank has failed: the first to be heard may not be the cause."""
_MISSED_A_RANK = re.compile(r"(closed|reset) by peer|remote worker")
"""What gloo and NCCL say in a rank whose partner has gone."""
_LOG_KEPT = 2000

Tell = Callable[[int, str], object]
"""Is told the rank and its stage."""
Keep = Callable[[int, bytes], object]
"""Is given the rank and what it knows already, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the ranks returned, as JSON, in their order."""

    values: tuple[bytes, ...]
    threads: int | None
    """CPU threads of each rank; None where ranks compute on GPUs."""
    start_s: float | None
    """From the start of the processes until all had met; None in somebody else's job."""


def launch(
    function: str, argument: Any, *, ranks: int, device: str, tell: Tell | None = None, keep: Keep | None = None,
    silent_s: float = SILENT_S,
) -> Launched:  # fmt: skip
    """What `function`, as module:name, returns on each of so many ranks.

    Raises InputError for what cannot run here, and StepscopeError that says which rank failed, in which stage, and of
    what. Whatever it raises, no process is left behind.
    """
    place = check_launch(ranks, device)
    encoded = msgspec.Raw(msgspec.json.encode(argument))
    if place is not None:
        return _in_this_job(function, encoded, place, device)
    folder = Path(tempfile.mkdtemp(prefix="stepscope-ranks-"))
    job = _Job(folder, tell or (lambda _rank, _stage: None), keep or (lambda _rank, _part: None), silent_s)
    try:
        for rank in range(ranks):
            place = RankPlace(
                rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, meeting=f"file://{folder}/meeting",
                began_s=time.time(),
            )  # fmt: skip
            job.start(Call(function=function, argument=encoded, device=device, place=place))
        return job.finished()
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)


def check_launch(ranks: int, device: str) -> RankPlace | None:
    """Raise InputError where no such ranks can be started here. Returns this process's place in a job that somebody
    else started; None where there is none."""
    if ranks < 1:
        raise InputError(f"--ranks is {ranks}: give 1 or more")
    place = place_in_job(os.environ)
    if place is not None:
        if ranks != place.ranks:
            raise InputError(
                f"this job has {place.ranks} ranks, and --ranks says {ranks}: leave it out, or say the same"
            )
        return place
    if device != "cpu":
        from stepscope.recording.environment import resolve_device  # noqa: PLC0415  (torch, which CPU ranks need not wait for)

        resolve_device(device, RankPlace(rank=0, ranks=ranks, local_rank=0, local_ranks=ranks, meeting=""))
    check_processes(ranks)
    return None


def _in_this_job(function: str, argument: msgspec.Raw, place: RankPlace, device: str) -> Launched:
    """The same where this process is one of the ranks already; every one of them gets all values."""
    call = Call(function=function, argument=argument, device=device, place=place)
    try:
        values, threads = run_call(call, lambda stage, part=b"": None, gather=True)
    except StepscopeError:
        raise
    except Exception as error:  # of the function, or since another rank has ended
        raise StepscopeError(f"rank {place.rank} of {place.ranks} failed: {named_line(error)}") from error
    return Launched(values=tuple(values), threads=threads, start_s=None)


@dataclass
class _Rank:
    """A rank's process, and what it has said."""

    number: int
    process: subprocess.Popen[bytes]
    words: int
    """The pipe on which it tells."""
    log: Path
    stage: str = "start"
    stages: int = 0
    """How many stages it has begun: of ranks that wait for one another, the one behind is waited for."""
    last: Word | None = None
    rest: bytearray = field(default_factory=bytearray)

    @property
    def failed(self) -> bool:
        """Whether its end is known, and is not a value."""
        return bool(self.last.error) if self.last is not None else self.process.returncode is not None

    @property
    def died(self) -> bool:
        return self.failed and self.last is None

    def what(self) -> str:
        """How it failed, in words."""
        if self.last is not None:
            return f"failed during {self.stage}: {self.last.error}"
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name} during {self.stage}"
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.log.read_bytes()[-_LOG_KEPT:].decode(errors="replace").strip().splitlines()
        last_line = f": {middle_cut(printable(lines[-1].strip()), 300)}" if lines else ""
        return f"ended with code {code} during {self.stage}{last_line}"


class _Job:
    """The ranks that were started, from their first word to their end."""

    def __init__(self, folder: Path, tell: Tell, keep: Keep, silent_s: float) -> None:
        self._folder, self._tell, self._keep, self._silent_s = folder, tell, keep, silent_s
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._began_s = time.monotonic()
        self._met_s: float | None = None

    def start(self, call: Call) -> None:
        """Start a rank."""
        number = call.place.rank
        log = self._folder / f"rank-{number}.log"
        words, write_end = os.pipe()
        try:
            with log.open("wb") as printed:
                process = subprocess.Popen(
                    (sys.executable, "-P", "-m", "stepscope.training.parallel.launching", str(write_end)),
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=(write_end,),
                    env={"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the ranks
                )
        except OSError as error:
            os.close(words)
            raise StepscopeError(f"cannot start rank {number}: {error.strerror or error}") from error
        finally:
            os.close(write_end)
        rank = _Rank(number, process, words, log)
        self._ranks.append(rank)
        self._selector.register(words, selectors.EVENT_READ, rank)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that is dead already says so by its exit code
            process.stdin.write(msgspec.json.encode(call) + b"\n")
            process.stdin.flush()

    def finished(self) -> Launched:
        """What all ranks returned. Raises StepscopeError once one has failed, or all are silent for too long."""
        heard_s = time.monotonic()
        while self._selector.get_map():
            if self._hear(1.0):
                heard_s = time.monotonic()
            if any(rank.failed for rank in self._ranks):
                self._raise_for_the_cause()
            bound_s = self._silent_s if self._met_s is not None else _MEET_S
            if time.monotonic() - heard_s > bound_s:
                self._raise_for_the_last(bound_s)
        last = [rank.last or Word() for rank in self._ranks]
        return Launched(
            values=tuple(bytes(word.value) for word in last),
            threads=last[0].threads,
            start_s=None if self._met_s is None else self._met_s - self._began_s,
        )

    def _hear(self, seconds: float) -> bool:
        """Take in what the ranks say within this time; returns whether any said something."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            rank: _Rank = key.data
            data = os.read(rank.words, 1 << 16)
            if not data:
                self._selector.unregister(rank.words)
                if rank.last is None:  # it can say nothing any more, and is ended where it goes on
                    try:
                        rank.process.wait(_LAST_WORDS_S)
                    except subprocess.TimeoutExpired:
                        os.killpg(rank.process.pid, signal.SIGKILL)
                        rank.process.wait()
                continue
            rank.rest += data
            *lines, rest = bytes(rank.rest).split(b"\n")
            rank.rest = bytearray(rest)
            for line in lines:
                self._take(rank, msgspec.json.decode(line, type=Word))
        return bool(ready)

    def _take(self, rank: _Rank, word: Word) -> None:
        if not word.stage:
            rank.last = word
            return
        rank.stage, rank.stages = word.stage, rank.stages + 1
        if bytes(word.part):
            self._keep(rank.number, bytes(word.part))
        if self._met_s is None and all(one.stages > 1 for one in self._ranks):
            self._met_s = time.monotonic()
        self._tell(rank.number, word.stage)

    def _raise_for_the_cause(self) -> None:
        """Raise for the rank that failed first: others fail since they miss it, and may be heard before."""
        until_s = time.monotonic() + _LAST_WORDS_S
        failed = [rank for rank in self._ranks if rank.failed]
        while self._selector.get_map() and time.monotonic() < until_s and not any(rank.died for rank in failed):
            self._hear(0.1)
            failed += [rank for rank in self._ranks if rank.failed and rank not in failed]
        causes = [rank for rank in failed if rank.last is None or not _MISSED_A_RANK.search(rank.last.error)]
        cause = next((rank for rank in failed if rank.died), (causes or failed)[0])
        if cause.last is not None and cause.last.wrong_input:
            raise InputError(cause.last.error)
        raise StepscopeError(f"rank {cause.number} of {len(self._ranks)} {cause.what()}")

    def _raise_for_the_last(self, bound_s: float) -> None:
        """Raise for the ranks that are furthest behind: one alone is what the others wait for."""
        waited = [rank for rank in self._ranks if rank.last is None]
        stages = min(rank.stages for rank in waited)
        behind = [rank for rank in waited if rank.stages == stages]
        numbers = ", ".join(str(rank.number) for rank in behind)
        who = f"rank {numbers} of {len(self._ranks)} hangs" if len(behind) == 1 else f"ranks {numbers} hang"
        raise StepscopeError(
            f"{who} during {behind[0].stage}: no rank came on in {counted(round(bound_s), 'second')}, and all are ended"
        )

    def close(self) -> None:
        """End every rank, and what it started."""
        for rank in self._ranks:
            # Until it is waited for, its number is nobody else's; afterwards its group may still have members.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if rank.process.returncode is None:
                    os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(5.0)
            if rank.process.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.process.stdin.close()
            os.close(rank.words)
        self._selector.close()


# A rank's process, as `launching.py` starts it: it reads a Call on stdin, and tells its stages on a pipe.


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
