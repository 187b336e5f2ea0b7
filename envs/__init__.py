"""Environments: one file each, written against the public API. Copy one to start your own."""
