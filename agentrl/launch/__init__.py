"""Starts and supervises the processes of a run, and holds the controller's entry point."""
