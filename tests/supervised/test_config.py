import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.supervised import evaluates, objective


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gsm8k_sft", ["rollout.group_size=4"], ("rollout.group_size", "trainer.type=sft")),
        ("gsm8k_sft", ["weights.transport=disk"], ("weights.transport", "trainer.type=sft")),
        ("gsm8k_rm", ["reward.scale=2.0"], ("reward.scale", "trainer.type=rm")),
        ("gsm8k_dpo", ["trainer.kl_coef=0.1"], ("trainer.kl_coef", "trainer.type=dpo")),
        ("gsm8k_sft", ["trainer.replay_routing=true"], ("trainer.replay_routing", "trainer.type=sft")),
        ("gsm8k_dpo", ["trainer.freeze=[vision]"], ("trainer.freeze", "trainer.type=dpo")),
        ("gsm8k_rm", ["trainer.router_aux_loss=0.1"], ("trainer.router_aux_loss", "trainer.type=rm")),
        ("gsm8k_sft", ["trainer.preset=dapo"], ("does nothing with trainer.type=sft",)),
        ("gsm8k_sft", ["supervised.beta=0.5"], ("supervised.beta", "trainer.type=sft", "trainer.type=dpo")),
        ("gsm8k_rm", ["supervised.loss_type=ipo"], ("supervised.loss_type", "trainer.type=rm")),
        ("gsm8k_dpo", ["supervised.completion_only=false"], ("supervised.completion_only", "trainer.type=dpo")),
        ("gsm8k_sft", ["trainer.nproc=3"], ("supervised.batch_size=4", "trainer.nproc=3")),
        ("gsm8k_sft", ["inference.urls=[http://h]"], ("inference.urls", "supervised.evaluate=false")),
        ("gsm8k_sft", ["env.id=none", "train_dataset.name=env"], ("train_dataset.path", "env.id")),
        ("gsm8k_grpo", ["supervised.batch_size=4"], ("supervised.batch_size", "trainer.type=grpo")),
        ("gsm8k_grpo", ["env.id=none"], ("env.id is missing", "trainer.type=grpo")),
    ],
)
def test_what_cannot_act_is_refused_with_both_keys(name, settings, words):
    with pytest.raises(ConfigError) as error:
        load_recipe(name, settings, device="cpu")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["gsm8k_sft", "gsm8k_rm", "gsm8k_dpo"])
def test_the_recipes_load_and_say_what_they_minimise(name, device):
    recipe = load_recipe(name, device=device)
    assert evaluates(recipe) == (name == "gsm8k_sft" or (name, device) == ("gsm8k_dpo", "cuda"))
    assert objective(recipe)[0].startswith("loss = ")
