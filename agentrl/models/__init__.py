"""Prefix trees of token sequences, and a test of whether a Hugging Face model can compute them.

Shared by the trainer and the embedded engine.
"""
