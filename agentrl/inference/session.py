"""Token-exact chat sessions: agents see ``openai``, the trajectory sees ids.

Guarantees: a turn's prompt is exactly the stored ids of the earlier turns plus the ids of the new messages, with the
placeholders of their images, which are sent beside the ids; each sampled token is stored once with the logprob and
version that the server returned; every other token has mask 0. A conversation that differs from the stored one starts a
branch after the last common message. A request that the server aborted is continued with the same ids and with random
numbers that were not used yet; a stop text ends it also where it began before the abort. No two requests of an episode
draw the same random numbers. Where the prompt ends in an open thought, everything sampled is reasoning until it closes,
with tools or without.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Any

from agentrl.core.agent import ContextOverflow
from agentrl.core.episode import Message, Node, Trajectory
from agentrl.core.expert_rows import both
from agentrl.core.images import images_of
from agentrl.core.message_shape import in_shape
from agentrl.inference.backend import Generation, InferenceError, Sampler, SamplingParams
from agentrl.inference.completions import CompletionStream, Sampled, completion
from agentrl.inference.drift import Drift, measure
from agentrl.inference.ledger import Ledger
from agentrl.inference.messages import before_stop
from agentrl.inference.options import ChatOptions
from agentrl.inference.random_streams import request_seed, stream_seed
from agentrl.inference.resumed import stopped_at_text
from agentrl.inference.sdk_client import OpenAINames, within
from agentrl.inference.template import ChatTemplate
from agentrl.inference.thoughts import TAIL, knows_tags, opens_thought, without_special
from agentrl.inference.tool_parsers import ParsedAnswer, ToolParser, parser_for

MAX_RESUMES = 100  # a server that aborts one request this often is broken, not busy


@dataclass(frozen=True)
class SessionSettings:
    """Defaults and limits of a session.

    Attributes:
        sampling: Default sampling parameters, for options that the agent does not set.
        context_length: Limit of prompt and answer together, in tokens.
        locked: Whether options that change the distribution that the trainer assumes (temperature, top_p) are refused.
        model: Name put into responses.
        parser: Parser of tool calls; ``None`` chooses it by the template.
        structured_output: Whether the server can constrain an answer to a JSON schema.
        experts: Whether the experts of each token are asked for and stored.
    """

    sampling: SamplingParams
    context_length: int
    locked: bool
    model: str
    parser: ToolParser | None = None
    structured_output: bool = False
    experts: bool = False

    def as_record(self) -> dict[str, Any]:
        """Returns the set-up as plain data; the seed is the episode's."""
        each = asdict(self.sampling).items()  # a request's own seed and images are no part of the set-up
        sampling = {key: value for key, value in each if key not in ("seed", "images") and value is not None}
        return _plain({"model": self.model, "context_length": self.context_length, **sampling})


class ChatSession(OpenAINames):
    """The conversation of one role in one episode.

    Args:
        backend: Server that samples.
        template: The model's chat template.
        settings: Defaults and limits.
        role: Role in the episode; each role draws random numbers of its own.
    """

    def __init__(
        self, backend: Sampler, template: ChatTemplate, settings: SessionSettings, role: str = "assistant"
    ) -> None:
        self._backend = backend
        self._template = template
        self._settings = settings
        self._role = role
        self._calls = 0
        self._ledger = Ledger()
        self.last_sampled: int | None = None
        self._tools: dict[int, list[dict[str, Any]]] = {}  # of each conversation, by its first node

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory, with token ids."""
        return self._ledger.trajectory

    @property
    def _parser(self) -> ToolParser:
        """The parser of tool calls: the recipe's, or the one that fits the template."""
        return self._settings.parser or parser_for(self._template.source)

    async def create(self, *, messages: Sequence[Any], **given: Any) -> Any:
        """Samples an answer; the interface is that of ``openai``'s ``chat.completions.create``.

        Returns:
            A ``ChatCompletion``, or with ``stream=True`` an async iterator of chunks.

        Raises:
            TypeError: An option is not supported, or an element of ``messages`` is no message.
            ValueError: An option would change the distribution that training assumes.
            openai.APITimeoutError: The answer took longer than ``timeout``.
            ContextOverflow: The prompt leaves no room for an answer.
            TemplateError: The conversation cannot be continued with this chat template.
        """
        options = ChatOptions.read(given)
        options.check_template(self._template.variables)
        params = options.sampling(self._settings.sampling, locked=self._settings.locked)
        if params.json_schema is not None and not self._settings.structured_output:
            raise ValueError(
                "chat.completions.create(response_format=...): servers of this kind (inference.engine) cannot "
                "constrain an answer to a schema"
            )
        parent = self._store_new(messages, options.tools)
        prompt = self._ledger.prompt(parent)
        params = replace(params, images=self._ledger.images(parent))
        if self._settings.experts:
            params = replace(params, experts_from=self._ledger.experts_from(parent))
        call, self._calls = self._calls, self._calls + 1
        samples = [self._sample(prompt, self._seeded(params, call, index)) for index in range(options.n)]
        async with within(options.timeout):
            answers = await _all_or_none(samples) if len(samples) > 1 else [await samples[0]]
        sampled = [self._store_answer(parent, answer, params, options) for answer in answers]
        read = self._template.token_bytes if options.logprobs else None
        whole = completion(self._settings.model, sampled, len(prompt), read)
        return CompletionStream(whole, include_usage=options.include_usage) if options.stream else whole

    def _store_new(self, messages: Sequence[Any], tools: list[dict[str, Any]]) -> int:
        """Store the messages that are new, and return the node that the answer continues."""
        if not messages:
            raise ValueError("chat.completions.create: messages is empty")
        key = json.dumps(tools, sort_keys=True) if tools else ""
        images = self._template.shown.possible
        new, parent = self._ledger.find(messages, key, images=images)
        if not new and parent is not None:
            return parent  # the same prompt once more: another branch from the same node
        if parent is not None and self._template.rewrites(new, tools, has_system=self._has_system(parent)):
            if self._template.policy is None:
                raise self._template.refuse_rewrite()
            if self._template.policy == "branch":
                parent, new = None, [in_shape(message, images=images) for message in messages]
        if parent is None:
            self._tools[len(self.trajectory.nodes)] = tools
            ids = self._template.first(new, tools)
        else:
            answered = self._ledger.node(parent)
            said = answered.token_ids
            ids = self._template.following(new, answered=answered.message, answer_ids=said, tools=tools)
        if tools:
            self._template.prompts.check_calls(self._parser, chosen=self._settings.parser is not None)
        index = self._ledger.add_prompt(parent, new, ids, key)
        if (reader := self._template.shown.reader) is not None:
            urls = [url for message in new for url in images_of(message)]
            self._ledger.hold_images(index, reader.places(urls, ids))
        return index

    def _has_system(self, node: int) -> bool:
        """Whether the conversation of a node begins with a system message."""
        return self._ledger.first(node).message.get("role") in ("system", "developer")

    def drift(self) -> Drift | None:
        """Drift of the latest answer's conversation; ``None`` before the first answer."""
        if self.last_sampled is None:
            return None
        path = self.trajectory.path(self.last_sampled)
        nodes = [self._ledger.node(index) for index in path]
        sampled = [mask == 1 for node in nodes for mask in node.loss_mask]
        ids, messages = self._ledger.prompt(self.last_sampled), [node.message for node in nodes]
        return measure(self._template, ids, messages, self._tools[path[0]], sampled)

    def _seeded(self, params: SamplingParams, call: int, index: int) -> SamplingParams:
        """Gives sample ``index`` of a call a seed of its own, also where the agent names the same seed each time."""
        if params.seed is None:
            return params
        return replace(params, seed=stream_seed(self._settings.sampling.seed, params.seed, self._role, call, index))

    async def _sample(self, prompt: list[int], params: SamplingParams) -> Generation:
        room = self._settings.context_length - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"prompt of {len(prompt)} tokens does not fit inference.context_length={self._settings.context_length}"
            )
        budget = min(params.max_new_tokens, room)
        if budget < params.max_new_tokens:
            params = replace(params, max_new_tokens=budget)
        first = replace(params, seed=request_seed(params.seed, 0))
        part = await self._backend.generate(prompt, first, request_id=token_hex(16))
        if part.finish_reason != "abort":
            return part
        part = stopped_at_text(part, params.stop, 0, partial(self._template.text, special=True))
        return part if part.finish_reason != "abort" else await self._generate_on(prompt, part, params)

    def _store_answer(self, parent: int, answer: Generation, params: SamplingParams, options: ChatOptions) -> Sampled:
        message = self._message(self._ledger.prompt(parent), answer, params, options)
        set_by_call = options.params | ({"n": options.n} if options.n > 1 else {})
        node = Node(
            parent=parent,
            message=message,
            token_ids=answer.token_ids,
            loss_mask=[1] * len(answer.token_ids),
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            at=time.time(),
            sampling=_plain(set_by_call) or None,
        )
        self.last_sampled = self._ledger.add(node)
        if answer.experts is not None and params.experts_from is not None:
            self._ledger.hold_experts(self.last_sampled, answer.experts, params.experts_from)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        finish = "length" if answer.finish_reason == "length" else finish  # as OpenAI: a cut answer says so first
        return Sampled(message, finish, answer.token_ids, answer.logprobs)

    def _message(self, prompt: list[int], answer: Generation, params: SamplingParams, options: ChatOptions) -> Message:
        """Parse an answer into a message with its reasoning; calls are made only if the conversation has tools."""
        stops = params.stop if answer.finish_reason == "stop" else ()
        parser, ids = self._parser, answer.token_ids
        in_thought = opens_thought(self._template.text(prompt[-TAIL:], special=True), parser.thinking)
        if options.parses_calls:
            text = before_stop(self._template.text(ids, special=True), stops)
            return self._with_calls(parser.parse(text, options.tools, in_thought=in_thought))
        if in_thought or knows_tags(self._template.source, parser.thinking):
            text = before_stop(self._template.text(ids, special=True), stops)
            parsed = parser.without_calls(text, in_thought=in_thought)
            if parsed is not None:
                content = without_special(parsed.content, ids, self._template.tokenizer, self._template.special_ids)
                return self._with_calls(replace(parsed, content=content.strip()))
        return {"role": "assistant", "content": before_stop(self._template.text(ids), stops)}

    def _with_calls(self, parsed: ParsedAnswer) -> Message:
        """An assistant message with its tool calls; a malformed call keeps the model's text and gets an ``error``."""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        calls = []
        written = Counter(call.id for call in parsed.calls)
        for index, call in enumerate(parsed.calls):
            function = {"name": call.name, "arguments": call.arguments}
            call_id = call.id if call.id and written[call.id] == 1 else self._call_id(index)
            entry: dict[str, Any] = {"id": call_id, "type": "function", "function": function}
            if call.error is not None:
                entry["error"] = call.error
            calls.append(entry)
        if calls:
            message["tool_calls"] = calls
        return message

    def _call_id(self, index: int) -> str:
        """An id for call ``index`` of the next message, the same in each run: templates may repeat it in a prompt.

        Nine letters and digits, as Mistral's templates want them.
        """
        seed = self._settings.sampling.seed
        return f"c{stream_seed('call', seed, self._role, len(self.trajectory.nodes), index):08x}"

    async def _generate_on(self, prompt: list[int], done: Generation, params: SamplingParams) -> Generation:
        """Continue an aborted generation until it ends by itself or the token budget is used up."""
        for _ in range(MAX_RESUMES):
            if len(done.token_ids) >= params.max_new_tokens:
                return replace(done, finish_reason="length")
            taken = len(done.token_ids)
            seed = request_seed(params.seed, taken)
            left = replace(params, max_new_tokens=params.max_new_tokens - taken, seed=seed)
            if params.experts_from is not None and done.experts is not None:
                left = replace(left, experts_from=params.experts_from + len(done.experts))
            part = await self._backend.generate(prompt + done.token_ids, left, request_id=token_hex(16))
            done = Generation(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
                experts=both(done.experts, part.experts),
            )
            done = stopped_at_text(done, params.stop, taken, partial(self._template.text, special=True))
            if done.finish_reason != "abort":
                return done
        raise InferenceError(f"{self._backend.url} aborted one request {MAX_RESUMES} times")


async def _all_or_none(samples: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """All results, in order; the first failure cancels the others and is raised unchanged."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling options as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
