"""One question a file: which steps, and which answer."""
