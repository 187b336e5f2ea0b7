"""Waits that end at their limit, and say by which key; docs/waits.md lists them."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.config.load import load_recipe
from agentrl.host.entry import STOPPED
from agentrl.inference.backend import InferenceError
from agentrl.launch import controller_process
from agentrl.launch.controller_process import LOST, start_limit, until_over
from agentrl.train.controller_client import ControllerClient, ControllerError


class Clock:
    """A clock that each look moves by what is next."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def run() -> SimpleNamespace:
    """What is looked at of a controller."""
    return SimpleNamespace(last_beat=1000.0, finished=asyncio.Event(), trainer_done=asyncio.Event())


async def test_a_trainer_that_is_silent_for_the_timeout_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert await until_over(run(), 600.0, asyncio.Event(), Clock(1600.5)) == LOST
    assert "no heartbeat from the trainer for 600 s (launch.heartbeat_timeout=600): the run ends" in (
        capsys.readouterr().err
    )


async def test_a_heartbeat_moves_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """The first wait ends at 1600; a heartbeat came meanwhile, at 1590, so that the next one ends at 2190."""
    controller = run()

    class Beats(Clock):
        def __call__(self) -> float:
            now = super().__call__()
            if now >= 1600 and controller.last_beat == 1000.0:
                controller.last_beat = 1590.0
            return now

    clock = Beats(1599.999, 1600.0, 2189.999, 2190.0)
    assert await until_over(controller, 600.0, asyncio.Event(), clock) == LOST
    assert clock.times == [2190.0] and "for 600 s" in capsys.readouterr().err


async def test_the_end_of_the_run_and_a_stop_are_noticed_without_a_look_at_the_clock() -> None:
    ending, stopped, stopping = run(), run(), asyncio.Event()
    ends = asyncio.create_task(until_over(ending, 1e6, asyncio.Event(), Clock(1000.0)))
    stops = asyncio.create_task(until_over(stopped, 1e6, stopping, Clock(1000.0)))
    ending.finished.set()
    await asyncio.sleep(0)
    assert not ends.done(), "the trainer is not done"
    ending.trainer_done.set()
    stopping.set()
    assert (await ends, await stops) == (0, STOPPED)
    assert {task.get_name() for task in asyncio.all_tasks()} & {"SIGTERM", "end of the run"} == set()


async def test_servers_that_are_not_started_in_time_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=r"not started within 0\.01 s \(inference\.start_timeout"):
        await controller_process._servers(tmp_path / "servers.json", 0.01)
    recipe = load_recipe("arithmetic_grpo", ["inference.start_timeout=10", "inference.servers=2"], device="cpu")
    assert start_limit(recipe) == 30.0


@pytest.mark.parametrize(("call", "said"), [("batch", r"within 0\.05 s \(trainer\.batch_timeout\)"), ("ready", "s$")])
def test_a_controller_that_does_not_answer_is_left_at_the_limit_of_the_call(
    monkeypatch: pytest.MonkeyPatch, call: str, said: str
) -> None:
    monkeypatch.setattr("agentrl.train.controller_client.ANSWER_SECONDS", -4.95)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        client = ControllerClient(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.05)
        with pytest.raises(ControllerError, match=r"no answer from the controller to /\w+ .*" + said):
            client.next_batch(0) if call == "batch" else client.ready()
