"""FLOPs and bytes of one call of an operator, from what was recorded of its arguments."""
