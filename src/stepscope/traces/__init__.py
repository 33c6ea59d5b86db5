"""One table for every profiler: what ran on the device, what launched it, and the ranges around the launches."""
