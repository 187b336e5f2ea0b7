"""The platform class; imported by SGLang only."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin  # type: ignore[import-not-found]
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform  # type: ignore[import-not-found]


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """A CPU as PyTorch alone drives it."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled-dot-product attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """PyTorch's own operators instead of kernels."""
        return "native"

    def post_load_model(self, model: Any) -> None:
        """Has memory for experts that answers name allocated without a GPU driver, with which SGLang registers it."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS  # type: ignore[import-not-found]

        ALLOC_MEMORY_FUNCS["cpu"] = _unpinned

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to copy to."""
        return False


def _unpinned(dims: tuple[int, ...], dtype: Any, device: str, pin_memory: bool, allocator: Any, *more: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)
