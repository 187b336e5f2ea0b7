import asyncio
import contextlib
import contextvars
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from agentrl.host.key_guard import KEY_ENV
from agentrl.host.worker_pool import (
    HungThreadsError,
    WorkerCallError,
    WorkerCrashedError,
    WorkerPool,
    WorkerPoolClosedError,
    WorkerTimeoutError,
    in_thread,
    shared_pool,
)
from agentrl.host.worker_threads import ThreadCalls
from agentrl.train.controller_client import SECRET_ENV
from tests.host import blocking

LONG = 60.0  # bounds a test that has gone wrong
SHORT = 0.05  # for calls that never return


@pytest.fixture
def pool():
    made = WorkerPool(2)
    yield made
    made.close()


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def gone(pid: int) -> None:
    """Wait until the process is over."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LONG)


async def test_a_function_runs_in_another_process_that_is_kept(pool):
    first = await pool.run(blocking.pid_after, timeout=LONG)
    assert first != os.getpid()
    assert await pool.run(blocking.pid_after, timeout=LONG) == first


async def test_a_worker_does_not_know_the_runs_keys(pool, monkeypatch):
    for name in (SECRET_ENV, KEY_ENV, "OPENAI_API_KEY"):  # a judge needs the last
        monkeypatch.setenv(name, "told")
    assert await pool.run("os:getenv", SECRET_ENV, timeout=LONG) is None
    assert await pool.run("os:getenv", KEY_ENV, timeout=LONG) is None
    assert await pool.run("os:getenv", "OPENAI_API_KEY", timeout=LONG) == "told"


async def test_a_name_is_imported_in_the_worker_only(pool, tmp_path, monkeypatch):
    (tmp_path / "only_in_the_worker.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert await pool.run("only_in_the_worker:double", 21, timeout=LONG) == 42
    assert "only_in_the_worker" not in sys.modules


async def test_a_worker_imports_no_more_than_its_function_needs(pool):
    for heavy in ("torch", "pytest", "numpy", "openai"):
        assert await pool.run(blocking.modules_with, heavy, timeout=LONG) == []


@pytest.mark.parametrize("function", [blocking.hang, blocking.hang_in_c])
async def test_a_timeout_kills_its_own_process_and_no_other(pool, fifo, function):
    hung = asyncio.create_task(pool.run(function, fifo, timeout=1.0))
    pid = int(await in_thread(Path(fifo).read_text, timeout=LONG))
    with pytest.raises(WorkerTimeoutError, match=f"{function.__name__} took over 1 s"):
        await hung
    await in_thread(gone, pid, timeout=LONG)
    pids = await asyncio.gather(*(pool.run(blocking.pid_after, n, timeout=LONG) for n in range(8)))
    assert pid not in pids


async def test_calls_go_on_beside_one_that_hangs(pool, fifo):
    hung = asyncio.create_task(pool.run(blocking.hang, fifo, timeout=LONG))
    await in_thread(Path(fifo).read_text, timeout=LONG)
    assert len(await asyncio.gather(*(pool.run(blocking.pid_after, n, timeout=LONG) for n in range(8)))) == 8
    assert not hung.done()
    hung.cancel()


async def test_cancelling_the_caller_kills_the_process(pool, fifo):
    task = asyncio.create_task(pool.run(blocking.hang, fifo, timeout=LONG))
    pid = int(await in_thread(Path(fifo).read_text, timeout=LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await in_thread(gone, pid, timeout=LONG)
    assert await pool.run(blocking.pid_after, timeout=LONG) != pid


async def test_a_call_cancelled_in_the_queue_is_never_run(fifo, tmp_path):
    pool = WorkerPool(1)
    hung = asyncio.create_task(pool.run(blocking.hang, fifo, timeout=LONG))
    await in_thread(Path(fifo).read_text, timeout=LONG)
    mark = tmp_path / "mark"
    queued = asyncio.create_task(pool.run(blocking.announce, str(mark), timeout=LONG))
    await asyncio.sleep(0)
    queued.cancel()
    hung.cancel()
    await asyncio.gather(queued, hung, return_exceptions=True)
    await pool.run(blocking.pid_after, timeout=LONG)
    assert not mark.exists()
    pool.close()


@pytest.mark.parametrize(
    ("function", "args", "code", "text"),
    [
        (blocking.segfault, (), -signal.SIGSEGV, "signal SIGSEGV"),
        (blocking.leave, (3,), 3, "exit status 3"),
        (blocking.leave_politely, (4,), 4, "exit status 4"),
    ],
)
async def test_a_crash_fails_its_own_call_only(pool, fifo, function, args, code, text):
    beside = asyncio.create_task(pool.run(blocking.announce, fifo, timeout=LONG))
    with pytest.raises(WorkerCrashedError, match=text) as caught:
        await pool.run(function, *args, timeout=LONG)
    assert caught.value.exit_code == code
    assert not beside.done()
    await in_thread(Path(fifo).read_text, timeout=LONG)
    await beside
    assert await pool.run(blocking.pid_after, timeout=LONG)


async def test_a_worker_that_died_idle_is_replaced(pool):
    pid = await pool.run(blocking.pid_after, timeout=LONG)
    os.kill(pid, signal.SIGKILL)
    await in_thread(gone, pid, timeout=LONG)
    assert await pool.run(blocking.pid_after, timeout=LONG) != pid


async def test_memory_is_bounded():
    pool = WorkerPool(1, memory=1 << 30)
    with pytest.raises(MemoryError):
        await pool.run(blocking.fill_memory, timeout=LONG)
    pool.close()


async def test_what_a_function_raises_is_raised_with_the_workers_traceback(pool):
    with pytest.raises(ValueError, match="said so") as caught:
        await pool.run(blocking.raise_value_error, "said so", timeout=LONG)
    assert "raise_value_error" in caught.value.__notes__[0]


async def test_an_error_that_cannot_travel_comes_as_text(pool):
    with pytest.raises(WorkerCallError, match="LocalError: left behind"):
        await pool.run(blocking.raise_local, timeout=LONG)


async def test_a_result_that_cannot_travel_is_an_error_of_the_call(pool):
    with pytest.raises(TypeError, match="pickle"):
        await pool.run(blocking.give_lock, timeout=LONG)


async def test_wrong_calls_are_refused_at_once(pool):
    with pytest.raises(TypeError, match="top level of a module"):
        await pool.run(lambda: 1, timeout=LONG)
    with pytest.raises(ValueError, match="module:name"):
        await pool.run("colorsys", timeout=LONG)
    for timeout in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            await pool.run(blocking.pid_after, timeout=timeout)
    with pytest.raises(ModuleNotFoundError):
        await pool.run("no_such_module_here:f", timeout=LONG)
    with pytest.raises(ValueError, match="size=0"):
        WorkerPool(0)


async def test_close_ends_running_and_waiting_calls(fifo):
    pool = WorkerPool(1)
    running = asyncio.create_task(pool.run(blocking.hang, fifo, timeout=LONG))
    pid = int(await in_thread(Path(fifo).read_text, timeout=LONG))
    waiting = asyncio.create_task(pool.run(blocking.pid_after, timeout=LONG))
    await asyncio.sleep(0)
    await in_thread(pool.close, timeout=LONG)
    for task in (running, waiting):
        with pytest.raises(WorkerPoolClosedError):
            await task
    with pytest.raises(WorkerPoolClosedError):
        await pool.run(blocking.pid_after, timeout=LONG)
    gone(pid)
    pool.close()


def test_one_pool_serves_event_loops_one_after_the_other():
    pool = WorkerPool(1)
    pids = {asyncio.run(pool.run(blocking.pid_after, timeout=LONG)) for _ in range(3)}
    assert len(pids) == 1
    pool.close()


def test_workers_outlive_the_thread_that_called_first():
    pool = WorkerPool(1)
    pids: list[int] = []
    caller = threading.Thread(target=lambda: pids.append(asyncio.run(pool.run(blocking.pid_after, timeout=LONG))))
    caller.start()
    caller.join()
    assert asyncio.run(pool.run(blocking.pid_after, timeout=LONG)) == pids[0]
    pool.close()


SCRIPT = """
import asyncio, sys
from agentrl.host.worker_pool import shared_pool
from tests.host import blocking

def from_main(fifo):
    import os
    return os.getpid()

if __name__ == "__main__":
    mode, fifo = sys.argv[1:]
    async def main():
        await shared_pool().run(from_main, fifo, timeout=60)
        call = asyncio.create_task(shared_pool().run(blocking.hang_in_c, fifo, timeout=600))
        if mode == "exit":
            await asyncio.to_thread(sys.stdin.readline)
            raise SystemExit(7)
        await call
    asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["exit", "kill"])
def test_nothing_is_left_when_the_parent_ends(tmp_path, fifo, mode):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, script, mode, fifo], stdin=subprocess.PIPE, env=environment)
    pid = int(Path(fifo).read_text())
    assert psutil.pid_exists(pid)
    if mode == "kill":
        parent.kill()
    code = parent.communicate(b"\n", LONG) and parent.returncode
    assert code == (-signal.SIGKILL if mode == "kill" else 7)
    gone(pid)


def _use_shared_pool(queue: "multiprocessing.SimpleQueue[int]") -> None:
    queue.put(asyncio.run(shared_pool().run(blocking.pid_after, timeout=LONG)))


def test_a_forked_child_has_a_shared_pool_of_its_own():
    ours = asyncio.run(shared_pool().run(blocking.pid_after, timeout=LONG))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_use_shared_pool, args=(queue,))
    child.start()
    theirs = queue.get()
    child.join(LONG)
    assert theirs != ours
    assert child.exitcode == 0
    assert psutil.pid_exists(ours)
    assert asyncio.run(shared_pool().run(blocking.pid_after, timeout=LONG))


def test_the_shared_pool_is_made_anew_once_closed():
    first = shared_pool()
    assert shared_pool() is first
    first.close()
    assert shared_pool() is not first


async def test_a_thread_gives_its_result_and_has_the_callers_context():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    assert await in_thread(variable.get, timeout=LONG) == "mine"
    assert await in_thread(threading.get_ident, timeout=LONG) != threading.get_ident()


async def test_a_thread_that_is_given_up_takes_no_place_until_the_bound():
    calls = ThreadCalls(2)
    release = threading.Event()
    with pytest.raises(WorkerTimeoutError, match=r"Event\.wait took over 0\.05 s"):
        await calls.call(release.wait, timeout=SHORT)
    assert await calls.call(os.getpid, timeout=LONG) == os.getpid()
    started = threading.Event()
    second = asyncio.create_task(calls.call(lambda: (started.set(), release.wait()), timeout=LONG))
    await asyncio.to_thread(started.wait)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(HungThreadsError, match=r"all 2 threads.*Event\.wait \(1\)"):
        await calls.call(os.getpid, timeout=LONG)
    release.set()
    async with asyncio.timeout(LONG):
        while True:
            try:
                assert await calls.call(os.getpid, timeout=LONG) == os.getpid()
                break
            except HungThreadsError:  # the threads are on their way back
                await asyncio.sleep(0)


async def test_calls_beyond_the_bound_wait_for_threads_that_work():
    calls = ThreadCalls(2)
    barrier = threading.Barrier(2)
    await asyncio.gather(*(calls.call(barrier.wait, timeout=LONG) for _ in range(8)))


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(1), KeyboardInterrupt()])
async def test_what_would_upset_a_coroutine_comes_as_a_runtime_error(error):
    def fail():
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await in_thread(fail, timeout=LONG)


async def test_a_functions_own_timeout_error_is_not_ours():
    def fail():
        raise TimeoutError("my own")

    with pytest.raises(TimeoutError, match="my own") as caught:
        await in_thread(fail, timeout=LONG)
    assert not isinstance(caught.value, WorkerTimeoutError)
