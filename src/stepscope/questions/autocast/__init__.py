"""What autocast does: to a model of any kind, and to each operator."""
