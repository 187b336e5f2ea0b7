"""Says which extra of the distribution brings a package, and how to install it.

Guarantees: every message about a missing package takes its words from here. ``PACKAGES`` names what ``pyproject.toml``
lists for each extra; a test compares the two. Nothing is imported to find out what is missing.
"""

import importlib.util

DISTRIBUTION = "agentrl-toolkit"  # on the index, ``agentrl`` is a package of somebody else's; the import stays agentrl

ON_INDEX = {"PIL": "pillow", "grpc": "grpcio"}  # import names that differ from those on the index by more than - and _
PACKAGES: dict[str, tuple[str, ...]] = {  # import names, called so on the index too, but for those above
    "train": (
        "accelerate",
        "datasets",
        "filelock",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "matplotlib",
        "numpy",
        "reasoning_gym",
        "safetensors",
        "tensorboardX",
        "tokenizers",
        "torch",
        "transformers",
        "trl",
    ),
    "sglang": ("sglang",),
    "gpu": (),
    "vllm": ("vllm",),
    "lora": ("peft",),
    "rewards": ("math_verify",),
    "vision": ("PIL",),
    "ray": ("grpc", "ray"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
}


def install_hint(extra: str | None = None) -> str:
    """Returns the words that say how to install agentrl, which is not on the index yet: from a checkout.

    Args:
        extra: The extra to install, for example ``train``; ``None`` for the core alone.
    """
    brackets = f"[{extra}]" if extra else ""
    return f"pip install -e '.{brackets}' in a checkout of agentrl"


def extra_of(module: str) -> str | None:
    """Returns the extra that brings a module, or ``None`` if no extra does."""
    package = module.partition(".")[0]
    return next((extra for extra, packages in PACKAGES.items() if package in packages), None)


def missing_packages(extra: str) -> list[str]:
    """Lists the packages of an extra that are not installed."""
    return [package for package in PACKAGES[extra] if importlib.util.find_spec(package) is None]
