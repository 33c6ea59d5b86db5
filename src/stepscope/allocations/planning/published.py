"""What others published of training over many GPUs: the layout, and the figures that a plan is set beside."""

import msgspec

from stepscope.core.device_spec import DATASHEET, DeviceSpec
from stepscope.core.layout import Layout

_H100 = DATASHEET["NVIDIA H100 80GB HBM3"]
_H100_96 = msgspec.structs.replace(
    _H100, name="H100 96GB HBM2e, 500 W", memory_bytes=96 * 10**9, peak_bytes_per_s=2.4e12,
    source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
)  # fmt: skip
_HERD = "Grattafiori et al. 2024, table 4"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a publication, and what is known of how it came about."""

    source: str
    model: str
    layout: Layout
    seq_len: int
    batch_size: int
    spec: DeviceSpec
    compile: str = "default"
    attention: str = "flash"
    mfu: float | None = None
    """Share of the device's peak, as published."""
    tokens_per_s: float | None = None
    """Of each GPU."""
    peak_gib: float | None = None
    unknown: str = ""
    """What the source does not say, and what stands for it here."""


def _herd(ranks: int, context: int, data: int, batch_of_data: int, mfu: float) -> tuple[Published, ...]:
    """Once for each number of chunks that 126 blocks and 16 ranks allow."""
    length = 131_072 if context > 1 else 8_192
    return tuple(
        Published(
            source=_HERD, model="llama3-405B", seq_len=length, batch_size=batch_of_data * data, spec=_H100, mfu=mfu,
            layout=Layout(
                tensor=8, context=context, pipeline=16, data=data, sharding="zero1-master", shard=data * context,
                chunks=chunks, micro_batch=1, micro_batches=batch_of_data,
            ),
            unknown=f"{ranks:,} GPUs; how many chunks a rank has",
        )
        for chunks in (1, 2, 4, 8)
    )  # fmt: skip


def _titan(data: int, compiled: str, tokens_per_s: float, peak_gib: float) -> Published:
    return Published(
        source=_TITAN, model="llama3-8B", seq_len=8_192, batch_size=2 * data, spec=_H100_96, compile=compiled,
        layout=Layout(data=data, shard=data, sharding="zero3", micro_batch=2, checkpointing="selective"),
        tokens_per_s=tokens_per_s, peak_gib=peak_gib,
        unknown="rates under a limit of 500 W; what its allocator reserved beyond the peak, which is in its figures; "
        "its selective checkpointing runs every second product again",
    )  # fmt: skip


PUBLISHED = (
    *_herd(8_192, 1, 64, 32, 0.43),
    *_herd(16_384, 1, 128, 16, 0.41),
    *_herd(16_384, 16, 8, 16, 0.38),
    _titan(8, "eager", 5_762, 82.4),
    _titan(8, "default", 6_667, 77.0),
    _titan(128, "eager", 5_605, 67.0),
    _titan(128, "default", 6_514, 62.0),
)
