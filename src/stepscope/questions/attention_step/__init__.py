"""A whole step with each attention, side by side."""
