"""Ways in which ranks share a step: one a file, with a function `spread`; its record is in core/strategies.py."""
