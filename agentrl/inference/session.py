"""Token-exact chat sessions: agents see ``openai``, the trajectory sees ids.

Guarantees: what is sent to the engine on a turn is exactly the ids stored for the turns before plus the new ones; each
sampled token is stored once with the logprob and version the server gave; every other token has mask 0. A conversation
that departs from what is stored starts a branch at the last message they share. A request the server aborted goes on
with the same ids.
"""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from agentrl.core.agent import ContextOverflow
from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.backend import Generation, InferenceError, Sampler, SamplingParams
from agentrl.inference.completions import CompletionStream, Sampled, completion
from agentrl.inference.drift import Drift, measure
from agentrl.inference.ledger import Ledger
from agentrl.inference.messages import before_stop, plain
from agentrl.inference.options import ChatOptions
from agentrl.inference.template import ChatTemplate
from agentrl.inference.tool_parsers import ParsedAnswer, ToolParser, parser_for

MAX_RESUMES = 100  # a server that aborts one request this often is broken, not busy


@dataclass(frozen=True)
class SessionSettings:
    """Defaults and limits of a session.

    Attributes:
        sampling: Used where the agent sets nothing.
        context_length: Prompt and answer together, in tokens.
        locked: Refuse what would change the distribution that the trainer assumes (temperature, top_p).
        model: Name put into responses.
        parser: Finds tool calls; chosen from the template where ``None``.
        structured_output: Whether the server can hold an answer to a JSON schema.
    """

    sampling: SamplingParams
    context_length: int
    locked: bool
    model: str
    parser: ToolParser | None = None
    structured_output: bool = False


class ChatSession:
    """One role's conversation in one episode.

    Args:
        backend: Server that samples.
        template: The model's chat template.
        settings: Defaults and limits.
    """

    def __init__(self, backend: Sampler, template: ChatTemplate, settings: SessionSettings) -> None:
        self._backend = backend
        self._template = template
        self._settings = settings
        self._ledger = Ledger()
        self.last_sampled: int | None = None
        self._tools: dict[int, list[dict[str, Any]]] = {}  # of each conversation, by its first node

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory, with token ids."""
        return self._ledger.trajectory

    @property
    def chat(self) -> "ChatSession":
        """``openai``'s namespace; there is nothing else in it."""
        return self

    @property
    def completions(self) -> "ChatSession":
        """``openai``'s namespace; there is nothing else in it."""
        return self

    async def create(self, *, messages: Sequence[Any], **given: Any) -> Any:
        """``openai``'s ``chat.completions.create``.

        Returns:
            A ``ChatCompletion``, or with ``stream=True`` an async iterator of chunks.

        Raises:
            TypeError: An option is not supported, or a message is not one.
            ValueError: An option would change the distribution that training assumes.
            ContextOverflow: The prompt leaves no room for an answer.
            TemplateError: The conversation cannot be continued with this chat template.
        """
        options = ChatOptions.read(given)
        params = options.sampling(self._settings.sampling, locked=self._settings.locked)
        if params.json_schema is not None and not self._settings.structured_output:
            raise ValueError(
                "chat.completions.create(response_format=...): servers of this kind (inference.engine) do not hold an "
                "answer to a schema"
            )
        parent = self._store_new(messages, options.tools)
        prompt = self._ledger.prompt(parent)
        samples = [self._sample(prompt, self._seeded(params, index)) for index in range(options.n)]
        answers = await _all_or_none(samples) if len(samples) > 1 else [await samples[0]]
        sampled = [self._store_answer(parent, answer, params, options) for answer in answers]
        text = (lambda token: self._template.text([token])) if options.logprobs else None
        whole = completion(self._settings.model, sampled, len(prompt), text)
        return CompletionStream(whole, include_usage=options.include_usage) if options.stream else whole

    def _store_new(self, messages: Sequence[Any], tools: list[dict[str, Any]]) -> int:
        """Store the messages that are new, and return the node that the answer continues."""
        if not messages:
            raise ValueError("chat.completions.create: messages is empty")
        key = json.dumps(tools, sort_keys=True) if tools else ""
        new, parent = self._ledger.find(messages, key)
        if not new and parent is not None:
            return parent  # the same prompt once more: another branch from the same node
        if parent is not None and self._template.rewrites(new):
            if self._template.policy is None:
                raise self._template.refuse_rewrite()
            if self._template.policy == "branch":
                parent, new = None, [plain(message) for message in messages]
        if parent is None:
            self._tools[len(self.trajectory.nodes)] = tools
            ids = self._template.first(new, tools)
        else:
            answered = self._ledger.node(parent)
            last = answered.token_ids[-1] if answered.token_ids else None
            ids = self._template.following(new, answered=answered.message, last_id=last, tools=tools)
        return self._ledger.add_prompt(parent, new, ids, key)

    def drift(self) -> Drift | None:
        """Drift of the latest answer's conversation; ``None`` before the first answer."""
        if self.last_sampled is None:
            return None
        path = self.trajectory.path(self.last_sampled)
        messages = [self._ledger.node(index).message for index in path]
        return measure(self._template, self._ledger.prompt(self.last_sampled), messages, self._tools[path[0]])

    def _seeded(self, params: SamplingParams, index: int) -> SamplingParams:
        """Each turn and each sample of it gets its own random stream."""
        if params.seed is None:
            return params
        return replace(params, seed=params.seed + len(self.trajectory.nodes) + index)

    async def _sample(self, prompt: list[int], params: SamplingParams) -> Generation:
        room = self._settings.context_length - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"prompt of {len(prompt)} tokens does not fit inference.context_length={self._settings.context_length}"
            )
        budget = min(params.max_new_tokens, room)
        if budget < params.max_new_tokens:
            params = replace(params, max_new_tokens=budget)
        part = await self._backend.generate(prompt, params, request_id=token_hex(16))
        return part if part.finish_reason != "abort" else await self._generate_on(prompt, part, params)

    def _store_answer(self, parent: int, answer: Generation, params: SamplingParams, options: ChatOptions) -> Sampled:
        message = self._message(answer, params, options)
        node = Node(
            parent=parent,
            message=message,
            token_ids=answer.token_ids,
            loss_mask=[1] * len(answer.token_ids),
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
        )
        self.last_sampled = self._ledger.add(node)
        finish = "length" if answer.finish_reason == "length" else "stop"
        finish = "tool_calls" if message.get("tool_calls") else finish
        return Sampled(message, finish, answer.token_ids, answer.logprobs)

    def _message(self, answer: Generation, params: SamplingParams, options: ChatOptions) -> Message:
        """Parse an answer into a message, with tool calls if the conversation has tools."""
        stops = params.stop if answer.finish_reason == "stop" else ()
        if not options.parses_calls:
            text = before_stop(self._template.text(answer.token_ids), stops)
            return {"role": "assistant", "content": text}
        text = before_stop(self._template.text(answer.token_ids, special=True), stops)
        parser = self._settings.parser or parser_for(self._template.source)
        return _with_calls(parser.parse(text, options.tools))

    async def _generate_on(self, prompt: list[int], done: Generation, params: SamplingParams) -> Generation:
        """Go on after an abort until the server stops for its own reason or the budget is used up."""
        for _ in range(MAX_RESUMES):
            if len(done.token_ids) >= params.max_new_tokens:
                return replace(done, finish_reason="length")
            left = replace(params, max_new_tokens=params.max_new_tokens - len(done.token_ids))
            part = await self._backend.generate(prompt + done.token_ids, left, request_id=token_hex(16))
            done = Generation(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
            )
            if part.finish_reason != "abort":
                return done
        raise InferenceError(f"{self._backend.url} aborted one request {MAX_RESUMES} times")


async def _all_or_none(samples: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """All results, in order; the first failure gives up the others and is raised as it is."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _with_calls(parsed: ParsedAnswer) -> Message:
    """An assistant message with its tool calls; a malformed one keeps the model's own words and says what is wrong."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    calls = []
    for call in parsed.calls:
        function = {"name": call.name, "arguments": call.arguments}
        entry: dict[str, Any] = {"id": token_hex(5)[:9], "type": "function", "function": function}
        if call.error is not None:
            entry["error"] = call.error
        calls.append(entry)
    if calls:
        message["tool_calls"] = calls
    return message
