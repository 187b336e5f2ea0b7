"""Secrets are taken out, and nothing else."""

import pytest

from agentrl.core.redacted import HIDDEN, names_secret, redacted, redacted_command, redacted_text


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "OPENAI_API_KEY",
        "--api-key",
        "hf_token",
        "HF_TOKEN",
        "password",
        "client_secret",
        "agent.kwargs.api_key",
    ],
)
def test_names_of_secrets(name):
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "api_key_env",
        "max_new_tokens",
        "tokens",
        "tokenizer",
        "author",
        "key",
        "monkey",
        "eos_token",
        "stop_token",
        "stop_token_ids",
        "passes",
    ],
)
def test_names_that_are_none(name):
    assert not names_secret(name)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("api_key=sk-1 n=3", f"api_key={HIDDEN} n=3"),
        ("https://me:pass@host/x and max_new_tokens=4", f"https://{HIDDEN}@host/x and max_new_tokens=4"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("the value s3cret-value here", f"the value {HIDDEN} here"),
        ("git@github.com:me/repo", "git@github.com:me/repo"),
    ],
)
def test_texts(text, wanted):
    assert redacted_text(text, {"MY_TOKEN": "s3cret-value", "SHORT_KEY": "me", "HOME": "/root"}) == wanted


def test_data_keep_their_keys():
    given = {"a": {"api_key": "x", "api_key_env": "OPENAI_API_KEY", "token": None}, "b": ["password=1", 2, True]}
    wanted = {
        "a": {"api_key": HIDDEN, "api_key_env": "OPENAI_API_KEY", "token": None},
        "b": [f"password={HIDDEN}", 2, True],
    }
    assert redacted(given, {}) == wanted


def test_a_command_line():
    given = ["agentrl", "eval", "gsm8k", "--api-key", "sk-1", "--token=abc", "agent.kwargs.secret=x", "--n", "5"]
    wanted = [
        "agentrl",
        "eval",
        "gsm8k",
        "--api-key",
        HIDDEN,
        f"--token={HIDDEN}",
        f"agent.kwargs.secret={HIDDEN}",
        "--n",
        "5",
    ]
    assert redacted_command(given, {}) == wanted
