from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion

from agentrl.agents.chat import ChatAgent


class Model:
    """Answers with the number of messages it was sent, and remembers them."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, messages: list[dict[str, Any]], **options: Any) -> ChatCompletion:
        self.sent.append(list(messages))
        self.options.append(options)
        message = {"role": "assistant", "content": str(len(messages))}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_the_history_grows_by_what_is_new_and_what_was_said():
    model = Model()
    agent = ChatAgent(model)
    await agent.reset()
    assert await agent.step([user("a")], {}) == {"role": "assistant", "content": "1"}
    await agent.step([user("b")], {})
    assert model.sent[1] == [user("a"), {"role": "assistant", "content": "1"}, user("b")]


async def test_a_reset_forgets_and_the_system_prompt_stays_first():
    model = Model()
    agent = ChatAgent(model, system="Be brief.")
    for text in ("a", "b"):
        await agent.reset()
        await agent.step([user(text)], {})
    assert model.sent[1] == [{"role": "system", "content": "Be brief."}, user("b")]


async def test_the_environments_tools_go_along_until_the_next_episode():
    model = Model()
    agent = ChatAgent(model)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await agent.reset()
    await agent.step([user("a")], {"tools": tools})
    await agent.step([user("b")], {})
    await agent.reset()
    await agent.step([user("c")], {})
    assert model.options == [{"tools": tools}, {"tools": tools}, {}]
