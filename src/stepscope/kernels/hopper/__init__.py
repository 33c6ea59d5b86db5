"""FlashAttention-2 for Hopper, in Gluon: taken by `flash/launch.py` where it runs."""
