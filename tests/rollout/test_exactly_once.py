"""Each draw is trained once, whenever controller and trainer are killed: the journal alone proves it.

A kill is simulated by a copy of the run's folder as it is at that moment, in which the journal's end that no checkpoint
synced may be missing; the controller that went on in the old folder is closed, so that whatever it writes when it ends
is not seen.
"""

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.core.columns import Columns
from agentrl.core.episode import Task
from agentrl.rollout.journal_lines import FILE
from agentrl.rollout.journal_proof import prove
from tests.rollout.test_controller import Harness, episodes_of, settle

KILLS = 52  # in the four runs together
MOMENTS = 40  # turns of the event loop: about two steps
TASKS = [Task(id=f"train/{i}", data={"n": i}) for i in range(30)]
EPOCHS = 3


class Life:
    """One process's life: a controller and a trainer whose parameters are the list of draws that it learned from."""

    def __init__(self, folder: Path, model: Path, settings: tuple[str, ...]) -> None:
        self.harness = Harness(folder, model, *settings, f"trainer.epochs={EPOCHS}", tasks=TASKS)
        self.folder = folder
        self.learned: list[int] = []
        self.step = 0

    async def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = sorted(self.folder.glob("step-*"))
        if found:
            state = json.loads((found[-1] / "state.json").read_text())
            self.learned, self.step = state["learned"], state["step"]
            self.harness.controller.restore(self.step, (found[-1] / "rollouts").read_bytes(), recorded=True)
            self.harness.controller.start()
            await self.harness.controller.publish(self.harness.manifest(self.step))
        else:
            (self.folder / FILE).unlink(missing_ok=True)  # nothing to resume: the run starts anew
            self.harness.controller.start()

    async def train(self, save_every: int) -> None:
        """Make all steps, as the trainer does."""
        last = False
        while not last:
            columns, facts = Columns.from_bytes(await self.harness.controller.next_batch(self.step))
            last = facts["last"]
            if not columns.episodes:
                break
            await asyncio.sleep(0)
            self.learned += sorted({int(one.group_id[1:]) for one in columns.episodes})
            self.step += 1
            await self.harness.publish(self.step, final=last)
            if self.step % save_every == 0 or last:
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint; the process may be killed before it has its name."""
        partial = self.folder / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / "rollouts").write_bytes(await self.harness.controller.checkpoint())
        (partial / "size").write_text(str((self.folder / FILE).stat().st_size))
        await asyncio.sleep(0)
        (partial / "state.json").write_text(json.dumps({"step": self.step, "learned": self.learned}))
        partial.rename(self.folder / f"step-{self.step:06d}")

    async def end(self) -> None:
        await self.harness.controller.close()
        self.harness.journal.close()


def left_by_a_kill(folder: Path, target: Path, dice: random.Random) -> None:
    """Copy what a killed process leaves; bytes that were written behind the last synced ones may be lost."""
    shutil.copytree(folder, target)
    sizes = [int(path.read_text()) for path in target.glob("*/size")]
    journal = target / FILE
    if journal.is_file() and dice.random() < 0.5:
        content = journal.read_bytes()
        journal.write_bytes(content[: dice.randint(max(sizes, default=0), len(content))])


@pytest.fixture
def disk_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the disk answer within the turn of the loop that asks it: kills are counted in turns."""

    async def in_place(wait: Callable[[], None]) -> None:
        wait()

    monkeypatch.setattr("agentrl.rollout.journal.asyncio.to_thread", in_place)


@pytest.mark.usefixtures("disk_in_turn")
@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (0, ()),
        (1, ("rollout.max_staleness=0",)),
        (2, ("rollout.skip_uniform_groups=true", "rollout.max_failure_rate=1")),
        (3, ("rollout.max_staleness=3", "rollout.batch_size=4")),
    ],
)
async def test_each_draw_is_trained_once_under_random_kills(
    tiny_model: Path, tmp_path: Path, seed: int, settings: tuple[str, ...]
) -> None:
    dice = random.Random(seed)
    folder = tmp_path / "0"
    folder.mkdir()
    for kill in itertools.count(1):
        life = Life(folder, tiny_model, settings)
        if seed == 2:
            life.harness.workflow.uniform = True
            life.harness.workflow.solves = lambda task: dice.random() < 0.7
            life.harness.workflow.broken_draws = {dice.randrange(200) for _ in range(40)}
        await life.resume()
        training = asyncio.create_task(life.train(dice.choice((1, 1, 2))))
        moments = dice.randrange(MOMENTS) if kill <= KILLS // 4 else 1_000_000
        while moments and not training.done():
            await asyncio.sleep(0)
            moments -= 1
        if training.done():
            training.result()
            await life.end()
            break
        left_by_a_kill(folder, tmp_path / str(kill), dice)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await life.end()
        folder = tmp_path / str(kill)
        prove(folder)
    assert kill > KILLS // 4
    proof = prove(folder)
    trained = [draw for draw, (_, end) in proof.ends.items() if end["outcome"] == "trained"]
    assert sorted(life.learned) == sorted(trained) and len(set(life.learned)) == len(life.learned)
    assert not proof.running and proof.resumes >= 5
    if seed != 2:
        assert sorted(trained) == list(range(EPOCHS * len(TASKS)))
        tasks = [end["task"] for _, end in proof.ends.values()]
        assert {tasks.count(task.id) for task in TASKS} == {EPOCHS}


async def test_a_run_that_is_made_longer_trains_the_groups_that_its_end_had_cancelled(
    tiny_model: Path, tmp_path: Path
) -> None:
    first = Harness(tmp_path, tiny_model, tasks=TASKS)
    first.controller.start()
    await first.controller.next_batch(0)
    await settle()
    await first.publish(1, final=True)
    saved = await first.controller.checkpoint()
    await first.controller.close()
    first.journal.close()
    assert prove(tmp_path).outcomes == {"trained": 2, "cancelled": 2}
    second = Harness(tmp_path, tiny_model, tasks=TASKS)
    second.controller.restore(1, saved, recorded=True, evaluated=True)
    second.controller.start()
    await second.controller.publish(second.manifest(1))
    asked = len(second.backend.requests)
    batch = episodes_of(await second.controller.next_batch(1))
    assert {one.group_id for one in batch} == {"g2", "g3"} and asked == 0, "they were finished, and are not run again"
    assert prove(tmp_path).outcomes == {"trained": 4}
    await second.publish(2, final=True)
    assert second.evaluated == [2]
    await second.controller.close()


async def test_a_final_version_that_was_evaluated_is_not_evaluated_again(tiny_model: Path, tmp_path: Path) -> None:
    """The run was killed before its export; its resume publishes the final version and records it once more."""
    first = Harness(tmp_path, tiny_model, tasks=TASKS)
    first.controller.start()
    await first.controller.next_batch(0)
    await first.publish(1, final=True)
    saved = await first.controller.checkpoint()
    await first.controller.close()
    for evaluated in (True, False):
        second = Harness(tmp_path, tiny_model, tasks=TASKS)
        second.controller.restore(1, saved, recorded=True, evaluated=evaluated)
        second.controller.start()
        await second.controller.publish(second.manifest(1), final=True)
        assert await second.controller.ready(1.0)
        second.controller.record(1, {}, final=True)
        assert await second.controller.ready(1.0) and second.controller.finished.is_set()
        assert second.evaluated == ([] if evaluated else [1]) and second.backend.requests == []
        await second.controller.close()
        second.journal.close()
        assert not prove(tmp_path).running
