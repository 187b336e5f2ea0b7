"""Building blocks of environments: base classes, tools, spaces, wrappers, the checker, and Gymnasium both ways.

Concrete environments are in ``envs/``. This package does not depend on models, servers or training.
"""
