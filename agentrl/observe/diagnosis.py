"""Diagnoses a run from its metrics: each finding with its likely cause and a remedy.

Guarantees: every rule is a function of the step records alone, so the live view and ``agentrl doctor`` report the same
findings; a rule whose metrics are missing reports nothing. The thresholds are constants of this module and of
:mod:`agentrl.observe.learning_rules`.
"""

from collections.abc import Callable, Mapping, Sequence

from agentrl.observe.finding import RECENT, Finding, Record, newest, recent
from agentrl.observe.learning_rules import collapse, creep, entropy, proxy, signal, truncation

KL_OF_ANOTHER_POLICY = 0.03  # measured in healthy runs: 1e-10 in float32, 1e-3 in bfloat16
RATIO_AT_FIRST = {"float32": 1e-2, "bfloat16": 3.0}  # in healthy runs 1e-4; 0.4 to 1.3 in bfloat16
MANY_FILTERED = 0.8
MANY_DROPPED = 0.1  # share of the sampled tokens that were too old to be trained
MUCH_CLIPPED, MUCH_OVERHEAD = 0.5, 0.3
SLOW_RANK = 1.5  # times the others' time
MANY_INVALID = 0.2  # share of an evaluation's episodes
MANY_OVERFLOWS = 0.2  # share of episodes that run out of context
UNCHANGED = 0.5  # share of tensors that a weight push did not change
DECAYED = 0.1  # of the highest learning rate: below it updates are meant to be small
ENOUGH_TOKENS = 100  # measured tokens below which a mean KL says little
MUCH_ROUTING = 0.2  # share of layers; rounding between two implementations changes a tenth (arXiv:2510.11370)
LOW_ESS = 0.5  # effective sample size as a share; 0.99 and more in healthy runs
_FAILED = "rollout/failed_"  # then the kind
GIVEN_TO_LEARN = 10  # steps before a critic is judged


def diagnose(records: Sequence[Record], dtype: str = "float32", pause_mode: str = "retract") -> list[Finding]:
    """Returns all findings of a run so far.

    Args:
        records: Metrics of the training steps and of evaluations, in order.
        dtype: Compute dtype of the trainer.
        pause_mode: The recipe's ``weights.pause_mode``. With ``in_place`` a token of the current version may be sampled
            over the key/value cache of an older one: the server is judged by steps without older tokens alone.
    """
    invalid = _invalid(records)
    steps = [record for record in records if is_step(record) and not record.get("critic/warmup")]
    if not steps:
        return [invalid] if invalid is not None else []
    pure = [step for step in steps if pause_mode != "in_place" or step.get("staleness/max") == 0]
    found = [_ratio(pure, dtype), *(rule(pure if rule is _other_policy else steps) for rule in _RULES)]
    found.append(proxy(records, steps))
    return [finding for finding in [*found, invalid] if finding is not None]


def is_step(record: Mapping[str, object]) -> bool:
    """Whether a line of ``metrics.jsonl`` is a training step."""
    return "reward/mean_drawn" in record or "rollout/episodes" in record


def _invalid(records: Sequence[Record]) -> Finding | None:
    """Judges the newest evaluation."""
    last = newest(records, "eval/invalid")
    if last is None:
        return None
    invalid = last["eval/invalid"]
    episodes = invalid + last.get("eval/n", 0.0)
    if not episodes or invalid / episodes <= MANY_INVALID:
        return None
    at = f" at step {last['step']:.0f}" if "step" in last else ""
    return Finding(
        "invalid",
        f"{invalid:.0f} of {episodes:.0f} episodes of the evaluation{at} are invalid, and in no mean",
        "They failed: an environment, an agent or a server raised, or a deadline passed.",
        "See the reason of each in eval-episodes.jsonl (stop_reason, error; logging.episodes=true writes it).",
    )


def _ratio(steps: Sequence[Record], dtype: str) -> Finding | None:
    """Judges only tokens of age 0 before the first update: those of the very policy that the trainer holds."""
    step = newest(steps, "mismatch/ratio_max/age_0")
    allowed = RATIO_AT_FIRST.get(dtype, RATIO_AT_FIRST["float32"])
    if step is None or step["mismatch/ratio_max/age_0"] <= allowed:
        return None
    gap, token = step["mismatch/ratio_max/age_0"], step.get("mismatch/ratio_token/age_0")
    at = f", the largest at token id {token:.0f}" if token is not None and token >= 0 else ""
    return Finding(
        "ratio",
        f"the importance ratio of tokens of the current policy differs from 1 by up to {gap:.2g} before the update{at}",
        "Server and trainer compute different probabilities for the same tokens.",
        "Compare their dtype (inference.dtype, trainer.dtype) and the temperature; check that an external server "
        "returns processed logprobs.",
    )


def _other_policy(steps: Sequence[Record]) -> Finding | None:
    step = newest(steps, "mismatch/kl/age_0")
    if step is None or step.get("mismatch/tokens/age_0", 0.0) < ENOUGH_TOKENS:
        return None
    kl = step["mismatch/kl/age_0"]
    if kl <= KL_OF_ANOTHER_POLICY:
        return None
    return Finding(
        "kl",
        f"the server's logprobs are not the trainer's (KL {kl:.3f} on tokens of the same policy version)",
        "The server holds other weights, or returns logprobs of another temperature or dtype.",
        "Check that the weight push is confirmed (logs/controller.log) and that the server runs this model.",
    )


def _stale(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "mismatch/ess")
    if share is None or share >= LOW_ESS:
        return None
    return Finding(
        "ess",
        f"the importance weights make the batch worth only {share:.0%} of its tokens",
        "The policies that sampled are far from the policy that learns: mismatch/kl/age_* shows whether age is why.",
        "If old tokens are far, lower rollout.max_staleness or the learning rate, or bound the weights "
        "(trainer.correction, preset decoupled); if those of age 0 are, the server computes something else.",
    )


def _routing(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "routing/choices_differing")
    if share is None or share <= MUCH_ROUTING:
        return None
    return Finding(
        "routing",
        f"in {share:.0%} of the layers the trainer would choose other experts than the server did (mean over tokens)",
        "Server and trainer route differently. Rounding alone changes a tenth of the choices at most; more comes from "
        "other weights, another dtype of the router, or old episodes.",
        "Compare mismatch/kl/age_0 with and without trainer.replay_routing; compare inference.dtype and trainer.dtype; "
        "lower rollout.max_staleness.",
    )


def _masks(steps: Sequence[Record]) -> Finding | None:
    last = steps[-1]
    if last.get("train/tokens", 1.0) > 0 or last.get("train/signal", 0.0) == 0:
        return None
    return Finding(
        "masks",
        "no token of the batch was trained, although episodes have advantages",
        "All loss masks are zero: the answers were not sampled through the episode's session.",
        "Call the `llm` that the workflow or agent gets, not a client of your own.",
    )


def _all_cut(steps: Sequence[Record]) -> Finding | None:
    last = steps[-RECENT:]
    untrained = all(step.get("train/tokens") == 0 and step.get("rollout/groups_with_signal") for step in last)
    if len(last) < RECENT or not untrained or recent(steps, "rollout/truncated") != 1:
        return None
    return Finding(
        "all_cut",
        f"no token was trained in the last {RECENT} steps, although groups have answers with different rewards",
        "All episodes were cut, and trainer.mask_truncated leaves these out.",
        "Raise the limit that cuts them (sampling.max_new_tokens, inference.context_length, or the environment's), or "
        "set trainer.mask_truncated=false.",
    )


def _filtered(steps: Sequence[Record]) -> Finding | None:
    names = ("groups_filtered", "groups_drawn", "filtered_all_solved", "filtered_none_solved")
    found = [recent(steps, f"rollout/{name}") for name in names]
    filtered, drawn, every, none = (value or 0.0 for value in found)
    if not drawn or filtered / drawn <= MANY_FILTERED:
        return None
    return Finding(
        "filtered",
        f"{filtered / drawn:.0%} of the groups were dropped for equal rewards ({every / filtered:.0%} of them all "
        f"solved, {none / filtered:.0%} none solved)",
        "Most episodes are sampled for nothing: the tasks are too easy or too hard for the policy.",
        "Use other tasks, rollout.curriculum (retire_at, hard_at), or more answers per task (rollout.group_size).",
    )


def _too_old(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "dropped/tokens_share")
    if share is None or share <= MANY_DROPPED:
        return None
    return Finding(
        "too_old",
        f"{share:.0%} of the sampled tokens were dropped because their episodes were too old to be trained",
        "Some episodes run for longer than rollout.max_staleness steps; what is trained is shorter than what is "
        "sampled (dropped/tokens_mean beside trained/tokens_mean).",
        "Raise rollout.max_staleness, shorten the longest episodes, or set rollout.stale=mask, which trains the "
        "younger tokens of such episodes.",
    )


def _truncation(steps: Sequence[Record]) -> Finding | None:
    return None if _all_cut(steps) is not None else truncation(steps)  # whose remedy is another


def _overflow(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "rollout/ended_context_overflow")
    if share is None or share <= MANY_OVERFLOWS:
        return None
    return Finding(
        "overflow",
        f"{share:.0%} of the episodes run out of context",
        "Conversations outgrow inference.context_length; such an episode counts as wrong, and as cut where it is "
        "trained.",
        "Raise inference.context_length, shorten tool results (ContextLimit, max_result_chars), limit the turns, or "
        "use an agent that shortens its conversation.",
    )


def _drift(steps: Sequence[Record]) -> Finding | None:
    share = steps[-1].get("drift/special", 0.0)
    if share <= 0:
        return None
    return Finding(
        "drift",
        f"in {share:.1%} of the episodes the special tokens are not those of the chat template",
        "The model is trained on other token ids than it will see in use.",
        "Check model.chat_template and inference.history; `agentrl env play` shows the ids.",
    )


def _failed(steps: Sequence[Record]) -> Finding | None:
    failed = steps[-1].get("rollout/failed", 0.0)
    if not failed:
        return None
    counts = {name.removeprefix(_FAILED): count for name, count in steps[-1].items() if name.startswith(_FAILED)}
    kinds = ", ".join(f"{kind} {count:.0f}" for kind, count in counts.items() if count) or "kinds unknown"
    return Finding(
        "failed",
        f"{failed:.0f} episodes drawn for the step failed ({kinds}) and are not trained on",
        "If failures depend on the answer, training is biased.",
        "See logs/controller.log, which has each kind of failure once.",
    )


def _unchanged(steps: Sequence[Record]) -> Finding | None:
    updated = [step for step in steps if step.get("train/skipped", 1.0) == 0]  # without an update nothing can change
    share = recent(updated, "weights/unchanged")
    rates = [step.get("train/learning_rate", 1.0) for step in steps]
    decayed = max(rates[-RECENT:]) < DECAYED * max(rates)
    if share is None or share <= UNCHANGED or decayed:
        return None
    return Finding(
        "weights",
        f"{share:.0%} of the pushed tensors did not change",
        "The updates are too small for the servers' dtype, or parameters are frozen.",
        "Raise trainer.learning_rate, or serve in float32 (inference.dtype).",
    )


def _skipped(steps: Sequence[Record]) -> Finding | None:
    broken = sum(step.get("train/nonfinite", 0.0) > 0 for step in steps)
    if not broken:
        return None
    return Finding(
        "skipped",
        f"in {broken} of {len(steps)} steps the gradient was not finite, and no update was made",
        "A loss or a weight overflowed.",
        "Lower trainer.learning_rate, or check whether rewards or logprobs of such a batch are extreme (nonfinite/).",
    )


def _clipped(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "train/clip_fraction")
    if share is None or share <= MUCH_CLIPPED:
        return None
    return Finding(
        "clip",
        f"{share:.0%} of the tokens are outside the clip range",
        "The data are too stale, or the updates too large, for the trust region.",
        "Lower rollout.max_staleness or the learning rate, or use preset decoupled, cispo or m2po.",
    )


def _overhead(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "time/overhead_share")
    if share is None or share <= MUCH_OVERHEAD:
        return None
    return Finding(
        "overhead",
        f"{share:.0%} of a step is neither sampling nor updating",
        "Weight pushes or reading batches take long compared with the work of a small batch.",
        "Use larger batches, weights.transport=shm on one host, or weights.pause_mode=in_place.",
    )


def _slow_rank(steps: Sequence[Record]) -> Finding | None:
    """Finds a rank that was the slowest in each of the latest steps, and much slower than the others, or several."""
    last = steps[-RECENT:]
    ranks = {step.get("ranks/slowest") for step in last}
    least = min((step.get("ranks/slowdown", 0.0) for step in last), default=0.0)
    slow = last[-1].get("ranks/slow", 0.0)  # of one machine, say: which of them is slowest changes
    rank = ranks.pop()
    if len(last) < RECENT or rank is None or least <= SLOW_RANK or (ranks and slow < 2):
        return None
    which = f"{slow:.0f} trainer ranks take" if slow > 1 else f"trainer rank {rank:.0f} takes"
    return Finding(
        "slow_rank",
        f"{which} {least:.1f} times as long as the other ranks for the same products",
        "All ranks wait for it in each update: its machine has other work, is too hot, or has a slower card.",
        "logs/trainer.log names its machine; free it, or leave it out.",
    )


def _critic(steps: Sequence[Record]) -> Finding | None:
    share = recent(steps, "critic/explained")
    if share is None or share >= 0 or len(steps) < GIVEN_TO_LEARN:
        return None
    return Finding(
        "critic",
        f"the critic explains {share:.0%} of the variance of the returns: less than a constant would",
        "The critic learns too slowly to follow the policy.",
        "Raise trainer.critic_learning_rate or trainer.critic_warmup, or use an advantage that needs no critic.",
    )


def _unsaved(steps: Sequence[Record]) -> Finding | None:
    """Finds checkpoints that could not be written."""
    failed = steps[-1].get("checkpoint/failed")
    if not failed:
        return None
    return Finding(
        "checkpoint",
        f"the latest {failed:.0f} checkpoints could not be written; a resume would go on from an older one",
        "The disk is full, or the run's folder cannot be written.",
        "Free some space; the reason is in logs/trainer.log.",
    )


_RULES: tuple[Callable[[Sequence[Record]], Finding | None], ...] = (
    _unsaved, _other_policy, _stale, _routing, _masks, _all_cut, _failed, _drift, _unchanged, _skipped, signal,
    _filtered, _too_old, entropy, _truncation, _overflow, creep, collapse,
    _clipped, _overhead, _slow_rank, _critic,
)  # fmt: skip
