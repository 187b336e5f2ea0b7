"""Loads a model's weights with transformers, or says in one line why it does not.

Guarantees: every parameter of a loaded model comes from its files. One that they lack, or hold in another shape, is
refused: transformers would draw it at random.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import __version__

from agentrl.core.image_reader import has_image_class
from agentrl.core.model_files import Unreadable, one_line, unreadable
from agentrl.models.auto_class import makes_model

SHOWN = 3  # weights that a message names


def load_weights(
    kind: Any, path: Path, config: Any, *, drawn: Sequence[str] = (), trust: bool = False, **how: Any
) -> Any:
    """Loads a model with the first attention that its class has.

    Args:
        kind: Auto class of transformers.
        path: Folder of the model.
        config: Config of the model.
        drawn: Parts of the names of weights that its files may lack, as the caller sets them; ``[""]`` for all.
        trust: Whether code that comes with the model may run.
        how: Further arguments of ``from_pretrained``.

    Raises:
        Unreadable: It cannot be loaded, or not whole.
    """
    how |= {"trust_remote_code": trust, "output_loading_info": True}
    errors: list[Exception] = []
    for attention in ("sdpa", "eager"):
        try:
            model, found = kind.from_pretrained(
                str(path), config=config, attn_implementation=attention, ignore_mismatched_sizes=True, **how
            )
        except torch.OutOfMemoryError:
            raise
        except (ValueError, ImportError) as error:  # no attention that we can use, a missing package
            errors.append(error)
        except unreadable() as error:
            errors.append(error)
            break
        else:
            if why := _not_whole(found, drawn):
                raise Unreadable(f"{path} {why}")
            return model
    brought = getattr(config, "auto_map", None) or {}
    if not (makes_model(config) or has_image_class(config) or brought):
        raise Unreadable(
            f"transformers {__version__} has no causal language model of a {config.model_type!r}: take a causal "
            "language model"
        ) from errors[0]
    raise Unreadable(f"{path} cannot be loaded ({one_line(errors[0])}): compare config.json and weights with the "
                     "model's own, or download it again") from errors[0]  # fmt: skip


def _not_whole(found: dict[str, Any], drawn: Sequence[str]) -> str | None:
    """Returns which weights of a loaded model do not come from its files; ``None`` if all do."""
    again = "take the config.json that belongs to them, or download the model again"
    if wrong := sorted(found["mismatched_keys"], key=str):
        name, stored, wanted = wrong[0][:3]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"holds {name} as {list(stored)}, and its config.json wants {list(wanted)}{more}: {again}"
    lacks = sorted(name for name in found["missing_keys"] if not any(part in name for part in drawn))
    if not lacks:
        return None
    more = f" and {len(lacks) - SHOWN} more" if len(lacks) > SHOWN else ""
    return f"lacks weights that its config.json asks for ({', '.join(lacks[:SHOWN])}{more}): {again}"
