"""Building blocks of environments: base classes, tools, spaces, wrappers, the checker, and Gymnasium both ways.

Concrete environments stand in ``envs/``. Nothing here knows of models, servers or training.
"""
