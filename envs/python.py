"""Python as a tool: problems that a short program solves, over several turns, in a sandbox.

Guarantees: code runs without network, with nothing of the host to read and bounded time and memory; where the machine
offers no isolation the environment refuses to be made; what the program printed is all that the model sees of it.
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
    """Try the sandbox, once in a process, so that a machine without isolation is told before any episode."""
    with ThreadPoolExecutor(1) as thread:  # a thread of its own: the caller's may have a running loop
        thread.submit(asyncio.run, make_sandbox(backend)).result()


_SANDBOXES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Sandbox]] = WeakKeyDictionary()


async def shared_sandbox(backend: str) -> Sandbox:
    """One sandbox for all episodes of an event loop: it bounds how many programs run at once."""
    found = _SANDBOXES.setdefault(asyncio.get_running_loop(), {})
    if backend not in found:
        found[backend] = await make_sandbox(backend)
    return found[backend]


class Python(ToolEnvironment):
    """A problem with one number as its answer, and a Python interpreter.

    A task is ``{"question": str, "answer": str}``, where the answer ends in ``#### N``. Each call is a fresh program:
    nothing is kept between calls but what the conversation says.

    Args:
        seconds: Time limit of one program, in seconds.
        memory_mb: Memory limit of one program, in MB.
        backend: Sandbox, see :func:`agentrl.rewards.sandbox.make_sandbox`; ``auto`` takes the best that works here.
        settings: Limits of :class:`~agentrl.ToolEnvironment`.
    """

    dataset = "openai/gsm8k"
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
        """The problem, and what the answer must look like."""
        return [{"role": "user", "content": f"{task['question']}\n\n{INSTRUCTION}"}]

    def reward(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """1 for the right number."""
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
