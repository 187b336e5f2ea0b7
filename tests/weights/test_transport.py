"""Which way new weights take."""

import shutil
import socket
from collections import namedtuple
from typing import Any

import pytest

from agentrl.config.load import load_recipe
from agentrl.inference.backend import Transport
from agentrl.launch.dry_run import plan
from agentrl.weights.transport import choose, require_room

HERE, THERE = "http://127.0.0.1:1", "http://node7:1"


ALL = ("shm", "disk", "broadcast")


@pytest.mark.parametrize(
    ("asked", "transports", "urls", "files_only", "way"),
    [
        ("auto", ALL, (), False, "shm"),
        ("auto", ALL, (HERE, f"http://{socket.gethostname()}:2"), False, "shm"),
        ("auto", ALL, (HERE, THERE), False, "broadcast"),
        ("auto", ("shm", "disk"), (THERE,), False, "disk"),
        ("auto", ("disk",), (HERE,), False, "disk"),
        ("auto", ("broadcast",), (HERE,), False, "broadcast"),
        ("auto", ALL, (THERE,), True, "disk"),
        ("disk", ALL, (HERE,), False, "disk"),
        ("shm", ALL, (THERE,), False, "shm"),
    ],
)
def test_auto_goes_by_where_the_servers_stand_and_what_they_take(
    asked: Any, transports: tuple[Transport, ...], urls: tuple[str, ...], files_only: bool, way: str
) -> None:
    assert choose(asked, transports, urls, nbytes=0, files_only=files_only) == way


@pytest.mark.parametrize(("transports", "files_only"), [((), False), (("shm",), False), (("broadcast",), True)])
def test_servers_that_no_way_reaches_are_refused(transports: tuple[Transport, ...], files_only: bool) -> None:
    with pytest.raises(ValueError, match=r"weights\.transport=auto finds no way to the servers"):
        choose("auto", transports, (THERE,), nbytes=0, files_only=files_only)


def test_auto_falls_back_to_disk_where_tmpfs_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    assert choose("auto", ALL, (), nbytes=1000, files_only=False) == "disk"
    assert choose("shm", ALL, (), nbytes=1000, files_only=False) == "shm", "what was asked for is not changed"
    with pytest.raises(OSError, match=r"weights\.transport=disk"):
        require_room(1000)
    require_room(50)


def test_the_plan_names_the_way_and_what_each_costs() -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 1_000_000, "tie_word_embeddings": True,
    }  # fmt: skip
    more = ["inference.urls=[http://node7:1,http://node8:1]", "inference.dtype=bfloat16", "inference.engine=sglang"]
    _, lines = plan(load_recipe("arithmetic_grpo", more, device="cpu"), config, "m")
    (first,) = [line for line in lines if line.startswith("weights ")]
    assert "broadcast: 128 MB sent to each of 2 servers" in first
    assert "auto       weights.transport: broadcast" in lines
    assert sum("instead of" in line for line in lines) == 2
    assert not any("double-buffered" in line for line in lines)
