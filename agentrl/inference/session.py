"""Token-exact chat sessions: agents see ``openai``, the trajectory sees ids.

Guarantees: what is sent to the engine on a turn is exactly the ids stored for the turns before plus the new ones; each
sampled token is stored once with the logprob and version the server gave; every other token has mask 0. A conversation
that departs from what is stored starts a branch at the last message they share. A request the server aborted goes on
with the same ids.
"""

import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from agentrl.core.episode import NOT_SAMPLED, Message, Node, Trajectory
from agentrl.inference.backend import Backend, ContextOverflow, Generation, InferenceError, SamplingParams
from agentrl.inference.template import ChatTemplate

ACCEPTED = frozenset(
    {"messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n"}
)
MAX_RESUMES = 100  # a server that aborts one request this often is broken, not busy


@dataclass(frozen=True)
class SessionSettings:
    """Defaults and limits of a session.

    Attributes:
        sampling: Used where the agent sets nothing.
        context_length: Prompt and answer together, in tokens.
        locked: Refuse what would change the distribution that the trainer assumes (temperature, top_p).
        model: Name put into responses.
    """

    sampling: SamplingParams
    context_length: int
    locked: bool
    model: str


class ChatSession:
    """One role's conversation in one episode.

    Args:
        backend: Server that samples.
        template: The model's chat template.
        settings: Defaults and limits.
    """

    def __init__(self, backend: Backend, template: ChatTemplate, settings: SessionSettings) -> None:
        self._backend = backend
        self._template = template
        self._settings = settings
        self.trajectory = Trajectory()
        self.last_sampled: int | None = None
        self.overflowed = False

    @property
    def chat(self) -> "ChatSession":
        """``openai``'s namespace; there is nothing else in it."""
        return self

    @property
    def completions(self) -> "ChatSession":
        """``openai``'s namespace; there is nothing else in it."""
        return self

    async def create(self, *, messages: list[Message], **options: Any) -> ChatCompletion:
        """``openai``'s ``chat.completions.create``.

        Raises:
            TypeError: An option is not supported.
            ValueError: An option would change the distribution that training assumes.
            ContextOverflow: The prompt leaves no room for an answer.
        """
        unknown = sorted(set(options) - ACCEPTED)
        if unknown:
            raise TypeError(f"chat.completions.create: {unknown} not supported here; supported: {sorted(ACCEPTED)}")
        params = self._params(options)
        parent = self._store_new(messages)
        samples = int(options.get("n") or 1)
        choices = [await self._sample(parent, params, index) for index in range(samples)]
        prompt = sum(len(self.trajectory.nodes[i].token_ids) for i in self.trajectory.path(parent))
        completion = sum(len(self.trajectory.nodes[c].token_ids) for c, _ in choices)
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        return ChatCompletion(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            object="chat.completion",
            created=int(time.time()),
            model=self._settings.model,
            choices=[choice for _, choice in choices],
            usage=usage,
        )

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        base = self._settings.sampling
        changes: dict[str, Any] = {}
        for key in ("temperature", "top_p"):
            value = options.get(key)
            if value is None:
                continue
            if self._settings.locked and value != getattr(base, key):
                raise ValueError(
                    f"chat.completions.create({key}={value}): training samples with sampling.{key}="
                    f"{getattr(base, key)}; another value would make the behavior logprobs wrong"
                )
            changes[key] = float(value)
        limit = options.get("max_completion_tokens") or options.get("max_tokens")
        if limit is not None:
            changes["max_new_tokens"] = int(limit)
        stop = options.get("stop")
        if stop:
            changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if options.get("seed") is not None:
            changes["seed"] = int(options["seed"])
        return replace(base, **changes)

    def _store_new(self, messages: list[Message]) -> int:
        """Store the messages that are new, and return the node that the answer continues."""
        if not messages:
            raise ValueError("chat.completions.create: messages is empty")
        known, parent = self._match(messages)
        new = messages[known:]
        if not new and parent is not None:
            return parent  # the same prompt once more: another branch from the same node
        if parent is None:
            ids = self._template.first(new)
        else:
            closed = self.trajectory.nodes[parent].token_ids[-1:] == [self._template.eos_id]
            ids = self._template.following(new, turn_closed=closed)
        for number, message in enumerate(new):
            tokens = ids if number == len(new) - 1 else []
            parent = self._append(_prompt_node(parent, message, tokens))
        assert parent is not None
        return parent

    def _match(self, messages: list[Message]) -> tuple[int, int | None]:
        """How many leading messages are stored as one path, and its last node.

        New messages may follow a sampled answer only (or nothing): ids in between belong to a prompt rendered as a
        whole.
        """
        parent: int | None = None
        best: tuple[int, int | None] = (0, None)
        nodes = self.trajectory.nodes
        for depth, message in enumerate(messages, start=1):
            key = _essence(message)
            parent = next(
                (i for i, node in enumerate(nodes) if node.parent == parent and _essence(node.message) == key), None
            )
            if parent is None:
                break
            sampled = nodes[parent].finish_reason is not None
            if sampled or (depth == len(messages) and nodes[parent].token_ids):
                best = (depth, parent)
        return best

    async def _sample(self, parent: int, params: SamplingParams, index: int) -> tuple[int, Choice]:
        prompt = [t for i in self.trajectory.path(parent) for t in self.trajectory.nodes[i].token_ids]
        room = self._settings.context_length - len(prompt)
        if room < 1:
            self.overflowed = True
            raise ContextOverflow(
                f"prompt of {len(prompt)} tokens does not fit inference.context_length={self._settings.context_length}"
            )
        if params.seed is not None:
            params = replace(params, seed=params.seed + len(self.trajectory.nodes))  # each turn its own stream
        budget = min(params.max_new_tokens, room)
        result = await self._generate_through_aborts(prompt, replace(params, max_new_tokens=budget))
        text = self._template.text(result.token_ids)
        node = Node(
            parent=parent,
            message={"role": "assistant", "content": text},
            token_ids=result.token_ids,
            loss_mask=[1] * len(result.token_ids),
            logprobs=result.logprobs,
            versions=result.versions,
            finish_reason=result.finish_reason,
        )
        self.last_sampled = self._append(node)
        return self.last_sampled, _choice(index, text, result.finish_reason)

    async def _generate_through_aborts(self, prompt: list[int], params: SamplingParams) -> Generation:
        """Go on after aborts until the server stops for its own reason or the budget is used up."""
        done = Generation(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
        for _ in range(MAX_RESUMES):
            left = replace(params, max_new_tokens=params.max_new_tokens - len(done.token_ids))
            part = await self._backend.generate(prompt + done.token_ids, left, request_id=uuid.uuid4().hex)
            done = Generation(
                token_ids=done.token_ids + part.token_ids,
                logprobs=done.logprobs + part.logprobs,
                versions=done.versions + part.versions,
                finish_reason=part.finish_reason,
            )
            if part.finish_reason != "abort":
                return done
            if len(done.token_ids) >= params.max_new_tokens:
                return replace(done, finish_reason="length")
        raise InferenceError(f"{self._backend.url} aborted one request {MAX_RESUMES} times")

    def _append(self, node: Node) -> int:
        self.trajectory.nodes.append(node)
        return len(self.trajectory.nodes) - 1


def _prompt_node(parent: int | None, message: Message, tokens: list[int]) -> Node:
    count = len(tokens)
    return Node(
        parent=parent,
        message=message,
        token_ids=tokens,
        loss_mask=[0] * count,
        logprobs=[0.0] * count,
        versions=[NOT_SAMPLED] * count,
    )


def _essence(message: Message) -> dict[str, Any]:
    """A message without the fields that are unset, so that what comes back from an agent equals what was given."""
    return {key: value for key, value in message.items() if value is not None}


def _choice(index: int, text: str, finish_reason: str) -> Choice:
    return Choice(
        index=index,
        finish_reason="length" if finish_reason == "length" else "stop",
        message=ChatCompletionMessage(role="assistant", content=text),
        logprobs=None,
    )
