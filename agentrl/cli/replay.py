"""``agentrl replay``: runs recorded training steps once more, with no server, and shows what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.completion import complete_run

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.inference.replayed import PromptDifference
    from agentrl.launch.replay import Replay, StepReplay

SHOWN = 5  # differing episodes of a step that are shown
AROUND = 8  # tokens shown before the first that differs
SMALL = 1e-3  # values of a metric below this are compared absolutely
UPDATE_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # of a metric of the update, relative


def replay(
    run: Annotated[
        Path,
        typer.Argument(help="A recorded run's folder, or its name below runs/.", autocompletion=complete_run),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="The step, as metrics.jsonl counts them. Default: all.", min=1)
    ] = None,
    update: Annotated[
        bool,
        typer.Option(help="Also compute the update of the first step, or of one with a checkpoint before it."),
    ] = True,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON line for each step.")] = False,
) -> None:
    """Run workflow, parsing, masks, rewards, advantages and update of recorded steps once more, with no server.

    Needs a run with logging.record=true. The model's answers are the recorded ones; everything else is computed by
    the code as it is now. The exit code is 1 if something differs.
    """
    import json

    from rich.console import Console

    from agentrl.launch.needed_packages import TRAINING, require_packages

    require_packages(dict.fromkeys(TRAINING, "agentrl replay"))
    from agentrl.launch.replay import Replay

    made = Replay(run if run.is_dir() else Path("runs") / run)
    console = Console(highlight=False)
    same = True
    for number in [step] if step is not None else made.steps():
        found = made.run(number)
        found = made.update(found) if update and (step is not None or number == 1) else found
        agrees = is_same(found, made.recipe.trainer.dtype)
        same = same and agrees
        if json_lines:
            print(json.dumps(as_json(found, agrees)))
        else:
            show(found, made, console)
    if not same:
        raise typer.Exit(1)


def is_same(found: "StepReplay", dtype: str) -> bool:
    """Whether a replayed step is what the run recorded; metrics of the update may differ in their last digits.

    A step of which nothing can be replayed is not.
    """
    close = all(is_close(then, now, dtype) for then, now in found.update.values())
    return bool(found.episodes) and not found.differing and not found.advantages and close


def is_close(then: float, now: float, dtype: str) -> bool:
    """Whether two values of a metric agree as far as sums in another order do."""
    return abs(now - then) <= UPDATE_TOLERANCE[dtype] * max(abs(then), SMALL)


def as_json(found: "StepReplay", same: bool) -> dict[str, object]:
    """Returns a replayed step as plain data."""
    differing = [
        {"group": one.recorded.group_id, "episode": one.recorded.index, "differs": one.what} for one in found.differing
    ]
    return {
        "step": found.step,
        "same": same,
        "episodes": len(found.episodes),
        "differing": differing,
        "left_out": found.left_out,
        "advantages_differ_by": found.advantages,
        "advantages_not_compared": found.why_none,
        "update_not_computed": found.why_no_update,
        "update": {name: {"recorded": then, "now": now} for name, (then, now) in found.update.items()},
    }


def show(found: "StepReplay", made: "Replay", console: "Console") -> None:
    """Prints a replayed step."""
    from rich.text import Text

    differing = found.differing
    count, same = len(found.episodes), len(found.episodes) - len(differing)
    console.print(f"step {found.step}: {count} episodes, {same} the same", style="bold")
    for why, number in found.left_out.items():
        console.print(Text(f"  {number} left out: {why}"), soft_wrap=True)
    for one in differing[:SHOWN]:
        console.print(Text(f"  group {one.recorded.group_id}, episode {one.recorded.index}: {one.what}"))
        if one.prompts and one.prompts[0].recorded:
            for side, text in prompt_sides(one.prompts[0], made):
                console.print(Text(f"    {side:8}  {text}"))
    if len(differing) > SHOWN:
        console.print(f"  and {len(differing) - SHOWN} more")
    if found.advantages is None:
        console.print(Text(f"  advantages not compared: {found.why_none}"))
    else:
        words = "the same" if found.advantages == 0 else f"differ by up to {found.advantages:.3g}"
        console.print(f"  advantages {words}")
    if found.why_no_update:
        console.print(Text(f"  update not computed: {found.why_no_update}"))
    elif found.update:
        show_update(found.update, made.recipe.trainer.dtype, console)


def show_update(update: Mapping[str, tuple[float, float]], dtype: str, console: "Console") -> None:
    """Prints how the metrics of an update compare: those that differ, and the loss."""
    wrong = {name: pair for name, pair in update.items() if not is_close(*pair, dtype)}
    loss = f" (train/loss {update['train/loss'][1]:.6g})" if "train/loss" in update and not wrong else ""
    console.print(f"  update: {len(update) - len(wrong)} of {len(update)} metrics the same{loss}")
    for name, (then, now) in wrong.items():
        console.print(f"    {name} {then:.6g} in the run, {now:.6g} now", soft_wrap=True)


def prompt_sides(one: "PromptDifference", made: "Replay") -> list[tuple[str, str]]:
    """Returns both prompts around the first token that differs, the token in brackets."""
    from agentrl.observe.shown_text import quoted

    data = made.template.token_bytes

    def text(ids: list[int]) -> str:
        before = "".join(quoted(data(token)) for token in ids[max(0, one.at - AROUND) : one.at])
        here = f"[{ids[one.at]} {quoted(data(ids[one.at]))}]" if one.at < len(ids) else "[the end]"
        after = "".join(quoted(data(token)) for token in ids[one.at + 1 : one.at + 1 + AROUND])
        return f"...{before}{here}{after}"

    return [("recorded", text(one.recorded)), ("now", text(one.now))]
