"""Metric sinks, live progress, curves and tables."""
