"""The nodes of a cluster that measured a sweep's cells, and which of them are unlike the others."""

from collections.abc import Iterable, Sequence

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.finding import Finding, warning
from stepscope.core.run import Run
from stepscope.core.units import counted

_NAMED = 3
"""Differences that a sentence names; the others are counted."""


class UnlikeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose environment differs from that of the nodes which measured most cells."""

    name: str
    cells: int
    differences: dict[str, tuple[object, object]]
    """By field, what most have and what this one has."""


def node_of(run: Run) -> str | None:
    """The name of the node that measured the run; None where no cluster did."""
    return run.environment.node if run.environment is not None else None


def unlike_nodes(runs: Sequence[Run]) -> list[UnlikeNode]:
    """The nodes of these runs that are unlike those which measured most of them."""
    environments: dict[str, Environment] = {}
    cells: dict[str, int] = {}
    for run in runs:
        if run.environment is not None and run.environment.node is not None:
            name = run.environment.node
            environments.setdefault(name, run.environment)
            cells[name] = cells.get(name, 0) + 1
    if not environments:
        return []
    alike = {
        name: sum(cells[other] for other, found in environments.items() if not environment.differences(found))
        for name, environment in environments.items()
    }
    most = environments[max(environments, key=lambda name: alike[name])]
    return [
        UnlikeNode(name=name, cells=cells[name], differences=differences)
        for name, environment in environments.items()
        if (differences := most.differences(environment))
    ]


def nodes_findings(runs: Sequence[Run]) -> Iterable[Finding]:
    """A finding for each node that is unlike the others."""
    for node in unlike_nodes(runs):
        told = [f"{field} {_said(here)}, not {_said(most)}" for field, (most, here) in node.differences.items()]
        more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        yield warning(
            "unlike-node",
            f"Node {node.name}, which measured {counted(node.cells, 'cell')}, is unlike the others: "
            f"{'; '.join(told[:_NAMED])}{more}.",
            {"node": node.name, "cells": node.cells},
            "Compare its cells with one another, or measure all cells on nodes of one kind.",
        )


def _said(value: object) -> str:
    return "none" if value is None else str(value)
