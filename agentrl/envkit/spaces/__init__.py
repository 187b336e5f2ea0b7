"""Gymnasium spaces of messages and tool calls."""
