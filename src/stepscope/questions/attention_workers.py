"""Calls of attention judged, or only made so that their kernels are compiled, by several processes at once.

On a GPU nearly all of a gate's time is compiling, and that is the host's work. A worker is `python -m` this module: a
task as a line of JSON on stdin, its answer as a line on stdout, until stdin closes. A worker that dies takes its task
with it, which is said, and another goes on with the rest.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from stepscope.core.attention_call import AttentionShape, AttentionVerdict, CallCompile, GateReport
from stepscope.core.errors import named_line
from stepscope.core.interrupts import awaited
from stepscope.core.parts import Attention, TensorDtype

WORKER_COMMAND = (sys.executable, "-P", "-m", "stepscope.questions.attention_workers")


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """judge: the gate on one shape in one dtype. gradcheck: PyTorch's own check of a user's function at its head_dim.
    compile: make the call once, forward and backward."""

    kind: Literal["judge", "gradcheck", "compile"]
    names: tuple[Attention, ...]
    dtype: TensorDtype
    shape: AttentionShape
    device: str
    seed: int = 0
    repeat: bool = False
    compile: CallCompile = "none"


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of a task: the gate's reports, or what went wrong."""

    reports: tuple[GateReport, ...] = ()
    error: str = ""


Told = Callable[[WorkerTask, WorkerAnswer], None]


def work_through(tasks: Sequence[WorkerTask], *, workers: int, deadline_s: float, on_answer: Told) -> None:
    """Have the tasks done by so many processes; each answer is told as it comes, from this thread.

    What is not done at `deadline_s` (of `time.monotonic`) is left. However this ends, the processes end with it.
    """
    if time.monotonic() >= deadline_s:
        return
    waiting: queue.SimpleQueue[WorkerTask] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    answers: queue.SimpleQueue[tuple[WorkerTask, WorkerAnswer]] = queue.SimpleQueue()
    crew = [_Worker(waiting, answers) for _ in range(min(workers, len(tasks)))]
    try:
        for worker in crew:
            worker.start()
        for _ in tasks:
            try:
                left_s = min(threading.TIMEOUT_MAX, max(0.0, deadline_s - time.monotonic()))
                on_answer(*awaited(partial(answers.get, timeout=left_s)))
            except queue.Empty:
                return
    finally:
        for worker in crew:
            worker.stop()
        for worker in crew:
            if worker.ident is not None:
                worker.join(timeout=5)


class _Worker(threading.Thread):
    """Feeds one process, and starts another when it dies."""

    def __init__(
        self,
        waiting: "queue.SimpleQueue[WorkerTask]",
        answers: "queue.SimpleQueue[tuple[WorkerTask, WorkerAnswer]]",
    ) -> None:
        super().__init__(daemon=True)
        self._waiting, self._answers = waiting, answers
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                task = self._waiting.get_nowait()
            except queue.Empty:
                break
            self._answers.put((task, self._ask(task)))
        self._end()

    def stop(self) -> None:
        self._stopped.set()
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def _ask(self, task: WorkerTask) -> WorkerAnswer:
        if self._process is None or self._process.poll() is not None:
            # Each compiles in its own process: helpers of it would be too many, and so would warnings of each.
            environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            self._process = subprocess.Popen(
                WORKER_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=WorkerAnswer)
        return WorkerAnswer(error=f"the process that ran it ended with code {process.wait()}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def perform(task: WorkerTask) -> WorkerAnswer:
    """Do one task in this process."""
    import torch

    from stepscope.questions.attention_calls import call_once
    from stepscope.recording.environment import resolve_device
    from stepscope.training.attention.gate import check_attention_matrix, check_users_gradients

    device = resolve_device(task.device)
    try:
        if task.kind == "compile":
            for name in task.names:
                call_once(name, task.compile, task.shape, task.dtype, device)
            return WorkerAnswer()
        if task.kind == "gradcheck":
            verdicts = {name: check_users_gradients(name, task.shape.head_dim, device) for name in task.names}
            return WorkerAnswer(reports=_reports(task, verdicts))
        reports = check_attention_matrix(
            task.names, device=device, dtypes=(task.dtype,), shapes=(task.shape,), seed=task.seed, repeat=task.repeat
        )
    except Exception as error:  # the next task may go well
        return WorkerAnswer(error=named_line(error))
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a device that failed says so in the next task
                torch.cuda.empty_cache()  # the other processes need it
    return WorkerAnswer(reports=reports)


def lost(task: WorkerTask, reason: str) -> tuple[GateReport, ...]:
    """The gate's reports of a task that has no answer: each failed, and why."""
    verdict = AttentionVerdict(dtype=task.dtype, shape=task.shape, outcome="failed", reason=reason)
    return _reports(task, dict.fromkeys(task.names, verdict))


def _reports(task: WorkerTask, verdicts: dict[Attention, AttentionVerdict]) -> tuple[GateReport, ...]:
    return tuple(
        GateReport(implementation=name, device=task.device, seed=task.seed, verdicts=(verdict,))
        for name, verdict in verdicts.items()
    )


def main() -> int:
    """Answer tasks until stdin closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr
    for line in sys.stdin.buffer:
        answer = perform(msgspec.json.decode(line, type=WorkerTask))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
