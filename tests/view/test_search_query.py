"""The search language, against a plain filter over the records."""

import pytest

from agentrl.config.errors import UserError
from tests.view.conftest import records_of


def _length(record):
    return sum(sum(node["loss_mask"]) for node in record["trajectories"]["assistant"]["nodes"])


def _said(record, text):
    return text in str([node["message"] for node in record["trajectories"]["assistant"]["nodes"]]).lower()


CASES = {
    "reward<0.5": lambda r: r["reward"] is not None and r["reward"] < 0.5,
    "reward>=1 stop:length": lambda r: r["reward"] == 1 and r["stop_reason"] == "length",
    "length:50..60": lambda r: 50 <= _length(r) <= 60,
    "tag:hard -stop:length": lambda r: r["tag"] == "hard" and r["stop_reason"] != "length",
    "stop!=length": lambda r: r["stop_reason"] != "length",
    "accuracy=1": lambda r: r["metrics"].get("accuracy") == 1,
    "-accuracy=1": lambda r: r["metrics"].get("accuracy") != 1,
    "is:failed": lambda r: r["reward"] is None,
    "-is:failed version=1": lambda r: r["reward"] is not None and r["version"] == 1,
    '"100 + 100"': lambda r: _said(r, "100 + 100"),
    "CALCULATE carried": lambda r: _said(r, "calculate") and _said(r, "carried"),
    "-text:carried text:CALCULATE": lambda r: not _said(r, "carried") and _said(r, "calculate"),
    'text:"100 + 100"': lambda r: _said(r, "100 + 100"),
    "-carried": lambda r: not _said(r, "carried"),
    'task:"train/3"': lambda r: r["task_id"] == "train/3",
    "group:g2 index<4": lambda r: r["group_id"] == "g2" and r["index"] < 4,
    "": lambda r: True,
}


@pytest.mark.parametrize("query", CASES)
def test_a_filter_lets_through_what_it_says(run, query):
    wanted = [r for r in records_of(run.folder / "episodes.jsonl") if CASES[query](r)]
    assert run.index.page(query=query).total == len(wanted)
    assert len(wanted) > 0


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("rewad<1", "no field 'rewad', did you mean 'reward'?"),
        ("reward<high", "reward is a number: 'high' is none"),
        ("stop<length", "stop is a text: write stop:length"),
        ("is:good", "is:good is unknown; want one of: failed, retried, trained"),
        ("reward:0..x", "reward is a number: 'x' is none"),
        ("tag:", "tag: needs a value"),
        ("stpo:length", "no field 'stpo', did you mean 'stop'? For the text write \"stpo:length\" in quotes"),
        ("rewards:1", "did you mean 'reward'?"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_would_be_right(run, query, said):
    with pytest.raises(UserError) as error:
        run.index.page(query=query)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "query",
    ["'; DROP TABLE episodes; --", '" OR 1=1', "%", "note: this", "http://x", '"stpo:x"', "(", "-", '"'],
)
def test_what_looks_like_code_is_a_text(run, query):
    assert run.index.page(query=query).total <= 65
    assert run.index.page().total == 65


def test_the_search_folds_case_of_all_letters(run):
    from tests.view.conftest import append, hostile_episode

    record = hostile_episode() | {"error": "ÄRGER mit ẞ"}
    append(run.folder / "episodes.jsonl", record)
    run.index.update()
    assert run.index.page(query='"ärger MIT ß"').total == 1
