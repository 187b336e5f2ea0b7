"""Publishes an adapter alone; the servers add it to the base weights that they hold.

Guarantees: the manifest proves both parts. Beside the adapter's own fingerprints it has those of the frozen weights in
the servers' dtype, computed once, so a server with another base is detected.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.core.weight_manifest import WeightManifest, fingerprint
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.gather import full_tensor
from agentrl.weights.lora_weights import ADAPTER_FILE, CONFIG_FILE, adapter_weights, plain_weights, write_config


class AdapterPublisher(WeightPublisher):
    """Writes published versions of an adapter in PEFT's format, float32.

    Args:
        model: With adapters, sharded or not.
        dtype: Element type in which the servers hold their weights.
        transport: As for :class:`WeightPublisher`.
        disk_dir: Folder for ``disk``.
        is_writer: Whether this rank writes.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        transport: Literal["shm", "disk"],
        disk_dir: Path,
        *,
        is_writer: bool,
    ) -> None:
        super().__init__(
            adapter_weights(model), torch.float32, transport, disk_dir, is_writer=is_writer, file=ADAPTER_FILE
        )
        self._model = model
        self._served = dtype
        self._plain = list(plain_weights(model))
        frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self._frozen = [(name.replace(".base_layer.bias", ".bias"), parameter) for name, parameter in frozen]
        self._base: dict[str, str] | None = None  # fingerprints

    def write(self, version: int) -> WeightManifest | None:
        """Gather the adapter, and the first time the base as well; see :meth:`WeightPublisher.write`."""
        manifest = super().write(version)
        if self._base is None:
            self._base = {name: self._fingerprint(full_tensor(parameter)) for name, parameter in self._frozen}
        if manifest is None:
            return None
        if not (Path(manifest.path) / CONFIG_FILE).is_file():
            write_config(self._model, Path(manifest.path))
        return manifest.model_copy(update={"fingerprints": self._base | manifest.fingerprints})

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters of the plain model, the adapter added, one at a time; a collective over all ranks."""
        for name, weight in self._plain:
            yield name, full_tensor(weight)

    def _fingerprint(self, tensor: Tensor) -> str:
        data: Any = tensor.to(self._served).cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return fingerprint(memoryview(data))
