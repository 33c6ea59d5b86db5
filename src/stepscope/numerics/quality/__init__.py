"""The same training in every precision."""
