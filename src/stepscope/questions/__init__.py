"""The questions that stepscope answers, a file or a folder each: what is measured, and the answer."""
