"""Lengths and speeds from a run's own records, and the command that uses them."""

import asyncio
import json
import logging
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.load import load_recipe
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.rollout.journal import Journal
from agentrl.sim.choice import Case
from agentrl.sim.device import Device, Speed
from agentrl.sim.episodes import Shape
from agentrl.sim.recorded import Call, at_a_time, calls_of, fit_speed, read_run, shapes_of, without_first
from agentrl.sim.report import lines as report
from agentrl.sim.shapes import Lognormal
from agentrl.sim.simulation import Devices
from agentrl.sim.virtual_loop import run_virtual

START = 1_700_000_000.0
SPEED = Speed(token=0.02, sequence=0.004, call=0.3)


def episode(
    group: int, index: int, answers: list[tuple[float, float, int]], seconds: float, after: float = 0.0
) -> Episode:
    """An episode whose requests and answers are at these seconds after its start, with so many tokens."""
    nodes: list[Node] = []
    start = START + after
    for asked, answered, tokens in answers:
        parent = len(nodes) - 1 if nodes else None
        nodes.append(Node(parent=parent, message={"role": "user", "content": "?"}, at=start + asked))
        sampled = {"token_ids": [1] * tokens, "loss_mask": [1] * tokens, "logprobs": [0.0] * tokens}
        nodes.append(
            Node(
                parent=len(nodes) - 1, message={"role": "assistant", "content": "!"}, versions=[0] * tokens,
                finish_reason="stop", at=start + answered, **sampled,
            )
        )  # fmt: skip
    return Episode(
        group_id=f"g{group}", task_id=f"t{group}", index=index, seed=index, reward=float(index % 2), seconds=seconds,
        stop_reason=StopReason.TERMINATED, started=datetime.fromtimestamp(start, UTC).isoformat(),
        trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


def simulated_calls() -> list[Call]:
    """Calls of a simulated server, with many and with few at a time."""
    lengths, found = Lognormal(200, 0.8, 1000), []

    async def main() -> None:
        device, now = Device(SPEED), asyncio.get_running_loop().time

        async def one(seed: int) -> None:
            start, tokens = now(), lengths.of("", seed).tokens
            await asyncio.sleep(SPEED.call)
            await device.generate(tokens)
            found.append(Call(start, now(), tokens))

        for at_once in (1, 2, 8, 30):
            await asyncio.gather(*(one(100 * at_once + each) for each in range(at_once)))

    run_virtual(main())
    return found


def test_the_turns_of_an_episode_and_the_time_between_them_are_read() -> None:
    one = episode(0, 1, [(0.5, 2.0, 30), (5.0, 6.0, 10)], 8.0)
    assert [(call.end - call.start, call.tokens) for call in calls_of(one)] == [(1.5, 30), (1.0, 10)]
    shape = shapes_of([one]).of("sim/0", 0)
    assert [turn.tokens for turn in shape.turns] == [30, 10]
    assert [turn.outside for turn in shape.turns] == pytest.approx([3.0, 2.0])
    assert (shape.before, shape.reward) == (pytest.approx(0.5), 1.0)


def test_calls_at_a_time_are_a_mean_over_each_call() -> None:
    assert at_a_time([Call(0.0, 4.0, 1), Call(2.0, 4.0, 1)], 1, Speed(1.0, 0.0)).tolist() == pytest.approx([1.5, 2.0])


def test_the_speed_of_a_server_is_found_in_its_calls() -> None:
    found = fit_speed(simulated_calls(), 1)
    assert found.token == pytest.approx(SPEED.token, rel=0.1)
    assert found.sequence == pytest.approx(SPEED.sequence, rel=0.1)


def test_answers_of_the_same_length_leave_no_wait_for_the_first_token() -> None:
    """The noise of a machine that does other things would else make it all of the time, and longer answers free."""
    chance = random.Random(0)
    seconds = [(10, chance.uniform(4, 40)) for _ in range(200)] + [(9, 30.0)] * 6
    found = fit_speed([Call(100.0 * i, 100.0 * i + took, tokens) for i, (tokens, took) in enumerate(seconds)], 1)
    assert found.call == 0.0
    assert 10 * (found.token + found.sequence) == pytest.approx(22.0, rel=0.2)


def recorded_run(folder: Path, first: float = 4.0) -> Path:
    """A run of steps that took 4 s of generation, 3 s of training and 1 s of all else.

    Args:
        folder: Folder of the run.
        first: Seconds of generation of the first step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_staleness=0"]
    recipe = load_recipe("arithmetic_grpo", settings, device="cpu")
    (folder / "config.json").write_text(recipe.model_dump_json())
    journal = Journal(folder, episodes=True)
    for group in range(4):
        for member in range(2):
            late, seconds = group // 2, 4.0 if group // 2 else first
            answers = [(0.0, seconds, 40)]
            journal.episode(episode(group, member, answers, seconds, after=(first + 4.0) * late))
    journal.close()
    step = {"time/step": 8.0, "time/wait_batch": 4.0, "time/update": 3.0, "time/publish": 0.25}
    lines = [{"step": 0, "time": 0.0, "eval/accuracy": 0.1}, *({"step": n, "time": 8.0 * n, **step} for n in (1, 2, 3))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_episodes_of_the_first_step_count_no_more_than_the_step_itself(tmp_path: Path) -> None:
    records = read_run(recorded_run(tmp_path, first=400.0))
    own = Case(records.recipe, records.devices, records.shapes, 2)
    assert own.run(1, 1, 0).step_seconds == pytest.approx(8.0, rel=0.02)


def test_a_run_that_has_only_the_first_groups_is_read_with_them() -> None:
    episodes = [episode(group, 0, [(0.0, 4.0, 40)], 4.0) for group in range(2)]
    assert list(without_first(episodes, 2)) == episodes
    assert [one.group_id for one in without_first(episodes, 1)] == ["g1"]


def test_groups_are_in_the_order_of_their_last_episodes() -> None:
    ends = [(0, 0), (1, 0), (1, 1), (0, 1)]
    episodes = [episode(group, member, [(0.0, 4.0, 40)], 4.0) for group, member in ends]
    assert {one.group_id for one in without_first(episodes, 1)} == {"g0"}, "group 1 was complete first"


def test_the_report_says_how_long_a_request_waits_for_its_first_token(folder: Path) -> None:
    records = read_run(folder)
    devices = replace(records.devices, speed=Speed(token=0.01, sequence=0.0, call=2.5))
    case = Case(records.recipe, devices, records.shapes, 2)
    text = report(case, [case.run(1, 1, 0)], "a test")
    assert "a request 2.5 s before its first token, however many there are" in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recorded_run(tmp_path)


def test_the_prediction_of_a_run_is_held_against_its_own_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_run(folder)
    assert records.step_seconds == 8.0 and records.steps == 2, "the first step loads and compiles"
    assert records.devices.training_time(0) == 3.0 and records.devices.push_seconds == 0.25
    settings = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_concurrent=8"]
    main_exits(["sim", "arithmetic_grpo", *settings, "--from", str(folder), "--gpus", "2", "--steps", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["run_step_seconds"] == 8.0
    assert found["run_predicted_seconds"] == pytest.approx(8.0, rel=0.02)
    assert {one["max_staleness"] for one in found["tried"]} >= {0, 1}


def test_what_a_step_waited_for_an_evaluation_is_no_part_of_it(folder: Path) -> None:
    """The simulation plays no evaluation, so the truth that it is held against has none."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    waited = [one | {"time/step": one["time/step"] + 90.0, "time/wait_evaluation": 90.0} for one in lines[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in waited))
    found = read_run(folder)
    assert found.step_seconds == 8.0 and found.devices.step_seconds == pytest.approx(0.75)


def test_episodes_that_did_not_end_well_are_left_out_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(folder, episodes=True)
    for index in (2, 3):
        stale = episode(3, index, [(0.0, 90.0, 4000)], 90.0, after=8.0)
        journal.episode(stale.model_copy(update={"reward": None, "stop_reason": StopReason.STALE}))
    journal.close()
    settings = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_concurrent=8"]
    main_exits(["sim", "arithmetic_grpo", *settings, "--from", str(folder), "--split", "1+1", "--steps", "1"])
    out = capsys.readouterr().out
    assert "left out  episodes that did not end well: 2 stale;" in out and "40 tokens on average" in out


def test_a_simulated_run_that_cannot_go_on_ends_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose rewards were all equal, with dynamic sampling; and answers that no time limit allows."""
    few = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_concurrent=8"]
    uniform = [*few, "rollout.skip_uniform_groups=true", "rollout.max_uniform_groups=5"]
    (folder / "config.json").write_text(load_recipe("arithmetic_grpo", uniform, device="cpu").model_dump_json())
    (folder / "episodes.jsonl").unlink()
    journal = Journal(folder, episodes=True)
    for group in range(4):
        journal.episode(episode(group, 0, [(0.0, 4.0, 40)], 4.0, after=8.0 * group))
    journal.close()
    (folder / "long.txt").write_text("1e9\n")
    for arguments, said in (
        ([*few, "--from", str(folder)], "5 groups in a row had equal rewards"),
        ([*few, "--lengths", str(folder / "long.txt")], "(rollout.episode_timeout)"),
    ):
        assert main_exits(["sim", "arithmetic_grpo", *arguments, "--split", "1+1", "--steps", "1"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "the simulated run with 1+1 devices" in line and said in line


def test_a_run_that_leaves_out_most_groups_makes_all_its_steps() -> None:
    """One group of twenty has different rewards; it once ran out of tasks, and no figure could be computed."""

    class Seldom(Lognormal):
        def of(self, task: str, seed: int) -> Shape:
            mixed = random.Random(task).random() < 0.05
            return Shape(super().of(task, seed).turns, float(mixed and seed % 2))

    settings = ["rollout.batch_size=2", "rollout.group_size=8", "rollout.skip_uniform_groups=true"]
    recipe = load_recipe("arithmetic_grpo", settings, device="cpu")
    case = Case(recipe, Devices(1, 1, Speed(0.01, 0.0), train_seconds=1.0), Seldom(20, 0.5, 100), 4)
    assert case.run(1, 1, 0).steps == 4


def test_the_table_has_80_columns_and_names_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = folder / "lengths.txt"
    lengths.write_text("100\n200\n700\n")
    settings = ["rollout.batch_size=2", "rollout.group_size=2", "sampling.max_new_tokens=1000"]
    settings += ["inference.context_length=2000"]
    main_exits(["sim", "arithmetic_grpo", *settings, "--gpus", "3", "--lengths", str(lengths), "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") :]
    assert all(len(line) <= 80 for line in table), [line for line in table if len(line) > 80]
    assert sum(line.startswith("* ") for line in table) == 1
    assert any(line.startswith("best ") for line in table)


def test_one_split_is_tried_with_the_recipes_own_bound(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["rollout.batch_size=2", "rollout.group_size=2", "rollout.max_staleness=3"]
    main_exits(["sim", "arithmetic_grpo", *settings, "--split", "5+2", "--steps", "1", "--json"])
    found = json.loads(capsys.readouterr().out)["tried"]
    assert [(one["inference"], one["training"], one["max_staleness"]) for one in found] == [(5, 2, 3)]


def test_a_folder_without_records_and_a_file_without_numbers_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.txt").write_text("100\nmany\n")
    (tmp_path / "old").mkdir()
    recorded_run(tmp_path / "old")
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step":1,"time":1.0,"time/step":8.0}\n')
    (tmp_path / "less.txt").write_text("100\n-5\n")
    (tmp_path / "endless.txt").write_text("inf\n")
    level = logging.getLogger("agentrl").level
    for arguments, said in (
        (["--from", str(tmp_path)], "no metrics.jsonl"),
        (["--lengths", str(tmp_path / "none.txt")], "no such file"),
        (["--lengths", str(tmp_path / "words.txt")], "'many'"),
        (["--lengths", str(tmp_path / "less.txt")], "cannot have -5 tokens"),
        (["--lengths", str(tmp_path / "endless.txt")], "cannot have inf tokens"),
        (["--from", str(tmp_path / "old")], "has 0 steps with their times"),
        (["--split", "8"], "--split 8: want devices"),
        (["--split", "0+8"], "--split 0+8: want devices"),
    ):
        assert main_exits(["sim", "arithmetic_grpo", *arguments]) == 2
        assert logging.getLogger("agentrl").level == level, "what a command silences speaks again after it"
        assert said in capsys.readouterr().err


def main_exits(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
