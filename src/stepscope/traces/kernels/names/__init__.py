"""What a kernel's name says of it: library, architecture, dtypes, layout, tile, and the unit that multiplies."""
