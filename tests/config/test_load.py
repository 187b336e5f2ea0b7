from pathlib import Path

import pytest

from agentrl.config import load
from agentrl.config.device import detect_device
from agentrl.config.load import ConfigError, dotted_keys, find_recipe, load_recipe, recipe_names, validate
from agentrl.config.render import render
from agentrl.config.yaml12 import read_yaml
from agentrl.core.episode import Task
from agentrl.evaluate.setup import setup_of

MINIMAL = """
model: {name: some/model}
train_dataset: {name: arithmetic}
valid_dataset: {name: arithmetic, split: test}
env: {id: arithmetic}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL + "seed: 1\non_cpu: {seed: 2, trainer: {nproc: 2}}\non_gpu: {seed: 3}\n")
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), overrides, device="cpu")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("settings", "here", "found"),
    [
        (["launch.type=slurm"], "cpu", None),
        (["launch.type=ray"], "cpu", None),
        (["launch.type=slurm", "launch.device=auto"], "cpu", None),
        (["launch.type=slurm"], "cuda", "cuda"),
        (["launch.type=slurm", "launch.device=cuda"], "cpu", "cuda"),
        (["launch.type=ray", "launch.device=cpu"], "cpu", "cpu"),
        (["launch.type=ray", "launch.ray_address=local"], "cpu", "cpu"),
        (["launch.type=local"], "cpu", "cpu"),
    ],
)
def test_the_device_of_a_login_node_does_not_decide_for_the_nodes_of_a_job(
    settings: list[str], here: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "detect_device", lambda: here)
    if found is not None:
        assert load_recipe("arithmetic_grpo", settings).launch.device == found
        return
    with pytest.raises(
        ConfigError, match=r"which has no GPU, and launch.type=\w+ runs on others: set launch.device=cuda"
    ):
        load_recipe("arithmetic_grpo", settings)


@pytest.mark.parametrize("name", ["gsm8k_grpo", "arithmetic_grpo"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shipped_recipes_load_on_both_devices(name, device):
    recipe = load_recipe(name, device=device)
    assert recipe.name == name
    assert recipe.launch.device == device


def test_the_device_part_is_merged_over_the_recipe(recipe_file):
    assert load_recipe(str(recipe_file), device="cpu").seed == 2
    assert load_recipe(str(recipe_file), device="cuda").seed == 3
    assert load_recipe(str(recipe_file), device="cuda").trainer.nproc == 1


def test_launch_device_chooses_the_part(recipe_file):
    assert load_recipe(str(recipe_file), ["launch.device=cuda"]).seed == 3
    assert load_recipe(str(recipe_file), ["launch.device=cpu"]).seed == 2


def test_a_config_file_goes_over_the_device_part_and_overrides_over_both(recipe_file, tmp_path):
    extra = tmp_path / "extra.yaml"
    extra.write_text("seed: 4\nenv: {kwargs: {a: 1}}")
    assert load_recipe(str(recipe_file), [], str(extra), device="cpu").seed == 4
    recipe = load_recipe(str(recipe_file), ["seed=5", "env.kwargs.b=2"], str(extra), device="cpu")
    assert recipe.seed == 5
    assert recipe.env.kwargs == {"a": 1, "b": 2}


def test_a_config_file_alone_is_enough(recipe_file):
    assert load_recipe(None, (), str(recipe_file)).name == "mine"


def test_the_run_is_named_after_the_file_unless_told_otherwise(recipe_file):
    assert load_recipe(str(recipe_file)).name == "mine"
    assert load_recipe(str(recipe_file), ["name=7"]).name == "7"


def test_an_unknown_key_is_answered_with_the_nearest(recipe_file):
    assert problems_of(recipe_file, "trainer.lerning_rate=1e-6") == [
        "unknown key 'trainer.lerning_rate', did you mean 'trainer.learning_rate'?"
    ]


def test_a_key_of_another_section_is_found(recipe_file):
    assert "did you mean 'sampling.temperature'?" in problems_of(recipe_file, "trainer.temperature=1")[0]


def test_unknown_keys_in_files_name_the_file_even_in_the_unused_part(recipe_file):
    recipe_file.write_text(MINIMAL + "sed: 1\non_gpu: {trainer: {lr: 1}}\n")
    found = problems_of(recipe_file)
    assert len(found) == 2
    assert found[0].startswith(f"{recipe_file}: on_gpu: unknown key 'trainer.lr'")
    assert found[1] == f"{recipe_file}: unknown key 'sed', did you mean 'seed'?"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_rate=fast", ["trainer.learning_rate was 'fast' (text)", "a number, greater than 0"]),
        ("trainer.learning_rate=true", ["true (true or false)"]),
        ("trainer.learning_rate=.inf", ["a number"]),
        ("trainer.total_steps=1.5", ["1.5 (a decimal number)", "a whole number, at least 1"]),
        ("trainer.total_steps=0", ["at least 1"]),
        ("trainer.clip_eps=2", ["greater than 0", "less than 1"]),
        ("trainer.time_budget=-1", ["a number or null"]),
        ("weights.transport=shn", ["auto or shm or disk or broadcast"]),
        ("inference.args=3", ["a list of text"]),
        ("trainer.freeze=[tower]", ["trainer.freeze.0 was 'tower' (text), but must be a list of vision ("]),
        ("trainer=5", ["a mapping with the keys preset,"]),
        ("launch.device=tpu", ["auto or cpu or cuda"]),
        ("model.name=null", ["model.name was null", "must be text"]),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(recipe_file, override, words):
    (problem,) = problems_of(recipe_file, override)
    assert all(word in problem for word in words), problem


def test_all_problems_are_told_at_once(recipe_file):
    found = problems_of(recipe_file, "seed=x", "trainer.foo=1", "rollout.batch_size=0", "novalue")
    assert len(found) == 4


def test_combinations_are_answered_with_both_keys(recipe_file):
    (problem,) = problems_of(recipe_file, "sampling.max_new_tokens=5000")
    assert "sampling.max_new_tokens=5000" in problem
    assert "inference.context_length" in problem


@pytest.mark.parametrize("text", ["seed", "=3", "", "trainer.nproc"])
def test_an_override_without_key_or_equals_is_explained(recipe_file, text):
    assert "section.key=value" in problems_of(recipe_file, text)[0]


def test_a_missing_section_says_what_it_holds(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 1")
    assert any(
        line.startswith("model is missing: it must be a mapping with the keys name") for line in problems_of(path)
    )


def test_a_key_that_stands_twice_is_refused(recipe_file):
    recipe_file.write_text(MINIMAL + "seed: 1\nseed: 2\n")
    assert "twice" in "\n".join(problems_of(recipe_file))


def test_an_unknown_recipe_is_answered_with_the_nearest_and_the_places():
    with pytest.raises(ConfigError, match="did you mean 'gsm8k_grpo'") as caught:
        find_recipe("gsm8k_gpro")
    assert "Looked in" in str(caught.value)
    with pytest.raises(ConfigError, match="no recipe file"):
        find_recipe("nowhere/mine.yaml")


def test_recipes_of_the_working_folder_come_first(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gsm8k_grpo.yaml").write_text(MINIMAL)
    (tmp_path / "recipes" / "own.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert {"own", "arithmetic_grpo"} <= set(recipe_names())
    assert load_recipe("gsm8k_grpo").model.name == "some/model"


def test_a_rendered_recipe_reads_back_equal():
    recipe = load_recipe("gsm8k_grpo", ["name=1e5", "env.kwargs.x=[on, 1e-3, null]", "inference.urls=[http://h]"])
    assert validate(read_yaml(render(recipe), "rendered")) == recipe


def test_rendered_keys_carry_their_descriptions():
    line = next(line for line in render(load_recipe("gsm8k_grpo")).splitlines() if "group_size" in line)
    assert line.endswith("# Episodes per task.")


def test_dotted_keys_hold_sections_and_fields():
    assert {"trainer", "trainer.learning_rate", "env.kwargs", "name"} <= set(dotted_keys())


def test_the_device_is_a_gpu_only_where_one_is_visible(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect_device(tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert detect_device(tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert detect_device(tmp_path) == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device(tmp_path) == "cpu"


def test_another_component_does_not_inherit_the_arguments_of_the_one_it_replaces(tmp_path):
    plain = load_recipe("arithmetic_grpo", device="cpu")
    assert plain.env.kwargs and plain.valid_dataset.kwargs
    swapped = load_recipe("arithmetic_grpo", ["env.kwargs.limit=3", "env.id=mine.py:Mine"], device="cpu")
    assert swapped.env.kwargs == {"limit": 3}, "its own are kept, wherever they stand"
    assert swapped.valid_dataset == plain.valid_dataset
    assert load_recipe("arithmetic_grpo", ["env.id=arithmetic"], device="cpu").env == plain.env
    (tmp_path / "mine.yaml").write_text("valid_dataset: {name: openai/gsm8k}\n")
    from_file = load_recipe("arithmetic_grpo", config_file=str(tmp_path / "mine.yaml"), device="cpu")
    assert from_file.valid_dataset.kwargs == {}
    assert from_file.train_dataset == plain.train_dataset


PARTS = """
on_cpu:
  model: {name: small, chat_template: chatml_tools}
  env: {kwargs: {examples: 1}}
  sampling: {max_new_tokens: 80}
  inference: {engine: embedded, context_length: 512, max_running: 8}
  eval: {tasks: 48}
on_gpu:
  model: {name: large}
  sampling: {max_new_tokens: 900}
  inference: {engine: sglang, context_length: 2048, max_running: 256}
  rollout: {max_concurrent: 512}
  eval: {tasks: 512}
on_eval:
  eval: {tasks: 200}
"""


def test_an_evaluation_measures_the_same_on_every_device(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("env: {id: gsm8k}\n" + PARTS)
    cpu, gpu = (load_recipe(str(path), ["trainer.type=null"], device=device) for device in ("cpu", "cuda"))
    for section in ("model", "env", "sampling", "eval"):
        assert getattr(cpu, section) == getattr(gpu, section)
    assert (gpu.model.name, gpu.env.kwargs, gpu.eval.tasks) == ("small", {"examples": 1}, 200)
    assert cpu.inference.context_length == gpu.inference.context_length == 512
    assert (gpu.inference.engine, gpu.inference.max_running, gpu.rollout.max_concurrent) == ("sglang", 256, 512)
    trains = load_recipe(str(path), [], device="cuda")
    assert (trains.model.name, trains.eval.tasks, trains.env.kwargs) == ("large", 512, {})
    chosen = load_recipe(str(path), ["trainer.type=null", "model.name=x", "eval.tasks=3"], device="cuda")
    assert (chosen.model.name, chosen.eval.tasks) == ("x", 3)


@pytest.mark.parametrize("name", [one for one in recipe_names() if one.startswith("gsm8k")])
def test_a_shipped_evaluation_has_the_same_set_up_on_every_device(name: str) -> None:
    cpu, gpu = (load_recipe(name, ["trainer.type=null"], device=device) for device in ("cpu", "cuda"))
    task = Task(id="x", data={})
    assert setup_of(cpu, [task], "x") == setup_of(gpu, [task], "x")
