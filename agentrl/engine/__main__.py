"""``python -m agentrl.engine``: start the server.

Guarantees: the port is bound before anything slow, so a port in use ends at once with one line and exit code 2; the
ready file appears, complete, only when the model answers; SIGTERM and SIGINT end the server with exit code 0, within
seconds and without a traceback; with ``--parent-pid`` the server ends when its parent does.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.engine import KEPT_TOKENS
from agentrl.host.entry import refuse
from agentrl.host.key_guard import KEY_ENV, KeyGuard
from agentrl.host.process import tie_to_parent, write_json

if TYPE_CHECKING:
    import uvicorn

    from agentrl.engine.service import Service

BACKLOG = 1024
CHUNK_TOKENS, LEAST_CHUNK = 512, 16
KEEP_ALIVE = 120  # seconds: longer than a client's pause between two turns
STOP_SECONDS = 2.0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog="agentrl-engine", description="Serve a Hugging Face causal language model.")
    parser.add_argument("--model", required=True, help="folder in Hugging Face's format")
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"address to listen on; beyond this machine it needs a key in ${KEY_ENV}"
    )
    parser.add_argument("--tls-certificate", help="certificate (PEM), to speak HTTPS")
    parser.add_argument("--tls-key", help="private key of the certificate (PEM)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--ready-file", type=Path, help="path of a JSON file that is written once the model answers")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's choice")
    parser.add_argument("--max-running", type=int, default=64, help="most requests decoded together")
    parser.add_argument("--max-waiting", type=int, default=4096, help="most requests in the queue; more get HTTP 503")
    parser.add_argument("--max-tokens", type=int, help="most tokens of all running requests; default: slots x context")
    parser.add_argument(
        "--kept-tokens", type=int, default=KEPT_TOKENS, help="tokens in the prefix cache; 0 disables it"
    )
    parser.add_argument(
        "--prefill-chunk", type=int, default=CHUNK_TOKENS, help="tokens of a long prompt per decode step"
    )
    parser.add_argument("--context-length", type=int, help="tokens; default: the model's maximum")
    parser.add_argument("--seed", type=int, help="seed for requests without a sampling_seed")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument(
        "--enable-return-routed-experts",
        action="store_true",
        help="let requests ask for the experts that a mixture of experts chose for each token",
    )
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    return parser


def bind(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Raises:
        OSError: If the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def on_loopback(host: str) -> bool:
    """Whether an address, or the one that a name stands for, cannot be reached from other machines."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # told when it is bound
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def main(argv: list[str] | None = None) -> int:
    """Run the server until a signal ends it.

    Args:
        argv: Arguments of the command line without the program's name; ``None`` takes ``sys.argv``.

    Returns:
        0 after a signal, :data:`~agentrl.host.entry.REFUSED` if the model cannot be served, 1 if it could not be
        loaded otherwise, 2 for wrong arguments or a port in use.
    """
    args = build_parser().parse_args(argv)
    least = {
        "max_running": 1,
        "max_tokens": 2,
        "context_length": 2,
        "max_waiting": 0,
        "kept_tokens": 0,
        "threads": 0,
        "prefill_chunk": LEAST_CHUNK,
    }
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            print(f"--{name.replace('_', '-')} {value}: must be at least {smallest}", file=sys.stderr)
            return 2
    if not on_loopback(args.host) and not os.environ.get(KEY_ENV):
        print(
            f"--host {args.host} can be reached from elsewhere: set a key in ${KEY_ENV}, here and in the run",
            file=sys.stderr,
        )
        return 2
    if args.parent_pid is not None and not tie_to_parent(args.parent_pid):
        print(f"the parent process {args.parent_pid} is gone", file=sys.stderr)
        return 1
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        print(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}", file=sys.stderr)
        return 2
    before = {number: signal.signal(number, _exit_now) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with listener:
            return asyncio.run(_serve(args, listener))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_now(number: int, frame: object) -> None:
    """Exits at once: before the server runs there is nothing to clean up."""
    os._exit(0)


async def _serve(args: argparse.Namespace, listener: socket.socket) -> int:
    """Serve at once, load the model in the background, and end on a signal."""
    import uvicorn

    from agentrl.engine.server import build_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    service = _start_service(args)
    app, key = build_app(service), os.environ.get(KEY_ENV)
    config = uvicorn.Config(
        KeyGuard(app, key) if key else app,
        ssl_certfile=args.tls_certificate,
        ssl_keyfile=args.tls_key,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )
    server = _quiet(uvicorn.Server(config))
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task(stopped.wait())
    loading = asyncio.wrap_future(service.engine.ready)
    await asyncio.wait({loading, waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if loading.done() and not stopped.is_set():
        loading.exception()  # retrieved here, because asyncio prints exceptions that nobody retrieves
        code = _announce(args, listener, service)
    if code == 0:
        await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    ended = await asyncio.to_thread(service.engine.stop, STOP_SECONDS)
    server.should_exit = True
    await serving
    if not ended:  # a step or the load still runs in C++, where a normal exit of the interpreter would crash
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _quiet(server: "uvicorn.Server") -> "uvicorn.Server":
    """Keep uvicorn from handling the signals: it would raise them again at the end."""
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    return server


def _start_service(args: argparse.Namespace) -> "Service":
    """Starts an engine, whose thread begins to load the model."""
    from transformers.utils import logging as transformers_logging

    from agentrl.engine.engine import Engine
    from agentrl.engine.make_runner import Runner, make_runner
    from agentrl.engine.model import load_model
    from agentrl.engine.service import Service

    transformers_logging.disable_progress_bar()

    def build() -> Runner:
        loaded = load_model(args.model, args.dtype, args.device, args.context_length, trust=args.trust_remote_code)
        return make_runner(loaded, args.max_running, args.kept_tokens, experts=args.enable_return_routed_experts)

    engine = Engine(
        build,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_tokens=args.max_tokens,
        prefill_chunk=args.prefill_chunk,
        seed=args.seed,
        version=args.weight_version,
        threads=args.threads,
    )
    return Service(engine.start(), args.model)


def _announce(args: argparse.Namespace, listener: socket.socket, service: "Service") -> int:
    """Write the ready file, or print why the model could not be loaded."""
    from agentrl.engine.model import ModelError

    error = service.engine.ready.exception()
    if isinstance(error, ModelError):
        return refuse(ModelError(f"cannot serve {args.model}: {error}"))
    if error is not None:
        print(f"cannot serve {args.model}: {error}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    scheme = "https" if args.tls_certificate else "http"
    content: dict[str, object] = {
        "url": f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}",
        "pid": os.getpid(),
        "model": args.model,
        "dtype": service.loaded.dtype,
        "context_length": service.loaded.context_length,
    }
    if args.ready_file is not None:
        args.ready_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.ready_file, content)
    logging.getLogger(__name__).info("serving %s", json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
