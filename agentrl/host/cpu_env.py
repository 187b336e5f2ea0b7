"""Environment of processes that compute on a CPU and share its cores with others."""

CPU_ENV = {
    # Waiting threads spin for some ten microseconds, enough between two operators, and then sleep: server and trainer
    # share the cores, and a spinning thread takes time from the other process.
    **{"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"},
    # The process keeps the memory of freed tensors: on a virtual machine, new pages for each step's gradients can cost
    # more time than the step (docs/performance.md).
    **{"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30), "MALLOC_TOP_PAD_": str(64 << 20)},
}
