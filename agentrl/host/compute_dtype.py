"""Number type of a run's computations."""

from pathlib import Path


def resolved_dtype(wanted: str, device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Resolves ``auto``: bfloat16 on a GPU and on CPUs that multiply it natively, else float32."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bfloat16"
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
