"""Base class of a kind of inference server: its client, its command line, and its capabilities.

Guarantees: everything that differs between kinds is in one subclass of :class:`ServerKind` each. ``inference.engine``
names it by a registered name or ``path/to/file.py:Class``; the error for a wrong name suggests the nearest one. Looking
up a kind starts nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.core.registry import load, registered
from agentrl.host import key_guard
from agentrl.inference.backend import Backend, PauseMode, Transport
from agentrl.inference.http import OPEN, Access

if TYPE_CHECKING:
    from agentrl.inference.client import EvaluationClient


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a kind of server; a run that needs more is refused before a process starts.

    The defaults describe a server that only answers in text.

    Attributes:
        starts: A run can start such a server (:meth:`ServerKind.command`); otherwise ``inference.urls`` must name
            running ones.
        token_logprobs: Servers take token ids and return the sampled ids with their logprobs
            (:meth:`ServerKind.backend`), which training needs; otherwise they are used through text
            (:meth:`ServerKind.text_client`), for evaluation only.
        token_versions: Answers report the policy version of each token. Otherwise no answer may continue across a
            weight push, so only ``weights.pause_mode=abort`` is possible.
        pause_modes: Supported pause modes for requests in flight during a weight push.
        transports: Supported transports of new weights.
        weight_names: Names and shapes in which servers take weights: ``files``, those of the model's files, where each
            expert of a mixture has its own; or ``model``, those of the model that transformers makes of them.
        adapters: Servers can load LoRA adapters without the base weights.
        structured_output: Servers can constrain an answer to a JSON schema.
        images: Servers take images beside the ids of a prompt.
        videos: They take the frames of videos too.
        mixed_placeholders: They take images of models that put other tokens between or around an image's placeholders.
        images_go_on: A request with images can go on after a weight push; otherwise a push aborts it, and it is sent
            again with the tokens that it had.
        experts: Servers of a mixture of experts name the experts that each layer chose for each token.
        scoring: Servers return the logprobs of given tokens, as a teacher's server must.
        remote: Servers can stand on other machines: they listen at ``ServerStart.host``, answer no call without the key
            in their environment (:data:`agentrl.host.key_guard.KEY_ENV`), and :meth:`ServerKind.backend` sends it.
        parallel: Names of the keys of ``inference`` that split one server over GPUs: ``tp``, ``pp``, ``dp``, ``ep``.
        reasons: Reasons for missing capabilities, by attribute name or missing value; error messages quote them.
    """

    starts: bool = False
    token_logprobs: bool = False
    token_versions: bool = False
    pause_modes: tuple[PauseMode, ...] = ()
    transports: tuple[Transport, ...] = ()
    weight_names: Literal["files", "model"] = "files"
    adapters: bool = False
    structured_output: bool = False
    images: bool = False
    videos: bool = False
    mixed_placeholders: bool = True
    images_go_on: bool = True
    experts: bool = False
    scoring: bool = False
    remote: bool = False
    parallel: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


class ImageReading(NamedTuple):
    """How a server of a model with images must read them.

    Attributes:
        pillow: It must resize them with Pillow, as this side does where torchvision is not installed.
        tower_changes: Weight pushes change the image tower, so features of old weights must not be kept.
    """

    pillow: bool
    tower_changes: bool


class StartOptions(NamedTuple):
    """Environment variables and flags that a server is started with."""

    env: dict[str, str]
    flags: list[str]


@dataclass(frozen=True)
class ServerStart:
    """Start options of one server of a run; the flags of ``inference.args`` are added to its command line.

    Attributes:
        model: Folder to load, in Hugging Face's format.
        python: Python interpreter that runs the server.
        port: Port to listen on; 0 for any free one, which is possible only without ``ready_path``.
        ready_file: File that a server without ``ready_path`` writes when ready: JSON with the key ``url``.
        dtype: ``float32`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        context_length: Limit of prompt and answer together, in tokens.
        max_running: Most requests that are decoded together.
        threads: Number of CPU threads; ``None`` for the server's default.
        seed: Seed for requests that have none.
        host: Address to listen on.
        certificate: File of its certificate; empty for plain HTTP.
        private_key: File of the certificate's key.
        sizes: Parallel ranks by name (``tp``, ``pp``, ``dp``, ``ep``), those above 1.
        guarded: Whether no call may be answered without the key in its environment.
        trust: Whether Python code that comes with the model may run.
        experts: Whether answers must name the experts of each token.
        images: How it must read images; ``None`` for a model of text.
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
    host: str = "127.0.0.1"
    certificate: str = ""
    private_key: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    guarded: bool = False
    trust: bool = False
    experts: bool = False
    images: ImageReading | None = None

    def module(self, name: str) -> list[str]:
        """Command that runs a server's module of an interpreter, behind the guard of its key where there is one."""
        return [self.python, str(Path(key_guard.__file__)), "-m", name] if self.guarded else [self.python, "-m", name]


@dataclass(frozen=True)
class TextApi:
    """Address and options of an API that takes and returns text.

    Attributes:
        url: URL from ``inference.urls``, or the base URL of a server that the run started.
        model: Name of the model at the API.
        api_key_env: Environment variable that holds the API key.
        timeout: Most seconds of one request.
        defaults: Request options (``temperature``, ``max_tokens``) where an agent sets none.
        max_concurrent: Largest number of requests at a time.
        retry_seconds: Most seconds that an episode waits to repeat requests that failed.
    """

    url: str
    model: str
    api_key_env: str
    timeout: float
    defaults: dict[str, Any]
    max_concurrent: int = 128
    retry_seconds: float = 1800.0


class ServerKind:
    """Base class of all kinds; ``inference.engine`` names a subclass, whose constructor takes no arguments.

    A kind overrides the methods that its ``capabilities`` promise: ``starts`` needs :meth:`command`,
    ``token_logprobs`` needs :meth:`backend`, and a kind without ``token_logprobs`` needs :meth:`text_client`.

    Attributes:
        capabilities: Capabilities of its servers.
        package: Python package of the server; ``None`` if agentrl contains it. It is looked for in this interpreter,
            then in ``.venv-<package>`` of the working folder; ``inference.python`` names another interpreter.
        install: Installation advice, shown if the package is missing.
        ready_path: Path that answers 200 as soon as the server takes requests; ``None`` for a server that picks a
            port itself and announces its URL in ``ServerStart.ready_file``.
    """

    capabilities: Capabilities = Capabilities()
    package: str | None = None
    install: str = "install it into an environment of its own"
    ready_path: str | None = None

    def command(self, start: ServerStart) -> list[str]:
        """Command line of one server; the run starts and ends it."""
        raise NotImplementedError(f"{type(self).__name__}.command: a run cannot start this kind of server")

    def env(self, start: ServerStart) -> dict[str, str]:
        """Environment variables of the server, added to this process's own."""
        return {}

    def for_images(self, reading: ImageReading) -> StartOptions:
        """Environment and flags that a server needs for images; the user is told them for ``inference.urls``."""
        return StartOptions({}, [])

    def backend(self, url: str, timeout: float, access: Access = OPEN) -> Backend:
        """Connection to the server at ``url``.

        Args:
            url: Base URL.
            timeout: Most seconds of one request, pauses included.
            access: The server's key and trust; given to kinds that are ``remote``.
        """
        raise NotImplementedError(f"{type(self).__name__}.backend: this kind of server returns no token ids")

    def text_client(self, api: TextApi) -> "EvaluationClient":
        """Client for sessions in text, for evaluation."""
        raise NotImplementedError(f"{type(self).__name__}.text_client: this kind of server is used with token ids")

    def more_memory(self, weights: int, token: int, device: str) -> list[tuple[str, int]]:
        """Memory that a server needs beside weights and the KV cache of running requests, for the dry run.

        Args:
            weights: Size of the weights, in bytes.
            token: Size of one token's keys and values, in bytes.
            device: ``cpu`` or ``cuda``.

        Returns:
            Pairs of a description and a number of bytes.
        """
        return []


def server_kind(name: str) -> ServerKind:
    """Returns the kind that ``inference.engine`` or ``teacher.engine`` names.

    Raises:
        LookupError: There is no such kind, file or class.
        TypeError: The named class is no :class:`ServerKind`.
    """
    found = load("server", name)
    if not (isinstance(found, type) and issubclass(found, ServerKind)):
        raise TypeError(f"server {name!r} is {found!r}, but must be a subclass of {__name__}.ServerKind")
    return found()


def kinds_that(capability: str) -> list[str]:
    """Names of the registered kinds that have a capability."""
    return [name for name in registered("server") if getattr(server_kind(name).capabilities, capability)]
