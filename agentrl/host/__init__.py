"""The machine a process runs on: child processes, worker threads and processes, cache folder, number type.

Nothing here depends on models, environments, training or torch.
"""
