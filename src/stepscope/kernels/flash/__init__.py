"""FlashAttention-2: in Triton, and tile by tile in PyTorch (`tiled.py`)."""
