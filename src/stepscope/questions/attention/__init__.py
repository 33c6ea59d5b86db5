"""Timings of attention: ordered, and answered in tables and sentences."""
