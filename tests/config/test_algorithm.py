"""Presets, choices over them, contradictions, and the formula that is shown."""

import pytest
from pydantic import ValidationError

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.declarations import find_preset, preset_names
from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import TrainerConfig
from agentrl.train.formula import formula


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_fills_in_what_is_not_set_and_no_more(name: str) -> None:
    made = TrainerConfig.model_validate({"preset": name})
    for key, field in AlgorithmConfig.model_fields.items():
        if key != "preset":
            assert getattr(made, key) == find_preset(name).settings.get(key, field.default), key
    changed = TrainerConfig.model_validate({"preset": name, "aggregation": "constant", "clip_eps": 0.11})
    assert (changed.aggregation, changed.clip_eps) == ("constant", 0.11)
    assert TrainerConfig.model_validate(made.model_dump()) == made, "what is resolved loads again"
    assert all(find_preset(name).source for name in preset_names())


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"preset": "gpro"}, ["trainer.preset", "grpo"]),
        ({"correction": "truncate"}, ["trainer.correction", "trainer.proximal"]),
        ({"m2_threshold": 0.04, "proximal": "log_linear"}, ["trainer.m2_threshold", "trainer.proximal"]),
        ({"ratio": "sequence", "objective": "cispo"}, ["trainer.ratio", "trainer.objective"]),
        ({"kl_in": "reward"}, ["trainer.kl_in", "trainer.kl_coef"]),
        ({"reference": "ema"}, ["trainer.reference", "trainer.kl_coef"]),
        ({"advantage": "reward"}, ["trainer.advantage", "trainer.scale_rewards"]),
        ({"advantage": "leave_one_out", "scale_rewards": "mean"}, ["trainer.advantage", "trainer.scale_rewards"]),
        ({"advantage": "gae", "scale_rewards": "group"}, ["trainer.advantage", "trainer.scale_rewards"]),
        ({"discount": 0.9}, ["trainer.discount", "trainer.advantage"]),
        ({"critic_warmup": 3, "advantage": "turns"}, ["trainer.critic_warmup", "trainer.advantage"]),
        ({"distill_coef": 0.5, "ratio": "sequence"}, ["trainer.distill_coef", "trainer.ratio"]),
        ({"advantage": "none", "scale_rewards": "none"}, ["trainer.advantage", "trainer.distill_coef"]),
        ({"preset": "distill", "scale_rewards": "batch"}, ["trainer.advantage", "trainer.scale_rewards"]),
        (
            {"preset": "distill", "kl_coef": 0.1, "kl_in": "reward", "scale_rewards": "none"},
            ["trainer.advantage", "trainer.kl_in"],
        ),
        ({"reject_high": 1.2}, ["trainer.reject_high", "trainer.reject_by"]),
        ({"reject_by": "k2"}, ["trainer.reject_by", "trainer.reject_high"]),
        ({"reject_by": "k3", "reject_low": 0.1, "reject_high": 1}, ["trainer.reject_low", "trainer.reject_by"]),
        ({"reject_by": "k1", "reject_low": 0.1}, ["trainer.reject_low", "trainer.reject_by"]),
        ({"reject_by": "geometric", "reject_low": 0}, ["trainer.reject_low", "trainer.reject_by"]),
        ({"reject_by": "geometric", "reject_high": 0.9}, ["trainer.reject_high", "trainer.reject_by"]),
        ({"clip_cov_high": 3}, ["trainer.clip_cov_high", "trainer.clip_cov"]),
        ({"clip_cov": 0.1, "clip_cov_low": 5}, ["trainer.clip_cov_low", "trainer.clip_cov_high"]),
        ({"clip_cov": 0.1, "kl_cov": 0.1}, ["trainer.clip_cov", "trainer.kl_cov"]),
        ({"kl_cov_coef": 0.5}, ["trainer.kl_cov_coef", "trainer.kl_cov"]),
        ({"dppo_divergence": "kl"}, ["trainer.dppo_divergence", "trainer.objective"]),
        ({"dppo_threshold": 0.1, "objective": "sapo"}, ["trainer.dppo_threshold", "trainer.objective"]),
        ({"objective": "dppo", "ratio": "sequence"}, ["trainer.objective", "trainer.ratio"]),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, ["trainer.kl_estimator", "trainer.kl_gradient"]),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2"},
            ["trainer.kl_estimator", "trainer.kl_in"],
        ),
        ({"scale_rewards": "mean", "kl_coef": 0.1, "kl_in": "reward"}, ["trainer.scale_rewards", "trainer.kl_in"]),
        (
            {"advantage": "turns", "scale_rewards": "mean", "kl_coef": 0.1, "kl_in": "reward"},
            ["trainer.scale_rewards", "trainer.kl_in"],
        ),
    ],
)
def test_contradictions_are_refused_with_both_keys(choices: dict, named: list[str]) -> None:
    with pytest.raises(ValidationError):
        TrainerConfig.model_validate(choices)
    with pytest.raises(ConfigError) as caught:  # as a user gets it
        load_recipe("arithmetic_grpo", [f"trainer.scale_rewards={choices.get('scale_rewards', 'group')}"] + [
            f"trainer.{key}={value}" for key, value in choices.items()
        ])  # fmt: skip
    message = str(caught.value)
    assert all(key in message for key in named) and "mapping" not in message, message


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(Exception, match=r"rollout\.batch_size.*trainer\.minibatches"):
        load_recipe("arithmetic_grpo", ["trainer.minibatches=3"])


def test_the_constant_of_dr_grpo_is_the_longest_answer() -> None:
    recipe = load_recipe("arithmetic_grpo", ["trainer.preset=dr_grpo", "trainer.aggregation=constant"])
    assert recipe.trainer.aggregation_length == recipe.sampling.max_new_tokens


def test_the_formula_names_every_part_that_acts() -> None:
    shown = "\n".join(formula(TrainerConfig(preset="dapo", kl_coef=0.01, entropy_coef=0.1, minibatches=2)))
    for part in ("clamp(r_t, 0.8, 1.28)", "0.01 * k3", "- 0.1 * H_t", "tokens of the batch", "truncated", "2503.14476"):
        assert part in shown, shown
    assert "reference = the starting policy" in shown and "2 updates" in shown
    decoupled = "\n".join(formula(TrainerConfig(preset="decoupled")))
    assert "w_t = pi_proximal(t) / pi_behavior(t), at most 5" in decoupled
    turns = "\n".join(formula(TrainerConfig(advantage="turns", discount=0.9)))
    assert (
        "G_k - mean(G over the turns of the group)) / std(G of the group)" in turns and "0.9 * G of the turn" in turns
    )
    ppo = "\n".join(formula(TrainerConfig(preset="ppo", gae_lambda=0.95, critic_warmup=2)))
    assert "lambda = 0.95" in ppo and "V_before(t) +- 0.2" in ppo
    assert "only the critic learns in the first 2 steps" in ppo
    pure = "\n".join(formula(TrainerConfig(preset="distill")))
    assert "A = -1 * log(pi_behavior(t) / teacher(t))\n" in pure and "temperature 1" in pure and "[-r_t A]" in pure
    both = "\n".join(formula(TrainerConfig(distill_coef=0.5, scale_rewards="none", whiten="batch")))
    assert "A = R_i - mean(R of the group), minus 0.5 * log(pi_behavior(t) / teacher(t)), then whitened" in both
    m2po = "\n".join(formula(TrainerConfig(preset="m2po")))
    assert "m_t" in m2po and "-r_t A" in m2po


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, "k3(pi || reference) = reference(t) / pi(t) - 1 - log reference(t) / pi(t); gradient: its own, on fresh "
             "samples that of KL(reference || pi)"),
        ({"preset": "dapo"}, "log reference(t) / pi(t); gradient: that of k2, on fresh samples that of KL(pi || ref"),
        ({"kl_estimator": "k2"}, "gradient: its own, on fresh samples that of KL(pi || reference)"),
        ({"kl_gradient": "weighted"}, "its own times pi(t) / pi_behavior(t), on samples of any age that of KL(pi || "),
    ],
)  # fmt: skip
def test_the_formula_says_which_kl_the_gradient_is_of(choices: dict, expected: str) -> None:
    assert expected in "\n".join(formula(TrainerConfig.model_validate({"kl_coef": 0.1, **choices})))


def test_the_formula_says_where_a_kl_in_the_reward_enters() -> None:
    in_reward = {"kl_coef": 0.1, "kl_in": "reward"}
    for preset in ("ppo", "reinforce_pp"):
        shown = "\n".join(formula(TrainerConfig.model_validate({"preset": preset, **in_reward})))
        assert "each token's reward minus 0.1 * log pi_behavior(t) / reference(t), from there to the end" in shown
        assert "gradient" not in shown
    assert "R_i minus 0.1 * sum_t log pi_behavior(t) / reference(t)" in "\n".join(
        formula(TrainerConfig.model_validate(in_reward))
    )


def test_the_formula_names_masks_rejections_and_selections() -> None:
    icepop = formula(TrainerConfig(preset="icepop"))
    assert "[m_t * w_t * max(" in icepop[0]
    assert "m_t = 0 where pi_proximal(t) / pi_behavior(t) is below 0.5 or above 5" in icepop
    rejecting = formula(TrainerConfig(reject_by="geometric", reject_high=1.01))
    assert "a_i * [" in rejecting[0]
    assert any("exp(mean log pi(t) / pi_behavior(t)) is above 1.01; they still" in line for line in rejecting)
    assert "m_t" in formula(TrainerConfig(preset="clip_cov"))[0]
    assert "+ 1 * c_t k3(pi_behavior(t) || pi(t))]" in formula(TrainerConfig(preset="kl_cov"))[0]
    assert "|pi(t) - pi_behavior(t)| > 0.15" in formula(TrainerConfig(preset="dppo"))[0]
    assert "> 0.05" in formula(TrainerConfig(preset="dppo", dppo_divergence="kl"))[0]
    assert not any(letter in formula(TrainerConfig())[0] for letter in ("m_t *", "a_i", "c_t"))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"preset": "dapo"}, "count only in their group's mean"),
        ({"advantage": "turns"}, "count only in their group's mean"),
        ({"preset": "ppo"}, "are not trained on"),
        ({"preset": "reinforce"}, "are not trained on"),
        ({"preset": "distill"}, "are not trained on"),
    ],
)
def test_cut_episodes_count_in_a_group_only_where_there_is_one(choices: dict[str, str], words: str) -> None:
    (line,) = (
        line
        for line in formula(TrainerConfig.model_validate({"mask_truncated": True, **choices}))
        if line.startswith("episodes")
    )
    assert line.endswith(words)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_formula(name: str) -> None:
    lines = formula(TrainerConfig(preset=name))
    assert lines[0].startswith("loss = ") and find_preset(name).source in lines[-1]
