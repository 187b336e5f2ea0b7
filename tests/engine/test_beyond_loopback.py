"""The embedded server beyond this machine: its key, and TLS."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import trustme

from agentrl.engine.__main__ import main, on_loopback
from agentrl.host.key_guard import KEY_ENV
from agentrl.inference.backend import InferenceError, SamplingParams
from agentrl.inference.http import Access
from agentrl.inference.kinds.embedded import EmbeddedBackend

SECONDS = 120


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_it_is_refused_without_a_key(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    assert main(["--model", "none", "--host", host]) == 2
    assert f"set a key in ${KEY_ENV}" in capsys.readouterr().err


def test_addresses_of_this_machine_alone_need_none() -> None:
    assert on_loopback("127.0.0.1") and on_loopback("localhost") and on_loopback("::1") and on_loopback("127.0.0.2")


def test_it_speaks_tls_to_those_who_know_the_key(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    certificate = ours.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    ours.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    theirs.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "agentrl.engine", "--model", str(tiny_model), "--ready-file", str(ready)]
    command += ["--tls-certificate", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with subprocess.Popen([*command, "--threads", "1"], env={**os.environ, KEY_ENV: "right"}) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not ready.is_file():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            url = json.loads(ready.read_text())["url"]
            assert url.startswith("https://127.0.0.1:")
            asyncio.run(_ask(url, tmp_path))
            assert "right" not in Path(f"/proc/{process.pid}/cmdline").read_text()
            with pytest.raises(httpx.HTTPError):
                httpx.get(url.replace("https", "http"), trust_env=False)
        finally:
            process.send_signal(signal.SIGTERM)


async def _ask(url: str, folder: Path) -> None:
    async def sample(access: Access) -> list[int]:
        backend = EmbeddedBackend(url, 30.0, access)
        try:
            answer = await backend.generate([5, 6, 7], SamplingParams(max_new_tokens=3), request_id="a")
            return answer.token_ids
        finally:
            await backend.close()

    assert len(await sample(Access("right", str(folder / "ca.pem")))) == 3
    for key in ("wrong", ""):
        with pytest.raises(InferenceError, match="answered 401"):
            await sample(Access(key, str(folder / "ca.pem")))
    for ca in (str(folder / "other.pem"), None):
        with pytest.raises(InferenceError, match=r"(?i)certificate"):
            await sample(Access("right", ca))
    with pytest.raises(InferenceError, match=r"launch.tls.ca=.*cannot be read"):
        await sample(Access("right", str(folder / "none.pem")))
    assert "right" not in repr(Access("right"))
