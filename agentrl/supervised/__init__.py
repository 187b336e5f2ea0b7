"""Supervised learning from examples: SFT, reward models and DPO on TRL's trainers."""
