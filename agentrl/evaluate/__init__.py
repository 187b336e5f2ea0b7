"""Metrics with confidence intervals, and evaluation without a trainer."""
