"""A Network: what joins the GPUs of a node, and nodes with one another; the known ones by name.

Within a node, latency and bandwidth that were measured go before the named ones.
"""

import re
from collections.abc import Sequence

import msgspec

from stepscope.core.device_spec import DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.study_results import CollectiveFit
from stepscope.core.units import parse_bytes

MOST_RANKS = 131_072


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Links of one kind within a node, and of another between nodes. Rates are in one direction, for each GPU."""

    name: str
    node: int
    """GPUs that the fast links join."""
    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 1.9e-6
    """One hop of a ring within a node. This and the next two are NCCL's own constants for the protocol LL128
    (src/graph/tuning.cc, `hwLatencies` and `baseLatencies`)."""
    between_latency_s: float = 4.0e-6
    call_s: float = 14.0e-6
    """What a collective takes before its first byte."""
    share: float = 0.8
    """Share of a link's rate that a collective of large messages reaches: an assumption."""
    beside: float | None = None
    """How many times as long matrix products take while a collective runs; None for what was measured of NCCL. 1 where
    copy engines or switches do what multiprocessors do for NCCL."""
    source: str = ""
    measured: tuple[CollectiveFit, ...] = ()
    """What collectives within a node take, as it was measured; empty where nothing was."""

    def fit_for(self, kind: str, ranks: int) -> CollectiveFit | None:
        """What was measured of this kind: among as many ranks, or else the most below, or the fewest; None of a kind
        that was not measured."""
        fits = sorted((fit for fit in self.measured if fit.kind == kind), key=lambda fit: fit.ranks)
        return next((fit for fit in reversed(fits) if fit.ranks <= ranks), fits[0] if fits else None)

    def faster(self, *, inside: float = 1.0, between: float = 1.0) -> "Network":
        """A copy of this network whose links, inside nodes and between them, are so many times as fast."""
        return msgspec.structs.replace(
            self,
            inside_bytes_per_s=self.inside_bytes_per_s * inside,
            between_bytes_per_s=self.between_bytes_per_s * between,
            measured=tuple(
                msgspec.structs.replace(fit, bytes_per_s=fit.bytes_per_s and fit.bytes_per_s * inside)
                for fit in self.measured
            ),
        )


def measured_network(usual: Network, fits: Sequence[CollectiveFit], source: str) -> Network:
    """The network whose collectives within a node take what was measured; over NCCL, where several backends were."""
    chosen = [fit for fit in fits if fit.backend == "nccl"] or list(fits)
    return msgspec.structs.replace(usual, measured=tuple(chosen), source=source)


_HGX = "8 GPUs on NVSwitch"
NETWORKS: dict[str, Network] = {
    one.name: one
    for one in (
        Network(
            name="nvlink3-ib200", node=8, inside_bytes_per_s=300e9, between_bytes_per_s=25e9,
            source=f"NVIDIA DGX A100: {_HGX}, 200 Gb/s InfiniBand a GPU",
        ),
        Network(
            name="nvlink4-ib400", node=8, inside_bytes_per_s=450e9, between_bytes_per_s=50e9,
            source=f"NVIDIA DGX H100: {_HGX}, 400 Gb/s InfiniBand a GPU",
        ),
        Network(
            name="nvlink5-ib400", node=8, inside_bytes_per_s=900e9, between_bytes_per_s=50e9,
            source=f"NVIDIA DGX B200: {_HGX}, 400 Gb/s InfiniBand a GPU",
        ),
        Network(
            name="nvl72-ib400", node=72, inside_bytes_per_s=900e9, between_bytes_per_s=50e9,
            source="NVIDIA GB200 NVL72: 72 GPUs on NVSwitch, 400 Gb/s InfiniBand a GPU",
        ),
        Network(
            name="pcie4-eth100", node=8, inside_bytes_per_s=32e9, between_bytes_per_s=12.5e9 / 8,
            source="8 GPUs on PCIe 4.0 x16, which share 100 Gb/s Ethernet",
        ),
    )
}  # fmt: skip

_RATES = {"inside": "inside_bytes_per_s", "between": "between_bytes_per_s"}
_LATENCIES = {"inside-latency": "inside_latency_s", "between-latency": "between_latency_s", "call": "call_s"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_KEYS = ", ".join(("node", *_RATES, *_LATENCIES, "share", "beside"))


def network_for(spec: DeviceSpec) -> Network:
    """The network of the machine in which a device is usually sold; PCIe where it has no links of its own."""
    rate = spec.link_bytes_per_s or 0
    if "GB200" in spec.name or "GB300" in spec.name:
        return NETWORKS["nvl72-ib400"]
    known = {900e9: "nvlink5-ib400", 450e9: "nvlink4-ib400", 300e9: "nvlink3-ib200"}
    if rate in known:
        return NETWORKS[known[rate]]
    if not rate:
        return NETWORKS["pcie4-eth100"]
    return Network(
        name=f"links of {spec.name}",
        node=8,
        inside_bytes_per_s=rate,
        between_bytes_per_s=50e9,
        source=f"{spec.source}, 8 GPUs a node; 400 Gb/s a GPU between nodes is assumed",
    )


def parse_network(text: str, usual: Network) -> Network:
    """`nvlink4-ib400`, `nvlink4-ib400,between=100GB` or `node=4,inside=300GB`: a known network, or changes to one."""
    network, changes = usual, dict[str, float | int]()
    for i, part in enumerate(part.strip() for part in text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if i or key not in NETWORKS:
                raise InputError(
                    f"unknown network {key[:40]!r}: choose one of {', '.join(NETWORKS)}, or write figures, as in "
                    "node=8,inside=450GB,between=50GB"
                )
            network = NETWORKS[key]
            continue
        changes.update(_change(key, value))
    if not changes:
        return network
    named = f"{network.name} with {', '.join(part.strip() for part in text.split(',') if '=' in part)}"
    return msgspec.structs.replace(network, name=named, **changes)


def _change(key: str, value: str) -> dict[str, float | int]:
    if key == "node" and re.fullmatch(r"[1-9][0-9]{0,5}", value):
        return {"node": int(value)}
    if key in _RATES:
        return {_RATES[key]: float(parse_bytes(value.removesuffix("/s")))}
    latency = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", value)
    if key in _LATENCIES and latency:
        return {_LATENCIES[key]: float(latency[1]) * _SECONDS[latency[2]]}
    if key == "share" and re.fullmatch(r"0?\.\d+|1(\.0*)?", value) and float(value) > 0:
        return {"share": float(value)}
    if key == "beside" and re.fullmatch(r"\d{1,2}(\.\d+)?", value) and float(value) >= 1:
        return {"beside": float(value)}
    raise InputError(
        f"cannot read {key[:40]}={value[:40]} in --network: there are {_KEYS}, as in "
        "node=8,inside=450GB,between=50GB,between-latency=5us,share=0.8"
    )
