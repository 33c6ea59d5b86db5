"""What runs on disk say over time, and what became of forecasts."""
