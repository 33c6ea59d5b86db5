"""A step over many GPUs on paper: every layout, what it needs, how long it takes, and which one is best."""
