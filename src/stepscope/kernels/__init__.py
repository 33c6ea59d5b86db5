"""Attention as kernels: FlashAttention-2 in Triton, and the same tile by tile in PyTorch."""
