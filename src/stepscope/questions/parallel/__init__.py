"""What ranks gain that share a step."""
