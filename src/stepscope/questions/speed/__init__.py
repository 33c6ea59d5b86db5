"""A step in several dtypes, side by side."""
