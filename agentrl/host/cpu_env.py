"""Environment of processes that compute on a CPU and share its cores with others."""

CPU_ENV = {
    # Threads that wait spin for some ten microseconds, from one operator to the next, then sleep: server and trainer
    # share the cores, and a spinning thread steals the other's time.
    **{"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"},
    # Freed tensors stay with the process: pages taken anew for each step's gradients cost more than the step on a
    # virtual machine (docs/performance.md).
    **{"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30), "MALLOC_TOP_PAD_": str(64 << 20)},
}
