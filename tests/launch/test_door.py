"""The connection between the head of a run and its other machines."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from agentrl.config.machines import TlsConfig
from agentrl.launch import door
from agentrl.launch.door import Door, DoorError, Visit


@pytest.fixture
def head() -> Iterator[Door]:
    made = Door("127.0.0.1", 0, "secret")
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_side_learns_of_the_others_end(head: Door) -> None:
    one, two = (Visit("127.0.0.1", head.port, "secret", rank) for rank in (1, 2))
    until(lambda: head.inside() == {1, 2})
    assert not one.over
    two._held.close()  # as the kernel does for a process that is killed
    until(lambda: head.inside() == {1})
    assert head.lost() == [2] and head.lost() == []
    head.close()
    until(lambda: one.over)


def test_one_that_leaves_is_not_lost(head: Door) -> None:
    visit = Visit("127.0.0.1", head.port, "secret", 1)
    until(lambda: head.inside() == {1})
    visit.leave()
    until(lambda: head.inside() == set())
    assert head.lost() == []


def test_one_that_comes_again_takes_its_place(head: Door) -> None:
    first = Visit("127.0.0.1", head.port, "secret", 1)
    until(lambda: head.inside() == {1})
    again = Visit("127.0.0.1", head.port, "secret", 1)
    until(lambda: head._inside[1].getpeername() == again._held.getsockname())
    guests = [thread for thread in threading.enumerate() if thread.name == "door-guest"]
    first._held.close()
    until(lambda: not all(thread.is_alive() for thread in guests))
    assert head.inside() == {1} and head.lost() == []
    assert head.twice() == [1] and head.twice() == []
    again.leave()


def test_with_a_certificate_both_speak_tls_and_learn_of_the_others_end(tmp_path: Path) -> None:
    ours = trustme.CA()
    issued = ours.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    files = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    for name, authority in (("ours", ours), ("theirs", trustme.CA())):
        authority.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    tls = TlsConfig(**files, ca=str(tmp_path / "ours.pem"))
    head = Door("127.0.0.1", 0, "secret", tls)
    try:
        visits = [Visit("127.0.0.1", head.port, "secret", rank, tls) for rank in (1, 2, 3)]
        until(lambda: head.inside() == {1, 2, 3})
        assert not visits[0].over
        visits[1].leave()
        visits[2]._held.close()
        until(lambda: head.inside() == {1})
        assert head.lost() == [3]
        with pytest.raises(ssl.SSLCertVerificationError):
            Visit("127.0.0.1", head.port, "secret", 4, TlsConfig(**files, ca=str(tmp_path / "theirs.pem")))
        with pytest.raises(DoorError):
            Visit("127.0.0.1", head.port, "wrong", 4, tls)
        with socket.create_connection(("127.0.0.1", head.port), timeout=30) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            said = b""
            with contextlib.suppress(ConnectionResetError):
                said = stranger.recv(1000)
            assert b"nonce" not in said, "it says nothing in plain text"
        assert head.inside() == {1}
    finally:
        head.close()
    until(lambda: visits[0].over)


def test_a_wrong_secret_is_refused_on_both_sides(head: Door) -> None:
    with pytest.raises(DoorError):
        Visit("127.0.0.1", head.port, "guess", 1)
    assert head.inside() == set()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]

        def answer() -> None:
            held, _ = impostor.accept()
            with held:
                door._send(held, {"nonce": "x"})
                door._line(held)
                door._send(held, {"proof": door.proof("guess", "x", "head")})

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DoorError, match="is not this run's head"):
            Visit("127.0.0.1", port, "secret", 1)
        thread.join()


def test_a_proof_of_another_machine_or_side_does_not_do() -> None:
    """What a listener hears of one machine's proof is of no use for another number, nor in the other direction."""
    assert len({door.proof("s", "n", *words) for words in (("machine", "1"), ("machine", "2"), ("head",))}) == 3


@pytest.mark.parametrize("line", [b'{"proof": "x"}\n', b"[" * 1000 + b"\n", b"SSH-2.0\n"])
def test_what_is_no_head_is_told_in_one_line(line: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            held, _ = other.accept()
            with held:
                held.sendall(line)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DoorError, match="is no agentrl of this run"):
            Visit("127.0.0.1", other.getsockname()[1], "secret", 1)
        thread.join()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": "x"}\n', b'{"proof": 1}\n', b""])
def test_strangers_are_turned_away(head: Door, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", head.port)) as stranger:
        stranger.settimeout(30)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not stranger.recv(100):
                    break
            except ConnectionResetError:
                break
    assert head.inside() == set()
    Visit("127.0.0.1", head.port, "secret", 1).leave()
