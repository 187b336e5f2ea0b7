"""Lines into TRL's columns, and how many of them are computed at one time.

Guarantees: a line that is longer than ``supervised.max_length`` is left out, never cut, and counted; a run without any
line left is refused; the batch is shared out to ranks and micro-batches without a rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.errors import DataError
from agentrl.config.recipe import Recipe
from agentrl.inference.template import ChatTemplate
from agentrl.supervised.examples import Pair, Sample, load_held_out, load_lines
from agentrl.supervised.tokens import Encoder
from agentrl.train.schedule import planned_steps


@dataclass(frozen=True)
class Columns:
    """Encoded lines.

    Attributes:
        data: Column name to a list with one entry a line.
        longest: Tokens of the longest line, both answers of a pair together.
        left_out: How many were longer than allowed.
    """

    data: dict[str, list[list[int]]]
    longest: int
    left_out: int

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))


@dataclass(frozen=True)
class Lines:
    """What a training learns from, and what it is measured on.

    Attributes:
        train: Learned.
        held_out: Measured before and after; ``None`` where the recipe has none.
        source: Where the learned ones come from.
    """

    train: Columns
    held_out: Columns | None
    source: str

    @property
    def held_out_count(self) -> int:
        """Held-out lines."""
        return 0 if self.held_out is None else len(self.held_out)

    def told(self, recipe: Recipe) -> str:
        """One line for a person."""
        limit, micro = recipe.supervised.max_length, micro_batch(recipe, self.train.longest)
        kind = "lines" if recipe.trainer.type == "sft" else "pairs"
        return (
            f"data: {self.source}; {len(self.train)} {kind}, {self.train.left_out} longer than {limit} tokens left "
            f"out, {self.held_out_count} held out; {micro} at one time"
        )


def encode_all(recipe: Recipe, template: ChatTemplate) -> Lines:
    """Load and encode a recipe's lines.

    Raises:
        DataError: There are none, or too few.
    """
    encoder = Encoder(template, recipe.inference.chat_template_kwargs)
    train, held_out = load_lines(recipe, recipe.train_dataset), load_held_out(recipe)
    learned = encode(train.lines, recipe, encoder, what="train")
    if held_out is None:
        return Lines(learned, None, train.source)
    measured = encode(held_out.lines, recipe, encoder, what="held-out", most=recipe.eval.tasks)
    nproc = recipe.trainer.nproc
    even = len(measured) - len(measured) % nproc  # each rank measures as many as the others
    if even == 0:
        raise DataError(f"{len(measured)} held-out lines are too few for trainer.nproc={nproc}")
    data = {name: rows[:even] for name, rows in measured.data.items()}
    return Lines(learned, Columns(data, measured.longest, measured.left_out), train.source)


def encode(
    lines: Sequence[Sample | Pair], recipe: Recipe, encoder: Encoder, *, what: str, most: int | None = None
) -> Columns:
    """Encode lines for ``trainer.type``.

    Args:
        lines: Samples for SFT, else pairs.
        recipe: For ``trainer.type`` and ``supervised``.
        encoder: The model's.
        what: ``train`` or ``held-out``, for the message.
        most: Stop at so many that are short enough.

    Raises:
        DataError: No line is short enough.
    """
    limit = recipe.supervised.max_length
    rows: list[dict[str, list[int]]] = []
    longest, shortest, left_out = 0, 0, 0
    for line in lines:
        if most is not None and len(rows) == most:
            break
        row, sizes = _row(line, recipe, encoder)
        shortest = min(shortest or max(sizes), max(sizes))
        if max(sizes) > limit:
            left_out += 1
            continue
        rows.append(row)
        longest = max(longest, max(sizes) * len(sizes))
    if not rows:
        raise DataError(
            f"no {what} line fits supervised.max_length={limit}: the shortest of {len(lines)} has {shortest} tokens"
        )
    return Columns({name: [row[name] for row in rows] for name in rows[0]}, longest, left_out)


def _row(line: Sample | Pair, recipe: Recipe, encoder: Encoder) -> tuple[dict[str, list[int]], list[int]]:
    """A line's columns, and the lengths of its sequences."""
    if isinstance(line, Sample):
        encoded = encoder.sample(line, completion_only=recipe.supervised.completion_only)
        return {"input_ids": encoded.ids, "labels": encoded.labels}, [len(encoded.ids)]
    prompt, chosen, rejected = encoder.pair(line)
    sizes = [len(prompt) + len(chosen), len(prompt) + len(rejected)]
    if recipe.trainer.type == "rm":
        return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}, sizes
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}, sizes


def pad_token(template: ChatTemplate, lines: Lines) -> str:
    """A special token that stands in no line: a reward model reads its score at the last token that is no padding.

    Raises:
        DataError: There is none.
    """
    parts = [lines.train] if lines.held_out is None else [lines.train, lines.held_out]
    used = {token for part in parts for rows in part.data.values() for row in rows for token in row}
    tokenizer: Any = template.tokenizer
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in used:
        return str(tokenizer.pad_token)
    free = sorted(template.special_ids - template.end_ids - used)
    if not free:
        raise DataError("this model's tokenizer has no special token to pad with that stands in no line")
    return str(tokenizer.convert_ids_to_tokens(free[0]))


def micro_batch(recipe: Recipe, longest: int) -> int:
    """Lines that a rank computes at one time: as many as ``trainer.tokens_per_microbatch`` holds, at least one."""
    share = recipe.supervised.batch_size // recipe.trainer.nproc
    return even_batch(share, recipe.trainer.tokens_per_microbatch // longest)


def even_batch(lines: int, most: int) -> int:
    """The largest batch of at most ``most`` that divides ``lines``: TRL averages over batches, which must be alike."""
    return max(size for size in range(1, max(1, min(lines, most)) + 1) if lines % size == 0)


def step_count(recipe: Recipe, lines: int) -> tuple[int, int]:
    """Steps of the whole training, and of a pass over ``lines``."""
    per_epoch = -(-lines // recipe.supervised.batch_size)
    return planned_steps(recipe.trainer.total_steps, recipe.trainer.epochs, per_epoch), per_epoch
