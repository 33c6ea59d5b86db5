"""The names of the files in a run directory."""

RUN_FILE = "run.json"
FAILURE_FILE = "failure.txt"
"""The traceback of what ended the run."""
MEMORY_FILE = "memory.pickle.gz"
KINETO_FILE = "trace.kineto.json.gz"
REPORT_FILE, STREAM_FILE, EXPORT_FILE = "trace.nsys-rep", "trace.qdstrm", "trace.nsys.sqlite"
"""Files of a trace by nsys: its report, the stream that awaits its import, and the export that is read."""
CAPTURE_FILES = (KINETO_FILE, EXPORT_FILE, REPORT_FILE, STREAM_FILE)
"""Files that hold a trace, the quickest to read first."""
DIGEST_FILE = "trace-{tool}.json"
"""The file of a trace's digest, by the tool that took the trace."""
