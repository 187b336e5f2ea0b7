"""The trainer: torchrun + FSDP2 ranks that consume batches of episodes and publish weights."""
