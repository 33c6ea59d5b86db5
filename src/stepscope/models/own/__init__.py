"""A user's own model: its factory is found and called, and what it gives becomes the parts of a step."""
