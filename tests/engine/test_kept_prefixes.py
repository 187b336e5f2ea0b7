"""The radix tree of kept beginnings against a plain list of sequences."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.kept_prefixes import LEAST, KeptPrefixes
from agentrl.engine.slots import LayerShape, SlotCache
from agentrl.models.prefix_tree import common_prefix

SHAPES = [
    LayerShape(1, 1, 1, torch.float32, torch.device("cpu")),
    LayerShape(2, 1, 2, torch.float32, torch.device("cpu")),  # another shape: stored beside the first
    LayerShape(1, 1, 1, torch.float32, torch.device("cpu")),
]
CONTEXT = 160
blocks = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6)


def ids(names: list[str]) -> list[int]:
    """Each name is a run of 10 tokens: sequences branch in the middle of what is kept, and at its ends."""
    return [ord(name) * 100 + i for name in names for i in range(10)]


def write(cache: SlotCache, slot: int, tokens: list[int]) -> None:
    """Keys and values that tell token, position and layer."""
    cache.reserve(slot + 1, len(tokens))
    where = torch.arange(len(tokens))
    for layer, shape in enumerate(SHAPES):
        states = torch.tensor(tokens).float() + where / 1000 + layer * 1e5
        keys = states[:, None, None].expand(-1, shape.kv_heads, shape.key_dim)
        values = -states[:, None, None].expand(-1, shape.kv_heads, shape.value_dim)
        cache.write(layer, torch.full((len(tokens),), slot), where, keys, values)


@given(st.lists(st.tuples(st.booleans(), blocks), min_size=1, max_size=14), st.sampled_from([0, 20, 45, 90, 1000]))
def test_what_is_restored_is_what_was_computed(steps: list[tuple[bool, list[str]]], capacity: int) -> None:
    cache, truth = SlotCache(SHAPES, 3, CONTEXT), SlotCache(SHAPES, 3, CONTEXT)
    kept = KeptPrefixes(cache, capacity)
    stored: list[list[int]] = []
    for store, names in steps:
        tokens = ids(names)
        if store:
            write(cache, 0, tokens)
            kept.keep(tokens, 0)
            stored.append(tokens)
            assert kept.shared([*tokens, 1]) >= min(len(tokens), capacity) or len(tokens) < LEAST
        else:
            cache.reserve(2, CONTEXT)
            shared = kept.restore(tokens, 1)
            best = min(max((common_prefix(other, tokens) for other in stored), default=0), len(tokens) - 1)
            assert shared == kept.shared(tokens) <= best
            if capacity == 1000:
                assert shared == (best if best >= LEAST else 0)
            write(truth, 1, tokens)
            for layer in range(len(SHAPES)):
                assert torch.equal(cache.keys(layer)[1, :, :shared], truth.keys(layer)[1, :, :shared])
                assert torch.equal(cache.values(layer)[1, :, :shared], truth.values(layer)[1, :, :shared])
        assert kept.tokens <= capacity
    if capacity == 1000:
        beginnings = {tuple(other[: n + 1]) for other in stored if len(other) >= LEAST for n in range(len(other))}
        assert kept.tokens == len(beginnings), "a shared beginning is stored once"
    kept.forget()
    assert kept.tokens == 0 and all(kept.shared(other) == 0 for other in stored)


def test_what_was_used_last_stays() -> None:
    cache = SlotCache(SHAPES, 1, CONTEXT)
    kept = KeptPrefixes(cache, 60)
    first, second, third = (ids([name] * 3) for name in "abc")
    for tokens in (first, second):
        write(cache, 0, tokens)
        kept.keep(tokens, 0)
    assert kept.shared([*first, 0]) == 30, "used again"
    write(cache, 0, third)
    kept.keep(third, 0)
    assert [kept.shared([*tokens, 0]) for tokens in (first, second, third)] == [30, 0, 30]
