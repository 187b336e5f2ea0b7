"""The server that docs/servers.md makes a kind of: ``python -m acme_server --model DIR --port N``."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers every prompt with its own first ids."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/sample" and asked["temperature"] >= 0
        ids = asked["ids"][: asked["count"]]
        self._answer({"ids": ids, "logprobs": [-0.5] * len(ids), "ended": "length"})

    def _answer(self, content: dict[str, object], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    assert (args.model / "config.json").is_file()
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
