"""Sets the prediction of a run's step beside its measurement, and names the bottleneck.

Guarantees: both sides have the same work: lengths, groups with a signal and computed tokens are the run's own, so that
a difference is one of speed. A part that was not measured says so. Measured seconds are medians over the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.models.sizes import Decoder
from agentrl.plan.assumptions import Assumptions
from agentrl.plan.mesh import Mesh, mesh_of
from agentrl.plan.prediction import Prediction, predict
from agentrl.plan.report import assumption_lines
from agentrl.plan.times import Case, Layout, bound
from agentrl.plan.work import Work, work_of

FACTOR = 1.5  # a part whose two sides differ by more is marked
Step = dict[str, float]


@dataclass(frozen=True)
class Compared:
    """A part of a step, predicted and measured.

    Attributes:
        name: Name of the part.
        predicted: Predicted seconds; ``None`` where nothing predicts it.
        measured: Measured seconds; ``None`` where it was not measured.
        metric: Metrics that it is measured by.
    """

    name: str
    predicted: float | None
    measured: float | None
    metric: str

    @property
    def factor(self) -> float | None:
        """The measured seconds over the predicted ones; ``None`` without both."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class Account:
    """A run's step, part by part.

    Attributes:
        work: The work of a step.
        prediction: The prediction for this work.
        parts: Parts in the order of time.
        step: Seconds of a step, both sides.
        steps: Number of steps.
        bottleneck: Name of the part that sets the step.
        advice: Change to make next.
        assumptions: Assumptions of the prediction.
    """

    work: Work
    prediction: Prediction
    parts: tuple[Compared, ...]
    step: Compared
    steps: int
    bottleneck: str
    advice: tuple[str, ...]
    assumptions: Assumptions


def account(recipe: Recipe, decoder: Decoder, known: Assumptions, steps: Sequence[Step]) -> Account:
    """Compares a run with its prediction.

    Args:
        recipe: The run's resolved recipe.
        decoder: Sizes of the model.
        known: Assumptions, with the lengths of the run's episodes.
        steps: Records of its steps.
    """
    known = known.replaced(*_of_steps(recipe, known, steps))
    case = Case(recipe, decoder, work_of(recipe, known), known)
    found = predict(case, layout_of(recipe))
    parts = _parts(found, steps, exposed=bound(recipe) == 0)
    whole = Compared("step", found.seconds, _median(steps, lambda one: one["time/step"]), "time/step")
    name = bottleneck(parts, whole, overlap=bound(recipe) > 0)
    return Account(case.work, found, parts, whole, len(steps), name, tuple(_advice(name, case, parts)), known)


def layout_of(recipe: Recipe) -> Layout:
    """Returns who does what in a run; on one machine without a GPU all processes share the cores.

    The replicas of ``inference.dp`` share nothing, and count as servers.
    """
    own = recipe.inference
    if recipe.launch.device == "cpu" and recipe.trainer.nodes == 1:
        return Layout(1, 1, Mesh(), shared=True)
    servers = (len(own.urls) or own.servers) * own.dp
    return Layout(servers, own.tp * own.pp, mesh_of(recipe.trainer, recipe.trainer.ranks))


def _of_steps(recipe: Recipe, known: Assumptions, steps: Sequence[Step]) -> tuple[dict[str, float], str]:
    """Returns the share of groups with a signal and of tokens that are computed, as the steps record them."""
    values: dict[str, float] = {}
    signal = _median(steps, lambda one: one.get("train/signal"))
    if signal is not None:
        values["signal"] = signal
    rows = _median(steps, lambda one: one.get("train/rows_tokens"))
    whole = work_of(recipe, known.replaced({**values, "distinct": 1.0}, "")).computed
    if rows is not None and whole > 0:
        values["distinct"] = rows / whole
    return values, "train/signal and train/rows_tokens of the run"


def _median(steps: Sequence[Step], of: Callable[[Step], float | None]) -> float | None:
    values = [value for one in steps if (value := of(one)) is not None]
    return median(values) if values else None


def _parts(found: Prediction, steps: Sequence[Step], *, exposed: bool) -> tuple[Compared, ...]:
    def seconds(*names: str) -> float:
        return sum(part.seconds for part in found.parts if part.name in names)

    def time(*names: str) -> float | None:
        return _median(steps, lambda one: sum(one[n] for n in names) if all(n in one for n in names) else None)

    def rest(one: Step) -> float:
        known = ("time/wait_batch", "time/update", "time/wait_evaluation", "time/gather", "time/publish", "time/save")
        return one["time/step"] - sum(one.get(name, 0.0) for name in known)

    generation = time("time/wait_batch") if exposed else None
    metric = "time/wait_batch" if exposed else "not measured beside training"
    evaluated = any(part.name == "evaluation" for part in found.parts)
    saved = time("time/save")
    parts = [
        Compared("generation", seconds("prompts", "generation"), generation, metric),
        *([] if exposed else [Compared("waiting for a batch", None, time("time/wait_batch"), "time/wait_batch")]),
        Compared("update", seconds("batch", "scoring", "update", "exchange", "optimizer"), time("time/update"),
                 "time/update"),
        Compared("push", seconds("push"), time("time/gather", "time/publish"), "time/gather + time/publish"),
        Compared("waiting for an evaluation", None, time("time/wait_evaluation"), "time/wait_evaluation"),
        *([Compared("evaluation", seconds("evaluation"), None, "not measured beside training")] if evaluated else []),
        *([Compared("save", None, saved, "time/save, of the steps that have it")] if saved is not None else []),
        Compared("rest", None, _median(steps, rest), "time/step without the others"),
    ]  # fmt: skip
    return tuple(parts)


def bottleneck(parts: Sequence[Compared], step: Compared, *, overlap: bool) -> str:
    """Returns the name of the part that sets the step.

    Args:
        parts: Measured parts.
        step: The whole step.
        overlap: Whether generation goes on beside training: then it is the bottleneck where the trainer waits for a
            tenth of the step or more.
    """
    measured = {part.name: part.measured or 0.0 for part in parts}
    if overlap and measured["waiting for a batch"] >= 0.1 * (step.measured or 1.0):
        return "generation"
    own = {name: value for name, value in measured.items() if name != "waiting for a batch"}
    return max(own, key=lambda name: own[name])


def _advice(name: str, case: Case, parts: Sequence[Compared]) -> list[str]:
    """Returns what to change next, the nearest first; every line names a key."""
    recipe, measured = case.recipe, {part.name: part.measured or 0.0 for part in parts}
    rollout, trainer, inference = recipe.rollout, recipe.trainer, recipe.inference
    cpu = recipe.launch.device == "cpu"
    if name == "generation":
        wanted = rollout.batch_size * rollout.group_size
        lines = []
        if bound(recipe) == 0 and not cpu:
            lines.append("rollout.max_staleness=1: sample the next batch while this one is trained on")
        if inference.max_running * max(1, inference.servers) < min(wanted, rollout.max_concurrent):
            lines.append(f"inference.max_running={2 * inference.max_running}: episodes wait for a place on a server")
        if bound(recipe) > 0 and rollout.max_concurrent < 2 * wanted:
            lines.append(
                f"rollout.max_concurrent={2 * wanted}: a group keeps its places until its longest episode ends"
            )
        if not cpu:
            lines.append(f"inference.servers={inference.servers + 1}, with a card of the trainer or one more")
        return [*lines, "sampling.max_new_tokens, a shorter prompt: time grows with the tokens of an episode"]
    if name == "update":
        lines = []
        if trainer.tokens_per_microbatch < case.work.computed / max(1, trainer.ranks):
            lines.append(f"trainer.tokens_per_microbatch={2 * trainer.tokens_per_microbatch}, where memory allows it")
        if trainer.gradient_checkpointing:
            lines.append(
                "trainer.gradient_checkpointing=false, where memory allows it: a third more work in the layers"
            )
        if not cpu:
            lines.append(f"trainer.nproc={2 * trainer.nproc}, with cards of the servers or more")
        if case.work.signal < 0.5:
            lines.append("rollout.skip_uniform_groups=true: more groups with a signal in the same time")
        return [*lines, "rollout.group_size or batch_size, shorter answers: time grows with the tokens of a step"]
    if name == "push":
        return ["weights.transport=broadcast or shm (agentrl recipe run --dry-run says what each costs)",
                "trainer.lora_rank with lora_push=adapter: a push of a thousandth of the bytes"]  # fmt: skip
    if name in ("waiting for an evaluation", "evaluation"):
        return [f"eval.on_push=reserve with several servers, mix with one; eval.every={2 * max(1, recipe.eval.every)}, "
                "or fewer eval.tasks"]  # fmt: skip
    if name == "save":
        return [f"trainer.save_seconds={2 * (trainer.save_seconds or 600):g}: {measured['save']:,.3g} s a save"]
    return ["the trainer's log: what is neither waiting, updating nor pushing should be under a tenth of a step"]


def lines(found: Account, folder: Path) -> list[str]:
    """Returns the account as lines of text."""
    work = found.work
    text = [
        f"run        {folder}: medians of {found.steps} steps",
        f"step       {work.groups:g} groups of {work.members:g}; prompts of {work.prompt:,.0f} tokens, "
        f"{work.sampled:,.0f} sampled tokens, {work.computed:,.0f} computed in the update",
        "",
        f"  {'part':<28}{'predicted':>12}{'measured':>12}{'factor':>9}  measured by",
    ]
    for part in (*found.parts, found.step):
        factor = part.factor
        mark = "" if factor is None or 1 / FACTOR <= factor <= FACTOR else " !"
        shown = "" if factor is None else f"{factor:.2f}"
        numbers = f"{_seconds(part.predicted):>12}{_seconds(part.measured):>12}{shown:>9}{mark:<2}"
        text.append(f"  {part.name:<28}{numbers} {part.metric}")
    text += ["", f"bottleneck {found.bottleneck}", *(f"  next     {line}" for line in found.advice)]
    if any(part.factor is not None and not 1 / FACTOR <= part.factor <= FACTOR for part in found.parts):
        text += ["", f"! differs by more than {FACTOR:g}: an assumption is wrong here, or other processes were busy. "
                     "--probe 60 measures this machine"]  # fmt: skip
    return [*text, "", *assumption_lines(found.assumptions)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g} s"


def as_data(found: Account) -> dict[str, Any]:
    """Returns the account as plain data."""
    parts = [asdict(part) | {"factor": part.factor} for part in (*found.parts, found.step)]
    work = {name: getattr(found.work, name) for name in ("prompt", "answer", "sampled", "computed", "context")}
    return {
        "steps": found.steps,
        "work": work,
        "parts": parts,
        "bottleneck": found.bottleneck,
        "next": list(found.advice),
        "assumptions": [asdict(one) for one in found.assumptions.all()],
    }
