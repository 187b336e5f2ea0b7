"""Metrics with confidence intervals, and evaluation without a trainer.

``agentrl.evaluate(what, ...)`` is a function too: it evaluates a model, see :func:`agentrl.launch.api.evaluate`.
"""
