"""The command line: one verb a file; parse, call, render, map an error to an exit code."""
