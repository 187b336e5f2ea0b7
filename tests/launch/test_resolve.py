"""Every ``auto`` is decided when a run starts."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.load import load_recipe, recipe_names
from agentrl.config.recipe import Recipe
from agentrl.launch import dry_run
from agentrl.launch import resolve as resolve_module
from agentrl.launch import run as run_module
from agentrl.launch.model_shape import ModelShape, shape_of_folder, shape_of_weights
from agentrl.launch.resolve import KEYS, decided, pushed_bytes, resolve
from agentrl.launch.supervisor import ChildFailed

SHAPE = ModelShape(parameters=1000, layers=2, kv_width=8, vocab=16, linear_sides=500)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of six cores that has bfloat16, and a megabyte of shared memory."""
    monkeypatch.setattr(
        resolve_module, "resolved_dtype", lambda wanted, device: {"auto": "bfloat16"}.get(wanted, wanted)
    )
    monkeypatch.setattr(resolve_module, "usable_cores", lambda: 6)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**6 if "shm" in str(path) else 10**9))


def loaded(*overrides: str, recipe: str = "arithmetic_grpo") -> Recipe:
    return load_recipe(recipe, ["trainer.threads=null", *overrides], device="cpu")


def test_nothing_stays_open_but_what_the_models_class_decides() -> None:
    teacher = ["trainer.distill_coef=1.0", "teacher.model=someone", "teacher.dtype=auto"]
    open_keys = ["launch.device=auto", "trainer.dtype=auto", "inference.dtype=auto", *teacher]
    asked = loaded(*open_keys, "weights.transport=auto", "trainer.nproc=2")
    resolved = resolve(asked, SHAPE)
    assert decided(asked, resolved) == {
        "trainer.dtype": "bfloat16",
        "trainer.threads": "3",
        "inference.dtype": "bfloat16",
        "teacher.dtype": "bfloat16",
        "weights.transport": "shm",
    }
    text = json.dumps(resolved.model_dump(mode="json"))
    left = {name for name, value in json.loads(text)["trainer"].items() if value == "auto"}
    assert text.count('"auto"') == 2 and left == {"attention", "reshard_after_forward"}  # and what fits its memory
    assert resolve(resolved, SHAPE) == resolved and decided(resolved, resolved) == {}


@pytest.mark.parametrize("name", recipe_names())
def test_processes_can_read_what_was_decided(name: str) -> None:
    """A key that a run does not read may not be set: it is left alone."""
    resolved = resolve(load_recipe(name, device="cpu"), SHAPE)
    assert Recipe.model_validate_json(json.dumps(resolved.model_dump(mode="json"))) == resolved


@pytest.mark.parametrize(("engine", "names"), [("embedded", "model"), ("sglang", "files"), ("vllm", "files")])
def test_weights_are_sent_by_the_names_that_a_server_takes(engine: str, names: str) -> None:
    assert resolve(loaded(f"inference.engine={engine}"), SHAPE).weights.names == names


def test_what_is_asked_for_stays() -> None:
    asked = loaded(
        *("trainer.dtype=float32", "inference.dtype=float32", "trainer.threads=5", "weights.transport=disk"),
        "weights.names=files",
    )
    resolved = resolve(asked, SHAPE)
    assert decided(asked, resolved) == {}
    assert {key for key in KEYS if key.startswith("trainer")} == {"trainer.dtype", "trainer.threads"}
    assert (resolved.trainer, resolved.weights) == (asked.trainer, asked.weights)


@pytest.mark.parametrize(
    ("parameters", "more", "way"),
    [
        (200_000, (), "shm"),  # 0.4 MB in bfloat16, twice
        (300_000, (), "disk"),
        (300_000, ("trainer.lora_rank=2", "trainer.lora_push=adapter"), "shm"),
        (300_000, ("inference.urls=[http://node7:1]",), "broadcast"),
    ],
)
def test_new_weights_take_the_way_that_has_room_for_them(parameters: int, more: tuple[str, ...], way: str) -> None:
    shape = ModelShape(parameters, layers=2, kv_width=8, vocab=16, linear_sides=500)
    assert resolve(loaded(*more), shape).weights.transport == way


def test_a_run_writes_down_what_was_decided(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Recipe] = []

    def stop(recipe: Recipe, *_: object, **__: object) -> None:
        given.append(recipe)
        raise ChildFailed("far enough")

    monkeypatch.setattr(run_module, "_train", stop)
    recipe = loaded(f"model.name={tiny_model}", f"launch.run_dir={tmp_path}", "logging.live=false")
    with pytest.raises(ChildFailed):
        run_module.train_recipe(recipe, tmp_path, Console(quiet=True), resume=False)
    written = Recipe.model_validate_json((tmp_path / "config.json").read_text())
    assert written == given[0] == resolve(recipe, shape_of_folder(tiny_model))
    assert (written.trainer.dtype, written.trainer.threads) == ("bfloat16", 6)


def test_a_dry_run_shows_what_was_open_and_what_it_became() -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "tie_word_embeddings": True,
    }  # fmt: skip
    resolved, lines = dry_run.plan(loaded("inference.dtype=float32"), config, "a model")
    assert "auto       trainer.dtype: bfloat16" in lines and "auto       weights.transport: shm" in lines
    assert not any("inference.dtype" in line for line in lines), "it was asked for"
    assert resolved.trainer.dtype == "bfloat16"


def test_sizes_come_from_the_weights_where_the_config_does_not_tell_them(tiny_model: Path, tmp_path: Path) -> None:
    known = shape_of_folder(tiny_model)
    assert shape_of_weights(tiny_model).parameters == pytest.approx(known.parameters, rel=0.01)
    shutil.copytree(tiny_model, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "other"}')
    other = shape_of_folder(tmp_path / "other")
    assert other == shape_of_weights(tiny_model)
    assert pushed_bytes(resolve(loaded(), other), other) == 2 * other.parameters
