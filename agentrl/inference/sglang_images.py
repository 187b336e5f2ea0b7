"""What images need of SGLang, which expands their placeholders itself: start options, prompts, and a check of answers.

Guarantees: what such a server cannot read is refused before it is sent.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentrl.core.image_reader import PromptImage
from agentrl.inference.backend import InferenceError
from agentrl.inference.kinds.kind import ImageReading, StartOptions

EXACT_IDS = "SGLANG_MM_AVOID_RETOKENIZE"  # else the ids beside images are those of their text, tokenized again
FEATURE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"  # keeps features by an image's pixels; no call empties it


def start_options(reading: ImageReading) -> StartOptions:
    """Returns with what a server keeps a prompt's ids, and no features of older weights (sglang pull 36468)."""
    env = {EXACT_IDS: "1"} | ({FEATURE_CACHE: "0"} if reading.tower_changes else {})
    return StartOptions(env, ["--disable-fast-image-processor"] if reading.pillow else [])


def one_placeholder_each(token_ids: list[int], images: Sequence[PromptImage], url: str) -> list[int]:
    """Returns a prompt's ids with one placeholder in the place of each image.

    Args:
        token_ids: Ids with all placeholders, as the model reads them.
        images: Images of the prompt, at least one, in the order of their places.
        url: Base URL of the server.

    Raises:
        InferenceError: The prompt holds more placeholders than images, such as one that the policy sampled.
    """
    sent, end, kinds = list[int](), 0, set[int]()
    for image in images:
        ((placeholder, _),) = Counter(token_ids[image.start : image.end]).most_common(1)  # others separate rows
        sent += [*token_ids[end : image.start], placeholder]
        end = image.end
        kinds.add(placeholder)
    sent += token_ids[end:]
    if (found := sum(one in kinds for one in sent)) != len(images):
        raise InferenceError(
            f"the prompt for {url} holds {found} placeholders for {len(images)} images: one was sampled, and "
            "the server would wait for its image for ever"
        )
    return sent


def check_expanded(answer: Any, length: int, url: str) -> None:
    """Refuses an answer to a prompt that the server expanded otherwise.

    Args:
        answer: Answer of SGLang's ``/generate``.
        length: Number of the prompt's ids with all placeholders.
        url: Base URL of the server.

    Raises:
        InferenceError: The server read more or fewer tokens.
    """
    read = answer["meta_info"].get("prompt_tokens")
    if read != length:
        raise InferenceError(
            f"{url}/generate read a prompt of {read} tokens where {length} were sent: it expands the images otherwise "
            "than the model's processor here; use the same transformers, and the model's own preprocessor_config.json"
        )
