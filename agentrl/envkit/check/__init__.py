"""Checks an environment before training: contract, reproducibility, blocking calls and leaked resources."""
