"""Router replay from the server to the update: the trainer computes each token with the experts that sampled it.

The embedded engine samples conversations of a tiny mixture of experts through sessions; their ids and experts go the
way of a run: ledger, columns, shares, rows, micro-batches. The reference computes each sequence alone, with the same
experts, by the definition of the block (:mod:`tests.models.forced`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason
from agentrl.core.experts import ExpertRows, narrow, wide
from agentrl.engine.engine import Engine
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import load_model as load_served
from agentrl.engine.params import SamplingParams as EngineParams
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.launch.resolve import resolve
from agentrl.models.way import ModelForm, Way, set_form
from agentrl.train.__main__ import make_policy
from agentrl.train.batch import TrainBatch
from agentrl.train.branches import TokenColumns, branches_of, experts_of, token_ids
from agentrl.train.layout import Layout, Packed, Padded, PlainPacked, PlainPadded, collate
from agentrl.train.learner import PolicyLearner
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import ModelRefused, Policy, checkpoint_layers, load_model, routers_of
from agentrl.train.routing_replay import keep_routers
from agentrl.train.shares import Work, pack, plan_shares, unpack
from tests.engine.driving import SECONDS, Driver
from tests.models.forced import take_experts
from tests.tiny_mixture import build_tiny_mixture

CPU, TEMPERATURE, CHUNK = torch.device("cpu"), 0.9, 16
EXACT = 1e-5  # largest difference of a logprob in nats, and of a gradient relative to the largest, in float32
SETTINGS = SessionSettings(
    SamplingParams(max_new_tokens=6, temperature=TEMPERATURE), 300, locked=True, model="m", experts=True
)


class OwnEngine:
    """A server that is an engine of this process."""

    url = "engine"

    def __init__(self, engine: Engine) -> None:
        self._driver = Driver(engine)

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        options = EngineParams(max_new_tokens=params.max_new_tokens, temperature=params.temperature)
        request = self._driver.make(token_ids, options)
        request.experts_from = -1 if params.experts_from is None else params.experts_from
        self._driver.run(request)
        assert request.finish is not None
        experts = None if request.experts is None else ExpertRows.of(request.experts.numpy())
        count, kind = len(request.output), request.finish.kind
        return Generation(request.output, request.logprobs, [0] * count, kind, experts)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def engine(mixture: Path) -> Iterator[Engine]:
    loaded = load_served(str(mixture), "float32", "cpu", 300)
    made = Engine(lambda: make_runner(loaded, 8, experts=True), max_running=8, seed=0, threads=1).start()
    made.ready.result(SECONDS)
    yield made
    assert made.stop(timeout=SECONDS)


async def sampled(engine: Engine, folder: Path) -> Columns:
    """Two groups of three conversations of two turns."""
    template, backend, episodes = ChatTemplate.from_folder(folder), OwnEngine(engine), []
    for index in range(6):
        session = ChatSession(backend, template, SETTINGS)
        history = [{"role": "user", "content": f"say something about {'red' if index < 3 else 'blue'}"}]
        for turn in ("and more", ""):
            reply = await session.create(messages=history)
            history.append({"role": "assistant", "content": reply.choices[0].message.content})
            history.append({"role": "user", "content": turn})
        episode = Episode(
            group_id=f"g{index // 3}", task_id="t", index=index, seed=index, reward=float(index % 2),
            stop_reason=StopReason.TERMINATED, trajectories={"assistant": session.trajectory},
        )  # fmt: skip
        episodes.append(episode)
    return Columns.from_bytes(Columns.of(episodes).to_bytes())[0]


def replaying(folder: Path, *, perturbed: float = 0.0) -> Policy:
    """A policy with replay, whose routers are not quite the server's."""
    model = load_model(folder, context=300)
    perturb(model, perturbed)
    keep_routers(model)
    return Policy(model, TEMPERATURE, CHUNK)


@torch.no_grad()
def perturb(model: Any, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)


def reference(folder: Path, columns: Columns, perturbed: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of all trained tokens with the recorded experts, and the gradients of their weighted sum."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    perturb(model, perturbed)
    tokens, found = TokenColumns.of(columns), []
    places = []
    for branch in branches_of(columns):
        ids = token_ids(branch, tokens)
        mask = np.concatenate([tokens.loss_mask[tokens.starts[m] : tokens.starts[m + 1]] for m in branch.messages])
        places += [
            tokens.places[m] + np.arange(tokens.sampled_starts[m + 1] - tokens.sampled_starts[m])
            for m in branch.messages
        ]
        given = wide(experts_of(branch, tokens)[:-1])
        assert (given >= 0).all(), "each token that is computed has its experts"
        take_experts(model.model, torch.from_numpy(given).long())
        row = torch.from_numpy(ids.astype(np.int64))
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0]
        every = (logits / TEMPERATURE).log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        found.append(every[torch.from_numpy(np.flatnonzero(mask) - 1)])
    order = torch.from_numpy(np.argsort(np.concatenate(places)))
    logprobs = torch.cat(found)[order]
    (logprobs * weights(len(logprobs))).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def weights(count: int) -> Tensor:
    return torch.linspace(0.5, 1.5, count)


def computed(policy: Policy, columns: Columns, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the policy, in one micro-batch of a rank's share."""
    tokens = TokenColumns.of(columns)
    work = Work(branches_of(columns), tokens)
    (share,) = plan_shares(work, layout, 100_000, 1)
    share = unpack(pack(share))
    policy.zero_grad()
    found = torch.zeros(share.places)
    for batch, _ in share.micro_batches(0, layout, CPU):
        logprobs, _ = policy(batch)
        found = found.index_put((batch.places,), logprobs)
    (found * weights(len(found))).sum().backward()
    return found.detach(), {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() < EXACT * largest, name


def without_experts(columns: Columns) -> Columns:
    return replace(columns, experts=np.zeros((0, 0), np.uint8))


LAYOUTS = {
    "trees, padded": Padded(4096.0),
    "trees, packed": Packed(4096.0),
    "padded": PlainPadded(4096.0),
    "packed": PlainPacked(4096.0),
}


@pytest.mark.parametrize("way", LAYOUTS)
async def test_with_perturbed_routers_logprobs_and_gradients_are_those_of_the_recorded_experts(
    way: str, engine: Engine, mixture: Path, mesh: DeviceMesh
) -> None:
    columns = await sampled(engine, mixture)
    policy = replaying(mixture, perturbed=0.3)
    if way in ("padded", "packed"):
        set_form(policy.model, ModelForm(Way(way, why="it is tested")))  # type: ignore[arg-type]
    elif way == "trees, packed":
        from agentrl.train.row_attention import choose_attention

        choose_attention(policy.model, TrainerConfig(attention="packed"), CPU)
    wanted, gradients = reference(mixture, columns, 0.3)
    found, own = computed(policy, columns, LAYOUTS[way])
    assert (found - wanted).abs().max() < EXACT
    same(own, gradients)
    free, _ = computed(policy, without_experts(columns), LAYOUTS[way])
    assert (free - wanted).abs().max() > 0.01, "without replay the perturbed routers choose others"


async def test_layers_that_are_computed_again_take_the_same_experts(
    engine: Engine, mixture: Path, mesh: DeviceMesh
) -> None:
    columns = await sampled(engine, mixture)
    policy = replaying(mixture, perturbed=0.3)
    checkpoint_layers(policy.model.train())
    wanted, gradients = reference(mixture, columns, 0.3)
    found, own = computed(policy, columns, LAYOUTS["trees, padded"])
    assert (found - wanted).abs().max() < EXACT
    same(own, gradients)


def batch_of(columns: Columns) -> TrainBatch:
    tokens, every = TokenColumns.of(columns), branches_of(columns)
    advantages = np.linspace(-1, 1, tokens.total, dtype=np.float32)
    tokens = replace(tokens, sampled=tokens.sampled | {"advantages": advantages})
    return TrainBatch(every, tokens, float(tokens.total), 1.0)


def metrics_of(folder: Path, columns: Columns, perturbed: float) -> dict[str, float]:
    config = TrainerConfig(replay_routing=True, logprob_chunk=CHUNK, tokens_per_microbatch=100)
    return PolicyLearner(replaying(folder, perturbed=perturbed), None, config, CPU).update(batch_of(columns), 1e-3)


async def test_equal_weights_leave_no_mismatch_and_no_difference(
    engine: Engine, mixture: Path, mesh: DeviceMesh
) -> None:
    found = metrics_of(mixture, await sampled(engine, mixture), 0.0)
    assert found["mismatch/log_ratio"] < 1e-5 and found["mismatch/ratio_max"] < 1e-4
    assert found["routing/tokens_differing"] == found["routing/choices_differing"] == 0
    assert found["routing/recorded"] == 1


async def test_other_routers_are_counted_and_replay_makes_the_mismatch_smaller(
    engine: Engine, mixture: Path, mesh: DeviceMesh
) -> None:
    columns = await sampled(engine, mixture)
    found = metrics_of(mixture, columns, 0.3)
    assert 0 < found["routing/choices_differing"] < found["routing/tokens_differing"] < 1
    free = metrics_of(mixture, without_experts(columns), 0.3)
    assert free["routing/recorded"] == 0 and "routing/tokens_differing" not in free
    assert found["mismatch/kl"] < free["mismatch/kl"]


async def test_a_tree_shares_tokens_only_as_far_as_their_experts_are_the_same(engine: Engine, mixture: Path) -> None:
    columns = await sampled(engine, mixture)
    every, layout = branches_of(columns), LAYOUTS["trees, packed"]
    tokens = TokenColumns.of(columns)

    def computed_tokens(of: TokenColumns) -> int:
        return sum(len(row) for row in layout.rows(every, of, 100_000))

    apart = sum(len(row) for row in LAYOUTS["padded"].rows(every, tokens, 100_000))
    shared = computed_tokens(tokens)
    assert shared < apart, "one server computed a group's prompt once, so its members have the same experts"
    changed, at = wide(tokens.experts), int(tokens.starts[every[1].messages[0]]) + 5
    changed[at] = (changed[at] + 1) % 4
    other = replace(tokens, experts=narrow(changed))
    assert shared < computed_tokens(other) <= apart
    batch = collate(layout.rows(every, other, 100_000), every, other, layout, CPU)
    assert batch.experts is not None and (batch.experts == torch.from_numpy(changed[at])).all(-1).any()


async def test_a_share_holds_the_experts_of_its_own_tokens(engine: Engine, mixture: Path) -> None:
    columns = await sampled(engine, mixture)
    every, tokens = branches_of(columns), TokenColumns.of(columns)
    layout = LAYOUTS["padded"]
    for share in plan_shares(Work(every, tokens), layout, 40, 2):
        share = unpack(pack(share))
        for branch in share.branches:
            whole = every[branch.number]
            assert (experts_of(branch, share.tokens) == experts_of(whole, tokens)).all()


def test_a_run_without_recorded_experts_of_a_model_that_has_none_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelRefused, match=r"trainer\.replay_routing=true: no layer of Llama"):
        keep_routers(load_model(tiny_model))


def test_the_trainers_policy_is_made_with_its_routers_or_refused(
    mixture: Path, tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    def made(folder: Path, replays: bool) -> Policy:
        recipe = recipe_of(folder, tmp_path, f"trainer.replay_routing={str(replays).lower()}")
        return make_policy(resolve(recipe, None), folder, RankMesh.of_world(CPU), CPU)

    routers = routers_of(made(mixture, True).model)
    assert routers is not None and routers.width == 4
    assert routers_of(made(mixture, False).model) is None
    with pytest.raises(ModelRefused, match=r"trainer\.replay_routing"):
        made(tiny_model, True)


def recipe_of(folder: Path, tmp_path: Path, *overrides: str) -> Any:
    given = [
        f"model.name={folder}", f"launch.run_dir={tmp_path}", "launch.device=cpu", "trainer.dtype=float32",
        "inference.context_length=300", "sampling.max_new_tokens=6", *overrides,
    ]  # fmt: skip
    return load_recipe("arithmetic_grpo", given, device="cpu")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.compile=true", "trainer.compile=true"),
        ("trainer.context_parallel=2", "trainer.context_parallel=2"),
    ],
)
def test_what_it_does_not_work_with_is_refused_with_both_keys(
    override: str, words: str, mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"replay_routing.*{words}"):
        recipe_of(mixture, tmp_path, "trainer.replay_routing=true", "trainer.nproc=2", override)
