"""Published weights: what stands in the file, buffers, fingerprints, clean-up."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.weight_manifest import fingerprint, mismatches
from agentrl.weights.file_publisher import WeightPublisher


@pytest.fixture
def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 5), "b.bias": (7,), "c": (1,), "big": (300, 100)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_safetensors_reads_back_what_was_published(
    parameters: dict[str, torch.nn.Parameter], dtype: torch.dtype, transport: str, tmp_path: Path
) -> None:
    publisher = WeightPublisher(parameters.items(), dtype, transport, tmp_path, is_writer=True)  # type: ignore[arg-type]
    manifest = publisher.write(3)
    assert manifest is not None
    assert (manifest.version, manifest.transport) == (3, transport)
    loaded = load_file(manifest.file)
    assert set(loaded) == set(parameters)
    for name, parameter in parameters.items():
        assert torch.equal(loaded[name], parameter.detach().to(dtype))
    actual = {n: fingerprint(memoryview(t.view(torch.uint8).numpy()).cast("B")) for n, t in loaded.items() if t.dim()}
    assert mismatches(manifest.fingerprints, actual) == []
    folder = Path(manifest.path)
    publisher.close()
    assert not folder.exists()


def test_the_version_before_stays_readable_until_the_one_after_the_next(
    parameters: dict[str, torch.nn.Parameter], tmp_path: Path
) -> None:
    publisher = WeightPublisher(parameters.items(), torch.float32, "disk", tmp_path, is_writer=True)
    first = publisher.write(1)
    assert first is not None
    old = parameters["a.weight"].detach().clone()
    with torch.no_grad():
        parameters["a.weight"].add_(1)
    second = publisher.write(2)
    assert second is not None
    assert torch.equal(load_file(first.file)["a.weight"], old)
    assert torch.equal(load_file(second.file)["a.weight"], old + 1)
    assert first.fingerprints["a.weight"] != second.fingerprints["a.weight"]
    assert publisher.write(3).path == first.path  # type: ignore[union-attr]
    publisher.close()


def test_a_version_on_disk_is_a_file_of_its_own(parameters: dict[str, torch.nn.Parameter], tmp_path: Path) -> None:
    """Another host that shares the disk may remember the bytes of a file that it has read."""
    publisher = WeightPublisher(parameters.items(), torch.float32, "disk", tmp_path, is_writer=True)
    first = publisher.write(1)
    assert first is not None
    with open(first.file, "rb") as read:
        before = read.read()
        with torch.no_grad():
            parameters["big"].add_(1)
        third = publisher.write(3)
        assert third is not None and third.path == first.path
        read.seek(0)
        assert read.read() == before != third.file.read_bytes()
    publisher.close()


@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_what_is_not_trained_stands_beside_each_version_as_it_is(
    parameters: dict[str, torch.nn.Parameter], transport: str, tmp_path: Path
) -> None:
    """In its own type, which rounds nothing; a folder's file of weights holds what the fingerprints cover, alone."""
    kept = {"router.bias": torch.tensor([1.0 + 2**-20, 3.0]), "layer.count": torch.tensor(5)}
    publisher = WeightPublisher(
        parameters.items(),
        torch.bfloat16,
        transport,
        tmp_path,
        is_writer=True,
        beside=kept,  # type: ignore[arg-type]
    )
    for version in (1, 2, 3):
        manifest = publisher.write(version)
        assert manifest is not None
        read = [load_file(file) for file in Path(manifest.path).iterdir() if file != manifest.file]
        assert len(read) == 1 and set(read[0]) == set(kept)
        assert all(torch.equal(read[0][name], kept[name]) and read[0][name].dtype == kept[name].dtype for name in kept)
        assert set(load_file(manifest.file)) == set(parameters) == set(manifest.fingerprints)
    publisher.close()
