"""Multiplies measured costs by the counts of a large run: bytes and messages of each arrow, load of each process.

Guarantees: pure. A cost is one that a benchmark of ours measured, with its place; counts follow from a plan's times.
docs/scaling.md holds the tables that :func:`page_tables` makes, and a test compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.config.load import load_recipe
from agentrl.models.sizes import decoder_of
from agentrl.plan.assumptions import assumed
from agentrl.plan.cards import find_card
from agentrl.plan.mesh import Mesh
from agentrl.plan.published import PUBLISHED
from agentrl.plan.times import Case, Layout, at_a_time, decode_seconds, pushed_bytes
from agentrl.plan.work import Work

SIZES = (64, 512, 4096)


@dataclass(frozen=True)
class Costs:
    """Measured costs and sizes.

    Attributes:
        episode_s: Controller CPU of an episode, journal on, in seconds.
        worker_episode_s: Controller CPU of an episode whose calls a rollout worker makes.
        call_s: Controller CPU of a call: session, ids, HTTP.
        token_s: Controller CPU of a token on its way into a batch.
        rank_token_s: CPU of rank 0 for a token on its way into micro-batches.
        asked_bytes: Bytes of a token id in a request.
        answered_bytes: Bytes of a sampled token in an answer: id and logprob as JSON.
        batch_bytes: Bytes of a token in a batch for the trainer.
        held_bytes: Bytes of a token of a running episode in the controller's memory.
        journal_bytes: Bytes of a group's lines in ``journal.jsonl``.
        journal_lines: Number of these lines.
        episode_bytes: Bytes of a token in ``episodes.jsonl``, its share of the record included.
        step_bytes: Bytes of a step's line in ``metrics.jsonl``.
        push_calls: Calls of a server in a push: pause, load, verify, resume.
        trainer_calls: Calls of the trainer in a step.
    """

    episode_s: float = 0.22e-3  # bench async, `cpu_per_1k`, Zen 3
    worker_episode_s: float = 0.27e-3  # docs/rollout_workers.md, 4 turns (with its calls 2.9 ms: 0.22 + 4 x 0.65 here)
    call_s: float = 0.65e-3  # bench client, `cpu_vs_openai`: 0.62-0.66 ms, Zen 3
    token_s: float = 0.11e-6  # bench data, `controller_s`, Zen 3
    rank_token_s: float = 0.11e-6  # bench data, `batch_s` + `micro_batches_s`, Zen 3
    asked_bytes: float = 6.3  # ids below 151,936 and a comma
    answered_bytes: float = 34.0  # [[-4.716371675932981,123456,null],...
    batch_bytes: float = 12.5  # bench data, `wire_bytes_per_token`
    held_bytes: float = 96.0  # lists of ids, masks, logprobs and versions; tests/plan/test_scaling.py measures it
    journal_bytes: float = 176.0  # a run of arithmetic_grpo: 161 lines, 14,186 bytes
    journal_lines: float = 2.0
    episode_bytes: float = 36.0  # the same run: 640 episodes of 56 tokens, 1,297,569 bytes
    step_bytes: float = 2700.0  # the same run
    push_calls: float = 4.0
    trainer_calls: float = 7.0


@dataclass(frozen=True)
class Load:
    """The run whose arrows are counted.

    Attributes:
        in_flight: Episodes at a time.
        group: Episodes of a group.
        calls: Calls of an episode.
        prompt: Tokens of its prompt.
        sampled: Tokens that it samples in all calls.
        given: Tokens of its tool results.
        bound: Batches that are sampled ahead; a batch is a share of the episodes in flight.
    """

    in_flight: float = 1e5
    group: float = 16
    calls: float = 4
    prompt: float = 1000
    sampled: float = 4000
    given: float = 1000
    bound: float = 1

    @property
    def tokens(self) -> float:
        """Tokens of a finished episode."""
        return self.prompt + self.sampled + self.given

    @property
    def asked(self) -> float:
        """Tokens of all requests of an episode: each call sends the conversation so far."""
        each = (self.sampled + self.given) / self.calls
        return self.calls * self.prompt + each * self.calls * (self.calls - 1) / 2

    @property
    def episodes(self) -> float:
        """Episodes of a step."""
        return self.in_flight / (self.bound + 1)


@dataclass(frozen=True)
class Arrow:
    """Messages from one process to another.

    Attributes:
        name: From and to.
        messages: Messages a second.
        nbytes: Bytes a second.
        largest: Bytes of the largest message.
    """

    name: str
    messages: float
    nbytes: float
    largest: float


@dataclass(frozen=True)
class Busy:
    """Share of its time that a process or a link is busy.

    Attributes:
        name: Name of the process or link.
        share: Seconds of work in a second: above 1 it is saturated.
        how: Arithmetic that the share follows from.
    """

    name: str
    share: float
    how: str


@dataclass(frozen=True)
class Scaled:
    """A run on so many cards.

    Attributes:
        gpus: Number of cards; half of them serve.
        servers: Number of servers.
        tokens_s: Sampled tokens a second.
        step_s: Seconds of a step.
        arrows: Messages between the processes.
        busy: Shares of time of processes and links, the busiest first.
        held_gb: Memory of the controller for the episodes in flight.
        workers: Rollout processes that would share the controller's work per call, none above 70%.
    """

    gpus: int
    servers: int
    tokens_s: float
    step_s: float
    arrows: tuple[Arrow, ...]
    busy: tuple[Busy, ...]
    held_gb: float
    workers: int


def case_of(load: Load, model: str = "Qwen/Qwen3-8B", gpu: str = "h100") -> Case:
    """Returns the plan that the servers' speed comes from."""
    keys = {"max_running": 512, "engine": "sglang", "dtype": "bfloat16"}
    recipe = load_recipe("gsm8k_grpo", [], device="cuda")
    sections = {
        "inference": recipe.inference.model_copy(update=keys),
        "trainer": recipe.trainer.model_copy(update={"dtype": "bfloat16"}),
        "rollout": recipe.rollout.model_copy(update={"max_concurrent": int(load.in_flight)}),
        "launch": recipe.launch.model_copy(update={"device": "cuda"}),
    }
    recipe = recipe.model_copy(update=sections)
    work = Work(load.episodes / load.group, load.group, load.prompt, (load.sampled,), load.given)
    return Case(recipe, decoder_of(PUBLISHED[model]), work, assumed(find_card(gpu), recipe))


def scaled(gpus: int, load: Load | None = None, costs: Costs | None = None) -> Scaled:
    """Returns the arrows and loads of a run on so many cards, half of which serve."""
    load, costs = load or Load(), costs or Costs()
    case, servers = case_of(load), gpus // 2
    layout = Layout(servers, 1, Mesh(shards=gpus - servers))
    here = at_a_time(case, layout)
    tokens_s = servers * here / decode_seconds(case, here)
    episodes_s = tokens_s / load.sampled
    step_s = load.episodes / episodes_s
    weights = pushed_bytes(case)
    busy = _busy(load, costs, episodes_s, step_s, weights, servers, case)
    calls = episodes_s * (costs.call_s * load.calls)
    held = load.in_flight * (load.prompt + (load.sampled + load.given) / 2) * costs.held_bytes
    return Scaled(
        gpus, servers, tokens_s, step_s, _arrows(load, costs, episodes_s, step_s, weights, servers), busy, held / 1e9,
        max(1, -int(-calls // 0.7)),
    )  # fmt: skip


def _arrows(
    load: Load, costs: Costs, episodes_s: float, step_s: float, weights: float, servers: int
) -> tuple[Arrow, ...]:
    answer = load.sampled / load.calls
    longest = (load.tokens - answer) * costs.asked_bytes
    batch = load.episodes * load.tokens * costs.batch_bytes
    return (
        Arrow("controller to servers, requests", episodes_s * load.calls, episodes_s * load.asked * costs.asked_bytes,
              longest),
        Arrow("servers to controller, answers", episodes_s * load.calls, episodes_s * load.sampled *
              costs.answered_bytes, answer * costs.answered_bytes),
        Arrow("controller to trainer, batches", costs.trainer_calls / step_s, batch / step_s, batch),
        Arrow("weights to servers", costs.push_calls * servers / step_s, servers * weights / step_s, weights),
        Arrow("journal", episodes_s / load.group * costs.journal_lines, episodes_s / load.group * costs.journal_bytes,
              costs.journal_bytes / costs.journal_lines),
        Arrow("episodes.jsonl", episodes_s, episodes_s * load.tokens * costs.episode_bytes,
              load.tokens * costs.episode_bytes),
        Arrow("metrics.jsonl", 1 / step_s, costs.step_bytes / step_s, costs.step_bytes),
    )  # fmt: skip


def _busy(
    load: Load, costs: Costs, episodes_s: float, step_s: float, weights: float, servers: int, case: Case
) -> tuple[Busy, ...]:
    """Returns how busy each process and link is, the busiest first."""
    network = case.known["network_gbs"] * 1e9 * case.known["link_share"]
    calls, tokens = episodes_s * load.calls * costs.call_s, episodes_s * load.tokens
    controller = calls + episodes_s * costs.episode_s + tokens * costs.token_s
    sent = episodes_s * (load.asked * costs.asked_bytes + load.sampled * costs.answered_bytes)
    batch = load.episodes * load.tokens * costs.batch_bytes / step_s
    machines = servers / case.known["gpus_per_machine"]
    found = [
        Busy("controller, one core", controller, f"{calls / controller:.0%} of it for calls"),
        Busy("rank 0, one core", tokens * costs.rank_token_s, "planning of batches"),
        Busy("controller's network, 12.5 GB/s", (sent + batch) / (12.5e9 * case.known["link_share"]), "ids as JSON"),
        Busy("weights, a copy for each server", servers * weights / network / step_s, "rank 0's own network"),
        Busy(
            "weights, a copy for each machine of servers", machines * weights / network / step_s,
            "weights.transport=disk with a relay on each",
        ),
        Busy("weights, sent along a tree", weights / network / step_s, "weights.transport=broadcast"),
        Busy("disk of episodes.jsonl, 1 GB/s", tokens * costs.episode_bytes / 1e9, "logging.episodes=false ends it"),
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: -one.share))


def with_workers(found: Scaled, load: Load | None = None, costs: Costs | None = None) -> float:
    """Returns the load of the controller's own core when rollout workers make its calls."""
    costs = costs or Costs()
    alone = replace(costs, call_s=0.0, episode_s=costs.worker_episode_s)
    every = {one.name: one.share for one in scaled(found.gpus, load, alone).busy}
    return every["controller, one core"]


def _amount(value: float) -> str:
    for factor, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.2g} "


def page_tables(sizes: Sequence[int] = SIZES) -> str:
    """Returns the tables of docs/scaling.md, in Markdown."""
    every = [scaled(gpus) for gpus in sizes]
    head = " | ".join(f"{one.gpus:,} GPUs" for one in every)
    line = "|---|" + "---|" * len(every)
    rows = [f"| | {head} |", line]
    rows += [
        _row("servers", [f"{one.servers:,}" for one in every]),
        _row("sampled tokens a second", [_amount(one.tokens_s).strip() for one in every]),
        _row("seconds of a step", [f"{one.step_s:,.3g}" for one in every]),
        _row("controller's memory for episodes in flight", [f"{one.held_gb:,.3g} GB" for one in every]),
    ]
    rows += ["", f"| arrow, messages/s and bytes/s | {head} | largest message |", line + "---|"]
    for index, arrow in enumerate(every[0].arrows):
        cells = [f"{_amount(one.arrows[index].messages)}/s, {_amount(one.arrows[index].nbytes)}B/s" for one in every]
        rows.append(_row(arrow.name, [*cells, f"{_amount(arrow.largest)}B"]))
    rows += ["", f"| busy share (above 1: saturated) | {head} | |", line + "---|"]
    for name in [one.name for one in every[-1].busy]:
        found = [next(busy for busy in one.busy if busy.name == name) for one in every]
        rows.append(
            _row(name, [*(f"**{b.share:.2g}**" if b.share > 1 else f"{b.share:.2g}" for b in found), found[0].how])
        )
    rows.append(
        _row(
            "controller with rollout workers, one core",
            [*(f"{with_workers(one):.2g}" for one in every), "rollout.workers"],
        )
    )
    rows.append(_row("rollout workers that its calls need", [*(str(one.workers) for one in every), "none above 70%"]))
    return "\n".join(rows)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"
