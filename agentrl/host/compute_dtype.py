"""Chooses the dtype of a run's computations."""

from pathlib import Path


def resolved_dtype(wanted: str, device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Resolves ``auto``: bfloat16 on a GPU and on CPUs that multiply it natively, else float32."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bfloat16"
    return "bfloat16" if native_bfloat16(cpuinfo) else "float32"


def native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere it is emulated, 5 times slower than float32."""
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags
