"""Verifiers of answers."""
