"""The recipe's typed models, and the ways to fill them: a file, ``key=value`` and the device's own defaults."""
