"""Starting and supervising the processes of a run, and the entry points of those that are ours."""
