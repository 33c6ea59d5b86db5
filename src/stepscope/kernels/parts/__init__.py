"""Fused parts of a transformer in Triton: `norm`, `rope`, `mlp` and `loss`, one file each."""
