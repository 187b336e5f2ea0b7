"""Holds the machines of a run together: each keeps a connection to the head, whose end tells the other side.

A machine of servers has no ranks that end with the head's, so this connection is how it learns that the head is gone,
and how the head learns which machine is.

Guarantees: both sides prove that they know the run's secret, which itself is never sent; a machine without it is turned
away. Where ``launch.tls`` gives a certificate they speak TLS. A side that ends, even by ``kill -9``, is noticed at
once; one whose machine loses power or network within half a minute, by TCP's keepalive.
"""

import hmac
import json
import secrets
import select
import socket
import ssl
import threading
import time

from agentrl.config.machines import TlsConfig

SECONDS = 10.0  # for each step of the proof
LINE = 1024  # most bytes of one
QUIET, EVERY, MISSED = 10, 5, 4  # keepalive: seconds without data, between probes, and their number
LEFT = b"left\n"  # said by a machine that ends as it should


class DoorError(ConnectionError):
    """The other side does not know the run's secret, or is no agentrl."""


def proof(secret: str, *words: str) -> str:
    """Returns what only a holder of the secret can make of the words."""
    return hmac.new(secret.encode(), "\n".join(words).encode(), "sha256").hexdigest()


def proven(said: dict[str, object], secret: str, *words: str) -> bool:
    """Whether what the other side says holds the proof; it takes the same time wherever the texts differ."""
    return hmac.compare_digest(str(said["proof"]).encode(), proof(secret, *words).encode())


class Door:
    """The head's side; listens from its construction on.

    Args:
        address: Address to listen on.
        port: Port; 0 for any free one.
        secret: Secret of the run.
        tls: Certificate and private key, where the recipe has them.

    Raises:
        OSError: The address is not of this machine, or the port is taken.
    """

    def __init__(self, address: str, port: int, secret: str, tls: TlsConfig | None = None) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._context: ssl.SSLContext | None = None
        if tls is not None and tls.certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(tls.certificate, tls.key)
            self._context.num_tickets = 0  # a machine that looks for the head's end must find nothing else
        self._listener = socket.create_server((address, port), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._inside: dict[int, socket.socket] = {}
        self._lost: list[int] = []
        self._twice: list[int] = []
        self._clocks: dict[int, float] = {}
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def lost(self) -> list[int]:
        """Returns the numbers of machines that have gone without a word since the last call."""
        with self._lock:
            found, self._lost = self._lost, []
        return found

    def twice(self) -> list[int]:
        """Returns the numbers with which a machine has come while one of that number was there, since the last call."""
        with self._lock:
            found, self._twice = self._twice, []
        return found

    def inside(self) -> set[int]:
        """Returns the numbers of the machines that are there."""
        with self._lock:
            return set(self._inside)

    def clocks(self) -> dict[int, float]:
        """Returns how many seconds the clock of each machine was ahead of this one's when it came."""
        with self._lock:
            return dict(self._clocks)

    def close(self) -> None:
        """Closes the door; the machines notice and end."""
        self._listener.close()
        with self._lock:
            for held in self._inside.values():
                _shut(held)

    def _accept(self) -> None:
        while True:
            try:
                held, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._admit, args=(held,), name="door-guest", daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        try:
            held = self._secured(accepted)
        except OSError:  # a stranger, who does not speak TLS
            return
        with held:
            try:
                rank = self._ask(held)
            except (OSError, ValueError):  # a stranger: a port scanner, an older run
                return
            with self._lock:
                self._twice += [rank] if rank in self._inside else []
                self._inside[rank] = held
            said = _until_end(held)
            with self._lock:
                if self._inside.get(rank) is held:
                    del self._inside[rank]
                    if said != LEFT:
                        self._lost.append(rank)

    def _secured(self, accepted: socket.socket) -> socket.socket:
        accepted.settimeout(SECONDS)
        return accepted if self._context is None else self._context.wrap_socket(accepted, server_side=True)

    def _ask(self, held: socket.socket) -> int:
        nonce = secrets.token_hex(16)
        _send(held, {"nonce": nonce})
        said = _line(held, "rank", "nonce", "proof", "time")
        rank, theirs = int(str(said["rank"])), str(said["nonce"])
        if not proven(said, self._secret, nonce, "machine", str(rank)):
            raise DoorError("wrong secret")
        gap = float(str(said["time"])) - time.time()
        with self._lock:
            self._clocks[rank] = gap
        _send(held, {"proof": proof(self._secret, theirs, "head")})
        keep_alive(held)
        held.settimeout(None)
        return rank


class Visit:
    """A machine's side of the connection.

    Args:
        address: Address of the head.
        port: Port of its door.
        secret: Secret of the run.
        rank: Number of this machine.
        tls: Certificate of the run and its authority, where the recipe has them.

    Raises:
        DoorError: The head does not know the secret, or turns this machine away.
        OSError: There is no connection, or the head's certificate is not trusted.
    """

    def __init__(self, address: str, port: int, secret: str, rank: int, tls: TlsConfig | None = None) -> None:
        self._held = socket.create_connection((address, port), timeout=SECONDS)
        try:
            if tls is not None and tls.certificate is not None:
                trusted = ssl.create_default_context(cafile=tls.ca)
                self._held = trusted.wrap_socket(self._held, server_hostname=address)
            nonce = secrets.token_hex(16)
            theirs = str(_line(self._held, "nonce")["nonce"])
            own = proof(secret, theirs, "machine", str(rank))
            _send(self._held, {"rank": rank, "nonce": nonce, "proof": own, "time": time.time()})
            answer = _line(self._held, "proof")
            if not proven(answer, secret, nonce, "head"):
                raise DoorError(f"what answers at {address}:{port} is not this run's head")
            keep_alive(self._held)
            self._held.settimeout(None)
        except BaseException:
            self._held.close()
            raise

    @property
    def over(self) -> bool:
        """Whether the head has ended."""
        ready, _, _ = select.select([self._held], [], [], 0)
        if not ready:
            return False
        try:
            return self._held.recv(1) == b""
        except OSError:
            return True

    def leave(self) -> None:
        """Tells the head that this machine ends as it should."""
        try:
            self._held.sendall(LEFT)
        except OSError:  # the head is gone
            return
        finally:
            self._held.close()


def keep_alive(held: socket.socket) -> None:
    """Has the kernel notice a peer that is gone without closing the connection."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", QUIET), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", MISSED)):
        if hasattr(socket, name):
            held.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(held: socket.socket, data: dict[str, object]) -> None:
    held.sendall(json.dumps(data).encode() + b"\n")


def _line(held: socket.socket, *names: str) -> dict[str, object]:
    """Reads a line of the other side that must have some names."""
    text = b""
    while not text.endswith(b"\n"):
        more = held.recv(1)
        text += more
        if not more or len(text) > LINE:
            raise DoorError("the other side closed the connection, or is no agentrl of this run")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not set(names) <= set(said):
        raise DoorError("the other side is no agentrl of this run")
    return said


def _until_end(held: socket.socket) -> bytes:
    """Returns the last thing that was said before the connection ended."""
    said = b""
    while True:
        try:
            more = held.recv(LINE)
        except OSError:
            return said
        if not more:
            return said
        said = more


def _shut(held: socket.socket) -> None:
    try:
        socket.socket.shutdown(held, socket.SHUT_RDWR)  # not TLS's own, which a thread that reads would stumble over
    except OSError:  # it ended already
        return
