"""Loads safetensors files into the live parameters, and computes digests of the live parameters.

Guarantees: a load changes all parameters or none: all names, shapes and kinds of dtype are checked against the live
model before the first byte is written, and no parameter may be missing. Values are copied in place, so views and tied
parameters stay valid. Names are Hugging Face's; a tied parameter may be given under one of its names, and is reported
once, under its first name in the state dict.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentrl.core.weight_manifest import WEIGHTS_FILE, checksum, fingerprint
from agentrl.engine.params import BadRequestError

LISTED = 5  # most names in an error message
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
DIGESTS: dict[str, Callable[[memoryview], str]] = {"checksum": checksum, "fingerprint": fingerprint}


def live_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor of a state dict once, under its first name."""
    seen: set[tuple[int, int]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tensor.numel())
        if identity not in seen:
            seen.add(identity)
            tensors[name] = tensor
    return tensors


def digests(model: nn.Module, action: str) -> dict[str, str]:
    """Digest of each live tensor's bytes.

    Args:
        model: The live model.
        action: ``checksum`` (of all bytes) or ``fingerprint`` (of three windows of bytes).

    Returns:
        Digests by tensor name, as :mod:`agentrl.core.weight_manifest` defines them.
    """
    digest, tensors = DIGESTS[action], live_tensors(model.state_dict())
    dtype = served_dtype(tensors.values())
    return {name: digest(raw_bytes(as_sent(tensor, dtype))) for name, tensor in tensors.items()}


def served_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype of most weights: some classes keep a few of theirs in float32."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__) if counts else torch.float32


def as_sent(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a live tensor in the dtype in which weights are sent; no copy is made if it has that dtype."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; no copy is made if it is contiguous and on the CPU."""
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def weight_files(folder: str) -> list[Path]:
    """The safetensors files of a folder: ``model.safetensors`` if it exists, else all.

    Raises:
        BadRequestError: The folder holds no safetensors file.
    """
    single = Path(folder) / WEIGHTS_FILE
    files = [single] if single.is_file() else sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise BadRequestError(f"{folder} holds no safetensors file")
    return files


def load_weights(model: nn.Module, folder: str, adopt: Callable[[Tensor, Tensor], bool] | None = None) -> int:
    """Copy a folder's weights into the live model.

    Args:
        model: The live model.
        folder: Folder with safetensors files.
        adopt: Function that copies new values into a parameter and its packed copy at once; returns False if it cannot.

    Returns:
        Number of bytes read.

    Raises:
        BadRequestError: A file cannot be read or does not fit the model; no parameter is changed.
    """
    targets = dict(model.state_dict())
    files = weight_files(folder)
    try:
        opened = [safe_open(str(file), framework="pt") for file in files]
    except (SafetensorError, OSError) as error:
        raise BadRequestError(f"cannot read {folder}: {error}") from error
    sources = {name: handle for handle in opened for name in handle.keys()}  # noqa: SIM118 - not a dict
    required = live_tensors(dict(model.named_parameters()))  # buffers that a file lacks stay as they are
    _check(targets, {name: handle.get_slice(name) for name, handle in sources.items()}, required)
    read = 0
    with torch.no_grad():
        for name, handle in sources.items():
            source = handle.get_tensor(name)
            if adopt is None or not adopt(targets[name], source):
                targets[name].copy_(source)
            read += source.numel() * source.element_size()
    return read


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Copy some parameters into the live model; the others stay unchanged.

    Returns:
        Number of copied bytes.

    Raises:
        BadRequestError: A tensor does not fit; no parameter is changed.
    """
    targets = dict(model.state_dict())
    check_fit(targets, {name: (list(t.shape), t.is_floating_point()) for name, t in tensors.items()})
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check(targets: dict[str, Tensor], sources: dict[str, Any], required: Iterable[str]) -> None:
    """Refuse unknown names, missing parameters, wrong shapes, and floats for integers."""
    check_fit(targets, {name: (list(s.get_shape()), s.get_dtype() in FLOATS) for name, s in sources.items()})
    pointers = {targets[name].data_ptr() for name in sources}
    missing = sorted(name for name in required if targets[name].data_ptr() not in pointers)
    if missing:
        raise BadRequestError(f"parameters are missing, nothing was loaded: {_listed(missing)}")


def check_fit(targets: Mapping[str, Tensor], sources: Mapping[str, tuple[list[int], bool]]) -> None:
    """Refuse tensors that do not fit the live model.

    Args:
        targets: Live tensors by name.
        sources: Shape by name, and whether the tensor holds floating-point numbers.

    Raises:
        BadRequestError: A name is unknown, a shape is wrong, or floats replace integers or integers replace floats.
    """
    unknown = sorted(sources.keys() - targets.keys())
    if unknown:
        raise BadRequestError(f"unknown parameter names, nothing was loaded: {_listed(unknown)}")
    wrong = []
    for name, (shape, floats) in sources.items():
        target = targets[name]
        if shape != list(target.shape):
            wrong.append(f"{name} has shape {shape} instead of {list(target.shape)}")
        elif target.is_floating_point() != floats:
            wrong.append(f"{name} has another kind of dtype than the live {target.dtype}")
    if wrong:
        raise BadRequestError(f"parameters do not fit, nothing was loaded: {_listed(sorted(wrong))}")


def _listed(names: list[str]) -> str:
    """Joins the first names of a list, and says how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def parameter_json(model: nn.Module, name: str, size: int) -> Any:
    """The first ``size`` rows of a live tensor as nested lists.

    Raises:
        BadRequestError: No tensor has this name.
    """
    tensors = dict(model.state_dict())
    if name not in tensors:
        raise BadRequestError(f"no parameter is named {json.dumps(name)}")
    tensor = tensors[name]
    return (tensor[:size] if tensor.ndim else tensor).float().cpu().tolist()
