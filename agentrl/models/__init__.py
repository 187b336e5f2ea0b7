"""Prefix trees of token sequences, and which Hugging Face models can compute them.

Shared by the trainer and the embedded engine.
"""
