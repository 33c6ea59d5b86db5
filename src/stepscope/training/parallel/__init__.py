"""Several ranks that share a training step: a strategy is a file of strategies/, and a record in core/strategies.py."""
