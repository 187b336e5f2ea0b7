"""Validation of sampling parameters."""

import math

import pytest

from agentrl.engine.params import BadRequestError, SamplingParams, parse_params


def test_defaults_and_neutral_values_of_missing_features_are_accepted() -> None:
    assert parse_params(None) == SamplingParams()
    assert parse_params({"repetition_penalty": 1.0, "logit_bias": {}, "regex": None, "top_p": None}) == SamplingParams()


def test_an_unknown_key_is_named_and_the_allowed_ones_listed() -> None:
    with pytest.raises(BadRequestError, match=r"'seed'; allowed: .*sampling_seed"):
        parse_params({"seed": 1})


@pytest.mark.parametrize(
    "raw",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"max_new_tokens": 10**30},
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -0.1},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": 0},
        {"min_p": 2},
        {"n": 0},
        {"stop": [""]},
        {"stop": 3},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"ignore_eos": 1},
        {"sampling_seed": "a"},
        {"repetition_penalty": 1.1},
        {"json_schema": "{}"},
        ["temperature"],
    ],
)
def test_bad_values_are_refused(raw: object) -> None:
    with pytest.raises(BadRequestError):
        parse_params(raw)  # type: ignore[arg-type]
