"""`stepscope study NAME`: one verb a file."""
