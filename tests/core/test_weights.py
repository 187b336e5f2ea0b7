"""Fingerprints and checksums of tensors' bytes."""

import random

from agentrl.core.weights import WINDOW, checksum, fingerprint, mismatches


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
