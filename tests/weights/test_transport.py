"""Which way new weights take."""

import shutil
import socket
from collections import namedtuple

import pytest

from agentrl.config.load import load_recipe
from agentrl.launch.dry_run import plan
from agentrl.weights.transport import choose, require_room

HERE, THERE = "http://127.0.0.1:1", "http://node7:1"


@pytest.mark.parametrize(
    ("asked", "engine", "urls", "files_only", "way"),
    [
        ("auto", "embedded", (), False, "shm"),
        ("auto", "sglang", (HERE, f"http://{socket.gethostname()}:2"), False, "shm"),
        ("auto", "sglang", (HERE, THERE), False, "broadcast"),
        ("auto", "vllm", (THERE,), False, "disk"),
        ("auto", "embedded", (THERE,), True, "disk"),
        ("disk", "sglang", (HERE,), False, "disk"),
        ("shm", "sglang", (THERE,), False, "shm"),
    ],
)
def test_auto_goes_by_where_the_servers_stand(
    asked: str, engine: str, urls: tuple[str, ...], files_only: bool, way: str
) -> None:
    assert choose(asked, engine, urls, nbytes=0, files_only=files_only) == way  # type: ignore[arg-type]


def test_auto_falls_back_to_disk_where_tmpfs_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    assert choose("auto", "embedded", (), nbytes=1000, files_only=False) == "disk"
    assert choose("shm", "embedded", (), nbytes=1000, files_only=False) == "shm", "what was asked for is not changed"
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
