import json
import random
from pathlib import Path

import pytest

from agentrl.config.errors import DataError
from agentrl.config.load import load_recipe
from agentrl.data.plain import load_folder
from agentrl.envs.gsm8k import GSM8K, solution
from agentrl.supervised.examples import Pair, Sample, load_examples, load_held_out, named, pair_of, sample_of

TASK = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 clips\nso 48+24 = <<48+24=72>>1,072.\n#### 1,072"}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
OTHER = {"role": "assistant", "content": "hu"}


def calling(arguments: str) -> dict:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def folder(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_texts_are_messages_of_the_user_and_the_assistant():
    assert sample_of({"prompt": "hi", "completion": "ho"}) == Sample([USER, ANSWER], 1)
    assert sample_of({"prompt": [USER, OTHER, USER], "completion": "ho"}) == Sample([USER, OTHER, USER, ANSWER], 3)
    assert sample_of({"messages": [USER, ANSWER]}) == Sample([USER, ANSWER], 0)
    assert sample_of({"question": "hi", "answer": "ho"}) is None
    assert pair_of({"prompt": "hi", "chosen": "ho", "rejected": "hu"}) == Pair([USER], ANSWER, OTHER)
    assert pair_of({"prompt": "hi", "completion": "ho"}) is None


def test_pairs_may_hold_the_prompt_in_each_answer():
    whole = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert pair_of(whole) == Pair([USER], ANSWER, OTHER)
    assert pair_of({"prompt": "hi", **whole}) == Pair([USER], ANSWER, OTHER)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": [USER]}, "nothing to train on"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "want a role"),
        ({"messages": 3}, "messages is int"),
        ({"prompt": "hi", "completion": {"text": "ho"}}, "completion is dict"),
    ],
)
def test_a_sample_of_another_shape_is_refused(line, words):
    with pytest.raises(ValueError, match=words):
        sample_of(line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "hi", "chosen": "ho", "rejected": "ho"}, "are the same"),
        ({"chosen": "ho", "rejected": "hu"}, "no prompt"),
        ({"prompt": "hi", "chosen": [ANSWER, USER, ANSWER], "rejected": "hu"}, "chosen must be one assistant message"),
    ],
)
def test_a_pair_of_another_shape_is_refused(line, words):
    with pytest.raises(ValueError, match=words):
        pair_of(line)


def test_a_line_without_pairs_is_refused_with_both_keys(tmp_path: Path):
    path = folder(tmp_path, '{"prompt": "hi", "completion": "ho"}')
    recipe = load_recipe("gsm8k_dpo", ["train_dataset.name=jsonl", f"train_dataset.path={path}", "env.id=arithmetic"])
    with pytest.raises(DataError) as error:
        load_examples(recipe, recipe.train_dataset)
    for word in (str(path), "train/0", "trainer.type=dpo", "prompt, chosen and rejected", "env.id=arithmetic"):
        assert word in str(error.value)


def test_a_folder_needs_no_environment_and_no_name(tmp_path: Path):
    path = folder(tmp_path, '{"prompt": "hi", "completion": "ho"}', "", '{"messages": []}'.replace("[]", "[1]"))
    recipe = load_recipe("gsm8k_sft", ["env.id=none", "train_dataset.name=env", f"train_dataset.path={path}"])
    with pytest.raises(DataError, match="train/1"):
        load_examples(recipe, recipe.train_dataset)
    one = recipe.train_dataset.model_copy(update={"limit": 1, "shuffle": False})
    assert load_examples(recipe, one).examples == [Sample([USER, ANSWER], 1)]
    bare = recipe.model_copy(update={"valid_dataset": type(recipe.valid_dataset)()})
    assert load_held_out(bare) is None


def test_tasks_that_nobody_answers_are_for_the_evaluation_alone(tmp_path: Path):
    path = folder(tmp_path, '{"prompt": "hi", "completion": "ho"}')
    lines = [f"train_dataset.path={path}", "train_dataset.name=jsonl"]
    valid = ["env.id=arithmetic", "valid_dataset.name=arithmetic"]
    recipe = load_recipe("gsm8k_sft", [*lines, *valid], device="cpu")
    assert len(load_examples(recipe, recipe.train_dataset).examples) == 1
    assert load_held_out(recipe) is None
    unused = load_recipe("gsm8k_sft", [*lines, *valid, "supervised.evaluate=false"], device="cpu")
    with pytest.raises(DataError, match=r"env\.id=arithmetic cannot supply them"):
        load_held_out(unused)


def test_lines_that_are_no_objects_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"train\.jsonl:2 is not JSON"):
        load_folder("train", str(folder(tmp_path, "{}", "{")))
    with pytest.raises(DataError, match=r"train\.jsonl:1 is no JSON object"):
        load_folder("train", str(folder(tmp_path, "[1]")))
    with pytest.raises(DataError, match="the file is not"):
        load_folder("test", str(tmp_path))


def test_an_unknown_owner_and_name_is_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("gsm8k_sft", ["train_dataset.name=someone/pairs", "train_dataset.kwargs={config: main}"])
    assert named(recipe.train_dataset).name == "hub"
    assert named(recipe.train_dataset).kwargs == {"id": "someone/pairs", "config": "main"}
    assert named(recipe.valid_dataset).name == "openai/gsm8k"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"someone/pairs.*HF_HUB_OFFLINE is set"):
        load_examples(recipe, recipe.train_dataset)


def test_gsm8k_says_its_solution_in_its_own_format():
    env = GSM8K(examples=1)
    said = env.demonstration(TASK)
    assert said == "48/2 = 24 clips\nso 48+24 = 1,072.\n#### 1072"
    assert env.judge(TASK, said) == (1.2, {"accuracy": 1.0, "format": 1.0})
    assert env.demonstration({"answer": "#### 7"}) == "#### 7"
    with pytest.raises(ValueError, match="does not end in"):
        solution({"answer": "seven"})


def test_a_wrong_solution_differs_in_its_number_alone_and_follows_from_the_seed():
    env = GSM8K()
    right = env.demonstration(TASK)
    wrong = {env.wrong_demonstration(TASK, random.Random(seed)) for seed in range(20)}
    assert len(wrong) > 3
    for said in wrong:
        assert said.rpartition("#### ")[0] == right.rpartition("#### ")[0]
        assert env.judge(TASK, said)[1] == {"accuracy": 0.0, "format": 1.0}
    small = {"answer": "#### 1"}
    assert all(int(env.wrong_demonstration(small, random.Random(s))[5:]) >= 0 for s in range(20))


def test_gsm8k_recipes_give_the_prompt_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder(tmp_path, '{"question": "How many?", "answer": "2 + 5 = <<2+5=7>>7\\n#### 7"}')
    monkeypatch.setenv("AGENTRL_GSM8K", str(path))
    recipe = load_recipe(
        "gsm8k_sft", ["env.kwargs.examples=1", "agent={id: chat, kwargs: {system: Be brief.}}"], device="cpu"
    )
    (sample,) = load_examples(recipe, recipe.train_dataset).examples
    assert isinstance(sample, Sample)
    assert sample.messages[:-1] == [{"role": "system", "content": "Be brief."}, *GSM8K(examples=1).prompt(TASK)]
    assert sample.messages[-1]["content"] == "2 + 5 = 7\n#### 7" and sample.start == len(sample.messages) - 1
    pairs = load_recipe("gsm8k_dpo", ["seed=3"], device="cpu")
    first, again = (load_examples(pairs, pairs.train_dataset).examples for _ in range(2))
    assert first == again
    other = load_recipe("gsm8k_dpo", ["seed=4"], device="cpu")
    assert load_examples(other, other.train_dataset).examples != first


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), (TOOL,), [TOOL["function"]]])
def test_tools_are_read_from_a_list_or_its_text(given):
    sample = sample_of({"messages": [USER, ANSWER], "tools": given})
    assert sample is not None and sample.tools == [TOOL]
    pair = pair_of({"prompt": "hi", "chosen": "ho", "rejected": "hu", "tools": given})
    assert pair is not None and pair.tools == [TOOL]


@pytest.mark.parametrize("given", [None, [], "", "[]", "null"])
def test_no_tools_are_no_tools(given):
    sample = sample_of({"messages": [USER, ANSWER], "tools": given})
    assert sample is not None and sample.tools == []


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"tools": "add"}, "not JSON"),
        ({"tools": {"name": "add"}}, "tools is dict"),
        ({"tools": ["add"]}, "tools has add"),
        ({"weight": 0.5}, "column weight would change what is learned.*count alike"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, r"inference\.chat_template_kwargs"),
        ({"images": ["x"]}, "column images .*text alone"),
        ({"functions": [TOOL["function"]]}, "name the column tools"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "a message has weight 0"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "user message holds .*'image'"),
        ({"messages": [USER, calling("{")]}, "call of 'add' whose arguments are not a JSON object"),
    ],
)
def test_what_would_change_what_is_learned_and_is_not_read_is_refused(column, words):
    with pytest.raises(ValueError, match=words):
        sample_of({"messages": [USER, ANSWER], **column})


def test_columns_that_change_nothing_here_pass():
    line = {"weight": 1, "chat_template_kwargs": {}, "images": [], "functions": None, "id": 3}
    assert sample_of({"messages": [USER, {**ANSWER, "weight": 1}], **line}) == Sample([USER, ANSWER], 0)


def test_columns_that_nothing_reads_are_told_where_the_data_is_told(tmp_path: Path):
    lines = ['{"prompt": "hi", "completion": "ho", "topic": "x"}', '{"prompt": "hi", "completion": "ho", "id": 3}']
    options = ["env.id=none", "train_dataset.name=jsonl", f"train_dataset.path={folder(tmp_path, *lines)}"]
    recipe = load_recipe("gsm8k_sft", options)
    assert load_examples(recipe, recipe.train_dataset).source.endswith("; columns that nothing reads: id, topic")
    folder(tmp_path, '{"prompt": "hi", "completion": "ho", "tools": []}')
    assert "nothing reads" not in load_examples(recipe, recipe.train_dataset).source


def test_tasks_that_the_environment_reads_are_not_told(tmp_path: Path):
    options = [
        "env.id=GSM8K-v0",
        "train_dataset.name=jsonl",
        f"train_dataset.path={folder(tmp_path, json.dumps(TASK))}",
    ]
    recipe = load_recipe("gsm8k_sft", options)
    assert "nothing reads" not in load_examples(recipe, recipe.train_dataset).source
