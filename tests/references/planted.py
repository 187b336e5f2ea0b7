"""Plants errors in a copy of agentrl, one at a time, and says which reference tests notice.

``python -m tests.references.planted [PART OF A NAME]`` prints for each error the tests that failed; the exit status is
1 if some error went unnoticed. ``make test-long`` runs it. A planted error replaces a text that must be in
its package exactly once: one that is not there any more must be planted anew.
"""

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COPIED = ("agentrl", "envs", "agents", "recipes", "tests")
ENOUGH = 3  # failed tests after which no more are run


@dataclass(frozen=True)
class Planted:
    """An error: in ``agentrl/PACKAGE``, ``right`` becomes ``wrong``; ``ranks``: only a run on two ranks can show it."""

    name: str
    package: str
    right: str
    wrong: str
    ranks: bool = False

    def file(self, root: Path) -> Path:
        """Finds the file with the text.

        Raises:
            LookupError: The text is not in the package exactly once.
        """
        files = sorted((root / "agentrl" / self.package).glob("*.py"))
        found = [file for file in files for _ in range(file.read_text().count(self.right))]
        if len(found) != 1:
            raise LookupError(
                f"{self.name}: agentrl/{self.package} has {len(found)} times {self.right!r}: plant it anew"
            )
        return found[0]


ERRORS = (
    Planted("sign of the advantage", "train", "unclipped = -advantage * ratio\n", "unclipped = advantage * ratio\n"),
    Planted("epsilon", "train", "EPSILON = 1e-6", "EPSILON = 1e-5"),
    Planted(
        "upper clip bound",
        "train",
        "return 1 - config.clip_eps, 1 + (config.clip_eps_high or config.clip_eps)",
        "return 1 - config.clip_eps, 1 + config.clip_eps",
    ),
    Planted(
        "clip takes the other side", "train", "return unclipped.maximum(clipped)", "return unclipped.minimum(clipped)"
    ),
    Planted("group key without the role", "train", "Scored(key, reward", "Scored(key[:1], reward"),
    Planted("group key without the group", "train", "Scored(key, reward", "Scored(key[1:], reward"),
    Planted(
        "holes of the loss mask",
        "train",
        "here = np.flatnonzero(tokens.loss_mask[first:end])",
        "here = np.arange(tokens.loss_mask[first:end].sum())",
    ),
    Planted(
        "second-moment mask is lost",
        "train",
        "if kept is None else kept[places]",
        "if kept is None else kept[places] | True",
    ),
    Planted(
        "second moment keeps one more", "train", "(means <= threshold).sum())]", "(means <= threshold).sum()) + 1]"
    ),
    Planted(
        "shift of the targets",
        "train",
        "sources.append(path[found.positions - 1])",
        "sources.append(path[found.positions - 2])",
    ),
    Planted("length of an answer", "train", "return 1.0 / tokens if", "return 1.0 / (tokens + 1) if"),
    Planted("constant length", "train", "(length if config.aggregation", "(length + 1 if config.aggregation"),
    Planted("sign of the KL", "train", "loss = loss + config.kl_coef * kl", "loss = loss - config.kl_coef * kl"),
    Planted(
        "k3 of the other direction",
        "train",
        "value = (-difference).expm1() + difference",
        "value = difference.expm1() - difference",
    ),
    Planted("gradient of the KL", "train", 'value if gradient != "unbiased"', 'value if gradient != "biased"'),
    Planted("KL without its ratio", "train", "kl = kl * bounded_exp(tokens.logprobs - tokens.behavior)", "kl = kl * 1"),
    Planted("sign of the entropy", "train", "loss = loss - config.entropy_coef", "loss = loss + config.entropy_coef"),
    Planted("whitening by the biased deviation", "train", "values.std(ddof=1)", "values.std(ddof=0)"),
    Planted("whitening without the mean", "train", "(values - values.mean()) / (values.std", "values / (values.std"),
    Planted("biased deviation of a group", "train", "/ (len(values) - 1)) ** 0.5", "/ len(values)) ** 0.5"),
    Planted("leave-one-out divisor", "train", "max(sizes[key] - 1, 1)", "max(sizes[key], 1)"),
    Planted(
        "group's mean as divisor",
        "train",
        "        return sum(values) / len(values)\n",
        "        return 2 * sum(values) / len(values)\n",
    ),
    Planted(
        "deviation of the batch",
        "train",
        'of_batch if scale == "batch" else values',
        'of_batch if scale == "epoch" else values',
    ),
    Planted("discount of the next value", "train", "discount * value - before", "value - before"),
    Planted("lambda", "train", "discount * decay * carry", "discount * carry"),
    Planted("discount of turns", "train", "rewards[index] + discount * _mean", "rewards[index] + _mean"),
    Planted(
        "a reward that no step gave is lost",
        "train",
        "(turn.reward or 0.0) + rest * end",
        "(turn.reward or 0.0) + 0 * end",
    ),
    Planted(
        "what follows counts for unchosen samples",
        "train",
        "np.where(parents < 0, follows, parents)",
        "parents",
    ),
    Planted("bootstrap of a cut episode", "train", "else turn.after", "else 0.0"),
    Planted(
        "branches have a weight each",
        "train",
        "weight=token_weight(counts[branch.trajectory], config)",
        "weight=token_weight(sum(branch.trained), config)",
    ),
    Planted("shared turns are trained in each branch", "train", "and message not in seen", "and True"),
    Planted("credit in reverse", "train", "[self._sampled(number)] = credit", "[self._sampled(number)] = credit[::-1]"),
    Planted(
        "roles mixed up",
        "core",
        "for role, count in record.roles.items()",
        "for role, count in reversed(record.roles.items())",
    ),
    Planted(
        "cut episodes are kept, others dropped",
        "train",
        "config.mask_truncated and not one.terminated",
        "config.mask_truncated and one.terminated",
    ),
    Planted("age in the log-linear estimate", "train", "(version + 1 - versions)", "(version + 2 - versions)"),
    Planted(
        "correction's cap",
        "train",
        "weights.clamp(max=config.correction_cap)",
        "weights.clamp(max=config.correction_cap + 1)",
    ),
    Planted(
        "correction's mask",
        "train",
        "weights.masked_fill(weights > config.correction_cap",
        "weights.masked_fill(weights < config.correction_cap",
    ),
    Planted(
        "correction upside down",
        "train",
        "(tokens.proximal - tokens.behavior).detach()",
        "(tokens.behavior - tokens.proximal).detach()",
    ),
    Planted(
        "denominator leaves out what has no advantage",
        "train",
        "normalizer([counts[number] for number in kept], config)",
        "normalizer([counts[n] for n in kept if advantages[self._sampled(n)].any()], config)",
    ),
    Planted(
        "sequence ratio is the token's",
        "train",
        "return sequence_means(values, self.sequences) if",
        "return values if",
    ),
    Planted(
        "reference is the policy", "train", "reference, _ = self.reference(batch)", "reference, _ = self.policy(batch)"
    ),
    Planted("sign of the teacher", "train", "advantages - config.distill_coef", "advantages + config.distill_coef"),
    Planted("temperature", "train", '"temperature": self._temperature / form.scale', '"temperature": 1.0'),
    Planted("smaller error of the critic", "train", "torch.maximum(error,", "torch.minimum(error,"),
    Planted("critic's target is whitened", "train", '(sampled["values"] + plain)', '(sampled["values"] + advantages)'),
    Planted("factor of several updates", "train", "(updates * ranks)", "(ranks)"),
    Planted("factor of several ranks", "train", "(updates * ranks)", "(updates)", ranks=True),
    Planted(
        "a preset's number",
        "train",
        'clip_eps_high=0.28, aggregation="token"',
        'clip_eps_high=0.25, aggregation="token"',
    ),
    Planted("sign of k1 of a sequence", "train", "sequence_means(-log_ratios,", "sequence_means(log_ratios,"),
    Planted("k3 of a sequence", "train", "log_ratios.expm1() - log_ratios", "log_ratios.expm1() + log_ratios"),
    Planted("k2 of a sequence", "train", "log_ratios.square() / 2", "log_ratios.square()"),
    Planted(
        "geometric mean as a product",
        "train",
        "sequence_means(log_ratios, sequences).exp()",
        "sequence_sums(log_ratios, sequences).exp()",
    ),
    Planted(
        "rejected sequences have a loss",
        "train",
        "loss.masked_fill(rejected, 0.0)",
        "loss.masked_fill(rejected & False, 0.0)",
    ),
    Planted("tokens masked on one side", "train", "found if high is None else found | (values > high)", "found"),
    Planted(
        "mismatch of another policy",
        "train",
        'tokens.proximal if tokens.config.proximal == "recomputed" else',
        'tokens.logprobs if tokens.config.proximal == "recomputed" else',
    ),
    Planted("penalty of another token", "train", "accumulate(turn.penalties[:-1]", "accumulate(turn.penalties[1:]"),
    Planted("penalties in a turn's return", "train", "found[index] -= sum(one.turns[index].penalties)", "pass"),
    Planted("penalty of a token in its error", "train", "carry = earned - penalty +", "carry = earned +"),
    Planted("penalties of a fork are summed", "train", "sum(after) / len(after) if after", "sum(after) if after"),
    Planted(
        "sign of a penalty",
        "train",
        'work.tokens.sampled["behavior"] - reference',
        'reference - work.tokens.sampled["behavior"]',
    ),
    Planted(
        "baseline of all roles has the role", "config", "return (episode.group_id,)", "return (episode.group_id, role)"
    ),
    Planted("baseline of a tag without the role", "config", "return (episode.tag, role)", "return (episode.tag,)"),
    Planted("moving average the other way", "train", "1 - keep)", "keep)"),
    Planted(
        "reference copied too late",
        "train",
        "version % config.reference_every",
        "(version - 1) % config.reference_every",
    ),
    Planted(
        "age of a token",
        "train",
        "(version - tokens.versions).clamp(0, 2)",
        "(version + 1 - tokens.versions).clamp(0, 2)",
    ),
    Planted("effective sample size of sums", "train", '/ (count * total["ratio_square"])', '/ total["ratio_square"]'),
    Planted(
        "chi-square without its centre",
        "train",
        '"deviation_square": deviations.square()',
        '"deviation_square": ratios.square()',
    ),
    Planted("direction of a metric's kl", "train", '"k1": -log_ratios,', '"k1": log_ratios,'),
    Planted("a metric's divisor", "train", 'sums["clipped"] / count', 'sums["clipped"] / normalizer'),
)


class Failures:
    """A pytest plugin that remembers which tests failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid.rpartition("/")[2])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            raise RuntimeError(f"the tests do not load: {report.longrepr}")


@contextlib.contextmanager
def planted(copy: Path, error: Planted) -> Iterator[None]:
    """Changes a file of a copy, and restores it."""
    file = error.file(copy)
    before = file.read_text()
    file.write_text(before.replace(error.right, error.wrong))
    try:
        yield
    finally:
        file.write_text(before)


def _run(copy: Path, ranks: bool, found: Any) -> None:
    """Runs the reference tests on the copy, in a process of its own that has imported nothing of agentrl."""
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    failures = Failures()
    only = ["-k", "two_ranks" if ranks else "not two_ranks"]
    names = ("test_variants.py", "test_presets.py", "test_moving_reference.py")  # the quickest first
    files = [f"tests/references/{name}" for name in names]
    status = pytest.main(["-q", "-p", "no:cacheprovider", f"--maxfail={ENOUGH}", *only, *files], plugins=[failures])
    found.put((int(status), failures.names))


def tests_that_notice(copy: Path, error: Planted | None) -> list[str]:
    """Returns the tests that fail with an error planted, at most :data:`ENOUGH`; ``None`` plants nothing.

    Raises:
        RuntimeError: The tests could not be run.
    """
    forked = multiprocessing.get_context("fork")
    found = forked.SimpleQueue()
    with contextlib.nullcontext() if error is None else planted(copy, error):
        process = forked.Process(target=_run, args=(copy, error is not None and error.ranks, found))
        process.start()
        process.join()
    if process.exitcode or found.empty():
        raise RuntimeError(f"{error.name if error else 'nothing planted'}: the tests ended with {process.exitcode}")
    status, names = found.get()
    if status not in (0, 1) or bool(status) != bool(names):
        raise RuntimeError(f"{error.name if error else 'nothing planted'}: pytest ended with {status}, failed: {names}")
    return names


def copied(folder: Path) -> Path:
    """Copies what the tests need."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def main(part: str = "") -> int:
    """Plants every error whose name contains ``part``; returns the exit status."""
    import torch  # noqa: F401  imported once for all processes
    import transformers  # noqa: F401

    sys.dont_write_bytecode = True
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        if names := tests_that_notice(copy, None):
            print(f"without any error these tests fail: {names}")
            return 1
        for error in ERRORS:
            if part in error.name:
                names = tests_that_notice(copy, error)
                unnoticed += not names
                print(f"{error.name}: {', '.join(names) or 'NOT NOTICED'}", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
