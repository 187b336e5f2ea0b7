"""Base class of a kind of inference server: its client, its command line, and its capabilities.

Guarantees: whatever differs between kinds stands in one class for each, a :class:`ServerKind`; it is found under the
name that ``inference.engine`` gives, a registered one or ``path/to/file.py:Class``, and a wrong name is answered with
the nearest. Looking a kind up starts nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.registry import load, registered
from agentrl.inference.backend import Backend, PauseMode, Transport

if TYPE_CHECKING:
    from agentrl.inference.client import Client


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a kind of server; a run that needs more is refused before a process starts.

    The defaults are those of a server that answers in text and does nothing else.

    Attributes:
        starts: A run can start one (:meth:`ServerKind.command`); else ``inference.urls`` names those that run already.
        token_logprobs: Servers take token ids and return the sampled ids with their logprobs
            (:meth:`ServerKind.backend`), which training needs; otherwise they are used through text
            (:meth:`ServerKind.text_client`), for evaluation only.
        token_versions: Answers tell the policy version of each token. Where they do not, no answer may go on over
            a weight push, which leaves ``weights.pause_mode=abort``.
        pause_modes: Supported pause modes for requests in flight during a weight push.
        transports: Supported transports of new weights.
        adapters: Servers load LoRA adapters alone, without the base weights.
        structured_output: Servers can constrain an answer to a JSON schema.
        scoring: Servers return the logprobs of given tokens, as a teacher's server must.
        reasons: Reasons for missing capabilities, by attribute name or missing value; refusals quote them.
    """

    starts: bool = False
    token_logprobs: bool = False
    token_versions: bool = False
    pause_modes: tuple[PauseMode, ...] = ()
    transports: tuple[Transport, ...] = ()
    adapters: bool = False
    structured_output: bool = False
    scoring: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerStart:
    """Start options of one server of a run; the server's own flags (``inference.args``) are added to it.

    Attributes:
        model: Folder to load, in Hugging Face's format.
        python: Interpreter to start it with.
        port: Port of the loopback interface to listen on; 0 where the kind has no ``ready_path``.
        ready_file: File that a server without ``ready_path`` writes when ready: JSON with the key ``url``.
        dtype: ``float32`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        context_length: Prompt and answer together, in tokens.
        max_running: Requests that are decoded together.
        threads: CPU threads; ``None`` for the server's own choice.
        seed: Seed of requests without one.
    """

    model: Path
    python: str
    port: int
    ready_file: Path
    dtype: str
    device: str
    context_length: int
    max_running: int
    threads: int | None
    seed: int


@dataclass(frozen=True)
class TextApi:
    """Address and options of an API that takes and returns text.

    Attributes:
        url: URL from ``inference.urls``, or the base URL of a server that the run started.
        model: Name of the model there.
        api_key_env: Environment variable that holds the API key.
        timeout: Seconds one request may take.
        defaults: Request options (``temperature``, ``max_tokens``) where an agent sets none.
    """

    url: str
    model: str
    api_key_env: str
    timeout: float
    defaults: dict[str, Any]


class ServerKind:
    """Base of all kinds; ``inference.engine`` names a subclass, which is made without arguments.

    A kind overrides what its ``capabilities`` promise: ``starts`` needs :meth:`command`, ``token_logprobs`` needs
    :meth:`backend`, and a kind without it :meth:`text_client`.

    Attributes:
        capabilities: Capabilities of its servers.
        package: Python package that holds the server, where that is not agentrl. It is looked for in our interpreter,
            then in ``.venv-<package>`` of the working folder; ``inference.python`` names another place.
        install: Installation advice, shown if the package is missing.
        ready_path: Path that answers 200 once the server takes requests; ``None`` for a server that picks a port
            itself and announces its URL in ``ServerStart.ready_file``.
    """

    capabilities: Capabilities = Capabilities()
    package: str | None = None
    install: str = "install it into an environment of its own"
    ready_path: str | None = None

    def command(self, start: ServerStart) -> list[str]:
        """Command line of one server; the run sees to it that it ends with the run."""
        raise NotImplementedError(f"{type(self).__name__}.command: a run cannot start such a server")

    def env(self, start: ServerStart) -> dict[str, str]:
        """Environment variables added to this process's own."""
        return {}

    def backend(self, url: str, timeout: float) -> Backend:
        """Connection to the server at ``url``; ``timeout`` are the seconds one request may take, pauses included."""
        raise NotImplementedError(f"{type(self).__name__}.backend: such a server gives no token ids")

    def text_client(self, api: TextApi) -> "Client":
        """Sessions in text, for evaluation."""
        raise NotImplementedError(f"{type(self).__name__}.text_client: such a server is asked with token ids")

    def more_memory(self, weights: int, token: int, device: str) -> list[tuple[str, int]]:
        """Memory that a server needs beside weights and the KV cache of running requests, for the dry run.

        Args:
            weights: Bytes of the weights.
            token: Bytes of the keys and values of one token.
            device: ``cpu`` or ``cuda``.

        Returns:
            Pairs of what it is and its bytes.
        """
        return []


def server_kind(name: str) -> ServerKind:
    """The kind that ``inference.engine`` or ``teacher.engine`` names.

    Raises:
        LookupError: There is no such kind, file or class.
        TypeError: The named class is no :class:`ServerKind`.
    """
    found = load("server", name)
    if not (isinstance(found, type) and issubclass(found, ServerKind)):
        raise TypeError(f"server {name!r} is {found!r}, and must be a subclass of {__name__}.ServerKind")
    return found()


def kinds_that(capability: str) -> list[str]:
    """Names of the registered kinds that have a capability."""
    return [name for name in registered("server") if getattr(server_kind(name).capabilities, capability)]
