"""Fingerprints and checksums of tensors' bytes."""

import os
import random
import subprocess
import sys
from pathlib import Path

from agentrl.core.weight_manifest import SHM_PREFIX, WINDOW, checksum, fingerprint, mismatches, sweep_stale


def test_a_fingerprint_sees_head_middle_tail_and_length() -> None:
    data = bytearray(random.Random(0).randbytes(10 * WINDOW))
    base = fingerprint(memoryview(data))
    for position in (0, WINDOW - 1, 5 * WINDOW, 10 * WINDOW - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        assert fingerprint(memoryview(changed)) != base
    assert fingerprint(memoryview(data[:-1])) != base
    assert fingerprint(memoryview(b"")) != fingerprint(memoryview(b"\0"))


def test_a_checksum_sees_every_byte() -> None:
    data = bytearray(10 * WINDOW)
    base = checksum(memoryview(data))
    data[3 * WINDOW] = 1  # between the windows of a fingerprint
    assert checksum(memoryview(data)) != base


def test_a_tensor_that_the_server_does_not_have_is_a_mismatch() -> None:
    assert mismatches({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == ["b"]


def test_folders_of_dead_processes_are_swept_and_others_left(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = f"{SHM_PREFIX}{os.getpid()}-x"
    for name in (alive, f"{SHM_PREFIX}{dead.pid}-x", "other"):
        (tmp_path / name).mkdir()
    sweep_stale(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([alive, "other"])
