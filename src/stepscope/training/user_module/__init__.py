"""Finds and calls the factory of a user's own model, and makes the parts of a step of what it returns."""
