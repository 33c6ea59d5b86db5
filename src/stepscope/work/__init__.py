"""FLOPs and bytes of an operation and of a step: formulas with their source, plain arithmetic."""
