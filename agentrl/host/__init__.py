"""Services of the machine: entry points, child processes, worker threads and processes, cache folder, compute dtype.

Nothing here depends on models, environments, training or torch.
"""
