"""The nodes of a Ray cluster as a sweep sees them: places, which come and go. Ray itself is in a process of its own."""

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from stepscope.core.errors import DeviceError, InputError, StepscopeError, one_line
from stepscope.core.run import Failure, Run
from stepscope.core.run_directory import load_run
from stepscope.engine.cell_process import cell_environment
from stepscope.engine.cluster.on_node import Node, Order, Terms, Word
from stepscope.engine.measured_cell import INTERRUPT_GRACE_S, REFUSED, PlaceLost, record
from stepscope.engine.plan import Policy, SweepPlan
from stepscope.engine.request import Stage, StepRequest, Tell

_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.cluster.courier")
_START_S = 120.0
"""Seconds until the cluster has named its nodes."""
_NO_NODE_S = 60.0
"""Seconds for which a sweep without a node waits for another one."""
_LOOK_EVERY_S = 2.0
_STOP_S = INTERRUPT_GRACE_S + 8.0
"""Seconds for stopped cells to come home."""
_END_S = 10.0
_ADDRESS, _PORT = re.compile(r"ray://(?:[^:\[\]/]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?"), 10001
"""What `--on` may name beside `auto`, and the port that Ray has for its clients."""
_LINE_BYTES = 2**28
_COMPUTING = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "ONEDNN_", "TRITON_",
)  # fmt: skip
"""Beginnings of the variables that say how libraries compute: a cell has those of the sweep on any node."""
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE")
"""Endings of variables that name places, which are each node's own."""


def terms_of(on: str, plan: SweepPlan, policy: Policy) -> Terms:
    """What holds for a sweep on this cluster. Raises InputError where the address or the device cannot be meant."""
    named = _ADDRESS.fullmatch(on)
    if on != "auto" and named is None:
        raise InputError(f"--on {on}: write ray://HOST or ray://HOST:PORT, or auto for the cluster of this machine")
    address = f"{on}:{_PORT}" if named is not None and named[1] is None else on
    device, *others = plan.devices
    if others or device not in ("auto", "cpu", "cuda"):
        raise InputError(
            f"--device {','.join(plan.devices)} names devices of one machine: with --on write auto, cpu or cuda, and "
            "each GPU of each node measures"
        )
    counts = {
        name: value for name, value in os.environ.items() if name.startswith(_COMPUTING) and not name.endswith(_PLACES)
    }
    return Terms(
        address=address, device=device, out=str(Path(plan.out).resolve()), timeout_s=policy.timeout_s,
        folder=str(Path.cwd()), variables=counts, key=plan.key,
    )  # fmt: skip


class Cluster:
    """The connection to a cluster; `close` it whatever happens."""

    def __init__(self, terms: Terms, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._terms, self._process, self._log = terms, process, log
        self._joined: asyncio.Queue[Node | None] = asyncio.Queue()
        self._cells: dict[int, _Measured] = {}
        self._ready = asyncio.get_running_loop().create_future()
        self._failure: StepscopeError | None = None
        self._stopped, self._places = False, 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, terms: Terms, mark: str) -> "Cluster":
        """Connect. Raises StepscopeError where there is no such cluster, or it cannot measure."""
        log = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=_LINE_BYTES,
            start_new_session=True, env=cell_environment(mark), cwd="/",
        )  # fmt: skip
        self = cls(terms, process, log)
        try:
            self._write(terms)
            async with asyncio.timeout(_START_S):
                await self._ready
        except TimeoutError:
            process.kill()
            await self.close()
            raise InputError(
                f"the Ray cluster (--on {terms.address}) does not answer within {_START_S:.0f} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def places(self, all_ended: asyncio.Event) -> AsyncGenerator["NodePlace"]:
        """A place for each cell that a node measures at a time, as nodes join, until all cells have ended.

        Raises StepscopeError where the cluster is lost, or has had no node for long.
        """
        ended = asyncio.get_running_loop().create_task(all_ended.wait())
        try:
            while not ended.done():
                node = await self._next_node(ended)
                if node is None:
                    return
                self._places += node.slots
                for _ in range(node.slots):
                    yield NodePlace(self, node, self._terms.device)
        finally:
            ended.cancel()

    async def _next_node(self, ended: asyncio.Task[bool]) -> Node | None:
        """The next node that joins; None when the cells have ended."""
        joined = asyncio.get_running_loop().create_task(self._joined.get())
        alone_s = 0.0
        while True:
            await asyncio.wait({ended, joined}, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if joined.done() and (node := joined.result()) is not None:
                return node
            if self._failure is not None:
                raise self._failure
            if ended.done():
                joined.cancel()
                return None
            alone_s = 0.0 if self._places else alone_s + _LOOK_EVERY_S
            if alone_s > _NO_NODE_S:
                joined.cancel()
                raise DeviceError(
                    f"the Ray cluster (--on {self._terms.address}) has lost all nodes that measured, and no other "
                    f"joined within {_NO_NODE_S:.0f} s: the same command goes on where this one stopped"
                )

    async def measured(self, node: str, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Word:
        """What became of a cell on this node; where it is cancelled, the cell comes home first."""
        number = len(self._cells) + 1
        cell = self._cells[number] = _Measured(tell)
        if self._failure is not None:
            raise self._failure
        self._write(
            Order(number=number, node=node, request=request, modules=None if modules is None else tuple(modules))
        )
        try:
            return await asyncio.shield(cell.ended)
        except asyncio.CancelledError:
            if not self._stopped:
                self._stopped = True
                self._write(Order(stop=True))
            with contextlib.suppress(TimeoutError, StepscopeError):
                async with asyncio.timeout(_STOP_S):
                    await asyncio.shield(cell.ended)
            raise

    def left(self) -> None:
        """Take in that a place has gone."""
        self._places -= 1

    async def close(self) -> None:
        """End the connection, and every cell that still runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        finally:
            self._reading.cancel()
            self._log.close()

    def _write(self, said: Terms | Order) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(said) + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._hear(msgspec.json.decode(line, type=Word))
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        said = f": {one_line(Exception(last[0]))}" if last else ""
        self._fail(DeviceError(f"the connection to the Ray cluster (--on {self._terms.address}) was lost{said}"))

    def _hear(self, word: Word) -> None:
        if word.error is not None:
            self._fail(_ended(word))
        elif word.number is not None:
            self._cells[word.number].hear(word)
        elif word.node is not None:
            self._joined.put_nowait(word.node)
        elif word.ready and not self._ready.done():
            self._ready.set_result(None)

    def _fail(self, failure: StepscopeError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        if not self._ready.done():
            self._ready.set_exception(failure)
        for cell in self._cells.values():
            cell.fail(failure)
        self._joined.put_nowait(None)


def _ended(word: Word) -> StepscopeError:
    kinds = {kind.exit_code: kind for kind in (InputError, DeviceError)}
    return kinds.get(word.exit_code, StepscopeError)(word.error or "")


class _Measured:
    """A cell that a node measures."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self.began = tell, False
        self.ended: asyncio.Future[Word] = asyncio.get_running_loop().create_future()

    def hear(self, word: Word) -> None:
        if self.ended.done():
            return
        if word.stage:
            self.began = True
            self._tell(Stage(name=word.stage, detail=word.detail))
        else:
            self.ended.set_result(msgspec.structs.replace(word, stage="start" if self.began else ""))

    def fail(self, failure: StepscopeError) -> None:
        if not self.ended.done():
            self.ended.set_exception(failure)
            self.ended.exception()  # it may be that nobody waits


class NodePlace:
    """One of the cells that a node measures at a time."""

    unlike = True

    def __init__(self, cluster: Cluster, node: Node, device: str) -> None:
        self._cluster, self._node, self.device = cluster, node, device

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, which has come home. Raises PlaceLost where the node has died."""
        ranks, gpus = request.workload.ranks, self._node.gpus
        if 0 < gpus < ranks:
            message = f"{ranks} ranks need a GPU each, and node {self._node.name} has {gpus}"
            return record(request, None, "failed", Failure(message=message, during=REFUSED))
        word = await self._cluster.measured(self._node.id, request, modules, tell)
        if word.lost is not None:
            self._cluster.left()
            raise PlaceLost(word.lost, began=bool(word.stage))
        if word.killed is not None:
            return record(request, None, "killed", Failure(message=word.killed, during="start"))
        if word.directory is not None:
            return load_run(Path(word.directory))
        assert word.run is not None
        return word.run
