"""One reader for each kind of capture; all give a TraceTable and never change their input."""
