"""Contracts and data: environment, agent, workflow, episode, registry. Imports nothing heavier than pydantic."""
