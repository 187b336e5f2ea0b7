import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.observe.live import LiveView, evaluation_line, sparkline, step_line
from agentrl.observe.step_table import step_table
from agentrl.observe.summary import evaluation_table, summary_table

STEP = {
    "step": 3,
    "reward/mean_drawn": 0.25,
    "metrics/accuracy": 0.125,
    "tokens/completion_mean": 80.0,
    "staleness/mean": 0.5,
    "time/step": 8.0,
    "time/wait_batch": 3.0,
    "time/update": 4.5,
}
EVALUATION = {
    "eval/accuracy": 0.5,
    "eval/accuracy_low": 0.4,
    "eval/accuracy_high": 0.6,
    "eval/n": 64,
    "eval/invalid": 1,
}


def view(terminal: bool) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    return LiveView(load_recipe("gsm8k_grpo", device="cpu"), Path("runs/x"), console, clock=lambda: 0.0), out


def test_outside_a_terminal_each_step_is_one_line():
    shown, out = view(terminal=False)
    with shown:
        shown.state("starting servers")
        shown.state("starting servers")
        shown.update(STEP)
        shown.update({"step": 3, **EVALUATION})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "starting servers" in lines[0]
    for word in ("step 3/", "reward 0.250", "accuracy 0.125", "tokens 80.0", "8.0 s (wait 3.0, update 4.5)"):
        assert word in lines[1]
    assert "accuracy 0.500 [0.400, 0.600]" in lines[2]
    assert "invalid 1" in lines[2]


def test_in_a_terminal_the_panel_shows_steps_and_evaluation():
    shown, out = view(terminal=True)
    with shown:
        shown.update(STEP)
        shown.update({"step": 3, **EVALUATION})
    assert "0.250" in out.getvalue()
    assert "training, 3 of at most 60 steps done" in out.getvalue()
    assert "evaluation at step 3" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_logprobs_of_another_policy_and_foreign_special_tokens_are_told_once(terminal: bool):
    shown, out = view(terminal)
    with shown:
        shown.update({**STEP, "mismatch/kl": 0.5, "mismatch/kl/age_1": 0.5})
        assert "warning" not in out.getvalue()
        fresh = {"mismatch/kl/age_0": 0.5, "mismatch/tokens/age_0": 500.0, "staleness/max": 0.0}
        for step in (4, 5):
            shown.update({**STEP, "step": step, **fresh, "drift/special": 0.25})
    text = out.getvalue()
    assert "step 4: the server's logprobs are not the trainer's (KL 0.500" in text
    assert "in 25.0% of the episodes the special tokens" in text
    assert "step 5: " not in text


WIDE = {
    **STEP,
    **{f"metrics/{name}": 0.5 for name in ("format", "tool_calls", "tool_calls_ok", "tool_used", "a_rather_long_name")},
}
SICK = {"mismatch/kl/age_0": 0.5, "mismatch/tokens/age_0": 500.0, "staleness/max": 0.0, "drift/special": 0.25}


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (120, 40), (200, 50)])
def test_the_panel_fits_into_the_terminal_and_shows_every_number(width: int, height: int):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system=None)
    shown = LiveView(load_recipe("gsm8k_grpo", device="cpu"), Path("runs/x"), console, clock=lambda: 0.0)
    for step in range(1, 30):
        shown.update({**WIDE, **SICK, "step": step})
    shown.update({"step": 29, **EVALUATION})
    console.print(shown.render())
    lines = out.getvalue().splitlines()
    assert len(lines) <= height and {len(line) for line in lines} == {width} and "…" not in out.getvalue()
    text = " ".join(line.strip("│ ") for line in lines)
    for word in ("step", "reward", "accuracy", "tokens", "age", "step s", "0.250", "0.125", "80.0"):
        assert word in text
    for name in ("format", "tool_calls_ok", "a_rather_long_name", "wait s", "update s"):
        assert name in text
    shown.close()
    out.truncate(0)
    console.print(shown.render())
    text = " ".join(" ".join(line.strip("│ ") for line in out.getvalue().splitlines()).split())
    assert "the server's logprobs are not the trainer's (KL 0.500 on tokens of the same policy version)" in text
    assert (
        "in 25.0% of the episodes the special tokens" in text and text.count("step 2: ") + text.count("step 1: ") == 2
    )


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_step_table_leaves_out_the_least_important_columns(width: int):
    out = io.StringIO()
    Console(file=out, width=width).print(step_table([WIDE, {**WIDE, "step": 4}], width))
    head, *rows = out.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in (head, *rows))
    assert head.split()[:2] == ["step", "reward"]
    wanted = ["step", "reward", "accuracy", "tokens", "age", "step s"]
    there = [name for name in wanted if name in head]
    assert there == wanted[: len(there)] and (width < 60 or there == wanted)
    assert rows[0].split()[0] == "3" and rows[1].split()[0] == "4"
    assert "also:" not in out.getvalue() if width == 200 else "also:" in out.getvalue()


def test_a_step_says_how_many_episodes_failed_and_groups_were_filtered_of_all_that_were_drawn():
    counts = {"rollout/failed": 3.0, "rollout/episodes_drawn": 40.0, "rollout/episodes": 16.0}
    groups = {"rollout/groups_filtered": 2.0, "rollout/groups_drawn": 5.0, "dropped/episodes": 6.0}
    shown, out = view(terminal=False)
    with shown:
        shown.update({**STEP, **counts, **groups, "curriculum/pool": 2.0, "curriculum/retired": 7.0})
    assert "failed 3/40  filtered 2/5  too old 6  pool 2, retired 7" in out.getvalue()
    assert "retired" not in step_line({**STEP, "curriculum/pool": 2.0}, 9), "no task can retire"


def test_a_sparkline_spans_its_own_range():
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([2.0, 2.0], 10) == "▁▁"


def test_the_summary_has_intervals_and_counts():
    out = io.StringIO()
    after = {"eval/accuracy": 0.75, "eval/n": 64}
    Console(file=out, width=120).print(summary_table(EVALUATION, after))
    text = out.getvalue()
    assert "50.0% [40.0%, 60.0%]" in text
    assert "75.0% (no interval)" in text
    assert "64 judged, 1 invalid" in text
    assert "format" not in text


def test_the_summary_has_the_paired_change_and_what_was_set():
    out = io.StringIO()
    after = {**EVALUATION, "eval/accuracy": 0.75, "eval/reward": 0.3}
    changes = {"accuracy": (0.25, 0.125, 0.375, 63), "reward": (0.1, math.nan, math.nan, 63)}
    setup = {"temperature": 0.6, "max_new_tokens": 9, "tasks": 64, "samples": 1}
    Console(file=out, width=160).print(summary_table(EVALUATION, after, changes, setup))
    text = " ".join(out.getvalue().split())
    assert "change, paired [95% interval]" in text
    assert "+25.0 points [+12.5, +37.5]" in text and "+0.100 (no interval)" in text
    assert "change: 63 tasks judged both times" in text
    assert "temperature 0.6, up to 9 tokens an answer, 64 tasks, 1 sample a task" in text


@pytest.mark.parametrize("name", ["accuracy", "invalid_actions_per_turn_and_more"])
def test_at_80_columns_no_interval_of_the_summary_is_broken(name: str):
    before, after = ({f"eval/{name}": 0.125, f"eval/{name}_low": 0.071, f"eval/{name}_high": one} for one in (0.2, 1.0))
    changes = {name: (1.0, 0.943, 1.0, 64)}
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(before, {**after, "eval/reward": 1.2}, changes))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    shown = "+94.3, +100.0" if name == "accuracy" else "+0.943, +1.000"
    assert any(f"[{shown}]" in line and line.count("[") == 3 for line in lines), out.getvalue()
    assert not any(line.rstrip(" │").endswith(",") for line in lines), out.getvalue()


def test_a_metrics_name_is_no_markup():
    out = io.StringIO()
    for width in (80, 120):
        console = Console(file=out, width=width)
        console.print(summary_table({"eval/a[/b]": 0.5}, {"eval/a[/b]": 0.5}, {"a[/b]": (0.0, 0.0, 0.0, 1)}))
        console.print(evaluation_table({"eval/a[/b]": 0.5, "eval/n": 1}, "x[/y]"))
    assert out.getvalue().count("a[/b]") == 4 and "x[/y]" in out.getvalue()


def test_of_many_pass_at_k_a_table_shows_powers_of_two_and_the_last():
    names = {f"eval/pass@{k}": 0.5 for k in range(1, 13)} | {f"eval/pass@{k}_tasks": 9 for k in range(1, 13)}
    out = io.StringIO()
    Console(file=out, width=120).print(evaluation_table({**names, "eval/n": 108}, "x"))
    shown = [int(k) for k in re.findall(r"pass@(\d+)", out.getvalue())]
    assert shown == [1, 2, 4, 8, 12] and "of 9 tasks" in out.getvalue()
    line = evaluation_line({**names, "eval/pass@12_if_wrong": 0.1, "eval/a_episodes": 3, "eval/a": 1.0, "step": 3})
    assert "_tasks" not in out.getvalue() and [int(k) for k in re.findall(r"pass@(\d+)", line)] == [1, 12, 2, 4, 8]
    assert not any(beside in line for beside in ("_tasks", "_if_wrong", "_episodes")) and "a 1.000" in line


@pytest.mark.parametrize("terminal", [False, True])
def test_a_form_that_is_learned_is_shown_as_a_note_and_held_out_success_is_compared_with_the_first(terminal: bool):
    shown, out = view(terminal)
    first, last = (
        {"eval/accuracy": 0.02, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.03, "step": n} for n in (0, 20)
    )
    with shown:
        shown.update(first)
        for n in range(1, 21):
            shown.update({"step": n, "reward/mean_drawn": 0.1 + n / 100, "metrics/format": n / 20})
        assert "the form is learned" not in out.getvalue().lower()
        shown.update({**last, "reward/mean_drawn": 0.3, "metrics/format": 1.0})  # a step with its evaluation
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|│", " ", out.getvalue()).split())
    assert "held-out accuracy went from 2.0%" in text and "The form is learned, not the task" in text
    assert "warning, " not in text and (terminal or "note, step 20: the reward rose from" in text)
