import asyncio
import sys
from dataclasses import fields, replace

import pytest

from agentrl.rewards.sandbox import Ended, Isolation, Limits, SandboxUnavailableError, make_sandbox
from tests.rewards.sandbox.conftest import LIMITS, sandbox_or_skip


async def test_python_code_gives_its_output_and_exit_code(any_sandbox):
    execution = await any_sandbox.run_python("import sys; print('ä'); print('b', file=sys.stderr); sys.exit(7)")
    assert (execution.stdout, execution.stderr, execution.exit_code) == ("ä\n", "b\n", 7)
    assert (execution.ended, execution.isolation) == (Ended.EXITED, any_sandbox.isolation)
    assert execution.seconds > 0


async def test_a_traceback_names_the_line(any_sandbox):
    execution = await any_sandbox.run_python("x = 1\nx / 0\n")
    assert execution.exit_code == 1
    assert 'main.py", line 2' in execution.stderr


async def test_stdin_is_read_to_its_end(any_sandbox):
    text = "zeile ü\n" * 100_000
    execution = await any_sandbox.run_python("import sys; print(len(sys.stdin.read()))", stdin=text)
    assert execution.stdout == f"{len(text)}\n"


async def test_stdin_need_not_be_read(any_sandbox):
    execution = await any_sandbox.run(["true"], stdin="x" * 10_000_000)
    assert (execution.ended, execution.exit_code) == (Ended.EXITED, 0)


async def test_files_lie_in_the_working_folder_and_can_be_imported(any_sandbox):
    files = {"solution.py": "def f(): return 4", "data/raw.bin": bytes(range(256)), "empty": ""}
    code = """
import os, solution
print(solution.f(), open("data/raw.bin", "rb").read() == bytes(range(256)), sorted(os.listdir(".")))
open("new", "w").write("can be written")
"""
    execution = await any_sandbox.run_python(code, files=files)
    assert execution.stdout == "4 True ['data', 'empty', 'main.py', 'solution.py']\n", execution


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\0b"])
async def test_a_file_outside_the_folder_is_an_error(any_sandbox, name):
    with pytest.raises(ValueError, match="inside the working folder"):
        await any_sandbox.run(["true"], files={name: "x"})


async def test_files_larger_than_the_disk_are_an_error(any_sandbox):
    with pytest.raises(ValueError, match="disk_mb=8"):
        await any_sandbox.run(["true"], files={"x": bytes(9 << 20)})


async def test_a_file_below_a_file_is_an_error(any_sandbox):
    with pytest.raises(ValueError, match="below another file"):
        await any_sandbox.run(["true"], files={"./a": "", "a/b/c": ""})


async def test_a_limit_that_cannot_be_had_is_not_blamed_on_the_command(sandbox, monkeypatch):
    launch = sandbox.backend.launch
    broken = "00" * 8  # a filter without an end
    monkeypatch.setattr(sandbox.backend, "launch", lambda limits: replace(launch(limits), filter=broken))
    with pytest.raises(SandboxUnavailableError, match="failed"):
        await sandbox.run(["true"])


async def test_the_working_folder_can_be_removed_by_the_code(any_sandbox):
    code = "import os, shutil, time; shutil.rmtree(os.getcwd()); time.sleep(0.3); print('still here')"
    assert (await any_sandbox.run_python(code)).stdout == "still here\n"


@pytest.mark.parametrize("command", [[], "true", ["a\0b"]])
async def test_a_command_that_is_none_is_an_error(any_sandbox, command):
    with pytest.raises(ValueError, match="a program and its arguments"):
        await any_sandbox.run(command)


async def test_two_runs_share_nothing(any_sandbox):
    await any_sandbox.run_python("open('left', 'w'); import tempfile; tempfile.mkstemp('left')")
    execution = await any_sandbox.run(["sh", "-c", "ls; ls $HOME"])
    assert execution.stdout.split() in ([], ["work"])


async def test_a_command_that_is_not_there_did_not_start(any_sandbox):
    execution = await any_sandbox.run(["no-such-command"])
    assert (execution.ended, execution.exit_code) == (Ended.NOT_STARTED, None)
    assert "no-such-command" in execution.stderr or "No such file" in execution.stderr


@pytest.mark.parametrize("signum", [9, 11, 15])
async def test_a_signal_is_told_from_an_exit(any_sandbox, signum):
    execution = await any_sandbox.run_python(f"import os; os.kill(os.getpid(), {signum})")
    assert (execution.ended, execution.exit_code) == (Ended.KILLED, -signum)


async def test_output_that_is_not_text_is_replaced(any_sandbox):
    execution = await any_sandbox.run_python("import os; os.write(1, b'a\\xff\\xfeb\\xc3')")
    assert execution.stdout == "a\ufffd\ufffdb\ufffd"


@pytest.mark.parametrize("fd", [1, 2])
async def test_a_flood_of_output_is_cut_and_ends_the_run(any_sandbox, fd, leaves_nothing):
    code = f"import os\nwhile True: os.write({fd}, b'x' * 65536)"
    execution = await any_sandbox.run_python(code, limits=replace(LIMITS, output_chars=1000))
    assert (execution.ended, execution.exit_code) == (Ended.OUTPUT, None)
    assert (execution.stdout, execution.stderr)[fd - 1] == "x" * 1000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("chars", "ended"), [(1000, Ended.EXITED), (1001, Ended.OUTPUT)])
async def test_the_last_allowed_character_is_allowed(any_sandbox, stream, chars, ended):
    code = f"import sys; sys.{stream}.write('ü' * {chars})"
    execution = await any_sandbox.run_python(code, limits=replace(LIMITS, output_chars=1000))
    assert execution.ended is ended
    assert getattr(execution, stream) == "ü" * 1000


async def test_many_runs_at_the_same_time_keep_apart(any_sandbox):
    code = "import sys; print(sys.stdin.read(), open('number').read())"
    runs = [any_sandbox.run_python(code, stdin=str(n), files={"number": str(n)}) for n in range(24)]
    assert [execution.stdout for execution in await asyncio.gather(*runs)] == [f"{n} {n}\n" for n in range(24)]


async def test_a_cancelled_run_leaves_nothing(any_sandbox, marker, leaves_nothing):
    code = "import os, time; os.fork(); os.setsid() if os.fork() == 0 else 0; time.sleep(1000)"
    task = asyncio.create_task(any_sandbox.run([*any_sandbox.backend.code, "-c", code, marker.word]))
    await marker.wait_for(4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marker.processes() == []


async def test_a_run_cancelled_before_it_starts_leaves_nothing(any_sandbox, leaves_nothing):
    for turns in range(12):
        task = asyncio.create_task(any_sandbox.run_python("while True: pass"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_threads_subprocesses_and_pools_work(any_sandbox):
    if any_sandbox.isolation in (Isolation.DOCKER, Isolation.PODMAN):
        pytest.skip("a container has no /dev/shm, which a pool needs")
    code = """
import asyncio, multiprocessing, subprocess, threading
if __name__ == "__main__":
    thread = threading.Thread(target=print, args=("thread",), kwargs={"flush": True})
    thread.start()
    thread.join()
    print(subprocess.run(["echo", "subprocess"], capture_output=True, text=True).stdout.strip())
    print(asyncio.run(asyncio.sleep(0, "loop")))
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
"""
    execution = await any_sandbox.run_python(code)
    assert execution.stdout.split("\n")[:4] == ["thread", "subprocess", "loop", "[1, 2]"], execution


async def test_without_isolation_too_many_processes_end_the_run(marker):
    sandbox = await make_sandbox("none", limits=LIMITS)
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        time.sleep(1000)
time.sleep(1000)
"""
    execution = await sandbox.run([*sandbox.backend.code, "-c", code, marker.word])
    assert execution.ended is Ended.PROCESSES
    assert marker.processes() == []


async def test_a_stopped_command_still_ends_in_time(any_sandbox):
    execution = await any_sandbox.run(["sh", "-c", "kill -STOP $$"], limits=replace(LIMITS, seconds=1))
    assert execution.ended is Ended.TIMEOUT


@pytest.mark.parametrize("field", [field.name for field in fields(Limits)])
def test_a_limit_of_nothing_is_an_error(field):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


@pytest.mark.parametrize("isolation", [Isolation.BUBBLEWRAP, Isolation.NAMESPACES])
async def test_packages_and_folders_are_there_when_asked_for(isolation, tmp_path):
    await sandbox_or_skip(isolation)
    (tmp_path / "shown").write_text("shown")
    tmp_path.chmod(0o755)
    sandbox = await make_sandbox(isolation, packages=True, read_only=[tmp_path / "shown"])
    code = f"import yaml, sys; print(yaml.safe_load('1'), open({str(tmp_path / 'shown')!r}).read())"
    execution = await sandbox.run_python(code)
    assert execution.stdout == "1 shown\n", (execution, sys.prefix)
