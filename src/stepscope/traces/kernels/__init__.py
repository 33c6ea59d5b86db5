"""A kernel's name: decoded, explained, and sorted into a family."""
