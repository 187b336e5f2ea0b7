"""Shows the first example of a supervised run as its trainer encodes it: ids, and what of them is learned.

Guarantees: the example is read, rendered and encoded by the code that trains on it; what a trainer would refuse raises
here, with the same sentence.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.launch.first_prompt import PromptError, shortened
from agentrl.supervised.examples import Pair, load_examples
from agentrl.supervised.tokens import Encoded, Encoder


def example_lines(recipe: Recipe, model: Path) -> list[str]:
    """Returns what a person is shown of the first example.

    Args:
        recipe: Recipe of a supervised run.
        model: Folder with the model's tokenizer.

    Raises:
        DataError: The examples cannot be read.
        PromptError: The chat template cannot render the example whole.
    """
    example = load_examples(recipe, recipe.train_dataset).examples[0]
    try:
        template = ChatTemplate.from_folder(
            model,
            source=recipe.model.chat_template,
            policy="append",
            variables=recipe.inference.chat_template_kwargs,
            trust=recipe.model.trust_remote_code,
        )
        if isinstance(example, Pair):
            prompt, chosen, rejected = Encoder(template).pair(example)
            return [
                _line("example", template, prompt, "of its prompt"),
                _line("chosen", template, chosen),
                _line("rejected", template, rejected),
            ]
        encoded = Encoder(template).sample(example, completion_only=recipe.supervised.completion_only)
    except TemplateError as error:
        raise PromptError(f"model {recipe.model.name}: the first example: {error}") from error
    return [_line("example", template, encoded.ids), _learned(template, encoded)]


def _line(what: str, template: ChatTemplate, ids: list[int], more: str = "") -> str:
    return f"{what:<10} {' '.join(filter(None, (f'{len(ids)} tokens', more)))}: {shortened(_text(template, ids))!r}"


def _learned(template: ChatTemplate, encoded: Encoded) -> str:
    """The tokens with a loss: each unbroken part as a text of its own."""
    parts = [[token for token, _ in part] for is_learned, part in _parts(encoded) if is_learned]
    texts = " ".join(repr(shortened(_text(template, part))) for part in parts)
    return f"learned    {sum(encoded.learned)} of them: {texts}"


def _parts(encoded: Encoded) -> Iterable[tuple[bool, Iterable[tuple[int, bool]]]]:
    return groupby(zip(encoded.ids, encoded.learned, strict=True), key=lambda pair: pair[1])


def _text(template: ChatTemplate, ids: list[int]) -> str:
    return template.tokenizer.decode(ids, skip_special_tokens=False)
