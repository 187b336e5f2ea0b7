"""Models and datasets found by name."""
