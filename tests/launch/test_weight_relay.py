"""One copy of a version for all servers of a machine."""

import asyncio
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.machines import TlsConfig
from agentrl.core.weight_manifest import SHM_PREFIX
from agentrl.host.process import write_json
from agentrl.inference.backend import InferenceError
from agentrl.inference.http import Access
from agentrl.launch import weight_relay
from agentrl.launch.weight_relay import WeightRelay, has_room
from agentrl.weights.relays import Relays

SERVERS = ("http://10.0.0.7:1", "http://10.0.0.7:2", "http://10.0.0.7:3")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "run" / "servers").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def relay(tmp_path: Path, shared: Path) -> Iterator[WeightRelay]:
    (tmp_path / "memory").mkdir()
    made = WeightRelay("127.0.0.1", "key", TlsConfig(), shared, tmp_path / "memory")
    for number, url in enumerate(SERVERS):
        write_json(shared / "servers" / f"{number}.json", {"url": url, "relay": made.url})
    yield made
    made.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read from the shared folder."""
    read: list[Path] = []
    copy = shutil.copyfile

    def counted(source: Path, target: Path) -> None:
        read.append(source)
        copy(source, target)

    monkeypatch.setattr(weight_relay.shutil, "copyfile", counted)
    return read


def published(shared: Path, text: str, buffer: str = "a") -> str:
    """A version in one of the publisher's two buffers."""
    folder = shared / "weights" / buffer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    return str(folder)


def relays(shared: Path, key: str = "key") -> Relays:
    return Relays(shared / "servers", shared, Access(key), 30.0)


async def near(shared: Path, path: str, version: int, server: str = SERVERS[0]) -> Path:
    return Path(await relays(shared).near(server, path, version)) / "model.safetensors"


async def test_servers_of_a_machine_share_one_copy(relay: WeightRelay, shared: Path, copies: list[Path]) -> None:
    path = published(shared, "one")
    found = await asyncio.gather(*(near(shared, path, 1, server) for server in SERVERS))
    assert len(set(found)) == 1 and found[0].read_text() == "one" and found[0].is_relative_to(relay.folder)
    assert len(copies) == 1, "one copy over the wire"
    assert await near(shared, path, 1) == found[0] and len(copies) == 1, "nor is it read for a server that joins later"


async def test_a_buffer_that_is_used_again_is_read_again_and_two_versions_are_kept(
    relay: WeightRelay, shared: Path, copies: list[Path]
) -> None:
    first = await near(shared, published(shared, "one", "a"), 1)
    second = await near(shared, published(shared, "two", "b"), 2)
    assert (first.read_text(), second.read_text()) == ("one", "two")
    third = await near(shared, published(shared, "three", "a"), 3)
    assert third.read_text() == "three" and second.read_text() == "two" and not first.exists()
    assert len(copies) == 3 and len(list(relay.folder.iterdir())) == 2


async def test_a_server_without_a_relay_and_a_folder_that_is_everywhere_are_left_alone(
    relay: WeightRelay, shared: Path, copies: list[Path], tmp_path: Path
) -> None:
    path = published(shared, "one")
    assert await relays(shared).near("http://10.0.0.8:1", path, 1) == path
    assert await relays(shared).near(SERVERS[0], str(tmp_path / "model"), 0) == str(tmp_path / "model")
    assert copies == []


async def test_it_copies_nothing_without_the_key_and_nothing_from_elsewhere(
    relay: WeightRelay, shared: Path, copies: list[Path], tmp_path: Path
) -> None:
    path = published(shared, "one")
    for key in ("", "wrong"):
        with pytest.raises(InferenceError, match="answered 401"):
            await relays(shared, key).near(SERVERS[0], path, 1)
    (tmp_path / "private").mkdir()
    with pytest.raises(InferenceError, match=r"answered 400.*is not in"):
        await relays(shared).near(SERVERS[0], f"{shared}/weights/../../private", 1)
    assert copies == []


async def test_memory_that_is_full_is_told_and_leaves_nothing(
    relay: WeightRelay, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(weight_relay.shutil, "copyfile", full)
    path = published(shared, "one")
    with pytest.raises(InferenceError, match=r"answered 507.*No space left on device"):
        await near(shared, path, 1)
    assert list(relay.folder.iterdir()) == []
    monkeypatch.undo()
    assert (await near(shared, path, 1)).read_text() == "one"


def test_no_copy_remains_and_those_of_a_killed_relay_are_swept(tmp_path: Path) -> None:
    left = tmp_path / f"{SHM_PREFIX}{2**22 + 1}-relay-x"  # of a process that cannot be: above the kernel's limit
    left.mkdir()
    made = WeightRelay("127.0.0.1", "key", TlsConfig(), tmp_path, tmp_path)
    assert not left.exists() and made.folder.is_dir()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_two_versions_must_have_room(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert has_room(free // 4, tmp_path) and not has_room(free // 2, tmp_path)
    assert not has_room(1, tmp_path / "none")
