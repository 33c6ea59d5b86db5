"""Runs of a sweep that nodes of a cluster measured, alike and unlike."""

import msgspec

from stepscope.core.environment import GpuReading
from stepscope.core.run import Run
from stepscope.runs.answer import answer_cells, unlike_nodes
from tests.conftest import make_run
from tests.shown import shown


def on(node: str | None, **changes: object) -> Run:
    run = make_run(step=[0.1] * 3)
    assert run.environment is not None
    return msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, node=node, **changes))


ALIKE = [on("a"), on("b", before=GpuReading(sm_clock_mhz=1), device_index=3), on("a"), on("b")]


def test_nodes_that_differ_in_readings_alone_are_alike():
    assert unlike_nodes(ALIKE) == []
    answer = answer_cells(ALIKE)
    assert answer.findings == () and [row[-1] for row in answer.tables[0].rows] == ["a", "b", "a", "b"]


def test_the_node_that_differs_from_most_cells_is_named_with_what_differs():
    torch = {"stepscope": "0.1.0", "python": "3.11.7", "torch": "2.12.0"}
    runs = [on("c", device_name="another CPU", versions=torch), *ALIKE, on("c", device_name="another CPU")]
    (node,) = unlike_nodes(runs)
    assert (node.name, node.cells) == ("c", 2)
    assert node.differences == {"device_name": ("a CPU", "another CPU"), "torch": ("2.13.0", "2.12.0")}
    answer = answer_cells(runs)
    assert [row[-1] for row in answer.tables[0].rows] == ["c *", "a", "b", "a", "b", "c *"]
    (finding,) = answer.findings
    assert finding.kind == "unlike-node" and finding.severity == "warning"
    assert finding.sentence == (
        "Node c, which measured 2 cells, is unlike the others: device_name another CPU, not a CPU; "
        "torch 2.12.0, not 2.13.0."
    )
    assert "unlike" in shown(answer)


def test_a_sweep_on_one_machine_names_no_node():
    runs = [on(None), on(None, device_name="another CPU")]
    assert unlike_nodes(runs) == [] and "node" not in shown(answer_cells(runs))
