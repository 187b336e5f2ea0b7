"""Tests shares of a batch: sums over ranks equal those of one rank, for any layout and budget."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from agentrl.bench.made_batch import made_tokens
from agentrl.train.critic import Critic
from agentrl.train.layout import Layout, Packed, Padded
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import Policy, load_model
from agentrl.train.row_attention import use_tree_attention
from agentrl.train.shares import Share, Work, pack, plan_shares, unpack
from tests.train.test_rows import random_sequences

CPU = torch.device("cpu")
LAYOUTS: dict[str, Layout] = {"padded": Padded(4096.0), "packed": Packed(4096.0, blocks=False)}


def work_of(groups: int, *, bootstraps: bool) -> Work:
    """Random branches with advantages; with bootstraps, every second one asks for a value after its end."""
    rng = random.Random(1)
    sequences = [
        replace(one, advantages=[rng.gauss(0, 1) for _ in one.token_ids], group=index // 3)
        for index, one in enumerate(random_sequences(0, groups))
    ]
    branches, tokens = made_tokens(sequences)
    if bootstraps:
        branches = [
            replace(one, bootstrap=tokens.total + one.trajectory) if one.number % 2 else one for one in branches
        ]
    return Work(branches, tokens, 10.0, 3, {"signal": 0.5})


def shares(work: Work, layout: Layout, budget: int, ranks: int, updates: int) -> list[Share]:
    """Returns the share of each rank, sent through its serialized form."""
    return [unpack(pack(share)) for share in plan_shares(work, layout, budget, ranks, updates)]


def computed(
    module: nn.Module, found: list[Share], layout: Layout, loss_of: Callable[[MicroBatch], Tensor]
) -> tuple[float, list[Tensor]]:
    """Computes loss and gradients of all ranks together."""
    module.zero_grad()
    loss = 0.0
    for share in found:
        for part in range(len(share.parts)):
            for batch, _ in share.micro_batches(part, layout, CPU):
                one = loss_of(batch)
                one.backward()
                loss += one.item()
    return loss, [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bootstraps", [False, True])
def test_ranks_and_budgets_leave_loss_and_gradient_alone(tiny_model: Path, name: str, bootstraps: bool) -> None:
    """A policy's advantages, and a critic's values at places beyond the sampled tokens."""
    model = load_model(tiny_model)
    if name == "packed":
        use_tree_attention(model)
    module: nn.Module
    module = Critic(model.get_decoder()) if bootstraps else Policy(model, 0.8, 16)
    if isinstance(module, Critic):
        nn.init.normal_(module.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    layout, work = LAYOUTS[name], work_of(2, bootstraps=bootstraps)

    def loss_of(batch: MicroBatch) -> Tensor:
        if bootstraps:
            return (module(batch) * (batch.places + 1).sqrt()).sum()
        return (module(batch)[0] * batch.columns["advantages"]).sum()

    expected, gradients = computed(module, shares(work, layout, 10_000, 1, 1), layout, loss_of)
    assert gradients
    for ranks, budget, updates in ((1, 30, 2), (2, 60, 1), (3, 30, 2), (40, 500, 1)):
        loss, others = computed(module, shares(work, layout, budget, ranks, updates), layout, loss_of)
        assert loss == pytest.approx(expected, rel=1e-4), (ranks, budget)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4 * one.abs().max().item())


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_place_is_computed_once_and_a_rank_gets_its_own_tokens_only(name: str) -> None:
    work, layout = work_of(4, bootstraps=True), LAYOUTS[name]
    expected = sorted([*range(work.tokens.total), *(b.bootstrap for b in work.branches if b.bootstrap is not None)])
    for ranks in (1, 2, 3, 60):
        found = shares(work, layout, 60, ranks, 2)
        places = [
            place
            for share in found
            for part in range(2)
            for batch, _ in share.micro_batches(part, layout, CPU)
            for place in batch.places.tolist()
        ]
        assert sorted(places) == expected
        assert {tuple(map(len, share.parts)) for share in found} == {tuple(map(len, found[0].parts))}
        assert {share.places for share in found} == {max(expected) + 1}
        assert sum(len(share.tokens.token_ids) for share in found) == len(work.tokens.token_ids)
        assert (found[-1].normalizer, found[-1].version, found[-1].notes) == (10.0, 3, {"signal": 0.5})


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_empty_batch_gives_every_rank_nothing_to_train(name: str) -> None:
    for share in shares(Work(*made_tokens([])), LAYOUTS[name], 60, 3, 3):
        assert [len(rows) for part in share.parts for rows in part] == []
        assert (share.places, share.row_tokens) == (0, 0)
