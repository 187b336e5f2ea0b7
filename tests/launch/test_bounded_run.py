"""A process ends in time, whatever tasks and threads it leaves."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.launch.bounded_run import bounded_run

STUBBORN = """
import asyncio, signal, sys, threading, time
from agentrl.launch.bounded_run import bounded_run, end_within

async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            continue

async def late():
    try:
        await asyncio.sleep(3600)
    finally:
        raise ValueError("an exception that nobody waits for")

async def generator():
    try:
        yield 1
        yield 2
    finally:
        await stubborn()

async def main():
    for work in (stubborn(), late(), asyncio.to_thread(time.sleep, 3600)):
        asyncio.create_task(work)
    kept.append(generator())
    await anext(kept[0])
    print("ready", flush=True)
    if "wait" in sys.argv:
        await stubborn()
    return 7

kept = []
code = 3
try:
    code = bounded_run(main(), 0.1)
except KeyboardInterrupt:
    code = 130
    print("interrupted")
print("code", code, flush=True)
if "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    end_within(0.1, code)
sys.exit(code)
"""


@pytest.mark.parametrize("thread", [False, True])
def test_a_process_ends_beside_tasks_and_threads_that_do_not(tmp_path: Path, thread: bool) -> None:
    file = tmp_path / "stubborn.py"
    file.write_text(STUBBORN)
    command = [sys.executable, str(file), *(["thread"] if thread else [])]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout, found.stderr) == (7, "ready\ncode 7\n", "")


def test_a_teardown_gets_its_time_after_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "closing.py"
    file.write_text(
        "import asyncio, os, signal\n"
        "from agentrl.launch.bounded_run import bounded_run\n"
        "async def main():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asyncio.sleep(3600)\n"
        "    finally:\n"
        "        await asyncio.sleep(0.1)\n"
        "        print('closed')\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n"
        "    bounded_run(main(), 60.0)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert (found.stdout, found.stderr) == ("closed\ninterrupted\n", "")


def test_results_errors_and_threads_come_through() -> None:
    async def work(number: int) -> int:
        inner = await asyncio.to_thread(lambda: threading.current_thread().daemon)
        await asyncio.get_running_loop().getaddrinfo("localhost", 1)
        return number + inner

    async def fails() -> None:
        raise LookupError("as it is")

    assert bounded_run(work(1), 1.0) == 2
    with pytest.raises(LookupError, match="as it is"):
        bounded_run(fails(), 1.0)


FORGOTTEN = """
import atexit, sys, time
from agentrl.config.load import load_recipe
from agentrl.launch import {module} as process

def unforeseen(*arguments):
    raise RuntimeError("nobody foresaw this")

atexit.register(time.sleep, 3600)
process.END_SECONDS = 0.1
process.begin = lambda parent: None
process.recipe_of_run = lambda folder: load_recipe("arithmetic_grpo", device="cpu")
process.{work} = lambda *arguments, **options: None
process.bounded_run = unforeseen
process.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("module", "work", "arguments"),
    [
        ("controller_process", "serve", ["--servers-file", "s", "--ready-file", "r"]),
        ("rollout_worker", "work", ["--index", "0"]),
    ],
)
def test_an_error_that_nobody_foresaw_ends_a_process_whose_exit_handler_hangs(
    module: str, work: str, arguments: list[str]
) -> None:
    """As tensorboardX's did, whose queue had lost its places: the run waited for the controller for ever."""
    script = FORGOTTEN.format(module=module, work=work)
    command = [sys.executable, "-c", script, "--run-dir", "runs/a", "--model", "m", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "nobody foresaw this" in ended.stderr
