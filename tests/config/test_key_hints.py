"""What a user is told who writes a key as other toolkits call it, shortens it or misspells it."""

import pytest

from agentrl.config.key_hints import SYNONYMS, meant_key
from agentrl.config.keys import dotted_keys, fields, section_of, unknown_key

MEANT = {
    "trainer.lr": "trainer.learning_rate",
    "lr": "trainer.learning_rate",
    "optimizer.lr": "trainer.learning_rate",
    "trainr.lr": "trainer.learning_rate",
    "trainer.bs": "rollout.batch_size",
    "max_tokens": "sampling.max_new_tokens",
    "sampling.max_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "sampling.temp": "sampling.temperature",
    "sampling.t": "sampling.temperature",
    "epochs": "trainer.epochs",
    "n": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "rollout.group": "rollout.group_size",
    "eval.n": "eval.tasks",
    "gpus": "trainer.nproc",
    "trainer.gpus": "trainer.nproc",
    "trainer.kl": "trainer.kl_coef",
    "trainer.beta": "trainer.kl_coef",
    "supervised.betta": "supervised.beta",
    "trainer.steps": "trainer.total_steps",
    "model.path": "model.name",
    "modell.name": "model.name",
    "lora_r": "trainer.lora_rank",
    "rollout.curriculm.window": "rollout.curriculum.window",
    "trainer.lerning_rate": "trainer.learning_rate",
    "trainer.weight_deca": "trainer.weight_decay",
    "env.kwarg.limit": "env.kwargs.limit",
    "trainr": "trainer",
}


@pytest.mark.parametrize("key", MEANT)
def test_the_key_that_is_meant_is_named(key: str) -> None:
    assert unknown_key(key) == f"unknown key {key!r}, did you mean {MEANT[key]!r}?"


@pytest.mark.parametrize("key", ["zzz", "qqq.zzz", "trainer.zzz"])
def test_nothing_is_guessed_where_nothing_is_like_it(key: str) -> None:
    assert unknown_key(key) == f"unknown key {key!r}"


def test_a_key_without_its_section_is_found() -> None:
    lasts = [key.rpartition(".")[2] for key in dotted_keys()]
    for key in dotted_keys():
        last = key.rpartition(".")[2]
        if "." in key and lasts.count(last) == 1:
            assert meant_key(last, dotted_keys()) == key


def test_names_of_other_toolkits_mean_keys_that_exist_and_hide_none() -> None:
    words = [word for text in SYNONYMS.values() for word in text.split()]
    assert len(words) == len(set(words))
    for key in SYNONYMS:
        assert key in fields() and section_of(fields()[key]) is None
    assert not set(words) & {key for key in fields() if "." not in key and section_of(fields()[key]) is None}
