"""Rules about what the policy learns: whether groups still teach, and whether the reward stands for success.

Guarantees: a task that is solved is no fault: groups with equal rewards, little entropy and answers at their limit are
findings only where answers are wrong. A rule whose metrics are missing reports nothing.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

from agentrl.observe.finding import RECENT, Finding, Record, newest, recent, steps_of_enough_groups

FEW_SIGNALS, MANY_CUT, LOW_ENTROPY = 0.2, 0.5, 0.02
AS_MUCH = 0.5  # share of the reward of answers that ended; cut ones that earn less are hurt by the limit
NEXT_TO_NOTHING = 0.1  # the same share: cut answers that earn more are judged over SHORT_RUN steps, for few have ended
SOLVED = 0.5  # share of all groups that every answer solves, from which groups with equal rewards are a success
CREEP = 1.5  # factor by which answers may grow longer without a growing reward
SHRUNK = 1 / 3  # length of now as a share of the run's first
LONG_ENOUGH = 15  # tokens of a first answer from which it can collapse
SHORT_RUN = 10  # steps before a change of length is judged, or a reward that few answers had
OF_THE_GAIN = 0.25  # share of the reward's gain that success has to gain, where it is part of the reward
CLEAR = 3.0  # standard errors from which the reward's gain is no noise
GAINED = 0.05  # of the reward: a smaller gain is not judged
SUCCESS = "accuracy"


def signal(steps: Sequence[Record]) -> Finding | None:
    """Finds groups without differences in their rewards, unless most are solved."""
    count = steps_of_enough_groups(steps)
    share = recent(steps, "rollout/groups_with_signal", count)
    if share is None or share >= FEW_SIGNALS or "distill/reverse_kl" in steps[-1]:  # a teacher teaches every token
        return None
    taught = recent(steps, "train/signal", count)
    if taught is not None and taught >= FEW_SIGNALS:  # a critic, each turn or the reward itself teaches such groups
        return None
    if (recent(steps, "rollout/all_solved", count) or 0.0) >= SOLVED:
        return None
    never = recent(steps, "rollout/none_solved", count)
    told = f"; in {never:.0%} no answer is right" if never is not None else ""
    return Finding(
        "signal",
        f"only {share:.0%} of the groups have answers with different rewards{told}",
        "The tasks are too easy or too hard for the policy now; groups with uniform rewards teach nothing.",
        "Use other tasks, a worked example in the prompt, a finer-grained reward (for the form of a call, say), more "
        "answers per task (rollout.group_size), or rollout.skip_uniform_groups=true.",
    )


def entropy(steps: Sequence[Record]) -> Finding | None:
    """Finds a policy that always gives the same answer to tasks that it does not solve."""
    trained = [step for step in steps if "train/entropy" in step and step.get("train/tokens", 1.0) > 0]
    value, share = recent(trained, "train/entropy"), recent(steps, "rollout/groups_with_signal")
    if value is None or share is None or value >= LOW_ENTROPY or share >= FEW_SIGNALS:
        return None
    if not any(step is trained[-1] for step in steps[-RECENT:]):  # nothing was trained of late
        return None
    first = fmean(step["train/entropy"] for step in trained[:RECENT])
    if (recent(steps, "rollout/all_solved") or 0.0) >= SOLVED:
        return None
    return Finding(
        "entropy",
        f"the entropy is {value:.3f} nats per token (at first {first:.3g})",
        "The policy always gives the same answer, so the rewards within a group no longer differ.",
        "Use a lower learning rate, trainer.clip_eps_high=0.28, trainer.entropy_coef or a KL term.",
    )


def truncation(steps: Sequence[Record]) -> Finding | None:
    """Finds answers that reach the length limit, unless most right answers do, or answers that end earn no more."""
    answers, episodes = recent(steps, "tokens/truncated") or 0.0, recent(steps, "rollout/ended_length") or 0.0
    share = max(answers, episodes)
    right = recent(steps, f"metrics/{SUCCESS}") or 0.0
    if not _hurt_by_the_limit(steps):
        return None
    if share <= MANY_CUT or right + share - 1 > right / 2:  # at least so many answers are both
        return None
    return Finding(
        "truncation",
        f"{share:.0%} of the {'answers' if share == answers else 'last answers of episodes'} reach the length limit",
        "sampling.max_new_tokens is too small for what the model writes, or it does not end its answers.",
        "Raise the limit, penalise overlong answers (agentrl.rewards), or set trainer.mask_truncated=true. Harmless if "
        "the reward depends only on the beginning.",
    )


def _hurt_by_the_limit(steps: Sequence[Record]) -> bool:
    """Says whether answers that are cut earn less than those that end; also where that was not measured."""
    keys = "rollout/reward_truncated", "rollout/reward_finished"
    cut, finished = (recent(steps, key) for key in keys)
    if cut is None or finished is None or cut <= 0:
        return True
    if cut > NEXT_TO_NOTHING * finished:
        cut, finished = (recent(steps, key, SHORT_RUN) for key in keys)
    return cut is not None and finished is not None and cut < AS_MUCH * finished


def creep(steps: Sequence[Record]) -> Finding | None:
    """Finds answers that grow longer while the reward does not grow."""
    parts = quarters(steps, "tokens/completion_mean"), quarters(steps, "reward/mean_drawn")
    if parts[0] is None or parts[1] is None:
        return None
    if any(key.startswith("reward/") and key.count("/") == 2 for key in steps[-1]):
        return None  # roles have rewards of their own: those of a zero-sum game do not grow together
    (old_length, length), (old_reward, reward) = (tuple(map(fmean, part)) for part in parts if part is not None)
    if length < CREEP * old_length or reward > old_reward:
        return None
    return Finding(
        "length",
        f"answers grew from {old_length:.0f} to {length:.0f} tokens while the reward went from {old_reward:.3f} to "
        f"{reward:.3f}",
        "Length is rewarded by itself: a mean over each sequence makes long wrong answers cheap.",
        "Use trainer.aggregation=token or constant (Dr. GRPO), or a length penalty.",
    )


def collapse(steps: Sequence[Record]) -> Finding | None:
    """Finds answers that shrink to a part of their first length while no more tasks are solved."""
    last, first = recent(steps, "tokens/completion_mean"), recent(steps[:RECENT], "tokens/completion_mean")
    if len(steps) < SHORT_RUN or last is None or first is None or first < LONG_ENOUGH or last > SHRUNK * first:
        return None
    before, after = recent(steps[:RECENT], f"metrics/{SUCCESS}"), recent(steps, f"metrics/{SUCCESS}")
    if before is not None and after is not None and after - before > GAINED:
        return None  # it has stopped rambling
    said = "" if before is None or after is None else f" while accuracy went from {before:.1%} to {after:.1%}"
    return Finding(
        "collapse",
        f"answers shrank from {first:.0f} to {last:.0f} tokens{said}",
        "A part of the reward that needs no reasoning, such as one for the answer's format, is earned fastest by the "
        "shortest answer.",
        "Add a KL term (trainer.kl_coef), pay for the form only beside a right answer, or start from a policy that "
        "already keeps the form (SFT).",
    )


def proxy(records: Sequence[Record], steps: Sequence[Record]) -> Finding | None:
    """Finds a reward that rises while success, in training or on held-out tasks, does not."""
    rewards = quarters(steps, "reward/mean_drawn")
    if rewards is None or any(key.startswith("reward/") and key.count("/") == 2 for key in steps[-1]):
        return None
    old, new = map(fmean, rewards)
    error = (sum(stdev(part) ** 2 / len(part) for part in rewards)) ** 0.5
    gain = new - old
    if gain < GAINED or gain < CLEAR * error:
        return None
    told = _unmoved(records, steps, OF_THE_GAIN * gain)
    if not told:
        return None
    sampled = quarters(steps, f"metrics/{SUCCESS}")
    memorised = sampled is not None and fmean(sampled[1]) - fmean(sampled[0]) >= OF_THE_GAIN * gain
    form = None if memorised else _explanation(steps, gain)
    symptom = f"the reward rose from {old:.3f} to {new:.3f} while {told}"
    if form is not None:
        name, before, after = form
        return Finding(
            "form",
            symptom,
            f"The form is learned, not the task: {name} rose from {before:.0%} to {after:.0%}.",
            "Success may follow; if it does not, the tasks are too hard for the model: use easier ones, a larger "
            "model, or pay for the form only beside a right answer.",
            level="note",
        )
    return Finding(
        "proxy",
        symptom,
        "The policy earns the reward without solving more tasks: the reward is hacked, or the gain is memorised.",
        "Read episodes of the last steps (episodes.jsonl) for what is paid; judge success itself, or hold the policy "
        "near its start with trainer.kl_coef.",
    )


def _unmoved(records: Sequence[Record], steps: Sequence[Record], least: float) -> str:
    """Says which measure of success gained less than ``least``; empty if one clearly gained, or none is known."""
    first, last = (newest(part, f"eval/{SUCCESS}") for part in (list(reversed(records)), records))
    held_out = ""
    if first is not None and last is not None and first is not last:
        before, after = first[f"eval/{SUCCESS}"], last[f"eval/{SUCCESS}"]
        if last.get(f"eval/{SUCCESS}_low", after) > before + least:
            return ""
        if last.get(f"eval/{SUCCESS}_high", after) < before + least:
            held_out = f"held-out accuracy went from {before:.1%} to {after:.1%}"
    sampled = quarters(steps, f"metrics/{SUCCESS}")
    if sampled is not None and fmean(sampled[1]) - fmean(sampled[0]) < least:
        return f"accuracy went from {fmean(sampled[0]):.1%} to {fmean(sampled[1]):.1%}"
    return held_out


def _explanation(steps: Sequence[Record], gain: float) -> tuple[str, float, float] | None:
    """Returns the metric of the environment, other than success, that rose most, before and after.

    Metrics beyond 1, such as numbers of calls, are no shares and explain nothing. ``None`` if none rose by at least the
    reward's ``gain``: it could not be paid for by as much as that.
    """
    found: list[tuple[float, str, float, float]] = []
    for key in steps[-1]:
        if not key.startswith("metrics/") or key == f"metrics/{SUCCESS}":
            continue
        parts = quarters(steps, key)
        if parts is None or max(map(max, parts)) > 1 or min(map(min, parts)) < 0:
            continue
        before, after = map(fmean, parts)
        found.append((after - before, key.removeprefix("metrics/"), before, after))
    rise, name, before, after = max(found, default=(0.0, "", 0.0, 0.0))
    return (name, before, after) if rise >= gain else None


def quarters(steps: Sequence[Record], key: str) -> tuple[list[float], list[float]] | None:
    """Returns a metric in the first and the last quarter of a run; ``None`` if these are short or a step lacks it."""
    count = len(steps) // 4
    if count < RECENT or not all(key in step for step in steps):
        return None
    return [step[key] for step in steps[:count]], [step[key] for step in steps[-count:]]
