"""Every command with the core install alone: it works, or says in one line which extra it needs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core.extras import PACKAGES
from tests.chat_api import chat_api
from tests.without_packages import run_without

EXTRAS = {package for packages in PACKAGES.values() for package in packages} - {"numpy"}  # gymnasium brings numpy
TRAIN = "pip install -e '.[train]' in a checkout of agentrl"
API = ["--base-url", "http://127.0.0.1:9/v1", "--model", "some-model", "--n", "2"]

WORKS = [
    ["--help"],
    ["--version"],
    ["recipe", "list"],
    ["recipe", "show", "arithmetic_grpo"],
    ["recipe", "show", "gsm8k_sft"],
    ["plan", "gsm8k_grpo", "--gpus", "64", "model.name=Qwen/Qwen3-8B"],
    ["view", "healthy", "--html", "copy.html"],
    ["view", "healthy", "--tui"],
    ["plot", "healthy", "--list"],
    ["env", "list"],
    ["env", "new", "other_shop"],
    ["env", "check", "arithmetic"],
    ["env", "check", "my_shop"],
    ["env", "play", "calculator", "--seed", "1"],
    ["env", "play", "my_shop", "--seed", "1"],
    ["doctor", "healthy"],
]
NEEDS = {
    "recipe run arithmetic_grpo": (TRAIN, "training needs torch, transformers"),
    "recipe run arithmetic_grpo --dry-run": (TRAIN, "training needs torch, transformers"),
    "recipe run gsm8k_sft": (TRAIN, "trainer.type=sft needs torch, transformers"),
    "recipe run arithmetic_grpo trainer.type=null": (TRAIN, "inference.engine=embedded needs torch"),
    "eval arithmetic --n 2": (TRAIN, "inference.engine=embedded needs torch"),
    "serve --model some-model": (TRAIN, "agentrl serve needs torch"),
    "bench logprobs": (TRAIN, "agentrl bench logprobs needs torch"),
    "plan gsm8k_grpo --gpu cpu --gpus 1 --probe 10": (TRAIN, "agentrl plan --probe needs torch"),
    "plot healthy": (TRAIN, "matplotlib"),
    "bench client": (TRAIN, "agentrl bench client needs torch"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a new environment and a run."""
    made = tmp_path_factory.mktemp("core")
    assert run_without(EXTRAS, ["env", "new", "my_shop"], made / "site", made).returncode == 0
    (made / "runs" / "healthy").mkdir(parents=True)
    record = {"step": 1, "time": 1.0, "reward/mean_drawn": 0.5}
    (made / "runs" / "healthy" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return made


@pytest.mark.parametrize("arguments", WORKS, ids=" ".join)
def test_what_needs_no_extra_works_without_one(arguments: list[str], folder: Path) -> None:
    result = run_without(EXTRAS, arguments, folder / "site", folder, typed="I do not know\n/quit\n")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("line", NEEDS)
def test_what_needs_an_extra_says_which_in_one_line(line: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = run_without(EXTRAS, line.split(), folder / "site", folder)
    words = NEEDS[line]
    assert result.returncode == 2, result.stdout
    (told,) = result.stdout.splitlines()
    assert told.startswith("agentrl: ") and all(word in told for word in words), told
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ], "nothing was written"


@pytest.mark.parametrize(
    ("missing", "setting", "message"),
    [
        ("peft", "trainer.lora_rank=4", "trainer.lora_rank needs peft, not installed: pip install -e '.[lora]'"),
        ("tensorboardX", "seed=1", "logging.tensorboard=true needs tensorboardX, not installed"),
        ("matplotlib", "seed=1", "training needs matplotlib, not installed"),
    ],
)
def test_one_missing_package_is_told_before_the_run(missing: str, setting: str, message: str, tmp_path: Path) -> None:
    result = run_without(
        [missing], ["recipe", "run", "arithmetic_grpo", "--dry-run", setting], tmp_path / "site", tmp_path
    )
    assert result.returncode == 2 and message in result.stdout, result.stdout


def test_a_dataset_that_needs_a_package_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_GSM8K", raising=False)  # files on the disk need no package
    result = run_without(EXTRAS, ["eval", "gsm8k", *API], folder / "site", folder)
    assert result.returncode == 2 and TRAIN in result.stdout and "Traceback" not in result.stdout, result.stdout


def test_a_users_file_that_needs_a_package_names_line_and_extra(folder: Path) -> None:
    (folder / "heavy.py").write_text("import math\nimport torch\nfrom agentrl import ToolEnvironment\n")
    for command in (["env", "play"], ["env", "check"], ["eval"]):
        more = API if command == ["eval"] else []
        result = run_without(EXTRAS, [*command, "heavy.py:Heavy", *more], folder / "site", folder)
        assert "heavy.py:2: No module named 'torch'; it comes with pip install -e '.[train]'" in " ".join(
            result.stdout.split()
        ), result.stdout
        assert result.returncode == (1 if command == ["env", "check"] else 2), result.stdout
        assert "Traceback" not in result.stdout


@pytest.fixture
def api() -> Iterator[str]:
    """URL of a server that speaks OpenAI's protocol."""
    with chat_api("42") as url:
        yield url


def test_any_api_is_evaluated(api: str, folder: Path) -> None:
    for env in ("arithmetic", "my_shop_grpo"):
        arguments = ["eval", env, "--base-url", api, "--model", "m", "--n", "2", "--output", f"eval-{env}"]
        result = run_without(EXTRAS, arguments, folder / "site", folder)
        assert result.returncode == 0, result.stdout
        assert re.search(r"judged\W+2\b", result.stdout), result.stdout


def test_environments_are_made_in_python(folder: Path) -> None:
    (folder / "made.py").write_text(
        "import agentrl\nfrom agentrl import SingleTurnEnvironment\nagentrl.make('arithmetic')\nimport gymnasium\n"
        "gymnasium.make('agentrl/Arithmetic-v0').reset(seed=0)\n\n\nclass Made(SingleTurnEnvironment):\n"
        "    dataset = [{'question': 'x', 'answer': 'y'}]\n\n    def prompt(self, task):\n"
        "        return [{'role': 'user', 'content': 'x'}]\n\n    def judge(self, task, answer):\n        return 1.0\n"
    )
    result = run_without(EXTRAS, ["env", "play", "made.py:Made"], folder / "site", folder, typed="y\n")
    assert result.returncode == 0 and "reward of the episode: 1" in result.stdout, result.stdout
