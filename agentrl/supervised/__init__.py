"""Learning from lines: SFT, reward models and DPO on TRL's trainers."""
