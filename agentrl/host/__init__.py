"""The machine a process runs on: child processes, worker threads and processes, the cache folder, what it computes in.

Nothing here knows of models, environments or training; no torch.
"""
