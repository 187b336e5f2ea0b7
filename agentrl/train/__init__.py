"""The trainer: torchrun + FSDP2 ranks that consume batches of episodes and publish weights.

``agentrl.train(recipe, ...)`` is a function too: it trains with a recipe, see :func:`agentrl.launch.api.train`.
"""
