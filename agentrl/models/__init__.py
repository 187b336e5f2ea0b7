"""Prefix trees of token sequences, a test of whether a Hugging Face model can compute them, and the sizes of models.

Shared by the trainer and the embedded engine.
"""
