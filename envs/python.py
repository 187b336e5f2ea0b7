"""Problems with a sandboxed Python interpreter as a tool, over several turns.

Guarantees: code runs isolated, without network and with bounded time and memory; on a machine without isolation the
constructor raises; the model sees only the program's output and how it ended.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from agentrl import Message, ToolEnvironment, tool
from agentrl.rewards.numeric import numeric_reward
from agentrl.rewards.sandbox import Ended, Execution, Limits, Sandbox, make_sandbox

INSTRUCTION = "Use the run_python tool where it helps. Finish with a last line of the form: #### <number>"


@lru_cache
def require_sandbox(backend: str) -> None:
    """Test the sandbox, once per process, so that a machine without isolation fails before any episode."""
    with ThreadPoolExecutor(1) as thread:  # another thread, because the caller's may have a running event loop
        thread.submit(asyncio.run, make_sandbox(backend)).result()


_SANDBOXES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Sandbox]] = WeakKeyDictionary()


async def shared_sandbox(backend: str) -> Sandbox:
    """Returns the sandbox of all episodes of an event loop, which limits how many programs run concurrently."""
    found = _SANDBOXES.setdefault(asyncio.get_running_loop(), {})
    if backend not in found:
        found[backend] = await make_sandbox(backend)
    return found[backend]


class Python(ToolEnvironment):
    """Asks a problem and offers a Python interpreter; the answer is a number.

    A task is ``{"question": str, "answer": str}``, where the answer ends in ``#### N``. Each call is a new program:
    no state is kept between calls.

    Args:
        seconds: Time limit of one program, in seconds.
        memory_mb: Memory limit of one program, in MB.
        backend: Sandbox, see :func:`agentrl.rewards.sandbox.make_sandbox`; ``auto`` uses the first that works.
        settings: Limits of :class:`~agentrl.ToolEnvironment`.
    """

    dataset = "openai/gsm8k"
    columns = ("question", "answer")
    reward_range = (0.0, 1.0)

    def __init__(self, seconds: float = 5.0, memory_mb: int = 256, backend: str = "auto", **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_mb=memory_mb)
        self._backend = backend
        require_sandbox(backend)

    @tool
    async def run_python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program; only the standard library is there, and print shows results.
        """
        return report(await (await shared_sandbox(self._backend)).run_python(code, limits=self._limits))

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the problem with the required format of the answer."""
        return [{"role": "user", "content": f"{task['question']}\n\n{INSTRUCTION}"}]

    def reward(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Returns 1 for the right number, else 0."""
        accuracy = numeric_reward(answer, task["answer"])
        return accuracy, {"accuracy": accuracy}


def report(execution: Execution) -> str:
    """Format a program's output and end for the model."""
    parts = [execution.stdout.rstrip(), execution.stderr.rstrip()]
    if execution.ended is not Ended.EXITED:
        parts.append(f"[stopped: {execution.ended.value}]")
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    return "\n".join(part for part in parts if part) or "[nothing was printed]"
