"""A server that answers at once with a fixed response, so that a benchmark measures the client's cost only.

``python -m agentrl.bench.instant_server [SECONDS]`` prints its URL and serves ``/generate`` and
``/v1/chat/completions`` until it is terminated, each answer after so many seconds.
"""

import asyncio
import json
import sys
import time
from typing import Any

COMPLETION_IDS = tuple(range(100, 112))


def _canned() -> dict[bytes, bytes]:
    """Fixed responses by path."""
    ids = list(COMPLETION_IDS)
    meta: dict[str, Any] = {
        "id": "x",
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": 40,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    chat = {
        "id": "x",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "m",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "The answer is 42."}}
        ],
        "usage": {"prompt_tokens": 40, "completion_tokens": 12, "total_tokens": 52},
    }
    return {b"/generate": _response({"text": "", "meta_info": meta}), b"/v1/chat/completions": _response(chat)}


def _response(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class _Instant(asyncio.Protocol):
    """Answers HTTP requests; parses only their path and length."""

    def __init__(self, canned: dict[bytes, bytes], seconds: float = 0.0) -> None:
        self._canned = canned
        self._seconds = seconds
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, after = head.partition(b"content-length:")
            total = end + 4 + int(after.split(b"\r\n", 1)[0] or 0)
            if len(self._buffer) < total:
                return
            path = head.split(b" ", 2)[1]
            self._buffer = self._buffer[total:]
            assert self._transport is not None
            if self._seconds:
                asyncio.get_running_loop().call_later(self._seconds, self._transport.write, self._canned[path])
            else:
                self._transport.write(self._canned[path])


async def main() -> None:
    """Serve until the process is terminated."""
    canned = _canned()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Instant(canned, seconds), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
