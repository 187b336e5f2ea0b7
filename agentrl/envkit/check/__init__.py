"""Checks an environment before it is trained on: the contract, reproducibility, what it blocks and leaves open."""
