"""One reference trainer step in float64: one forward pass a sequence, plain gradient descent, every number of a metric.

:func:`train_step` reads from top to bottom like the papers: credit, whitening, weights, the critic's loss, the policy's
loss. Nothing is packed or shared, nothing is left out because its advantage is 0, and nothing of agentrl's is called.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder

import torch
from torch import Tensor

from agentrl.core.episode import Episode
from tests.references.credit import Credit, Entry, Turn, whitened
from tests.references.llama import Shape, distributions, shape_of, states, weights_of
from tests.references.losses import Kl, Surrogate, most_stable, rejected, value_loss
from tests.references.samples import Answer, Path, Sampled, answers_of


@dataclass(frozen=True)
class Algorithm:
    """A published algorithm, written out.

    Attributes:
        credit: Advantage of each token from rewards.
        surrogate: Loss of a token.
        aggregation: ``token``: mean over the tokens; ``sequence``: mean over the answers' means; ``constant``: mean
            over the answers' sums divided by the longest answer; ``sum``: mean over the answers' sums.
        by_sequence: Whether ratio and advantage are those of the sequence (GSPO).
        whiten: Whether the advantages of the batch's tokens get mean 0 and standard deviation 1.
        drop_cut: Whether cut episodes are left out of the loss.
        distill: Coefficient of the teacher's log ratio in the advantage.
        denominator: Policy below the ratio: ``behavior``, ``start`` of the step, or ``log_linear`` between them.
        bound: Function of ``start / behavior`` that gives the factor on a token's loss; ``None``: 1.
        bound_by_sequence: Whether that ratio is the product over the sequence.
        inside: Bounds of ``start / behavior`` outside of which a token has no surrogate loss (IcePop); of the current
            policy's ratio if the denominator is not the start.
        reject: Measure of that ratio over a sequence, and its bounds; a sequence outside has no loss.
        baseline: Rewards that are compared: those of one ``role`` of a group, of all of a ``group``, of a ``tag``.
        clip: Clip range below and above, for the metrics.
        second_moment: Largest mean squared log ratio (M2PO).
        clip_cov: Share of tokens without surrogate loss, and bounds of the covariance that they are drawn from.
        kl_cov: Share of tokens, those with the largest covariance, that are held near the ratio's denominator, and
            the coefficient.
        updates: Gradient steps, each over a part of the groups.
        kl: KL term of the loss.
        kl_reward: Coefficient of the KL that is taken off the episode's reward.
        kl_tokens: Coefficient of the KL that is taken off each token's reward.
        entropy: Coefficient of the entropy bonus.
        critic: Whether a critic learns the returns.
        value_clip: Clip range of the critic.
    """

    credit: Credit
    surrogate: Surrogate
    aggregation: str
    by_sequence: bool = False
    whiten: bool = False
    drop_cut: bool = False
    distill: float = 0.0
    denominator: str = "behavior"
    bound: Callable[[float], float] | None = None
    bound_by_sequence: bool = False
    inside: tuple[float, float] | None = None
    reject: tuple[str, float | None, float | None] | None = None
    baseline: str = "role"
    clip: tuple[float, float] = (0.2, 0.2)
    second_moment: float | None = None
    clip_cov: tuple[float, float, float] | None = None
    kl_cov: tuple[float, float] | None = None
    updates: int = 1
    kl: Kl | None = None
    kl_reward: float = 0.0
    kl_tokens: float = 0.0
    entropy: float = 0.0
    critic: bool = False
    value_clip: float | None = 0.2


@dataclass(frozen=True)
class Setting:
    """Inputs of a step beside the algorithm.

    Attributes:
        policy: Folder of the policy and of the critic's decoder.
        reference: Folder of the reference policy.
        head: ``[hidden + 1]`` the critic's head and its bias.
        version: Policy version that the step starts from.
        rate: Learning rate of policy and critic.
        temperature: Sampling temperature.
        longest: Length of the longest answer.
        scale: Factor on rewards.
        bias: Number added to rewards.
    """

    policy: Folder
    reference: Folder
    head: Tensor
    version: int
    rate: float
    temperature: float
    longest: int
    scale: float = 1.0
    bias: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Results of a step.

    Attributes:
        policy: Change of each of the policy's parameters.
        critic: Change of each of the critic's parameters; empty without one.
        metrics: Metrics of the updates under agentrl's names.
        measured: Means over all trained tokens before the first update, under agentrl's names.
        complete: Whether each trained token has a gradient.
    """

    policy: dict[str, Tensor]
    critic: dict[str, Tensor]
    metrics: dict[str, float]
    measured: dict[str, float]
    complete: bool


def train_step(
    episodes: Sequence[Episode],
    algorithm: Algorithm,
    setting: Setting,
    policy: dict[str, Tensor] | None = None,
    reference: dict[str, Tensor] | None = None,
) -> Outcome:
    """Computes one step; ``policy`` (changed in place) and ``reference`` are weights other than the setting's."""
    shape, policy = shape_of(setting.policy), policy or weights_of(setting.policy)
    critic = weights_of(setting.policy) | {"head": setting.head.double().requires_grad_()}
    answers = answers_of(episodes, setting.scale, lambda reward: setting.scale * reward + setting.bias)
    if algorithm.kl or algorithm.kl_reward or algorithm.kl_tokens:
        reference = reference or weights_of(setting.reference)
    for answer in answers:
        for path in answer.paths:
            _measure(path, policy, reference, shape, setting)
    if algorithm.kl_reward:
        for answer in answers:
            answer.reward -= algorithm.kl_reward * sum(t.behavior - t.reference for t in answer.tokens)
    if algorithm.critic:
        for answer in answers:
            for path in answer.paths:
                values = _values(critic, shape, path.ids)
                for position, token in path.trained.items():
                    token.value = values[position - 1].item()
    _assign_credit(answers, algorithm, critic, shape)
    chosen = [answer for answer in answers if answer.turns and not (algorithm.drop_cut and answer.cut)]
    _weigh(chosen, algorithm, setting)
    tokens = [token for answer in chosen for token in answer.tokens]
    metrics = _critic_metrics(tokens) if algorithm.critic else {}
    of_critic: dict[str, Tensor] = {}
    if algorithm.critic:
        loss_of = _critic_loss(critic, shape, algorithm, len(tokens))
        of_critic = _descend(chosen, critic, algorithm, setting, metrics, "critic", loss_of)
    normalizer = {
        "token": len(tokens), "sequence": len(chosen), "sum": len(chosen), "constant": len(chosen) * setting.longest,
    }[algorithm.aggregation]  # fmt: skip
    sums: dict[str, list[float]] = {}
    of_policy = _descend(
        chosen, policy, algorithm, setting, metrics, "train",
        lambda answer: _policy_loss(answer, policy, shape, algorithm, setting, sums) / max(normalizer, 1),
    )  # fmt: skip
    complete = _dense(algorithm) or all(token.advantage for token in tokens)
    metrics |= _of_updates(chosen, algorithm, sums if complete else {})
    return Outcome(of_policy, of_critic, metrics, _measured(chosen, algorithm, setting), complete)


# --- Before the update ---------------------------------------------------------------------------------------------


def _measure(
    path: Path, policy: dict[str, Tensor], reference: dict[str, Tensor] | None, shape: Shape, setting: Setting
) -> None:
    """Fills in the logprobs under the policy that the step starts from, and under the reference if there is one."""
    with torch.no_grad():
        own = distributions(policy, shape, path.ids, setting.temperature)
        other = None if reference is None else distributions(reference, shape, path.ids, setting.temperature)
    for position, token in path.trained.items():
        token.start = own[position - 1, path.ids[position]].item()
        token.entropy = -(own[position - 1].exp() * own[position - 1]).sum().item()
        if other is not None:
            token.reference = other[position - 1, path.ids[position]].item()


def _values(critic: dict[str, Tensor], shape: Shape, ids: list[int]) -> Tensor:
    head = critic["head"]
    return states(critic, shape, ids) @ head[:-1] + head[-1]


def _assign_credit(answers: list[Answer], algorithm: Algorithm, critic: dict[str, Tensor], shape: Shape) -> None:
    entries = []
    for answer in answers:
        rest = answer.reward - sum(answer.steps)  # what no step gave was earned by the end
        rewards = [step + rest * (not later) for step, later in zip(answer.steps, answer.followers, strict=True)]
        turns = [
            Turn(
                reward, [token.value for token in turn], later,
                [algorithm.kl_tokens * (token.behavior - token.reference) for token in turn],
            )
            for reward, turn, later in zip(rewards, answer.turns, answer.followers, strict=True)
        ]  # fmt: skip
        if algorithm.critic and answer.cut:
            for number, path in answer.ends.items():
                own = answer.turns[number][-1]
                place = next(position for position, token in path.trained.items() if token is own)
                turns[number].after = _values(critic, shape, path.ids)[place].item()
        entries.append(Entry(_compared(answer, algorithm), answer.reward, turns))
    for answer, credit in zip(answers, algorithm.credit(entries), strict=True):
        for token, value in zip(answer.tokens, credit, strict=True):
            token.advantage, token.goal = value, token.value + value
            token.advantage -= algorithm.distill * (token.behavior - token.teacher)


def _compared(answer: Answer, algorithm: Algorithm) -> tuple[str, ...]:
    group, role = answer.group
    return {"role": (group, role), "group": (group,), "tag": (str(answer.tag), role)}[algorithm.baseline]


def _weigh(chosen: list[Answer], algorithm: Algorithm, setting: Setting) -> None:
    """Whitens the advantages, gives each token its weight, and selects tokens by statistics of the batch."""
    tokens = [token for answer in chosen for token in answer.tokens]
    if algorithm.whiten:
        for token, value in zip(tokens, whitened([token.advantage for token in tokens]), strict=True):
            token.advantage = value
    if algorithm.aggregation == "sequence":
        for answer in chosen:
            for token in answer.tokens:
                token.weight = 1 / len(answer.tokens)
    if algorithm.second_moment is not None:
        squares = [(token.start - token.behavior) ** 2 for token in tokens]
        for token, stays in zip(tokens, most_stable(squares, algorithm.second_moment), strict=True):
            token.kept = stays
    _select_by_covariance(tokens, algorithm, setting)


def _select_by_covariance(tokens: list[Sampled], algorithm: Algorithm, setting: Setting) -> None:
    """Marks the tokens of Clip-Cov and KL-Cov (Cui et al. 2025), by ``(log pi - mean) (A - mean)``."""
    if not tokens or (algorithm.clip_cov is None and algorithm.kl_cov is None):
        return
    logprob = statistics.fmean(token.start for token in tokens)
    advantage = statistics.fmean(token.advantage for token in tokens)
    covariances = [(token.start - logprob) * (token.advantage - advantage) for token in tokens]
    if algorithm.clip_cov is not None:
        share, low, high = algorithm.clip_cov
        between = [token for token, value in zip(tokens, covariances, strict=True) if low < value < high]
        count = min(max(1, int(share * len(tokens))), len(between))
        for number in random.Random(setting.version).sample(range(len(between)), count):  # as it is documented
            between[number].kept = False
    if algorithm.kl_cov is not None:
        count = max(1, int(algorithm.kl_cov[0] * len(tokens)))
        for number in sorted(range(len(tokens)), key=covariances.__getitem__, reverse=True)[:count]:
            tokens[number].held = True


# --- Updates -------------------------------------------------------------------------------------------------------


def _descend(
    chosen: list[Answer],
    weights: dict[str, Tensor],
    algorithm: Algorithm,
    setting: Setting,
    metrics: dict[str, float],
    name: str,
    loss_of: Callable[[Answer], Tensor],
) -> dict[str, Tensor]:
    """Takes a gradient step for each part of the groups; returns the change of each weight."""
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    parts = _parts(chosen, algorithm)
    norms, total = [], 0.0
    for part in parts:
        for answer in part:
            loss = loss_of(answer)
            total += loss.item()
            (loss * len(parts)).backward()
        squares = 0.0
        for weight in weights.values():
            if weight.grad is not None:
                squares += weight.grad.square().sum().item()
                weight.data -= setting.rate * weight.grad
                weight.grad = None
        norms.append(math.sqrt(squares))
    metrics[f"{name}/loss"] = total
    metrics[f"{name}/grad_norm"] = statistics.fmean(norms)
    return {key: weight.detach() - before[key] for key, weight in weights.items()}


def _parts(chosen: list[Answer], algorithm: Algorithm) -> list[list[Answer]]:
    """Divides groups that teach something among the updates: the largest first, each to the smallest part so far.

    With a term of the loss that needs no advantage all groups do.
    """
    sizes: dict[str, int] = {}
    for answer in chosen:
        if _dense(algorithm) or any(token.advantage for token in answer.tokens):
            sizes[answer.group[0]] = sizes.get(answer.group[0], 0) + sum(len(path.ids) for path in answer.paths)
    count = max(1, min(algorithm.updates, len(sizes)))
    if count == 1:
        return [chosen]
    parts: list[list[Answer]] = [[] for _ in range(count)]
    loads = [0] * count
    for group in sorted(sizes, key=sizes.__getitem__, reverse=True):
        least = loads.index(min(loads))
        loads[least] += sizes[group]
        parts[least] += [answer for answer in chosen if answer.group[0] == group]
    return parts


def _policy_loss(
    answer: Answer,
    policy: dict[str, Tensor],
    shape: Shape,
    algorithm: Algorithm,
    setting: Setting,
    sums: dict[str, list[float]],
) -> Tensor:
    """Sums the weighted losses of an answer's tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for path in answer.paths:
        rows = distributions(policy, shape, path.ids, setting.temperature)
        logprobs = [rows[position - 1, path.ids[position]] for position in path.trained]
        entropies = [-(rows[position - 1].exp() * rows[position - 1]).sum() for position in path.trained]
        tokens = list(path.trained.values())
        below = [_denominator(t, now.item(), algorithm, setting) for t, now in zip(tokens, logprobs, strict=True)]
        log_ratios = [now - under for now, under in zip(logprobs, below, strict=True)]
        factors = [under - token.behavior for under, token in zip(below, tokens, strict=True)]
        advantages = [token.advantage for token in tokens]
        if algorithm.by_sequence:
            log_ratios = [torch.stack(log_ratios).mean()] * len(tokens)
            advantages = [statistics.fmean(advantages)] * len(tokens)
        if algorithm.bound_by_sequence:
            factors = [sum(factors)] * len(tokens)
        trainer = [
            t.start if algorithm.denominator == "start" else now.item() for t, now in zip(tokens, logprobs, strict=True)
        ]
        apart = [one - token.behavior for one, token in zip(trainer, tokens, strict=True)]
        gone = algorithm.reject is not None and rejected(apart, *algorithm.reject)
        for number, token in enumerate(tokens):
            surrogate, acted = algorithm.surrogate(log_ratios[number].exp(), advantages[number], logprobs[number])
            factor = 1.0 if algorithm.bound is None else algorithm.bound(math.exp(factors[number]))
            inside = _is_inside(apart[number], algorithm)
            loss = surrogate * factor if token.kept and inside else surrogate * 0
            if algorithm.kl_cov is not None and token.held:  # k3 of denominator and current policy
                loss = loss + algorithm.kl_cov[1] * (log_ratios[number].exp() - 1 - log_ratios[number])
            if algorithm.kl is not None:
                term, seen = algorithm.kl.term(logprobs[number], token.reference, token.behavior)
                loss = loss + term
                sums.setdefault("kl_reference", []).append(seen)
            loss = loss - algorithm.entropy * entropies[number]
            total = total + (0.0 if gone else token.weight) * loss
            sums.setdefault("rejected", []).append(float(gone))
            sums.setdefault("masked_ratio", []).append(float(not inside))
            sums.setdefault("clip_fraction", []).append(float(acted))
            sums.setdefault("correction", []).append(factor)
    return total


def _is_inside(log_ratio: float, algorithm: Algorithm) -> bool:
    if algorithm.inside is None:
        return True
    low, high = algorithm.inside
    return low <= math.exp(log_ratio) <= high


def _denominator(token: Sampled, now: float, algorithm: Algorithm, setting: Setting) -> float:
    if algorithm.denominator == "start":
        return token.start
    if algorithm.denominator == "log_linear":  # AReaL: by version, the current policy being one version on
        share = (setting.version - token.version) / (setting.version + 1 - token.version)
        return token.behavior + max(share, 0.0) * (now - token.behavior)
    return token.behavior


def _critic_loss(
    critic: dict[str, Tensor], shape: Shape, algorithm: Algorithm, count: int
) -> Callable[[Answer], Tensor]:
    def loss(answer: Answer) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for path in answer.paths:
            values = _values(critic, shape, path.ids)
            for position, token in path.trained.items():
                total = total + value_loss(values[position - 1], token.value, token.goal, algorithm.value_clip)
        return total / count

    return loss


# --- Metrics -------------------------------------------------------------------------------------------------------


def _critic_metrics(tokens: list[Sampled]) -> dict[str, float]:
    goals = [token.goal for token in tokens]
    left = [token.goal - token.value for token in tokens]
    if statistics.pvariance(goals) < 1e-12:
        return {}
    return {"critic/explained": 1 - statistics.pvariance(left) / statistics.pvariance(goals)}


def _dense(algorithm: Algorithm) -> bool:
    return algorithm.kl is not None or algorithm.entropy > 0 or algorithm.second_moment is not None


def _of_updates(chosen: list[Answer], algorithm: Algorithm, sums: dict[str, list[float]]) -> dict[str, float]:
    """Means over the tokens that the updates train, if these are all of the batch."""
    paths = [path for answer in chosen for path in answer.paths]
    useful = [path for path in paths if any(token.advantage for token in path.trained.values())]
    found = {"train/signal": len(useful) / max(len(paths), 1)}
    if not sums:
        return found
    tokens = [token for answer in chosen for token in answer.tokens]
    found["train/tokens"] = float(len(tokens))
    if algorithm.second_moment is not None:
        found["train/masked"] = statistics.fmean(not token.kept for token in tokens)
    names = ["clip_fraction"]
    names += ["correction"] if algorithm.bound is not None else []
    names += ["kl_reference"] if algorithm.kl is not None else []
    names += ["rejected"] if algorithm.reject is not None else []
    names += ["masked_ratio"] if algorithm.inside is not None else []
    return found | {f"train/{name}": statistics.fmean(sums[name]) for name in names}


def _measured(chosen: list[Answer], algorithm: Algorithm, setting: Setting) -> dict[str, float]:
    """Means over all trained tokens before the first update, and again over those of each age."""
    sequences = [list(path.trained.values()) for answer in chosen for path in answer.paths]
    tokens = [token for sequence in sequences for token in sequence]
    found = {"train/entropy": statistics.fmean(token.entropy for token in tokens)}
    for sequence in sequences:
        _mark_cuts(sequence, algorithm, setting)
    for suffix, ages in (("", (0, 1, 2)), ("/age_0", (0,)), ("/age_1", (1,)), ("/age_2+", (2,))):
        parts = [
            [token for token in sequence if min(setting.version - token.version, 2) in ages] for sequence in sequences
        ]
        of_age = mismatch([part for part in parts if part])
        found |= {f"mismatch/{name}{suffix}": value for name, value in of_age.items()}
    return found


def _mark_cuts(sequence: list[Sampled], algorithm: Algorithm, setting: Setting) -> None:
    """Names for each token the bounds that cut it: of the clip range, and of the correction."""
    logs = [token.start - token.behavior for token in sequence]
    below = [_denominator(token, token.start, algorithm, setting) - token.behavior for token in sequence]
    for token, own, under in zip(sequence, logs, below, strict=True):
        ratio = math.exp(statistics.fmean(logs) if algorithm.by_sequence else own)
        weight = math.exp(sum(below) if algorithm.bound_by_sequence else under)
        bounded = weight if algorithm.bound is None else algorithm.bound(weight)
        token.cuts = {
            "clip_low": ratio < 1 - algorithm.clip[0],
            "clip_high": ratio > 1 + algorithm.clip[1],
        }
        if algorithm.bound is not None:
            token.cuts["correction_low"] = bounded != weight and weight < 1
            token.cuts["correction_high"] = bounded != weight and weight >= 1


def mismatch(sequences: list[list[Sampled]]) -> dict[str, float]:
    """Compares the policy that the step starts from with the behavior policy, from whose samples this is.

    KL by Schulman 2020, the effective sample size by Kong 1992, Pearson's chi-square as the variance of the weights.
    """
    tokens = [token for sequence in sequences for token in sequence]
    if not tokens:
        return {}
    logs = [token.start - token.behavior for token in tokens]
    ratios, products = [math.exp(one) for one in logs], [_product(sequence) for sequence in sequences]
    cut = {name: statistics.fmean(token.cuts[name] for token in tokens) for name in tokens[0].cuts}
    worst = max(abs(one - 1) for one in ratios)
    return cut | {
        "tokens": float(len(tokens)),
        "kl": statistics.fmean(ratio - 1 - one for ratio, one in zip(ratios, logs, strict=True)),
        "kl_k1": -statistics.fmean(logs),
        "chi2": statistics.fmean((one - 1) ** 2 for one in ratios),
        "chi2_sequence": statistics.fmean((one - 1) ** 2 for one in products),
        "ess": _effective(ratios),
        "ess_sequence": _effective(products),
        "perplexity_behavior": math.exp(-statistics.fmean(token.behavior for token in tokens)),
        "perplexity_trainer": math.exp(-statistics.fmean(token.start for token in tokens)),
        "ratio_max": worst,
    }


def _product(sequence: list[Sampled]) -> float:
    return math.prod(math.exp(token.start - token.behavior) for token in sequence)


def _effective(weights: list[float]) -> float:
    return sum(weights) ** 2 / len(weights) / sum(one * one for one in weights)
