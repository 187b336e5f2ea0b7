"""What a newcomer does with ``agentrl.train`` and ``agentrl.evaluate`` in a first script, and what is said of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

import agentrl
from agentrl.core.import_file import import_file
from agentrl.launch import api
from agentrl.launch.class_path import class_path
from tests.end_to_end import environment
from tests.launch.test_api import Echo, seen, url  # noqa: F401 - fixtures


class Speaker(agentrl.Agent):
    """An agent; it is only named."""

    async def step(self, observation: Any, info: Any) -> Any:
        raise AssertionError


SCRIPT = """
import agentrl

class Shout(agentrl.SingleTurnEnvironment):
    dataset = [{"n": str(n)} for n in range(5)]

    def prompt(self, task):
        return [{"role": "user", "content": task["n"]}]

    def judge(self, task, answer):
        return 1.0

agentrl.%s
"""


@pytest.mark.parametrize(
    "call",
    [
        'evaluate("mine.py", model="m", base_url="http://127.0.0.1:9/v1")',
        'train("arithmetic_grpo", env={"id": Shout, "kwargs": {}}, train_dataset={"name": "env"})',
    ],
)
def test_a_script_that_a_run_imports_does_not_start_a_run_in_it(call: str, tmp_path: Path) -> None:
    """Each process that imports the file would start a run of its own, whose processes would, and so on."""
    (tmp_path / "mine.py").write_text(SCRIPT % call)
    ran = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1 and 'below `if __name__ == "__main__":`' in ran.stderr, ran.stderr
    assert "mine.py:13" in ran.stderr and not (tmp_path / "runs").exists()


def test_a_call_while_a_file_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT % 'train("arithmetic_grpo", {"trainer.total_steps": 1})')
    with pytest.raises(ImportError, match=r"mine\.py:13: ConfigError: .*mine\.py is imported by a run.*__main__"):
        import_file(tmp_path / "mine.py")
    with pytest.raises(agentrl.UserError, match="no recipe 'nosuch'"):
        agentrl.train("nosuch")  # the import is over


@pytest.mark.parametrize(
    "given",
    [{"env": Echo}, {"env": {"id": Echo}}, {"overrides": {"env.id": Echo}}, {"overrides": {"env": Echo}}],
)
def test_a_training_takes_a_class_by_the_place_where_its_processes_find_it(
    given: dict[str, Any],
    seen: dict[str, Any],  # noqa: F811
) -> None:
    with pytest.raises(agentrl.RunFailed):
        agentrl.train("arithmetic_grpo", **given, agent={"id": Speaker})
    assert (seen["recipe"].env.id, seen["recipe"].env.kwargs) == ("tests.launch.test_api:Echo", {})
    assert seen["recipe"].agent.id == "tests.launch.test_api_mistakes:Speaker"


def test_a_class_of_a_script_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = type("Own", (Echo,), {"__module__": "__main__", "__qualname__": "Own"})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "mine.py"), raising=False)
    assert class_path(own, in_process=False) == f"{tmp_path / 'mine.py'}:Own"
    assert class_path(own, in_process=True) == "__main__:Own"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(agentrl.UserError, match=r"Own.*other processes.*write it to a file"):
        class_path(own, in_process=False)


def test_a_class_of_a_file_beside_the_script_is_found_by_that_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("class Own:\n    pass\n")
    own = import_file(tmp_path / "beside.py").Own
    assert class_path(own, in_process=False) == f"{tmp_path / 'beside.py'}:Own"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: agentrl.evaluate("arithmetic", model="m", task=3), r"unknown key 'task', did you mean 'tasks'\?"),
        (
            lambda: agentrl.train("arithmetic_grpo", {"launch.type": "ray", "launch.device": "cpu"}),
            "ray: that is for the",
        ),
        (lambda: agentrl.train("arithmetic_grpo", overides={}), r"did you mean 'overrides'\?"),
        (lambda: agentrl.evaluate(Echo(), model="m"), "an object of class Echo: give the class itself"),  # type: ignore[arg-type]
        (lambda: agentrl.evaluate(None, model="m"), "want a recipe, an environment's id or path, or"),  # type: ignore[arg-type]
        (lambda: agentrl.train(Echo), r"trains a recipe.*env=Echo"),  # type: ignore[arg-type]
        (lambda: agentrl.evaluate("arithmetic", model="m", base_url="127.0.0.1:9"), "http://127.0.0.1:9"),
        (lambda: agentrl.evaluate("arithmetic", model="m", resume=True), "resume=True needs output="),
        (lambda: agentrl.train("arithmetic_grpo", {"trainer.learning_rate": object()}), r"trainer\.learning_rate"),
    ],
)
def test_a_mistake_in_the_call_is_a_users_error(
    call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agentrl.UserError, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


class Few(Echo):
    """Nothing is held out."""

    dataset: ClassVar[Any] = [{"n": "1"}]


def test_an_evaluation_that_was_refused_leaves_no_folder(url: str, tmp_path: Path) -> None:  # noqa: F811
    """Else the name is taken when the mistake is mended."""
    with pytest.raises(agentrl.UserError, match="no task in split 'test'"):
        agentrl.evaluate(Few, model="m", base_url=url, output=tmp_path / "out", console=Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_concurrency_and_resume_reach_the_run(seen: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(agentrl.RunFailed):
        agentrl.evaluate("arithmetic", output=tmp_path / "out", concurrency=7, resume=True)
    assert (seen["recipe"].rollout.max_concurrent, seen["resume"], seen["numbered"]) == (7, True, False)
    assert api.evaluate.__doc__ is not None and "concurrency:" in api.evaluate.__doc__


def test_an_evaluation_goes_on_and_holds_the_earlier_episodes(url: str, tmp_path: Path) -> None:  # noqa: F811
    def work(**more: Any) -> agentrl.EvalResult:
        quiet = Console(quiet=True)
        return agentrl.evaluate(Echo, model="m", base_url=url, output=tmp_path / "out", console=quiet, **more)

    first, second = work(), work(resume=True)
    assert (second.evaluation.n, second.evaluation.failed, len(second.episodes)) == (2, 1, 3)
    assert {one.seconds for one in first.episodes if not one.failed} <= {one.seconds for one in second.episodes}
