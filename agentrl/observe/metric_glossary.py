"""The glossary of all metrics that a run writes: unit, over what, good range.

Guarantees: one entry for each name or family of names; :func:`described` finds it for any written name, and
``docs/metrics.md`` is this list as a page (``python -m agentrl.observe.metric_glossary``). A test compares the list
with what runs write.
"""

import re
from dataclasses import dataclass
from functools import cache

AGED = "; with /age_0, /age_1 and /age_2+ over the tokens of that age alone"
_DRAWN = "all groups that the step counts"
_KEPT = "the episodes trained on"
_ROUTED = "tokens with recorded experts that were computed before the first update, prompts included"
_MEASURED = "the tokens measured before the first update"
_TRAINED = "the trained tokens"


@dataclass(frozen=True)
class Metric:
    """An entry of the glossary.

    Attributes:
        name: Name, or a family of names with ``*`` for its free part.
        unit: Unit; empty for a pure number.
        meaning: Explanation of the metric.
        over: Elements that it is a mean, sum or share of.
        good: Range of a healthy run; empty where there is none in general.
    """

    name: str
    unit: str
    meaning: str
    over: str
    good: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the names that the entry stands for."""
        return re.compile(re.escape(self.name).replace(r"\*", "(.+)"))


GLOSSARY: tuple[Metric, ...] = (
    Metric(
        "reward/mean_drawn", "", "mean reward, as the environment gave it", f"{_DRAWN}, filtered ones included", "rises"
    ),
    Metric("reward/mean_kept", "", "mean reward", _KEPT),
    Metric("reward/*/mean_drawn", "", "mean reward of a role with a reward of its own", _DRAWN),
    Metric("reward/*/mean_kept", "", "mean reward of a role with a reward of its own", _KEPT),
    Metric(
        "metrics/*",
        "",
        "mean of a number that the environment reports, accuracy say",
        f"the episodes of {_DRAWN} that report it",
    ),
    Metric("metrics_kept/*", "", "the same number", f"{_KEPT} that report it"),
    Metric("rollout/episodes", "episodes", "number of episodes", "the batch"),
    Metric("rollout/episodes_drawn", "episodes", "number of episodes", _DRAWN),
    Metric("rollout/groups_drawn", "groups", "number of groups", "the step"),
    Metric("rollout/groups_kept", "groups", "groups that are trained on", "the step"),
    Metric("rollout/groups_filtered", "groups", "groups left out for equal rewards", "the step", "a minority"),
    Metric("rollout/groups_failed", "groups", "groups with too few usable episodes", "the step", "0"),
    Metric("rollout/groups_stale", "groups", "groups that became too old", "the step", "0"),
    Metric(
        "rollout/groups_short",
        "groups",
        "trained groups with fewer usable episodes than rollout.group_size",
        "the step",
        "0",
    ),
    Metric("rollout/groups_cancelled", "groups", "groups cancelled because the run ended or was resumed", "the step"),
    Metric(
        "rollout/groups_with_signal", "share", "groups that have rewards that differ", "the batch's groups", "above 0.3"
    ),
    Metric("rollout/filtered_all_solved", "groups", "filtered groups that all episodes solved", "the step"),
    Metric("rollout/filtered_none_solved", "groups", "filtered groups that no episode solved", "the step"),
    Metric(
        "rollout/all_solved",
        "share",
        "groups that all episodes solved",
        _DRAWN,
        "below 0.5: else the tasks are too easy",
    ),
    Metric(
        "rollout/none_solved",
        "share",
        "groups that no episode solved",
        _DRAWN,
        "below 0.5: else the tasks are too hard",
    ),
    Metric("rollout/truncated", "share", "episodes that were cut by a limit", _KEPT, "below 0.1"),
    Metric("rollout/reward_truncated", "", "mean reward of the episodes that were cut", "the cut ones of " + _KEPT),
    Metric("rollout/reward_finished", "", "mean reward of the episodes that were not cut", "the others of " + _KEPT),
    Metric(
        "rollout/controller_cpu", "share", "time in which the controller's process used a core", "the step", "below 0.8"
    ),
    Metric("rollout/ended_*", "share", "episodes with this stop reason", _KEPT),
    Metric("rollout/episode_seconds", "s", "mean duration of an episode", _KEPT),
    Metric("rollout/failed", "episodes", "episodes that failed", _DRAWN, "0"),
    Metric("rollout/failed_*", "episodes", "episodes that failed in this way", _DRAWN, "0"),
    Metric("rollout/abandoned", "episodes", "episodes whose teardown was given up", _DRAWN, "0"),
    Metric("rollout/retried", "attempts", "failed attempts that were made again", _DRAWN, "0"),
    Metric(
        "rollout/stragglers", "episodes", "episodes cancelled because their group was complete", "the step's groups"
    ),
    Metric("rollout/straggler_tokens", "tokens", "tokens that they had sampled", "the step's groups"),
    Metric(
        "rollout/extra_*_ratio",
        "ratio",
        "mean of the trained episodes over that of all started ones",
        "groups with stragglers",
        "near 1",
    ),
    Metric("tokens/completion_mean", "tokens", "mean length of an answer", "all answers of the batch"),
    Metric("tokens/completion_max", "tokens", "length of the longest answer", "the batch"),
    Metric("tokens/completion_total", "tokens", "sampled tokens", "the batch"),
    Metric("tokens/truncated", "share", "answers cut at their length limit", "all answers of the batch", "below 0.1"),
    Metric(
        "staleness/mean", "versions", "mean age of an episode's oldest token", _KEPT, "at most rollout.max_staleness"
    ),
    Metric("staleness/max", "versions", "age of the oldest token", _KEPT),
    Metric("staleness/bound", "versions", "bound of the age that holds in this step", "the step"),
    Metric("staleness/over_bound", "share", "episodes older than the bound", _KEPT, "0"),
    Metric("staleness/masked", "share", "sampled tokens masked for their age", "the batch's tokens"),
    Metric("dropped/episodes", "episodes", "episodes dropped for their age, or with their group", "the step", "0"),
    Metric("dropped/tokens", "tokens", "their sampled tokens", "the step"),
    Metric(
        "dropped/tokens_share",
        "share",
        "their share of the sampled tokens",
        "dropped and trained episodes",
        "below 0.1",
    ),
    Metric("dropped/tokens_mean", "tokens", "mean length of the dropped episodes", "the dropped episodes"),
    Metric("dropped/turns_mean", "turns", "mean number of answers of the dropped episodes", "the dropped episodes"),
    Metric("dropped/reward_mean", "", "mean reward of the dropped episodes", "those with a reward"),
    Metric("trained/tokens_mean", "tokens", "mean length of the trained episodes, where some were dropped", _KEPT),
    Metric("trained/turns_mean", "turns", "mean number of answers of them", _KEPT),
    Metric("trained/reward_mean", "", "mean reward of them", _KEPT),
    Metric(
        "drift/special",
        "share",
        "conversations whose special tokens differ from the template's rendering",
        "episodes that were measured",
        "0",
    ),
    Metric(
        "drift/text",
        "share",
        "conversations with other ids that differ from the rendering",
        "episodes that were measured",
        "0",
    ),
    Metric(
        "distill/reverse_kl",
        "nats",
        "mean of behavior minus teacher logprob",
        "the tokens that a teacher scored",
        "falls",
    ),
    Metric("curriculum/pool", "pools", "number of the open pools", "the step"),
    Metric("curriculum/solve_rate", "share", "solve rate of the newest pool", "its latest groups"),
    Metric("curriculum/retired", "tasks", "tasks retired as solved", "the run so far"),
    Metric("curriculum/hard", "tasks", "tasks held to be too hard", "the run so far"),
    Metric("weights/paused_s", "s", "time a server was paused for the push", "the servers", "well below time/step"),
    Metric("weights/unchanged", "0 or 1", "whether the update changed no served weight", "the step", "0"),
    Metric("train/loss", "", "loss of the update", _TRAINED),
    Metric("train/tokens", "tokens", "number of trained tokens", "the step's updates"),
    Metric("train/tokens_share", "share", "trained tokens among the sampled ones", "the batch", "near 1"),
    Metric("train/signal", "share", "conversations with an advantage other than 0", "the batch", "above 0.3"),
    Metric("train/entropy", "nats", "mean entropy of the policy", _MEASURED, "falls slowly, stays above 0.1"),
    Metric("train/measured_share", "share", "tokens measured before the first update", "the sampled tokens"),
    Metric("train/grad_norm", "", "norm of the gradient before clipping", "the step's updates", "steady"),
    Metric("train/learning_rate", "", "learning rate", "the step"),
    Metric("train/clip_fraction", "share", "tokens whose ratio was clipped", _TRAINED, "below 0.2"),
    Metric(
        "train/update_ratio_mean", "", "mean of |r - 1|, with r the importance ratio in the loss", _TRAINED, "below 0.1"
    ),
    Metric("train/update_ratio_max", "", "largest |r - 1|", _TRAINED),
    Metric("train/update_ratio_token", "token id", "token of the largest |r - 1|", _TRAINED),
    Metric("train/correction", "", "mean correction weight", _TRAINED, "near 1"),
    Metric("train/kl_reference", "nats", "mean KL estimate to the reference policy", _TRAINED, "below 0.5"),
    Metric(
        "train/router_loss",
        "",
        "load-balancing loss of the routers, without its coefficient; the experts of a token if all are chosen alike",
        "the computed tokens, prompts included",
        "falls",
    ),
    Metric("train/masked_ratio", "share", "tokens masked for their ratio", _TRAINED, "below 0.05"),
    Metric("train/rejected", "share", "tokens of rejected sequences", _TRAINED, "below 0.1"),
    Metric("train/masked", "share", "tokens left out by a mask of the batch", "the batch's tokens"),
    Metric("train/masked_cov", "share", "tokens left out by Clip-Cov", "the batch's tokens"),
    Metric("train/penalized_cov", "share", "tokens penalised by KL-Cov", "the batch's tokens"),
    Metric(
        "train/skipped",
        "share",
        "updates that were skipped: no signal, or a gradient that is not finite",
        "the step's updates",
        "0",
    ),
    Metric("train/nonfinite", "share", "updates whose gradient is not finite", "the step's updates", "0"),
    Metric("train/microbatches", "micro-batches", "number of micro-batches of a rank", "the step"),
    Metric("train/rows_tokens", "tokens", "tokens in the rows of a rank, repeated beginnings once", "the step"),
    Metric(
        "train/token_accuracy",
        "share",
        "tokens that the model finds most likely (supervised)",
        "the batch's target tokens",
        "rises",
    ),
    Metric(
        "train/pair_accuracy",
        "share",
        "pairs in which the chosen answer scores higher (rm, dpo)",
        "the batch's pairs",
        "rises",
    ),
    Metric(
        "train/margin", "", "mean score of the chosen minus the rejected answer (rm, dpo)", "the batch's pairs", "rises"
    ),
    Metric("train/reward_chosen", "", "mean score of the chosen answer (dpo)", "the batch's pairs"),
    Metric("train/reward_rejected", "", "mean score of the rejected answer (dpo)", "the batch's pairs"),
    Metric("train/logp_chosen", "nats", "mean logprob of the chosen answer (dpo)", "the batch's pairs"),
    Metric("train/logp_rejected", "nats", "mean logprob of the rejected answer (dpo)", "the batch's pairs"),
    Metric("train/reward_min", "", "lowest score (rm)", "the batch's answers"),
    Metric("train/reward_mean", "", "mean score (rm)", "the batch's answers"),
    Metric("train/reward_max", "", "highest score (rm)", "the batch's answers"),
    Metric("train/epoch", "epochs", "passes over the data made so far (supervised)", "the run"),
    Metric("routing/recorded", "share", "predictions of tokens whose experts the server named", _MEASURED, "1"),
    Metric(
        "routing/tokens_differing",
        "share",
        "tokens for which a layer of the trainer would have chosen other experts than the server did",
        _ROUTED,
    ),
    Metric(
        "routing/choices_differing",
        "share",
        "layers in which the trainer would have chosen other experts, mean over tokens",
        _ROUTED,
        "below 0.1",
    ),
    Metric("critic/loss", "", "loss of the critic", "the sampled tokens", "falls"),
    Metric("critic/explained", "share", "explained variance of the returns", "the sampled tokens", "above 0"),
    Metric("critic/grad_norm", "", "norm of the critic's gradient", "the step's updates"),
    Metric("critic/nonfinite", "share", "critic updates whose gradient is not finite", "the step's updates", "0"),
    Metric("critic/warmup", "0 or 1", "whether the critic alone learns in this step", "the step"),
    Metric("mismatch/tokens*", "tokens", "number of measured tokens", _MEASURED + AGED),
    Metric(
        "mismatch/log_ratio*",
        "nats",
        "mean |log r|, r = trainer's over behavior probability",
        _MEASURED + AGED,
        "below 0.01 at age 0",
    ),
    Metric("mismatch/kl_k1*", "nats", "KL(behavior || trainer), estimator k1", _MEASURED + AGED, "near 0"),
    Metric("mismatch/kl*", "nats", "KL(behavior || trainer), estimator k3", _MEASURED + AGED, "below 0.001 at age 0"),
    Metric("mismatch/chi2_sequence*", "", "the same for the products of r over a sequence", _MEASURED + AGED),
    Metric("mismatch/chi2*", "", "mean (r - 1)²", _MEASURED + AGED, "near 0"),
    Metric("mismatch/ess_sequence*", "share", "the same for the products of r over a sequence", _MEASURED + AGED),
    Metric("mismatch/ess*", "share", "effective sample size", _MEASURED + AGED, "above 0.9"),
    Metric("mismatch/perplexity_behavior*", "", "exponential of the mean negative behavior logprob", _MEASURED + AGED),
    Metric("mismatch/perplexity_trainer*", "", "the same under the trainer's policy", _MEASURED + AGED),
    Metric("mismatch/clip_low*", "share", "tokens whose ratio is below the clip range", _MEASURED + AGED, "below 0.1"),
    Metric("mismatch/clip_high*", "share", "tokens whose ratio is above the clip range", _MEASURED + AGED, "below 0.1"),
    Metric(
        "mismatch/correction_low*", "share", "tokens whose correction weight a bound changed, below 1", _MEASURED + AGED
    ),
    Metric(
        "mismatch/correction_high*",
        "share",
        "tokens whose correction weight a bound changed, above 1",
        _MEASURED + AGED,
    ),
    Metric("mismatch/ratio_max*", "", "largest |r - 1|", _MEASURED + AGED, "below 0.01 at age 0 in float32"),
    Metric("mismatch/ratio_token*", "token id", "token of the largest |r - 1|", _MEASURED + AGED),
    Metric("time/step", "s", "time of a whole step", "the step"),
    Metric(
        "time/wait_batch",
        "s",
        "time the trainer waited for its batch",
        "the step",
        "small: else generation is the bottleneck",
    ),
    Metric("time/update", "s", "time of the update", "the step"),
    Metric("time/wait_evaluation", "s", "time the trainer waited for an evaluation", "the step"),
    Metric("time/gather", "s", "time to gather the new weights", "the step"),
    Metric("time/publish", "s", "time until the servers held the new version", "the step"),
    Metric("time/save", "s", "time a checkpoint held the step up", "the step"),
    Metric("time/overhead_share", "share", "time that was neither waiting nor updating", "the step", "below 0.2"),
    Metric("ranks/slowest", "rank", "rank that takes longest for the same products, computed alone", "the step"),
    Metric(
        "ranks/slowdown",
        "ratio",
        "its time over the median of the other ranks'",
        "products of some milliseconds in the step",
        "below 1.5: all ranks wait for it",
    ),
    Metric("ranks/slow", "ranks", "ranks whose slowdown was above 1.5 in ten steps in a row", "the last steps", "0"),
    Metric(
        "checkpoint/failed",
        "checkpoints",
        "checkpoints that could not be written since the last good one",
        "the run",
        "0",
    ),
    Metric("eval/n", "episodes", "judged episodes", "the evaluation"),
    Metric("eval/invalid", "episodes", "episodes that failed and are in no mean", "the evaluation", "0"),
    Metric("eval/abandoned", "episodes", "episodes whose teardown was given up", "the evaluation", "0"),
    Metric("eval/version_min", "version", "oldest policy version that an episode saw", "the evaluation"),
    Metric("eval/version_max", "version", "newest policy version that an episode saw", "the evaluation"),
    Metric("eval/examples", "examples", "held-out examples (supervised)", "the evaluation"),
    Metric("eval/*_low", "", "lower bound of the 95% interval", "as the metric"),
    Metric("eval/*_high", "", "upper bound of the 95% interval", "as the metric"),
    Metric("eval/*_if_wrong", "", "the metric if all invalid episodes were wrong", "all episodes"),
    Metric("eval/*_if_right", "", "the metric if all invalid episodes were right", "all episodes"),
    Metric("eval/*_tasks", "tasks", "tasks with at least k valid samples", "the evaluation"),
    Metric("eval/*_episodes", "episodes", "episodes that have the metric", "the evaluation"),
    Metric("eval/*", "", "mean of a metric on held-out tasks, each task with equal weight", "the judged episodes"),
)
"""The entries; where several fit a name, the first one holds."""


@cache
def entry_of(name: str) -> Metric | None:
    """Returns the entry of a written metric; ``None`` for a name that the glossary does not know."""
    return next((metric for metric in GLOSSARY if _fits(metric, name)), None)


def _fits(metric: Metric, name: str) -> bool:
    if metric.name.startswith("mismatch/") and metric.name.endswith("*"):
        base = metric.name[:-1]
        return name == base or name.startswith(f"{base}/")
    return metric.pattern.fullmatch(name) is not None


def described(name: str) -> dict[str, str]:
    """Returns a metric's ``unit``, ``meaning``, ``over`` and ``good`` range; empty texts for an unknown name."""
    metric = entry_of(name)
    keys = ("unit", "meaning", "over", "good")
    return {key: getattr(metric, key) if metric is not None else "" for key in keys}


def page() -> str:
    """Returns the glossary as a page in Markdown."""
    lines = [
        "# Metrics",
        "",
        "Every number in `metrics.jsonl`, made from `agentrl/observe/metric_glossary.py` by",
        "`python -m agentrl.observe.metric_glossary`. A metric is absent from a step in which nothing was measured.",
        "`*` stands for a name: a role, a stop reason, one of the environment's own metrics.",
        "",
        "| metric | unit | what it says | over | good |",
        "|---|---|---|---|---|",
    ]
    for one in GLOSSARY:
        cells = (f"`{one.name}`", one.unit, one.meaning, one.over, one.good)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
