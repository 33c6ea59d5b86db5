"""Calls of attention: judged, measured, and run by several processes."""
