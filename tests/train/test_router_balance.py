"""The routers' load-balancing loss: that of the model's class, of tokens that sequences have, with its own strength.

A step's part of it is compared with plain loops over single sequences, in float64, for objectives that weigh tokens
otherwise, and with groups that carry no signal.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from agentrl.models.decoder import decoder_of
from agentrl.models.way import ModelForm, Way, set_form
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import Policy, load_model, shard
from agentrl.train.router_balance import FUNCTION, NoRouters
from tests.models.families import FAMILIES, small_model
from tests.references.cases import Groups
from tests.references.learning import RATE, learned, setting
from tests.tiny_mixture import build_tiny_mixture
from tests.train.test_families import group
from tests.train.test_rows import collated

MODELS = Path(transformers.__file__).parent / "models"


def loaded(name: str, folder: Path) -> Any:
    small_model(name).save_pretrained(folder)
    return load_model(folder, context=64)


def has_routers(name: str) -> bool:
    """Whether the module of a family's class defines the loss."""
    module = name.replace("-", "_")
    file = MODELS / module / f"modeling_{module}.py"
    return file.is_file() and f"def {FUNCTION}" in file.read_text()


SAMPLE = ("mixtral", "qwen3_moe")
MIXTURES = [name for name in FAMILIES if name not in SAMPLE and has_routers(name)]


def check_family(name: str, folder: Path) -> None:
    model = loaded(name, folder)
    set_form(model, ModelForm(Way("padded", why="it is tested")))
    policy = Policy(model, 1.0, 64, balanced=True)
    batch = collated(group(), 200, layout_of(model))
    routed = decoder_of(model)(input_ids=batch.token_ids, use_cache=False, output_router_logits=True)
    if not routed.router_logits:  # not in a miniature of two layers
        with pytest.raises(NoRouters, match="no layer"):
            policy(batch)
        return
    policy(batch)
    found = policy.take_router_loss()
    used = torch.zeros_like(batch.token_ids)
    for row, one in enumerate(group()):
        used[row, : len(one.token_ids) - 1] = 1  # the last token predicts nothing that is trained
    own = model(input_ids=batch.token_ids, attention_mask=used, use_cache=False, output_router_logits=True)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, own.aux_loss, atol=1e-4, rtol=1e-4)
    found.backward()
    routers = [p for n, p in policy.named_parameters() if "gate" in n or "router" in n]
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in routers)
    assert policy.take_router_loss() is None, "it is taken once"


@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_the_models_own_over_the_tokens_of_all_sequences(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_it_is_that_of_every_mixture(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


def test_it_is_off_by_default_and_without_gradients(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    batch = collated(group(), 200, layout_of(model))
    quiet = Policy(model, 1.0, 64)
    quiet(batch)
    measured = Policy(model, 1.0, 64, balanced=True)
    with torch.no_grad():
        measured(batch)
    assert quiet.take_router_loss() is measured.take_router_loss() is None


def test_a_sharded_model_with_an_image_tower_keeps_it_in_passes_without_images(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    model = loaded("mixtral", tmp_path)
    batch = collated(group(), 200, layout_of(model))
    policy = Policy(model, 1.0, 64, balanced=True)
    policy(batch)
    wanted = policy.take_router_loss()

    class Tower:
        def idle(self, decoder: Any, device: torch.device) -> torch.Tensor:
            return torch.zeros(())

    decoder_of(model).agentrl_pixels = Tower()
    shard(policy, mesh, torch.float32)
    policy(batch)
    found = policy.take_router_loss()
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found, wanted)


def test_a_model_without_routers_is_refused_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(NoRouters, match=r"trainer\.router_aux_loss"):
        Policy(loaded("llama", tmp_path), 1.0, 64, balanced=True)


COEFFICIENT = 3.0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny mixture, as ``policy``."""
    folder = tmp_path_factory.mktemp("mixture")
    build_tiny_mixture(folder / "policy")
    return folder


def uneven() -> Groups:
    """Groups with and without signal, of a long answer, a single token, and one member alone."""
    made = Groups("uneven")
    made.answer("a", 1.0, "x" * 40)
    made.answer("a", 0.0, "x")
    made.answer("a", 0.0, "xxxx.xx")
    made.answer("equal", 0.5, "xxxxx")
    made.answer("equal", 0.5, "xxxxxxx")
    made.answer("one", 1.0, "xxx")
    return made


def computed(made: Groups) -> list[list[int]]:
    """Returns the ids before the last trained token of each conversation of the only group with a signal."""
    found = []
    for one in made.episodes[:3]:
        nodes = one.trajectories["assistant"].nodes
        found.append([token for node in nodes for token in node.token_ids][:-1])
    return found


def balance_of(model: Any, sequences: list[list[int]], skipped: list[int]) -> torch.Tensor:
    """The load-balancing loss of some sequences, each computed alone, without the first ``skipped`` tokens of each."""
    layers: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for ids, first in zip(sequences, skipped, strict=True):
        out = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
        for kept, logits in zip(layers, out.router_logits, strict=True):
            kept.append(logits[first:])
    chances = torch.cat([torch.cat(one) for one in layers]).double().softmax(-1)
    chosen = torch.zeros_like(chances).scatter(1, chances.topk(2).indices, 1.0)
    return chances.shape[1] * (chosen.mean(0) * chances.mean(0)).sum()


@pytest.mark.parametrize("rows", ["together", "one by one"])
@pytest.mark.parametrize("choices", [{"preset": "grpo"}, {"preset": "dr_grpo"}, {"preset": "dapo", "minibatches": 1}])
def test_its_strength_follows_from_the_coefficient_alone(
    choices: dict[str, Any], rows: str, mixture: Path, mesh: DeviceMesh
) -> None:
    made, given = uneven(), setting(mixture)
    choices = choices | {"tokens_per_microbatch": 1000 if rows == "together" else 1}
    plain = learned(made.episodes, choices, given, mixture)
    both = learned(made.episodes, choices | {"router_aux_loss": COEFFICIENT}, given, mixture)
    how = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(given.policy, **how)
    sequences = computed(made)
    if rows == "together":  # a prompt of four tokens is computed once
        expected = balance_of(model, sequences, [0, 4, 4])
    else:
        total = sum(map(len, sequences))
        expected = sum((len(one) / total * balance_of(model, [one], [0]) for one in sequences), torch.zeros(()))
    expected.backward()
    assert both.metrics["train/router_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert "train/router_loss" not in plain.metrics and both.metrics["train/loss"] == plain.metrics["train/loss"]
    largest = max(one.grad.abs().max().item() for one in model.parameters() if one.grad is not None)
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = (both.policy[name] - plain.policy[name]) / (-RATE * COEFFICIENT)
        torch.testing.assert_close(
            found, gradient, rtol=1e-3, atol=1e-4 * largest, msg=lambda text, n=name: f"{n}: {text}"
        )
