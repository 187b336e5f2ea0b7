"""Which columns of a dataset are read, which would change what is learned, and which say nothing to a trainer.

Guarantees: each column of an example is read, refused because it would change what is learned and nothing here reads
it, or told by name in the sentence about the data. The same holds for the weight of a message.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

_TEMPLATE = "set inference.chat_template_kwargs for the whole run"
_ALL_ALIKE = "all examples count alike: leave out those of weight 0, repeat others"
_OWN_MASK = "the loss mask follows from supervised.completion_only and from who spoke"
_OWN_IDS = "examples are encoded here, with the model's chat template"
_TEXT = "models here read text alone"
_AS_TOOLS = "name the column tools, and give each function as {type: function, function: ...}"
REFUSED = {
    "chat_template_kwargs": _TEMPLATE,
    "functions": _AS_TOOLS,
    "margin": "pairs have no margin in this loss",
    **dict.fromkeys(("weight", "weights", "sample_weight", "example_weight", "loss_weight"), _ALL_ALIKE),
    **dict.fromkeys(("loss_mask", "completion_mask", "assistant_masks", "assistant_mask"), _OWN_MASK),
    **dict.fromkeys(("input_ids", "labels", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids"), _OWN_IDS),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _TEXT),
}  # column -> what to do instead; TRL's trainers read most of them


def refuse_unread(example: Mapping[str, Any], read: Iterable[str]) -> None:
    """Refuse a column that would change what is learned and that nothing reads; empty ones pass.

    Raises:
        ValueError: There is such a column; the message says what to do.
    """
    for name in set(example) - set(read):
        value = example[name]
        if name in REFUSED and value is not None and value != 1 and not (hasattr(value, "__len__") and not len(value)):
            raise ValueError(f"column {name} would change what is learned, and is not read: {REFUSED[name]}")


def refuse_weight(message: Mapping[str, Any]) -> None:
    """Refuse a message whose ``weight`` is not 1: OpenAI's format leaves a turn of weight 0 out of the loss.

    Raises:
        ValueError: It has such a weight.
    """
    if message.get("weight", 1) not in (1, None):
        raise ValueError(
            f"a message has weight {message['weight']}, which is not read; to learn the last answer alone, give the "
            "turns before it as prompt and the answer as completion"
        )


def tools_of(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an example's tools, in the shape of a request's ``tools``; none where the column is missing or empty.

    Args:
        example: Row of the dataset; ``tools`` is a list of functions, or such a list as JSON text.

    Raises:
        ValueError: ``tools`` is something else.
    """
    given = example.get("tools")
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"tools is a text that is not JSON ({error}): {given[:60]!r}") from error
    if given is None or isinstance(given, str):
        return []
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ValueError(f"tools is {type(given).__name__}, want a list of functions, or that list as JSON text")
    return [_tool(one) for one in given]


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the functions among tools."""
    return [tool["function"]["name"] for tool in tools]


def _tool(given: object) -> dict[str, Any]:
    tool = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(tool.get("name"), str) and "function" not in tool:  # the function without its envelope
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tools has {str(given)[:80]}, want {{type: function, function: {{name: ...}}}}")
    return {**tool, "function": dict(function)}
