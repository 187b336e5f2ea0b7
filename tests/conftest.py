"""Fixtures that several packages' tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agentrl.envs.python import require_sandbox
from agentrl.rewards.sandbox import SandboxUnavailableError
from tests.tiny import build_tiny_model
from tests.tiny_vision import KINDS, build_tiny_vision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model with room for prompts of some thousand characters."""
    return build_tiny_model(tmp_path_factory.mktemp("roomy-model"), positions=4096)


@pytest.fixture(scope="session", params=KINDS)
def tiny_vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model that takes images, one of each kind."""
    return build_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[DeviceMesh]":
    """A process group of one rank, so that FSDP2 runs inside the test process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def needs_sandbox() -> None:
    """Skip where the machine offers no isolation at all, with what was tried."""
    try:
        require_sandbox("auto")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
