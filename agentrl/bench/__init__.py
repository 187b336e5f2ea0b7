"""Benchmarks: each module measures ratios within one run, its variants interleaved."""
