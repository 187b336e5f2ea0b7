"""Sequences with images train: logprobs and gradients equal the model's own on each sequence alone.

Episodes come from sessions, so that ids, masks and images go the way of a run: session, columns, shares, rows, a padded
micro-batch. The reference is transformers' own forward pass with the arguments of its own processor.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForImageTextToText

from agentrl.config.load import load_recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Trajectory
from agentrl.core.image_reader import ImageReader
from agentrl.core.images import opened
from agentrl.core.weight_manifest import mismatches
from agentrl.engine.model import load_model as load_served
from agentrl.engine.model_calls import ModelCalls
from agentrl.engine.weight_store import digests, load_weights
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.launch.resolve import resolve
from agentrl.models.decoder import decoder_of
from agentrl.models.pixels import vision_parameters
from agentrl.models.way import form_of
from agentrl.train.__main__ import make_critic, make_policy
from agentrl.train.branches import Branch, TokenColumns, branches_of
from agentrl.train.critic import Critic
from agentrl.train.layout import collate
from agentrl.train.layout_choice import layout_of
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import ModelRefused, Policy, load_model, shard
from agentrl.train.publishing import make_publisher
from agentrl.train.shares import Work, pack, plan_shares, unpack
from tests.end_to_end import ROOT, environment
from tests.inference.fakes import FakeBackend, answer
from tests.tiny_vision import build_tiny_vision, picture

TEMPERATURE, CHUNK = 0.8, 5
EXACT = 1e-5  # largest difference of a logprob in nats, and of a gradient relative to the largest, in float32
CPU = torch.device("cpu")
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 400, locked=True, model="m")


async def play(template: ChatTemplate, turns: list[Any], answers: list[list[int]]) -> Trajectory:
    """A conversation of given turns and given sampled ids."""
    left = iter(answers)
    session = ChatSession(FakeBackend(lambda ids, params: answer([*next(left), template.eos_id])), template, SETTINGS)
    history: list[Any] = []
    for turn in turns:
        history.append(turn)
        reply = await session.create(messages=history)
        history.append({"role": "assistant", "content": reply.choices[0].message.content})
    return session.trajectory


def asking(text: str, *seeds: int) -> dict[str, Any]:
    images = [{"type": "image", "image": picture(seed, 16 + 8 * (seed % 3), 16)} for seed in seeds]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


async def columns_of_a_group(template: ChatTemplate) -> Columns:
    """Four answers to one image, one to two, one to none, and a conversation in which the second turn shows one."""
    drawn = random.Random(0)
    conversations = [
        *([asking("what?", 1)] for _ in range(4)),
        [asking("both?", 2, 3)],
        [asking("hello")],
        [asking("first?", 4), asking("then?", 5)],
    ]
    episodes = []
    for index, turns in enumerate(conversations):
        said = [[drawn.randrange(3, 250) for _ in range(drawn.randint(3, 7))] for _ in turns]
        trajectory = await play(template, turns, said)
        episodes.append(episode_of(trajectory, index))
    return Columns.of(episodes)


def episode_of(trajectory: Trajectory, index: int) -> Episode:
    return Episode(
        group_id="g", task_id="t", index=index, seed=0, reward=1.0, stop_reason=StopReason.TERMINATED,
        trajectories={"assistant": trajectory},
    )  # fmt: skip


@pytest.fixture(scope="module")
def template(tiny_vision: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_vision)


@pytest.fixture(scope="module")
def reader(tiny_vision: Path) -> ImageReader:
    found, why = ImageReader.find(tiny_vision)
    assert found is not None, why
    return found


@pytest.fixture(scope="module")
def plain(tiny_vision: Path) -> Any:
    """The plain model of transformers."""
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return AutoModelForImageTextToText.from_pretrained(tiny_vision, **how).eval()


def own_arguments(reader: ImageReader, ids: list[int], images: tuple[bytes, ...]) -> dict[str, Tensor]:
    """Arguments of the model for one sequence, straight from its processor."""
    found = {"input_ids": torch.tensor([ids])}
    if images:
        made = reader._processor.image_processor([opened(one) for one in images], return_tensors="pt")
        names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
        found |= {name: made[name] for name in names if name in made}
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = (found["input_ids"] == reader.token_id).int()
    return found


def sequences_of(columns: Columns) -> list[tuple[list[int], list[int], tuple[bytes, ...]]]:
    """Ids, places of sampled tokens and images of each episode's one branch."""
    tokens, found = TokenColumns.of(columns), []
    for branch in branches_of(columns):
        own = [slice(int(tokens.starts[m]), int(tokens.starts[m + 1])) for m in branch.messages]
        mask = np.concatenate([tokens.loss_mask[one] for one in own])
        ids = np.concatenate([tokens.token_ids[one] for one in own]).tolist()
        images = tuple(image for m in branch.messages for image in tokens.images.get(m, ()))
        found.append((ids, np.flatnonzero(mask).tolist(), images))
    return found


def expected(model: Any, reader: ImageReader, columns: Columns) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the trained tokens, sequence by sequence."""
    logprobs, entropies = [], []
    for ids, places, images in sequences_of(columns):
        how = own_arguments(reader, ids, images)
        rows = (model(**how, use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
        at = torch.tensor(places)
        logprobs.append(rows[at - 1].gather(-1, torch.tensor(ids)[at, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1)[at - 1])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    scale = max(1.0, *(gradient.abs().max().item() for gradient in wanted.values()))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max().item() < EXACT * scale, name


def batch_of(columns: Columns, layout: Any) -> MicroBatch:
    tokens, branches = TokenColumns.of(columns), branches_of(columns)
    return collate(layout.rows(branches, tokens, 4096), branches, tokens, layout, CPU)


async def test_logprobs_and_gradients_equal_the_models_own_on_each_sequence_alone(
    tiny_vision: Path, template: ChatTemplate, reader: ImageReader, plain: Any
) -> None:
    columns = await columns_of_a_group(template)
    assert not np.any(columns.token_ids[columns.loss_mask] == reader.token_id)
    wanted, spread = expected(plain, reader, columns)
    weights = torch.linspace(0.5, 1.5, len(wanted))
    of_wanted = gradients(plain, (weights * (wanted - 0.1 * spread)).sum())
    assert {"visual", "vision_model"} & {name.split(".")[1] for name in of_wanted}, "gradients reach the tower"
    model = load_model(tiny_vision, context=400).train()
    assert form_of(model).way.rows == "padded" and "images" in form_of(model).way.why
    policy, layout = Policy(model, TEMPERATURE, CHUNK), layout_of(model)
    batch = batch_of(columns, layout)
    own = weights[batch.places]
    logprobs, entropies = policy(batch)
    gap = (logprobs.detach() - wanted.detach()[batch.places]).abs().max().item()
    assert gap < EXACT
    same(gradients(model, (own * (logprobs - 0.1 * entropies)).sum()), of_wanted)

    def loss_of(chosen: Tensor, some: Tensor, more: Tensor) -> Tensor:
        return (own[chosen] * (some - 0.1 * more)).sum()

    same(gradients(model, policy(batch, loss_of)), of_wanted)


async def test_another_image_changes_the_logprobs(tiny_vision: Path, template: ChatTemplate) -> None:
    model = load_model(tiny_vision, context=400)
    found = []
    for seed in (1, 4):  # of the same size
        columns = Columns.of([episode_of(await play(template, [asking("what?", seed)], [[5, 6, 7]]), 0)])
        found.append(Policy(model, TEMPERATURE, CHUNK)(batch_of(columns, layout_of(model)))[0])
    assert (found[0] - found[1]).abs().max() > 0.01


async def test_a_sampled_placeholder_is_trained_as_it_was_sampled(
    tiny_vision: Path, template: ChatTemplate, reader: ImageReader
) -> None:
    """The reference decodes token by token behind the prompt, as a server does."""
    said = [5, reader.token_id, 6, reader.token_id, 7]
    columns = Columns.of([episode_of(await play(template, [asking("what?", 1)], [said]), 0)])
    model = load_model(tiny_vision, context=400)
    policy, layout = Policy(model, 1.0, CHUNK), layout_of(model)
    batch = batch_of(columns, layout)
    found = policy(batch)[0].detach()
    ((ids, places, images),) = sequences_of(columns)
    served = load_served(str(tiny_vision), "float32", "cpu", 400)
    calls, prompt = ModelCalls(served.model), torch.tensor([ids[: places[0]]])
    assert served.pixels is not None
    with torch.inference_mode():
        pictured = torch.ones_like(prompt, dtype=torch.bool)
        logits, cache = calls.with_cache(prompt, None, 1, served.pixels.arguments(prompt, pictured, images))
        rows = [logits[0, -1]]
        for token in ids[places[0] : -1]:
            logits, cache = calls.with_cache(torch.tensor([[token]]), cache, 1)
            rows.append(logits[0, -1])
    wanted = torch.stack(rows).log_softmax(-1).gather(-1, torch.tensor(ids[places[0] :])[:, None])[:, 0]
    assert (found - wanted[batch.places]).abs().max() < EXACT
    policy(batch)[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


async def test_a_rank_gets_the_images_of_its_own_rows(tiny_vision: Path, template: ChatTemplate) -> None:
    columns = await columns_of_a_group(template)
    tokens, branches = TokenColumns.of(columns), branches_of(columns)
    model = load_model(tiny_vision, context=400)
    policy, layout = Policy(model, TEMPERATURE, CHUNK), layout_of(model)
    whole = torch.zeros(tokens.total)
    with torch.no_grad():
        batch = batch_of(columns, layout)
        whole[batch.places] = policy(batch)[0]
        found, images = torch.zeros(tokens.total), []
        for share in plan_shares(Work(branches, tokens), layout, 200, 2):
            own = unpack(pack(share))
            images.append({one for held in own.tokens.images.values() for one in held})
            for micro, _ in own.micro_batches(0, layout, CPU):
                found[micro.places] = policy(micro)[0]
    assert (found - whole).abs().max() < EXACT
    assert images[0] | images[1] == set(columns.images.values()) and len(images[0]) < len(columns.images)


@pytest.mark.long
async def test_ranks_without_images_take_part_in_the_tower(tmp_path: Path) -> None:
    """A sharded tower is gathered, and its gradients are reduced, by all ranks together, in one order."""
    folder = build_tiny_vision(tmp_path / "model")
    updated_alike(folder, await columns_of_a_group(ChatTemplate.from_folder(folder)), tmp_path)


def updated_alike(folder: Path, columns: Columns, scratch: Path) -> None:
    """Holds that one update on two ranks changes all weights as it does on one."""
    records = [one.model_copy(update={"reward": float(index % 3)}) for index, one in enumerate(columns.episodes)]
    (scratch / "columns").write_bytes(replace(columns, episodes=tuple(records)).to_bytes())
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # torchvision
    for ranks in (1, 2):
        words = ["tests.train.images_on_ranks", str(folder), str(scratch / "columns"), str(scratch / f"{ranks}.pt")]
        done = subprocess.run(
            [sys.executable, "-m", *words, str(ranks)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    one, two = (torch.load(scratch / f"{ranks}.pt") for ranks in (1, 2))
    start = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
    assert one.keys() == start.keys()
    for name, weight in one.items():
        assert (weight - two[name]).abs().max() < 1e-5, name
        assert (weight - start[name]).abs().max() > 1e-6, name


def test_a_text_model_refuses_rows_with_images(tiny_model: Path) -> None:
    model = load_model(tiny_model, context=64)
    tokens = TokenColumns(
        starts=np.array([0, 2, 3]), sampled_starts=np.array([0, 0, 1]), token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, False, True]),
        sampled={"behavior": np.zeros(1, np.float32), "versions": np.zeros(1, np.int32)},
        places=np.array([0, 0]), turns=np.array([-1, 0], np.int32), total=1, images={0: (b"x",)},
    )  # fmt: skip
    layout, branches = layout_of(model), [Branch((0, 1), (False, True))]
    with pytest.raises(ValueError, match="a sequence holds images"):
        collate(layout.rows(branches, tokens, 64), branches, tokens, layout, CPU)


def recipe_of(*settings: str) -> Any:
    own = ["inference.context_length=400", "weights.transport=disk", "inference.dtype=float32", "trainer.dtype=float32"]
    return resolve(load_recipe("arithmetic_grpo", [*own, *settings], device="cpu"), None)


async def test_after_three_updates_the_engine_serves_the_trainers_weights(
    tiny_vision: Path, template: ChatTemplate, tmp_path: Path, mesh: DeviceMesh
) -> None:
    served = load_served(str(tiny_vision), "float32", "cpu", 400)
    ranks, recipe = RankMesh.of_world(CPU), recipe_of()
    policy = make_policy(recipe, tiny_vision, ranks, CPU).train()
    layout, optimizer = layout_of(policy.model), torch.optim.AdamW(policy.parameters(), lr=1e-2)
    publisher = make_publisher(recipe, policy, tmp_path, CPU, None, ranks, tiny_vision)
    batch = batch_of(await columns_of_a_group(template), layout)
    tower = vision_parameters(policy.model)
    before = [one.detach().clone() for one in tower]
    for version in range(1, 4):
        policy(batch, lambda chosen, logprobs, entropies: -logprobs.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        manifest = publisher.write(version)
        assert manifest is not None
        load_weights(served.model, manifest.path)
        assert mismatches(manifest.fingerprints, digests(served.model, "fingerprint")) == []
    publisher.close()
    assert all((new - old).abs().max() > 1e-3 for new, old in zip(tower, before, strict=True))
    trained, own = dict(policy.model.named_parameters()), dict(served.model.named_parameters())
    assert trained.keys() == own.keys()
    assert all(torch.equal(trained[name], own[name]) for name in own)


async def test_a_frozen_tower_stays_and_the_rest_learns(
    tiny_vision: Path, template: ChatTemplate, mesh: DeviceMesh
) -> None:
    policy = make_policy(recipe_of("trainer.freeze=[vision]"), tiny_vision, RankMesh.of_world(CPU), CPU).train()
    tower = {id(one) for one in vision_parameters(policy.model)}
    batch = batch_of(await columns_of_a_group(template), layout_of(policy.model))
    policy(batch, lambda chosen, logprobs, entropies: -logprobs.sum()).backward()
    assert tower and all((parameter.grad is None) == (id(parameter) in tower) for parameter in policy.parameters())


async def test_the_critics_tower_is_frozen_with_the_policys(
    tiny_vision: Path, template: ChatTemplate, mesh: DeviceMesh
) -> None:
    learner = make_critic(recipe_of("trainer.freeze=[vision]"), tiny_vision, RankMesh.of_world(CPU), CPU)
    tower = {id(one) for one in vision_parameters(learner.critic.model)}
    learner.critic(batch_of(await columns_of_a_group(template), learner.layout)).sum().backward()
    given = [one for one in learner.critic.model.parameters() if one.requires_grad]
    assert tower and given and not tower & {id(one) for one in given}
    assert learner.critic.head.weight.grad is not None


async def test_ranks_that_share_a_tower_use_it_in_passes_without_images(
    tiny_vision: Path, template: ChatTemplate, mesh: DeviceMesh
) -> None:
    """Each pass of a rank is a collective: one that left the tower out would leave the others waiting."""
    columns = Columns.of([episode_of(await play(template, [asking("hello")], [[5, 6, 7]]), 0)])
    policy = Policy(load_model(tiny_vision, context=400).train(), TEMPERATURE, CHUNK)
    critic = Critic(decoder_of(load_model(tiny_vision, context=400)))
    for module in (policy, critic):
        shard(module, mesh, torch.float32)
        found = module(batch_of(columns, layout_of(module.model)))
        (found[0] if isinstance(found, tuple) else found).sum().backward()
        tower = vision_parameters(module.model)
        assert tower and all(one.grad is not None and not one.grad.to_local().any() for one in tower)


def test_a_text_model_has_no_tower_to_freeze(tiny_model: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(ModelRefused, match=r"trainer.freeze=\[vision\]: LlamaForCausalLM has no image tower"):
        make_policy(recipe_of("trainer.freeze=[vision]"), tiny_model, RankMesh.of_world(CPU), CPU)


async def test_an_image_behind_the_last_trained_token_is_not_computed(
    tiny_vision: Path, template: ChatTemplate
) -> None:
    """A conversation may end with a prompt that was never answered."""
    trajectory = await play(template, [asking("what?", 1), asking("then?", 2)], [[5, 6], [7]])
    trajectory.nodes.pop()
    columns = Columns.of([episode_of(trajectory, 0)])
    assert len(columns.images) == 2
    model = load_model(tiny_vision, context=400)
    found = Policy(model, TEMPERATURE, CHUNK)(batch_of(columns, layout_of(model)))[0]
    alone = Columns.of([episode_of(await play(template, [asking("what?", 1)], [[5, 6]]), 0)])
    assert torch.allclose(found, Policy(model, TEMPERATURE, CHUNK)(batch_of(alone, layout_of(model)))[0], atol=EXACT)
