"""What a published Kineto trace says, read by nothing of ours."""

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

KINETO = (
    "hta_a100_nccl_training", "hta_mi250_training", "hta_sampled_rank-0", "hta_v100_ddp_training",
    "tracelens_b200_inference", "tracelens_experts", "tracelens_h100_qwen", "tracelens_mi300_ddp_resnet18",
    "tracelens_mi300_sglang_qwen3", "tracelens_normalization", "tracelens_torch_compile",
    "tracelens_vllm_graph_execution",
)  # fmt: skip
"""Published captures with device work."""


def events_of(path: Path) -> list[Event]:
    """The complete events, category in lower case, `start` and `end` in whole nanoseconds."""
    with gzip.open(path) as file:
        trace = json.load(file, parse_float=str)
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return [
        {**event, "cat": (event.get("cat") or "").lower(), "ns": nanoseconds(event.get("dur", 0))} for event in found
    ]


def nanoseconds(microseconds: object) -> int:
    """The decimal text of microseconds as whole nanoseconds, half to even."""
    whole, _, rest = str(microseconds).partition(".")
    return int(whole) * 1000 + (round(float(f"0.{rest}") * 1000) if rest else 0)


def kernels_of(events: list[Event]) -> list[Event]:
    """The events of kernels."""
    return [event for event in events if event["cat"] in ("kernel", "concurrent_kernel")]
