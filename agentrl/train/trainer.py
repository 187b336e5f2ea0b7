"""The trainer's loop: batch, update, publish, save.

Guarantees: one batch is one step, and one step is one policy version; all ranks take the same decisions, which rank 0
broadcasts with each step; no version is published before the controller lets it, and the next update runs meanwhile;
each step's metrics say how its time was spent; parameters, optimizer and controller state of a checkpoint are of the
same step. A checkpoint that cannot be written leaves the one before and training goes on, but not for ever. A run that
is resumed after its last checkpoint makes no step: it evaluates and exports.
"""

import time
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.weight_manifest import WeightManifest
from agentrl.train.batch import Batch
from agentrl.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.train.checkpoint_saver import CheckpointFailed, CheckpointSaver
from agentrl.train.checkpoint_state import ROLLOUTS_FILE, SAVED_FILE, STOP_FILE, latest_checkpoint, why_over
from agentrl.train.controller_client import ControllerClient, ControllerError
from agentrl.train.export import export_model, exported_weights
from agentrl.train.first_mismatch import FirstMismatch, TrainingStopped
from agentrl.train.kept_logprobs import KeptLogprobs
from agentrl.train.learner import PolicyLearner
from agentrl.train.rank_speed import RankSpeed
from agentrl.train.schedule import learning_rate_factor, progress
from agentrl.train.step_times import step_times
from agentrl.weights.collectives import shared_data, shared_decision
from agentrl.weights.file_publisher import Publisher

MAX_UNSAVED = 3  # checkpoints in a row that cannot be written until training stops


class Trainer:
    """Runs a recipe's training on this rank.

    Args:
        recipe: Resolved recipe.
        model_path: Folder of the starting policy; its tokenizer goes into the export.
        run_dir: Folder of the run, ``runs/<name>``.
        engine: Learner with policy and optimizer.
        publisher: Publisher that brings weights to the servers.
        client: Client of the controller on rank 0, ``None`` on the others.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_path: Path,
        run_dir: Path,
        engine: PolicyLearner,
        publisher: Publisher,
        client: ControllerClient | None,
    ) -> None:
        self.recipe = recipe
        self.config = recipe.trainer
        self.model_path = model_path
        self.run_dir = run_dir
        self.engine = engine
        self.publisher = publisher
        self.client = client
        self.step = 0
        self.saver = CheckpointSaver(self.checkpoints, self.config.keep_checkpoints)
        self._elapsed_before = 0.0  # seconds spent by earlier runs of a resumed training
        self._last_save = time.monotonic()
        self._first_mismatch = FirstMismatch(self.config.max_first_mismatch)
        self._logprobs = KeptLogprobs(run_dir, recipe.logging.trainer_logprobs, engine.device)
        self._nonfinite = 0  # consecutive steps with a non-finite gradient
        self._out_of_time = False  # no further step fits the time budget
        self._epochs = 0  # epochs that were over at the latest batch
        self._over = False  # the resumed run made its last step already
        self._unsaved = 0  # checkpoints in a row that could not be written
        self._speed = RankSpeed(engine.device)
        self._step_seconds = 0.0  # length of the latest step, to predict whether another one fits the time budget

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.run_dir / "checkpoints"

    def resume(self) -> None:
        """Loads the newest checkpoint, if there is one, and publishes its version to the servers."""
        found = latest_checkpoint(self.checkpoints)
        if found is None:
            return
        state = load_checkpoint(found, self.engine)
        self.step, self._elapsed_before = state["step"], state["elapsed"]
        self._epochs = state["controller"]["epochs"]
        self._over = why_over(self.recipe, state) is not None
        self._publish(final=self._over)

    def run(self) -> None:
        """Trains until the steps or the time budget are used up, then saves and exports; or saves when asked to."""
        if self.step == 0 and self.recipe.weights.names == "files":
            self._publish(final=False)  # the servers' own weights: what fails on the way fails before an update
        start = time.monotonic()
        final = self._over
        if final:
            self._evaluate_final()
        while not final:
            began = time.monotonic()
            columns, plan = self._fetch(self._elapsed_before + began - start)
            waited = time.monotonic() - began
            self._epochs = plan["epochs"]
            if not plan["episodes"]:  # the tasks are exhausted, and no group of the rest was kept
                self._end_here(self._elapsed_before + waited + began - start)
                break
            final, self._out_of_time = plan["final"], plan["late"]
            metrics = self.update(columns, plan["learning_rate"], oldest=plan["oldest_version"])
            self._first_mismatch.check(metrics, self.engine.measured)
            self._logprobs.write(self.step, columns, self.engine.measured)
            self._check_gradients(metrics, columns)
            updated = time.monotonic()
            self.step += 1
            metrics |= self._speed.measure()
            metrics["time/wait_batch"], metrics["time/update"] = waited, updated - began - waited
            if self._unsaved:
                metrics["checkpoint/failed"] = float(self._unsaved)
            metrics |= self._publish(final=final)
            self._step_seconds = time.monotonic() - began
            if self.saver.stall is not None:  # of the save since the record before this one
                metrics["time/save"], self.saver.stall = self.saver.stall, None
            if self.client is not None:
                self.client.record(self.step, metrics | step_times(metrics, self._step_seconds), final=final)
            if final:
                self._wait_for_evaluation()  # before the last checkpoint: a run resumed from it would not evaluate
            elapsed = self._elapsed_before + time.monotonic() - start
            if shared_decision(final or plan["stop"] or self._save_due(plan), self.engine.device):
                self.save(elapsed)
            if plan["stop"] and not final:
                self._settle_save()  # it counts when it is complete
                if not self._unsaved:
                    self._say_saved()
                    return
        self._settle_save()
        self.export(self.run_dir / "model")
        if self.client is not None:
            self.client.finish()

    def _end_here(self, elapsed: float) -> None:
        """Makes the latest step the final one, after it was recorded; a collective."""
        self._evaluate_final()
        self.save(elapsed)

    def _evaluate_final(self) -> None:
        """Waits until the latest version is evaluated, as the final one; a collective."""
        self._wait_for_evaluation()
        if self.client is not None:
            self.client.record(self.step, {}, final=True)
        self._wait_for_evaluation()

    def _say_saved(self) -> None:
        """Tells the launcher that the checkpoint is complete, after a request to save and stop."""
        if self.client is not None:
            (self.run_dir / "processes" / SAVED_FILE).touch()

    def _fetch(self, elapsed: float) -> tuple[Columns | None, dict[str, Any]]:
        """Returns the batch (on rank 0), and rank 0's decisions about this step (on every rank)."""
        columns, decided = None, {}
        if self.client is not None:
            columns, facts = Columns.from_bytes(self.client.next_batch(self.step))
            decided = self._decide(facts, elapsed) | {"episodes": len(columns.episodes)}
        return columns, shared_data(decided, self.engine.device)

    def _decide(self, batch: dict[str, Any], elapsed: float) -> dict[str, Any]:
        config = self.config
        done = max(batch["done"], progress(self.step, config.total_steps, elapsed, config.time_budget))
        factor = learning_rate_factor(
            self.step,
            done,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
            floor=config.min_learning_rate_ratio,
        )
        late = config.time_budget is not None and elapsed + self._step_seconds >= config.time_budget
        final = self.step + 1 >= config.total_steps or late or batch["last"]
        passes = {name: batch[name] for name in ("epochs", "epochs_before", "oldest_version")}
        stop = (self.run_dir / "processes" / STOP_FILE).exists()
        return {"learning_rate": config.learning_rate * factor, "final": final, "late": late, "stop": stop, **passes}

    def update(self, columns: Columns | None, learning_rate: float, *, oldest: int | None = None) -> dict[str, float]:
        """Runs the update of a step, a collective; returns its metrics.

        Args:
            columns: Episodes of the step on rank 0, which sends the other ranks their shares.
            learning_rate: Learning rate of the step.
            oldest: Oldest version whose tokens carry a loss; ``None``: all do.
        """
        engine, config = self.engine, self.config
        batch = None if columns is None else Batch(columns, config, self.recipe.reward)
        tokens = None if batch is None else batch.tokens
        penalties = values = made = None
        if config.kl_coef > 0 and config.kl_in == "reward":
            penalties = engine.penalties(None if batch is None else batch.branches, tokens)
        if engine.critic is not None:
            values = engine.critic.values(None if batch is None else batch.asked_values(), tokens)
        if batch is not None:
            made = batch.train_batch(version=self.step, penalties=penalties, values=values, oldest=oldest)
        metrics = engine.update(made, learning_rate)
        if penalties is not None and len(penalties):
            metrics["train/kl_reference"] = float(penalties.mean()) / config.kl_coef
        return metrics

    def _check_gradients(self, metrics: dict[str, float], columns: Columns | None) -> None:
        """Saves a batch whose gradient was not finite, and stops training after several such steps in a row.

        Raises:
            TrainingStopped: The gradient was not finite in ``trainer.max_nonfinite`` consecutive steps.
        """
        broken = metrics["train/nonfinite"] or metrics.get("critic/nonfinite")
        self._nonfinite = self._nonfinite + 1 if broken else 0
        if not self._nonfinite:
            return
        file = self.run_dir / "nonfinite" / f"step-{self.step:06d}.jsonl"
        if columns is not None:
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(episode.model_dump_json() + "\n" for episode in columns.to_episodes()))
        if self._nonfinite >= self.config.max_nonfinite:
            raise TrainingStopped(
                f"the gradient was not finite in {self._nonfinite} steps in a row (trainer.max_nonfinite); the batches "
                f"are in {file.parent}. Lower trainer.learning_rate, or look for extreme rewards or logprobs in them"
            )

    def _publish(self, *, final: bool) -> dict[str, float]:
        """Publishes the current version to the servers; a collective.

        Returns:
            Metrics for the step's record: seconds spent, and the fraction of unchanged tensors; complete on rank 0.
        """
        found = {"time/wait_evaluation": self._wait_for_evaluation(self.step, final=final)}
        start = time.monotonic()

        def offer(manifest: WeightManifest) -> None:
            assert self.client is not None
            offered = time.monotonic()
            self.client.publish(self.step, manifest, final=final)
            found.update({"time/gather": offered - start, "time/publish": time.monotonic() - offered})

        self.publisher.publish(self.step, offer)
        if self.publisher.unchanged is not None:
            found["weights/unchanged"] = self.publisher.unchanged
        return found

    def _wait_for_evaluation(self, version: int | None = None, *, final: bool = False) -> float:
        """Waits until ``version`` may be published, without one until no evaluation is running; a collective.

        Every few seconds rank 0 broadcasts the controller's answer, so no timeout of a call or a collective limits the
        wait.

        Returns:
            Seconds waited.
        """
        start = time.monotonic()
        while not shared_decision(self.client is None or self.client.ready(version, final=final), self.engine.device):
            pass
        return time.monotonic() - start

    def _save_due(self, plan: dict[str, Any]) -> bool:
        config = self.config
        by_step = config.save_every > 0 and self.step % config.save_every == 0
        by_time = config.save_seconds is not None and time.monotonic() - self._last_save >= config.save_seconds
        every = config.save_epochs
        by_epoch = every is not None and plan["epochs"] // every > plan["epochs_before"] // every
        return by_step or by_time or by_epoch

    def save(self, elapsed: float) -> None:
        """Starts to write a checkpoint after the current step; ``elapsed`` is the training time in seconds.

        Raises:
            TrainingStopped: The latest :data:`MAX_UNSAVED` checkpoints could not be written.
        """
        self._settle_save()
        self._last_save = time.monotonic()
        budget = self.config.time_budget if self._out_of_time else None
        state = {"elapsed": elapsed, "spent_budget": budget, "controller": {"epochs": self._epochs}}
        try:
            save_checkpoint(self.saver, self.step, self.engine, state, self._rollouts())
        except CheckpointFailed as error:
            self._not_saved(error)

    def _settle_save(self) -> None:
        """Waits until the latest save is complete, and takes its outcome into account; a collective.

        Raises:
            TrainingStopped: The latest :data:`MAX_UNSAVED` checkpoints could not be written.
        """
        try:
            if self.saver.settle():
                self._unsaved = 0
        except CheckpointFailed as error:
            self._not_saved(error)

    def _not_saved(self, error: CheckpointFailed) -> None:
        self._unsaved += 1
        said = f"a checkpoint could not be written in {self.checkpoints} (noticed after step {self.step}): {error}"
        if self._unsaved >= MAX_UNSAVED:
            raise TrainingStopped(f"{said}; {self._unsaved} in a row: training stops") from error
        if self.client is not None:
            print(f"{said}; the one before it stays, and training goes on", flush=True)

    def _rollouts(self) -> dict[str, bytes]:
        """Returns the controller's part of a checkpoint, as a file of it, on rank 0; a collective.

        Raises:
            CheckpointFailed: The controller cannot write its journal.
        """
        data, refused = b"", ""
        if self.client is not None:
            try:
                data = self.client.checkpoint(self.step)
            except ControllerError as error:
                refused = str(error)
        refused = shared_data(refused, self.engine.device)
        if refused:
            raise CheckpointFailed(refused)
        return {ROLLOUTS_FILE: data}

    def export(self, target: Path) -> None:
        """Writes a Hugging Face model folder with the current weights, see :func:`export_model`; a collective."""
        policy, adapter = self.engine.policy, self.config.lora_rank is not None
        weights, trust = exported_weights(policy.model, adapter=adapter), self.recipe.model.trust_remote_code
        export_model(
            policy, weights, target, self.step, self.model_path, self.engine.mesh, adapter=adapter, trust=trust
        )
