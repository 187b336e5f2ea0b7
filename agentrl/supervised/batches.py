"""Encodes examples as columns for TRL's trainers, and computes the micro-batch size.

Guarantees: an example longer than ``supervised.max_length`` is left out and counted, never cut; a run without any
example left is refused; ranks and micro-batches divide the batch without a remainder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.errors import DataError
from agentrl.config.recipe import Recipe
from agentrl.inference.template import ChatTemplate
from agentrl.supervised.examples import Pair, Sample, load_examples, load_held_out
from agentrl.supervised.tokens import Encoder
from agentrl.train.schedule import planned_steps


@dataclass(frozen=True)
class Columns:
    """Encoded examples.

    Attributes:
        data: Maps each column name to one list of token ids per example.
        longest: Length of the longest example in tokens; a pair counts both answers.
        left_out: Number of examples that were longer than allowed.
    """

    data: dict[str, list[list[int]]]
    longest: int
    left_out: int

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))


@dataclass(frozen=True)
class EncodedExamples:
    """The encoded training and held-out examples of a run.

    Attributes:
        train: Examples to train on.
        held_out: Examples measured before and after the training; ``None`` if the recipe has none.
        source: Sentence that says where the training examples come from.
    """

    train: Columns
    held_out: Columns | None
    source: str

    @property
    def held_out_count(self) -> int:
        """Number of held-out examples."""
        return 0 if self.held_out is None else len(self.held_out)

    def summary(self, recipe: Recipe) -> str:
        """Returns one line about the data, for the live view."""
        limit, micro = recipe.supervised.max_length, micro_batch(recipe, self.train.longest)
        kind = "examples" if recipe.trainer.type == "sft" else "pairs"
        return (
            f"data: {self.source}; {len(self.train)} {kind}, {self.train.left_out} longer than {limit} tokens left "
            f"out, {self.held_out_count} held out; micro-batches of {micro}"
        )


def encode_all(recipe: Recipe, template: ChatTemplate) -> EncodedExamples:
    """Load and encode a recipe's examples.

    Raises:
        DataError: There are no examples, or too few for the number of ranks.
    """
    encoder = Encoder(template)
    train, held_out = load_examples(recipe, recipe.train_dataset), load_held_out(recipe)
    learned = encode(train.examples, recipe, encoder, what="train")
    if held_out is None:
        return EncodedExamples(learned, None, train.source)
    measured = encode(held_out.examples, recipe, encoder, what="held-out", most=recipe.eval.tasks)
    ranks = recipe.trainer.ranks
    even = len(measured) - len(measured) % ranks  # every rank gets the same number
    if even == 0:
        raise DataError(f"{len(measured)} held-out examples are too few for {ranks} ranks (trainer.nproc, nodes)")
    data = {name: rows[:even] for name, rows in measured.data.items()}
    return EncodedExamples(learned, Columns(data, measured.longest, measured.left_out), train.source)


def encode(
    examples: Sequence[Sample | Pair], recipe: Recipe, encoder: Encoder, *, what: str, most: int | None = None
) -> Columns:
    """Encode examples for ``trainer.type``.

    Args:
        examples: Samples for SFT, pairs for reward models and DPO.
        recipe: Recipe; ``trainer.type`` and ``supervised`` are read.
        encoder: Encoder with the model's chat template.
        what: ``train`` or ``held-out``, named in the error message.
        most: Maximum number of examples to return; ``None`` for all.

    Raises:
        DataError: No example is short enough.
    """
    limit = recipe.supervised.max_length
    rows: list[dict[str, list[int]]] = []
    longest, shortest, left_out = 0, 0, 0
    for example in examples:
        if most is not None and len(rows) == most:
            break
        row, sizes = _row(example, recipe, encoder)
        shortest = min(shortest or max(sizes), max(sizes))
        if max(sizes) > limit:
            left_out += 1
            continue
        rows.append(row)
        longest = max(longest, max(sizes) * len(sizes))
    if not rows:
        raise DataError(
            f"no {what} example fits supervised.max_length={limit}: the shortest of {len(examples)} has "
            f"{shortest} tokens"
        )
    return Columns({name: [row[name] for row in rows] for name in rows[0]}, longest, left_out)


def _row(example: Sample | Pair, recipe: Recipe, encoder: Encoder) -> tuple[dict[str, list[int]], list[int]]:
    """An example's columns, and the lengths of its sequences."""
    if isinstance(example, Sample):
        encoded = encoder.sample(example, completion_only=recipe.supervised.completion_only)
        return {"input_ids": encoded.ids, "labels": encoded.labels}, [len(encoded.ids)]
    prompt, chosen, rejected = encoder.pair(example)
    sizes = [len(prompt) + len(chosen), len(prompt) + len(rejected)]
    if recipe.trainer.type == "rm":
        return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}, sizes
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}, sizes


def pad_token(template: ChatTemplate, examples: EncodedExamples) -> str:
    """Returns a special token that no example contains, to pad with.

    A reward model reads its score at the last token that is not padding.

    Raises:
        DataError: The tokenizer has no such token.
    """
    parts = [examples.train] if examples.held_out is None else [examples.train, examples.held_out]
    used = {token for part in parts for rows in part.data.values() for row in rows for token in row}
    tokenizer: Any = template.tokenizer
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in used:
        return str(tokenizer.pad_token)
    free = sorted(template.special_ids - template.end_ids - used)
    if not free:
        raise DataError(
            "this model's tokenizer has no special token left to pad with: the examples contain all of them"
        )
    return str(tokenizer.convert_ids_to_tokens(free[0]))


def micro_batch(recipe: Recipe, longest: int) -> int:
    """Computes the examples per micro-batch of a rank: as many as ``trainer.tokens_per_microbatch`` allows, or one."""
    share = recipe.supervised.batch_size // recipe.trainer.ranks
    return even_batch(share, recipe.trainer.tokens_per_microbatch // longest)


def even_batch(examples: int, most: int) -> int:
    """Finds the largest batch size up to ``most`` that divides ``examples``: TRL averages over equal batches."""
    return max(size for size in range(1, max(1, min(examples, most)) + 1) if examples % size == 0)


def step_count(recipe: Recipe, examples: int) -> tuple[int, int]:
    """Returns the steps of the whole training, and of one epoch over ``examples``."""
    per_epoch = -(-examples // recipe.supervised.batch_size)
    return planned_steps(recipe.trainer.total_steps, recipe.trainer.epochs, per_epoch), per_epoch
