"""Tells how trainer and embedded engine take each miniature family, and why not in a faster way.

``python -m tests.models.account > docs/families.txt`` takes two minutes. Tests hold the same: :mod:`tests.models.ways`.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from agentrl.engine.model import ModelError, load_without_tokenizer
from agentrl.models.probe import wrong_rows
from agentrl.models.way import form_of
from agentrl.train.policy import ModelRefused, load_model
from tests.models.families import EXCEPTIONS, FAMILIES
from tests.models.ways import WAYS_WITH_IMAGES
from tests.train.test_families import write

CONTEXT = 64  # tokens; windows and chunks of the miniatures have four


class Taken(NamedTuple):
    """How a family is taken.

    Attributes:
        rows: ``trees``, ``padded`` or ``refused``.
        why: Why its rows are no trees.
        packs: Whether packed plain rows are exact too, for a family that does not compute trees.
        past: How the engine keeps the past of a request, or ``refused``.
        why_past: Why not in shared slots.
    """

    rows: str
    why: str
    packs: bool
    past: str
    why_past: str


def taken(name: str, folder: Path) -> Taken:
    """Loads a family as the trainer does, and as the engine does."""
    write(name, folder)
    try:
        model = load_model(folder, context=CONTEXT)
    except ModelRefused as error:
        rows, why, packs = "refused", str(error), False
    else:
        rows, why = form_of(model).way.rows, form_of(model).way.why
        packs = rows == "padded" and wrong_rows(model, "packed") is None
    try:
        loaded = load_without_tokenizer(str(folder), "float32", "cpu", CONTEXT)
    except ModelError as error:
        return Taken(rows, why, packs, "refused", str(error))
    return Taken(rows, why, packs, loaded.past, loaded.why)


def bare(why: str, folder: str) -> str:
    """Leaves out of a reason what differs from family to family."""
    why = re.sub(r" \(by [\d.]+% on average\)", "", why.replace(folder, "FOLDER"))
    return re.sub(r"\w+(Model|ForCausalLM|Attention)\b(\.forward)?", "CLASS", why)


def grouped(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each reason, with the families that have it."""
    names = defaultdict(list)
    for name, why in reasons.items():
        names[why].append(name)
    for why, some in sorted(names.items(), key=lambda item: -len(item[1])):
        yield f"  {len(some):3} {why}\n      {', '.join(some)}"


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Taken] = {}
    for name in [*FAMILIES, *WAYS_WITH_IMAGES]:
        with tempfile.TemporaryDirectory() as folder:
            one = taken(name, Path(folder))
            found[name] = one._replace(why=bare(one.why, folder), why_past=bare(one.why_past, folder))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, windows and chunks of 4 tokens")
    for title, names in (("causal language models", FAMILIES), ("with images, as text", sorted(WAYS_WITH_IMAGES))):
        some = {name: found[name] for name in names}
        print(f"\n== {len(some)} families: {title} ==")
        for field in ("rows", "past"):
            counts = defaultdict(int)
            for one in some.values():
                counts[getattr(one, field)] += 1
            print({"rows": "trainer:", "past": "engine: "}[field], dict(counts))
        packing = [name for name, one in some.items() if one.packs]
        print(f"\n{len(packing)} that compute no trees are exact in packed rows too: {', '.join(packing) or 'none'}")
        print("\nWhy the trainer computes no trees:")
        print(*grouped({name: one.why for name, one in some.items() if one.rows != "trees"}), sep="\n")
        print("\nWhy the engine does not share slots:")
        print(*grouped({name: one.why_past for name, one in some.items() if one.past != "slots"}), sep="\n")
    print(f"\n== {len(EXCEPTIONS)} left out ==")
    print(*grouped(EXCEPTIONS), sep="\n")


if __name__ == "__main__":
    main()
