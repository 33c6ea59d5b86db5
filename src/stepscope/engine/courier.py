"""The process that talks with Ray for a sweep, or for `trace`: what Ray prints, or ends, is no concern of theirs.

Started by `engine/cluster.py` as `python -m stepscope.engine.courier`. Terms and orders come as lines on
stdin, words go as lines to stdout. When stdin closes, the sweep has gone: this process ends, and Ray ends its cells.
No other file imports Ray.
"""

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from stepscope import __version__
from stepscope.core import interrupts
from stepscope.core.errors import EXIT_WRONG_INPUT, DeviceError, InputError, StepscopeError, named_line, one_line
from stepscope.engine import cluster as on_node
from stepscope.engine.cluster import Node, Order, Terms, Word, land
from stepscope.traces.ranks import in_order, processes_for

_ANSWER_S = 10.0
"""Seconds for a connection to the address to open."""
_CONNECT_S = 45.0
"""Seconds for Ray to connect. Its client waits for a process that the cluster starts for it."""
_LOOK_S = 60.0
"""Seconds for a node to say what it has. Its first process of Ray's must start for that."""
_WATCH_EVERY_S = 2.0
_MOST_LOSSES = 3
"""Cells that a node may lose for each that it measures at a time. Its workers die, or are ended, whatever they do."""
_CLIENT = "ray://"
_NAMES_THE_CLUSTER = "RAY_ADDRESS"
_TOLD = 300
"""Letters of Ray's own words that a message repeats."""


def main() -> int:
    """Serve the sweep until it closes stdin."""
    says = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints goes to the log
    terms = msgspec.json.decode(sys.stdin.buffer.readline(), type=Terms)

    def say(word: Word) -> None:
        with contextlib.suppress(OSError):  # the sweep has gone, which stdin says too
            says.write(msgspec.json.encode(word) + b"\n")

    def give_up() -> None:
        say(Word(error=f"the Ray cluster (--on {terms.address}) does not answer within {_CONNECT_S:.0f} s"))
        os._exit(EXIT_WRONG_INPUT)

    patience = threading.Timer(_CONNECT_S, give_up)
    patience.daemon = True
    patience.start()
    try:
        ray = _connected(terms.address, or_start=bool(terms.ranks))
        patience.cancel()
        courier = _Courier(ray, terms, say)
        try:
            asyncio.run(courier.read_ranks() if terms.ranks else courier.serve())
        finally:
            ray.shutdown()
    except StepscopeError as error:
        say(Word(error=str(error), exit_code=error.exit_code))
        return error.exit_code
    return 0


def _connected(address: str, *, or_start: bool) -> Any:
    """Ray, connected to the cluster. Raises InputError. or_start: where `auto` finds none, one is started here."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray as imported  # noqa: PLC0415  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise InputError(
            f"--on needs Ray, which is not there ({one_line(error)}): pip install 'stepscope[ray]'"
        ) from error
    ray: Any = imported
    named = os.environ.get(_NAMES_THE_CLUSTER, "") if address == "auto" else address
    if named:  # an empty one is for Ray to find
        host, _, port = named.removeprefix(_CLIENT).rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except (OSError, ValueError) as error:
            opens = "`ray start --head` opens it where Ray was installed as ray[client]"
            remedy = opens if named.startswith(_CLIENT) else f"{_NAMES_THE_CLUSTER} names it"
            raise InputError(f"no Ray cluster answers at {named}: {one_line(error)}; {remedy}") from error
    quietly: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    try:
        ray.init(address=named or address, **quietly)
    except ConnectionError as error:
        if or_start and not named:
            ray.init(address="local", include_dashboard=False, **quietly)
            return ray
        remedy = "start one with `ray start --head`, or name a host as ray://HOST"
        raise InputError(f"no Ray cluster for --on {address}: {one_line(error)}; {remedy}") from error
    except Exception as error:  # what the client raises is of gRPC too
        message = " ".join(str(error).split())
        if "version mismatch" in message.lower():
            raise InputError(
                f"the Ray cluster (--on {address}) has another Python or Ray than this command: {message[:_TOLD]}"
            ) from error
        raise InputError(f"cannot use the Ray cluster (--on {address}): {named_line(error)}") from error
    return ray


class _Courier:
    def __init__(self, ray: Any, terms: Terms, say: Callable[[Word], None]) -> None:
        self._ray, self._terms, self._say = ray, terms, say
        self._known: dict[str, _NodeState] = {}
        """Nodes that have been looked at, those that have gone too."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._measure = ray.remote(on_node.measure)
        self._desk: Any = None

    async def serve(self) -> None:
        head = next(node["NodeID"] for node in self._nodes() if "node:__internal_head__" in node["Resources"])
        self._desk = self._ray.remote(on_node.Desk).options(num_cpus=0, **self._at(head)).remote()
        await self._look_first()
        self._do(self._hear())
        self._do(self._watch())
        orders = asyncio.StreamReader(limit=2**26)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(orders), os.fdopen(0, "rb", buffering=0)
        )
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=Order)
            if order.stop:
                self._desk.stop.remote()
            else:
                self._do(self._have_measured(order))
        for task in self._tasks:
            task.cancel()

    async def read_ranks(self) -> None:
        """Have each node read the captures that the folder holds there; one of them reads what several see."""
        interrupts.end_with_stdin(self._ray.shutdown)
        await self._look_first()
        nodes = [state for state in self._known.values() if not state.fault]
        seen_by: dict[on_node.Seen, list[_NodeState]] = {}
        for state, seen in zip(nodes, await asyncio.gather(*map(self._captures_on, nodes)), strict=True):
            for one in seen:
                seen_by.setdefault(one, []).append(state)
        if not seen_by:
            raise InputError(
                f"{self._terms.ranks}: no node of the Ray cluster (--on {self._terms.address}) has captures there"
            )
        places = {one: place for place, one in enumerate(sorted(seen_by, key=lambda one: in_order(one.path)))}
        for one in sorted(places, key=lambda one: -one.need_bytes):
            state = min(seen_by[one], key=lambda state: state.due_bytes / state.units)
            state.due.append(one)
            state.due_bytes += one.need_bytes
        self._say(Word(ranks=len(places)))
        await asyncio.gather(*(self._have_read(state, places) for state in nodes))

    async def _captures_on(self, state: "_NodeState") -> list[on_node.Seen]:
        task = self._ray.remote(on_node.captures_here).options(num_cpus=0, **self._at(state.node.id))
        try:
            return await task.remote(self._terms.ranks)
        except self._ray.exceptions.RayTaskError as error:
            raise StepscopeError(f"{named_line(error.cause)} (on node {state.node.name})") from None

    async def _have_read(self, state: "_NodeState", places: dict[on_node.Seen, int]) -> None:
        """Have a node read what is due, so much at a time as its CPUs and MOST_BYTES hold."""
        if not state.due:
            return
        name = state.node.name
        cpus = ceil(state.units / processes_for([one.need_bytes for one in state.due], state.units))
        task = self._ray.remote(on_node.read_here).options(max_retries=0, num_cpus=cpus, **self._at(state.node.id))

        async def reply_of(capture: on_node.Seen) -> None:
            try:
                reply = await task.remote(capture.path, places[capture], name, cpus)
            except self._ray.exceptions.RayError as error:
                lines: list[str] = []
                reply = lines, StepscopeError(f"{capture.path}: node {name} did not read it ({type(error).__name__})")
            self._say(Word(reply=pickle.dumps(reply)))

        await asyncio.gather(*map(reply_of, state.due))

    def _do(self, work: Any) -> None:
        """Do this beside; what fails in it ends the sweep."""
        task = asyncio.get_running_loop().create_task(self._ending_all(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ending_all(self, work: Any) -> None:
        try:
            await work
        except StepscopeError as error:
            self._say(Word(error=str(error), exit_code=error.exit_code))
        except Exception as error:
            failure = DeviceError(f"the Ray cluster (--on {self._terms.address}) is lost: {named_line(error)}")
            self._say(Word(error=str(failure), exit_code=failure.exit_code))

    def _at(self, node: str) -> dict[str, Any]:
        return {"scheduling_strategy": self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, False)}

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    async def _look_first(self) -> None:
        """Name the nodes that are there. Raises InputError where one of them cannot measure, or none may."""
        nodes = self._nodes()
        gpus = self._terms.device == "cuda" or any(node["Resources"].get("GPU") for node in nodes)
        self._wants = "GPU" if gpus and self._terms.device != "cpu" else "CPU"
        fit = [node for node in nodes if node["Resources"].get(self._wants, 0) >= 1]
        if not fit:
            more = "; --device cpu measures on CPUs" if self._wants == "GPU" else ""
            raise InputError(
                f"no node of the Ray cluster (--on {self._terms.address}) has a {self._wants}: none of {len(nodes)} "
                f"was started with one (`ray start --num-{self._wants.lower()}s N`){more}"
            )
        looked_at = await asyncio.gather(*(self._look_at(node) for node in fit))
        answering = [state for state in looked_at if not state.silent]  # one that has just died is listed for a while
        for state in answering or looked_at:
            if state.fault:
                raise InputError(state.fault)
        for state in answering:
            self._say(Word(node=state.node))
        self._say(Word(ready=True))

    async def _watch(self) -> None:
        """Name the nodes that join later; those that cannot measure are left alone."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            for node in self._nodes():
                if node["NodeID"] not in self._known and node["Resources"].get(self._wants, 0) >= 1:
                    state = await self._look_at(node)
                    if not state.fault:
                        self._say(Word(node=state.node))

    async def _look_at(self, node: dict[str, Any]) -> "_NodeState":
        host, known = node["NodeManagerHostname"], [state.node.name for state in self._known.values()]
        several = sum(other["NodeManagerHostname"] == host for other in self._nodes()) > 1 or host in known
        units = int(node["Resources"][self._wants])
        name = f"{host}-{node['NodeID'][:6]}" if several else host
        gpus = units if self._wants == "GPU" else 0
        named = Node(id=node["NodeID"], name=name, slots=gpus or 1, gpus=gpus)
        state = self._known[named.id] = _NodeState(named, units)
        try:
            version, python, word = await asyncio.wait_for(self._version_on(named.id), _LOOK_S)
        except TimeoutError:
            state.fault = f"node {name} of the Ray cluster says nothing within {_LOOK_S:.0f} s"
            state.silent = True
        except self._ray.exceptions.RayError as error:
            state.fault = f"node {name} of the Ray cluster cannot be used: {named_line(error)}"
            state.silent = True
        else:
            if version is None:
                state.fault = f"node {name} has no stepscope in {python}: {word}; install stepscope {__version__} there"
            elif version != __version__:
                state.fault = f"node {name} has stepscope {version}, and this is {__version__}: install one on both"
        return state

    def _version_on(self, node: str) -> Any:
        return self._ray.remote(_looking()).options(num_cpus=0, max_retries=0, **self._at(node)).remote()

    async def _hear(self) -> None:
        while True:
            for number, (stage, detail) in (await self._desk.heard.remote()).items():
                self._say(Word(number=number, stage=stage, detail=detail))

    async def _have_measured(self, order: Order) -> None:
        assert order.request is not None
        state, errors = self._known[order.node], self._ray.exceptions
        gpus = {"num_gpus": order.request.workload.ranks, "num_cpus": 0}
        resources = gpus if state.node.gpus else {"num_cpus": state.units}
        task = self._measure.options(max_retries=0, **resources, **self._at(order.node))
        name = state.node.name
        try:
            outcome: on_node.Outcome = await task.remote(order, self._terms, name, self._desk)
        except errors.OutOfMemoryError:
            self._say(Word(number=order.number, killed=f"the memory of node {name} ran out, and Ray ended the cell"))
        except errors.RayTaskError as error:
            self._say(Word(number=order.number, killed=f"node {name} could not measure: {named_line(error.cause)}"))
        except errors.RayError as error:
            died = f"the worker on node {name}" if isinstance(error, errors.WorkerCrashedError) else f"node {name}"
            self._say(Word(number=order.number, lost=f"{died} died ({type(error).__name__})"))
            state.losses += 1
            if state.losses > _MOST_LOSSES * state.node.slots:
                return
            with contextlib.suppress(TimeoutError, errors.RayError):
                await asyncio.wait_for(self._version_on(order.node), _LOOK_S)
                self._say(Word(node=msgspec.structs.replace(state.node, slots=1)))  # only the worker had died
        else:
            self._bring_home(order.number, outcome)

    def _bring_home(self, number: int, outcome: on_node.Outcome) -> None:
        landed = land(outcome.files, Path(self._terms.out))
        if outcome.error is not None:
            refused = StepscopeError(outcome.error)
            refused.exit_code = outcome.exit_code
            raise refused
        if outcome.stopped:
            self._say(Word(number=number, stopped=True))
        elif landed:
            self._say(Word(number=number, directory=str(landed[-1])))
        else:
            self._say(Word(number=number, run=outcome.run))


@dataclass
class _NodeState:
    """A node as it was found."""

    node: Node
    units: int
    """Its GPUs, or else its CPUs."""
    fault: str | None = None
    """Why it cannot measure."""
    silent: bool = False
    """Whether it said nothing at all."""
    losses: int = 0
    """Cells that it has not brought to an end."""
    due: list[on_node.Seen] = field(default_factory=list[on_node.Seen])
    """Captures that it reads."""
    due_bytes: int = 0


def _looking() -> Callable[[], tuple[str | None, str, str]]:
    """What a node runs to say which stepscope it has: a function that travels whole, since the node may have none."""

    def look() -> tuple[str | None, str, str]:
        import subprocess  # noqa: PLC0415
        import sys  # noqa: PLC0415  (this one of the node)

        command = [sys.executable, "-P", "-c", "import stepscope; print(stepscope.__version__)"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        words = completed.stderr.strip().splitlines() or ["no word"]
        return (completed.stdout.strip() or None) if completed.returncode == 0 else None, sys.executable, words[-1]

    return look


if __name__ == "__main__":
    sys.exit(main())
