"""The controller's port for rollout workers on other machines: their calls alone, the run's secret, TLS."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.launch.worker_port import WorkerPort
from agentrl.rollout.worker_api import worker_routes
from agentrl.rollout.worker_link import HttpLink
from agentrl.rollout.worker_loop import ControllerGone, WorkerRefused
from agentrl.rollout.worker_processes import WorkerProcesses
from tests.rollout.test_worker_http import SECRET, Controlling

APART = ["launch.device=cpu", "rollout.nodes=1", "rollout.workers=2"]


@asynccontextmanager
async def listening(*settings: str) -> AsyncIterator[tuple[WorkerPort, WorkerProcesses]]:
    made = Controlling(None)
    recipe = load_recipe("arithmetic_grpo", [*APART, "launch.head=127.0.0.1", *settings])
    port = WorkerPort(recipe, worker_routes(made.workers, made.router, SECRET))
    try:
        yield port, made.workers
    finally:
        await made.workers.close()
        await port.close()


async def test_it_answers_the_calls_of_workers_alone_and_none_without_the_secret() -> None:
    async with listening() as (port, workers):
        async with HttpLink(port.url, SECRET, "worker-0", 1) as link:
            await link.join()
        assert list(workers.in_flight) == ["worker-0"]
        async with HttpLink(port.url, "wrong", "worker-1", 1) as link:
            with pytest.raises(WorkerRefused, match="401: wrong or missing secret"):
                await link.join()
        async with httpx.AsyncClient(base_url=port.url, headers={"authorization": f"Bearer {SECRET}"}) as http:
            for path in ("/status", "/servers"):
                assert (await http.get(path)).status_code == 404
            for path in ("/publish", "/record", "/next_batch"):
                assert (await http.post(path, json={})).status_code == 404


async def test_it_speaks_tls_to_workers_that_trust_its_certificate(tmp_path: Path) -> None:
    ours = trustme.CA()
    issued = ours.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    ours.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = [f"launch.tls.certificate={tmp_path}/cert.pem", f"launch.tls.key={tmp_path}/key.pem"]
    async with listening(*tls) as (port, workers):
        assert port.url.startswith("https://127.0.0.1:")
        async with HttpLink(port.url, SECRET, "worker-0", 1, str(tmp_path / "ca.pem")) as link:
            await link.join()
        assert list(workers.in_flight) == ["worker-0"]
        async with HttpLink(port.url, SECRET, "worker-1", 1) as link:
            with pytest.raises(ControllerGone, match=r"(?i)certificate"):
                await link.join()


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot listen at launch.head=192.0.2.1.*rollout.nodes=1"):
        async with listening("launch.head=192.0.2.1"):
            pass
