"""Ways in which ranks share a step: each a function of its name; its record is in core/strategies.py."""
