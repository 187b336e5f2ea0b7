"""Benchmarks: each module measures ratios within one run, and interleaves the compared variants."""
