"""Configurations of the kernels for Hopper."""

import msgspec

HOPPER_BLOCK_N = 128
"""Keys per tile of the backward kernel. Row statistics and sums are padded to a multiple of this, since under a causal
mask the kernel visits all queries at the positions of the tile's keys."""


def hopper_columns(head_dim: int) -> int | None:
    """The number of columns of the kernels' tiles: 64 or 128; None for head dimensions that they do not take.

    Between 64 and 128 the tensor-memory accelerator fills the columns beyond head_dim with zeros, which add nothing to
    a product, and writes none of them. It wants rows of whole 16 bytes, which are 8 numbers.
    """
    if head_dim not in range(64, 129, 8):
        return None
    return 64 if head_dim == 64 else 128


class HopperForward(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the forward kernel in Gluon: consumers of four warps, 64 queries each."""

    consumers: int = 2
    """The number of consumers, 1 to 3. Each has 64 queries of the tile."""
    block_n: int = 128
    """The number of keys of a tile: a power of two from 16 to 256."""
    stages: int = 2
    """The number of buffers for K, and of buffers for V: two or more."""
    turns: bool = False
    """Whether consumers take turns at the tensor cores."""
    late: bool = False
    """Whether weights are rounded while the next scores are computed. This takes registers."""
    max_registers: int | None = None
    """Registers per thread at launch; None for no cap. With a low cap several programs share a multiprocessor."""

    def __post_init__(self) -> None:
        """Check the values, which may come from a file."""
        if not 1 <= self.consumers <= 3:
            raise ValueError(f"a tile of queries has 1 to 3 consumers, not {self.consumers}")
        if not 16 <= self.block_n <= 256 or self.block_n & (self.block_n - 1) or not 2 <= self.stages <= 8:
            raise ValueError(
                f"tiles have a power of two of 16 to 256 keys, in 2 to 8 stages, not {self.block_n} and {self.stages}"
            )
        if self.max_registers is not None and not 24 <= self.max_registers <= 255:
            raise ValueError(f"a thread has 24 to 255 registers, not {self.max_registers}")

    def __str__(self) -> str:
        flags = [name for name, on in (("turns", self.turns), ("late", self.late)) if on]
        cap = [] if self.max_registers is None else [f"r{self.max_registers}"]
        return " ".join([f"hopper {self.consumers}x64x{self.block_n} s{self.stages}", *cap, *flags])


class HopperBackward(msgspec.Struct, frozen=True, kw_only=True):
    """The backward kernel's configuration in Gluon: tiles of 64 queries by 128 keys, two consumers of four warps."""

    v_in_registers: bool = False
    """Whether V stays in registers too, not only in shared memory. There is room for it at head_dim 64."""
    spread: bool = False
    """Whether, without a causal mask, each program begins at another tile of queries. Otherwise all programs of a head
    add to the same rows of dQ at the same time. Under a causal mask the diagonal spreads them."""
    share: bool = False
    """Whether, without a causal mask, several programs share each of the tiles of keys that do not fill the GPU."""

    ahead: bool = False
    """Whether the scores of the next tile of queries begin before dQ of this one. head_dim 64 has registers for it."""

    def __str__(self) -> str:
        flags = [
            name.replace("_", "-") for name in ("v_in_registers", "spread", "share", "ahead")
            if getattr(self, name)
        ]  # fmt: skip
        return " ".join([f"hopper 64x{HOPPER_BLOCK_N}", *flags])
