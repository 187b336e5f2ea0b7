"""An out-of-tree SGLang platform: PyTorch's own CPU operators. For tests; slow."""


def platform() -> str:
    """Where SGLang finds the platform."""
    return "agentrl_sglang_cpu.platform:PlainCpu"
