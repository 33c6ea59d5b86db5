"""Networks and layouts as text."""

import pytest

from stepscope.core.device_spec import DATASHEET
from stepscope.core.errors import InputError
from stepscope.core.layout import Layout, parse_layout
from stepscope.core.networks import NETWORKS, network_for, parse_network

H100 = NETWORKS["nvlink4-ib400"]


def test_a_network_is_a_name_or_figures():
    assert parse_network("nvlink3-ib200", H100) is NETWORKS["nvlink3-ib200"]
    changed = parse_network("nvlink4-ib400, between=100GB, between-latency=2.5us, node=4, share=0.9", H100)
    assert changed.between_bytes_per_s == 100e9
    assert changed.between_latency_s == pytest.approx(2.5e-6)
    assert (changed.node, changed.share, changed.inside_bytes_per_s) == (4, 0.9, 450e9)
    assert "between=100GB" in changed.name
    assert parse_network("inside=100GB/s", H100).inside_bytes_per_s == 100e9
    assert (H100.beside, parse_network("beside=1.2", H100).beside) == (None, 1.2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("infiniband", "unknown network 'infiniband': choose one of nvlink3-ib200"),
        ("node=0", "cannot read node=0 in --network: there are node, inside, between"),
        ("between=fast", "cannot read the size 'fast'"),
        ("call=5", "cannot read call=5"),
        ("share=1.5", "cannot read share=1.5"),
        ("beside=0.5", "cannot read beside=0.5"),
        ("colour=red", "cannot read colour=red"),
    ],
)
def test_a_network_that_cannot_be_read_is_one_line(text: str, words: str):
    with pytest.raises(InputError, match=words):
        parse_network(text, H100)


def test_each_device_of_the_datasheets_has_a_network():
    found = {name: network_for(spec) for name, spec in DATASHEET.items()}
    assert found["NVIDIA H200"] is H100
    assert found["NVIDIA GB200"].node == 72
    assert found["NVIDIA A10"].name == "pcie4-eth100"
    assert found["NVIDIA H800"].inside_bytes_per_s == 200e9


def test_a_layout_is_read_and_named():
    assert parse_layout("tp=8, pipeline=16,sharding=zero3,mb=2") == {
        "tensor": 8, "pipeline": 16, "sharding": "zero3", "micro_batch": 2,
    }  # fmt: skip
    layout = Layout(tensor=8, pipeline=16, data=64, sharding="zero2", shard=64)
    assert layout.name == "tp8 pp16 dp64 zero2"
    assert layout.ranks == 8192
    assert Layout().name == "one rank"
    assert Layout(data=8, sharding="zero3", shard=4).name == "dp8 zero3/4"


@pytest.mark.parametrize("text", ["tensor", "tensor=0", "width=3", "sharding=zero9", ","])
def test_a_layout_that_cannot_be_read_is_one_line(text: str):
    with pytest.raises(InputError):
        parse_layout(text)
