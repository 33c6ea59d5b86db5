"""FlashAttention-2 for Hopper, in Gluon. `flash/launch.py` uses it where it runs."""
