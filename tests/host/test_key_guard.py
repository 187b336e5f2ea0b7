"""The guard in front of a server: no call without the key, and no key where others can read it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentrl.host import key_guard
from agentrl.host.key_guard import KEY_ENV, KeyGuard

SERVER = """
import os, socket, sys, uvicorn
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": " ".join(sys.argv).encode()})
if __name__ == "__main__":
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    listener = config.bind_socket()
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])
"""


async def hello(scope: key_guard.Message, receive: key_guard.Receive, send: key_guard.Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    "given",
    [None, "", "key", "Bearer", "Bearer ", "Bearer ke", "Bearer key2", "bearer key", "Bearer key ", "Basic key", "é"],
)
async def test_no_call_is_answered_without_the_key(given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    transport = httpx.ASGITransport(KeyGuard(hello, "key"))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for method, path in (("GET", "/health"), ("POST", "/pause"), ("OPTIONS", "/v1/models")):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401 and "hello" not in answer.text
        right = await client.get("/health", headers={"Authorization": "Bearer key"})
        assert right.text == "hello"


async def test_a_websocket_without_the_key_is_closed() -> None:
    sent: list[key_guard.Message] = []

    async def receive() -> key_guard.Message:
        return {"type": "websocket.connect"}

    async def send(message: key_guard.Message) -> None:
        sent.append(message)

    await KeyGuard(hello, "key")({"type": "websocket", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_a_server_of_others_runs_behind_it_without_a_change(tmp_path: Path) -> None:
    """As ``python -m``: its own arguments, its folder on the path, and the key in no command line."""
    (tmp_path / "theirs.py").write_text(SERVER)
    command = [sys.executable, str(Path(key_guard.__file__)), "-m", "theirs", "--port", "7"]
    env = {**os.environ, KEY_ENV: "a secret", "PYTHONPATH": ""}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}/any"
            assert httpx.get(url).status_code == 401
            answer = httpx.get(url, headers={"Authorization": "Bearer a secret"})
            assert answer.status_code == 200 and answer.text.split()[1:] == ["--port", "7"]
            assert "a secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        finally:
            process.send_signal(signal.SIGTERM)
