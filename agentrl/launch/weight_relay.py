"""Brings new weights to a machine of servers once, for all servers on it.

Servers that read a version from a shared disk read it once each, so n servers on a machine cost n copies over the wire.
The relay copies the file into the machine's shared memory when the controller asks for it, before the servers pause,
and they load it from there.

Guarantees: a version is copied once, whoever asks for it how often; the copies of the last two versions are there, as
the publisher's are; no call is answered without the run's key; it listens at the machine's address in the run's network
and speaks TLS where ``launch.tls`` gives a certificate. No copy remains when it ends; after ``kill -9`` the next run on
the machine sweeps them.
"""

import hmac
import json
import os
import shutil
import ssl
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agentrl.config.machines import TlsConfig
from agentrl.core.weight_manifest import SHM, SHM_PREFIX, sweep_stale

KEPT = 2  # versions: the one that is served, and the one that comes
LONGEST = 64 * 1024  # bytes of a request
ROOM = 2.2  # times the bytes of a version that must be free


class WeightRelay:
    """The relay of one machine; it serves from its construction on.

    Args:
        address: Address of this machine in the run's network.
        key: Key of the run.
        tls: Certificate and private key, where the recipe has them.
        shared: Folder that all machines see; nothing else is copied.
        memory: Folder in shared memory for the copies.
    """

    def __init__(self, address: str, key: str, tls: TlsConfig, shared: Path, memory: Path = SHM) -> None:
        sweep_stale(memory)
        self._shared = shared
        self._folder = Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}{os.getpid()}-relay-", dir=memory))
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], Path] = {}
        relay, wanted = self, f"Bearer {key}".encode()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60.0  # of a connection that says nothing

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length", 0))
                body = self.rfile.read(min(size, LONGEST))
                given = self.headers.get("authorization", "").encode()
                if not hmac.compare_digest(given, wanted):
                    self._answer(401, {"error": "wrong or missing key"})
                    return
                try:
                    asked = json.loads(body)
                    self._answer(200, {"path": str(relay.bring(Path(asked["path"]), int(asked["version"])))})
                except (KeyError, TypeError, ValueError) as error:
                    self._answer(400, {"error": f"{type(error).__name__}: {error}"})
                except OSError as error:
                    self._answer(507, {"error": f"{error.filename or relay.folder}: {error.strerror or error}"})

            def _answer(self, status: int, said: dict[str, str]) -> None:
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing: the controller tells of failures."""

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        if tls.certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls.certificate, tls.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        host = f"[{address}]" if ":" in address else address
        self.url = f"{'https' if tls.certificate else 'http'}://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="weight relay", daemon=True).start()

    @property
    def folder(self) -> Path:
        """Folder of the copies."""
        return self._folder

    def bring(self, path: Path, version: int) -> Path:
        """Returns a folder on this machine with a version's files, which are copied at the first call.

        Args:
            path: Folder of the version that all machines see; the publisher uses it again for a later version.
            version: Policy version.

        Raises:
            OSError: The files cannot be read, or shared memory has no room.
            ValueError: The folder is not one that all machines see.
        """
        if not path.resolve().is_relative_to(self._shared.resolve()):
            raise ValueError(f"{path} is not in {self._shared}")
        with self._lock:  # who asks for the same version meanwhile waits for the copy
            found = self._held.get((str(path), version))
            if found is not None:
                return found
            while len(self._held) >= KEPT:
                oldest = next(iter(self._held))
                shutil.rmtree(self._held.pop(oldest))
            made = Path(tempfile.mkdtemp(prefix=f"{version:06d}-", dir=self._folder))
            try:
                for file in path.iterdir():
                    if file.is_file():
                        shutil.copyfile(file, made / file.name)
            except OSError:
                shutil.rmtree(made)
                raise
            self._held[str(path), version] = made
            return made

    def close(self) -> None:
        """Stops answering, and removes the copies."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)


def has_room(nbytes: int, memory: Path = SHM) -> bool:
    """Whether shared memory has room for the copies of two versions.

    Args:
        nbytes: Bytes of a version.
        memory: Folder in shared memory.
    """
    return memory.is_dir() and shutil.disk_usage(memory).free > ROOM * nbytes
