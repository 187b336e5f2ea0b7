"""Routers are found by running a model, and take given experts: the hidden states are those of exactly these."""

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.models.decoder import decoder_of
from agentrl.models.routing import NoRouters, Routers, find_routers
from tests.models.families import FAMILIES, REFUSED, small_config, small_model
from tests.models.forced import take_experts

IDS = [5, 9, 33, 12, 7, 40, 21, 3]
SAMPLE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe", "qwen3_next")
DENSE = {  # families whose miniatures have no experts, though their config has sizes of some
    "doge": "its experts are an option, with which routing is not causal",
    "gemma4_text": "they are an option, which the miniature of gemma4 takes",
}
NOT_FORCED = {  # families whose routers are refused, and the reason that is given
    "phimoe": "no layer",
}


def states(model: Any, ids: list[int] = IDS) -> Tensor:
    return decoder_of(model)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def own_choice(model: Any, routers: Routers) -> Tensor:
    with routers.recorded() as taken, torch.no_grad():
        states(model)
    return taken[0]


def has_experts(name: str) -> bool:
    said = str(small_config(name).to_dict())
    return "expert" in said or "moe" in said


def used_experts(model: Any, routers: Routers, experts: Tensor) -> None:
    """The experts whose weights get a gradient are those that were given, in each layer.

    Weights of a layer's experts are stacked, or stand in a list; both are found by their shape and their numbers.
    """
    routers.give(experts)
    model.zero_grad()
    states(model).square().sum().backward()
    given = experts.view(len(IDS), len(routers), routers.chosen)
    by_layer: dict[str, set[int]] = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name and not name.endswith("experts"):
            continue
        if parameter.ndim == 3 and len(parameter) == routers.experts and parameter.grad is not None:
            used = {number for number, grad in enumerate(parameter.grad) if grad.abs().max() > 0}
            by_layer.setdefault(name.partition(".experts")[0], set()).update(used)
    assert len(by_layer) == len(routers), "a router that is given experts has experts"
    for number, used in enumerate(by_layer.values()):
        assert used == set(given[:, number].flatten().tolist())


def check_family(name: str) -> Routers:
    model = small_model(name)
    routers = find_routers(model)
    own = own_choice(model, routers)
    plain = states(model)
    routers.give(own)
    torch.testing.assert_close(states(model), plain, atol=1e-5, rtol=1e-5)
    changed = own.clone()
    changed[3] = (changed[3] + 1) % routers.experts
    routers.give(changed)
    moved = (states(model) - plain).abs().amax(-1)
    assert moved[:3].max() < 1e-5 < moved[3], "a token's experts change its own states, and none before it"
    unknown = changed.clone()
    unknown[3] = -1
    routers.give(unknown)
    torch.testing.assert_close(states(model), plain, atol=1e-5, rtol=1e-5)
    return routers


@pytest.mark.parametrize("name", SAMPLE)
def test_given_experts_decide_the_states(name: str) -> None:
    check_family(name)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_the_given_experts_are_those_that_compute(name: str) -> None:
    model = small_model(name)
    routers = find_routers(model)
    used_experts(model, routers, torch.tensor([[1, 3] * len(routers)] * len(IDS)))
    used_experts(model, routers, torch.tensor([[2, 0] * len(routers)] * len(IDS)))


@pytest.mark.long
@pytest.mark.parametrize("name", [one for one in FAMILIES if one not in REFUSED and one not in SAMPLE])
def test_every_mixture_is_given_experts_or_refused(name: str) -> None:
    if not has_experts(name):
        pytest.skip("it has no experts")
    if name in DENSE:
        assert not any("expert" in key for key, _ in small_model(name).named_parameters())
        pytest.skip(DENSE[name])
    try:
        check_family(name)
    except NoRouters as error:
        assert name in NOT_FORCED and NOT_FORCED[name] in str(error)


def test_weights_and_gradients_are_those_of_the_current_scores_of_the_given_experts() -> None:
    """Mixtral against its definition: a softmax over all experts, of which those of the given ones add up to 1."""
    model = small_model("mixtral")
    routers = find_routers(model)
    given = torch.tensor([[0, 3, 2, 1]] * len(IDS))
    given[4] = torch.tensor([1, 2, 0, 2])
    routers.give(given)
    states(model).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    routers.give(None)
    model.zero_grad()
    take_experts(decoder_of(model), given)
    states(model).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=1e-4, rtol=1e-4, msg=name)


def test_a_choice_that_differs_is_counted_by_layer_whatever_its_order() -> None:
    model = small_model("mixtral")
    routers = find_routers(model)
    own = own_choice(model, routers)
    swapped = own.view(len(IDS), 2, 2).flip(-1).reshape(len(IDS), 4).clone()
    swapped[2, :2] = (own[2, :2] + 1) % 4
    swapped[5] = -1
    routers.give(swapped)
    states(model)
    found = routers.differences()
    assert found is not None
    differs, known = found
    assert known.tolist() == [row != 5 for row in range(len(IDS))]
    assert differs[2, 0] and not differs[:2].any()


def test_rows_of_all_decoder_layers_are_read_as_servers_send_them() -> None:
    """DeepSeek's first layer has no experts: SGLang and vLLM send a row of zeros for it."""
    model = small_model("deepseek_v3")
    routers = find_routers(model)
    assert len(routers) == 1
    own = own_choice(model, routers)
    routers.give(own)
    expected = states(model)
    routers.give(torch.cat([torch.zeros_like(own), own], dim=1))
    torch.testing.assert_close(states(model), expected, atol=0, rtol=0)


def test_experts_of_another_model_are_refused() -> None:
    routers = find_routers(small_model("mixtral"))
    with pytest.raises(ValueError, match="2 routers that choose 2"):
        routers.give(torch.zeros(8, 6, dtype=torch.int16))
    with pytest.raises(ValueError, match="expert 4 of a model that has 4"):
        routers.give(torch.full((8, 4), 4, dtype=torch.int16))


@pytest.mark.parametrize(("name", "reason"), [("llama", "no layer"), *NOT_FORCED.items()])
def test_a_model_whose_routers_cannot_be_given_experts_is_refused(name: str, reason: str) -> None:
    with pytest.raises(NoRouters, match=reason):
        find_routers(small_model(name))


def test_a_router_whose_choice_is_not_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial decides: here the block takes the experts of a second choice, and the first is a decoy."""
    model = small_model("mixtral")
    for layer in decoder_of(model).layers:
        gate = (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).gate
        own = gate.forward

        def forward(hidden: Tensor, gate: Any = gate, own: Any = own) -> Any:
            torch.topk(hidden.reshape(-1, hidden.shape[-1])[:, :4], 2)
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            values, indices = logits.softmax(-1).sort(descending=True)
            return logits, values[:, :2] / values[:, :2].sum(-1, keepdim=True), indices[:, :2]

        monkeypatch.setattr(gate, "forward", forward)
    with pytest.raises(NoRouters, match="with other experts the hidden states stay as they are"):
        find_routers(model)
