"""Each rank's share of a pass over a batch: its micro-batches and the tokens of their rows.

Guarantees: only rank 0 plans, and each rank gets the same number of micro-batches; a rank gets the tokens and images of
its own rows and no others; shares are sent as safetensors over gloo, whatever the backend of the gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.core.columns import as_bytes, from_array, image_arrays, take_images
from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.layout import Layout, collate
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.rows import Row


@dataclass(frozen=True, eq=False)
class Work:
    """The branches of a batch to compute, on rank 0.

    Attributes:
        branches: Branches with trained tokens.
        tokens: Token columns that the branches index.
        normalizer: Divisor of the loss's weighted sum over tokens.
        version: Policy version that the step starts from.
        notes: Other numbers that every rank needs, by name.
    """

    branches: Sequence[Branch]
    tokens: TokenColumns
    normalizer: float = 1.0
    version: int = 0
    notes: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a :class:`Work`.

    Attributes:
        parts: ``[updates][micro-batches][rows]`` of this rank.
        branches: Branches that the rows index.
        tokens: Tokens of these branches, and no others.
        places: Number of places of the global batch: one for each sampled token and each bootstrap position.
        row_tokens: Number of computed tokens on all ranks.
        normalizer: Divisor of the loss's weighted sum over tokens.
        version: Policy version that the step starts from.
        notes: Other numbers that every rank needs, by name.
        group: Ranks that together compute each token once; ``None``: all.
    """

    parts: list[list[list[Row]]]
    branches: Sequence[Branch]
    tokens: TokenColumns
    places: int
    row_tokens: int
    normalizer: float
    version: int
    notes: dict[str, float]
    group: dist.ProcessGroup | None = None

    def micro_batches(self, part: int, layout: Layout, device: torch.device) -> Iterator[tuple[MicroBatch, bool]]:
        """Yields the micro-batches of update ``part``, each with whether it is the last."""
        rows = self.parts[part]
        for index, of_one in enumerate(rows):
            yield collate(of_one, self.branches, self.tokens, layout, device), index == len(rows) - 1

    @torch.no_grad()
    def gather(self, layout: Layout, device: torch.device, compute: Any) -> Tensor:
        """Computes ``[places]``, one number for each trained token, on every rank; a collective.

        Args:
            layout: Layout of the model.
            device: Device of the micro-batches.
            compute: Function of a micro-batch that returns its ``[trained]`` numbers.
        """
        found = torch.zeros(self.places, device=device)
        for part in range(len(self.parts)):
            for batch, _ in self.micro_batches(part, layout, device):
                found[batch.places] = compute(batch)
        dist.all_reduce(found, group=self.group)
        return found


def share_out(branches: Sequence[Branch], tokens: TokenColumns, parts: int) -> list[list[int]]:
    """Divides branches into at most ``parts`` parts of whole groups with about equal tokens; returns their indices."""
    sizes: dict[int, int] = {}
    lengths = np.diff(tokens.starts)
    for branch in branches:
        sizes[branch.group] = sizes.get(branch.group, 0) + int(lengths[list(branch.messages)].sum())
    loads = [0] * max(1, min(parts, len(sizes)))
    chosen: dict[int, int] = {}
    for group in sorted(sizes, key=lambda g: sizes[g], reverse=True):
        chosen[group] = loads.index(min(loads))
        loads[chosen[group]] += sizes[group]
    return [[i for i, b in enumerate(branches) if chosen[b.group] == number] for number in range(len(loads))]


def plan_shares(work: Work, layout: Layout, budget: int, ranks: int, updates: int = 1) -> Iterator[Share]:
    """Yields the share of each rank in order.

    Args:
        work: Branches to compute.
        layout: Layout of the model.
        budget: Token budget of a micro-batch.
        ranks: Number of ranks.
        updates: Number of optimizer updates, each over a part of the groups.
    """
    plans: list[list[list[list[Row]]]] = []  # [updates][ranks][micro-batches][rows]
    computed = 0
    for part in share_out(work.branches, work.tokens, updates):
        rows = layout.rows([work.branches[index] for index in part], work.tokens, budget)
        for row in rows:
            row.branches = [part[index] for index in row.branches]
        computed += sum(map(len, rows))
        plans.append(layout.plan(rows, ranks, budget))
    places = max((branch.bootstrap + 1 for branch in work.branches if branch.bootstrap is not None), default=0)
    places = max(places, work.tokens.total)
    for rank in range(ranks):
        parts = [plan[rank] for plan in plans]
        share = Share(
            parts, work.branches, work.tokens, places, computed, work.normalizer, work.version, work.notes or {}
        )
        yield share if ranks == 1 else _own_part(share)


def distribute(work: Work | None, layout: Layout, budget: int, mesh: RankMesh, updates: int = 1) -> Share:
    """Plans on rank 0, sends each rank its share, and returns this rank's share; a collective.

    Ranks of one context or tensor group get the same share.

    Args:
        work: Branches to compute on rank 0; ``None`` on the others.
        layout: Layout of the model.
        budget: Token budget of a micro-batch.
        mesh: Mesh of the ranks.
        updates: Number of optimizer updates.
    """
    if mesh.rank:
        return replace(unpack(_receive()), group=mesh.tokens)
    assert work is not None
    own: Share | None = None
    for number, share in enumerate(plan_shares(work, layout, budget, mesh.shape.data, updates)):
        own = own or share
        others = [rank for rank in mesh.with_rows(number) if rank]
        packed = pack(share) if others else b""
        for rank in others:
            _send(packed, rank)
    assert own is not None
    return replace(own, group=mesh.tokens)


def pack(share: Share) -> bytes:
    """Serializes a share as safetensors."""
    from safetensors.numpy import save

    tokens = share.tokens
    columns = {f"sampled/{name}": np.ascontiguousarray(values) for name, values in tokens.sampled.items()}
    arrays = {name: getattr(tokens, name) for name in _ARRAYS}
    files = {data: str(n) for n, data in enumerate(dict.fromkeys(one for own in tokens.images.values() for one in own))}
    said = {
        "images": [[message, [files[one] for one in own]] for message, own in tokens.images.items()],
        "parts": [[[asdict(row) for row in rows] for rows in part] for part in share.parts],
        "branches": [asdict(branch) for branch in share.branches],
        "total": tokens.total,
        **{name: getattr(share, name) for name in _PLAIN},
    }
    return save(arrays | columns | image_arrays({n: data for data, n in files.items()}) | {"said": as_bytes(said)})


def unpack(data: bytes) -> Share:
    """Reads the bytes of :func:`pack`."""
    from safetensors.numpy import load

    arrays = load(data)
    said, files = from_array(arrays.pop("said")), take_images(arrays)
    images = {message: tuple(files[name] for name in names) for message, names in said["images"]}
    sampled = {name.removeprefix("sampled/"): arrays.pop(name) for name in list(arrays) if name.startswith("sampled/")}
    branches = [
        Branch(**{**branch, "messages": tuple(branch["messages"]), "trained": tuple(branch["trained"])})
        for branch in said["branches"]
    ]
    parts = [[[Row(**row) for row in rows] for rows in part] for part in said["parts"]]
    tokens = TokenColumns(sampled=sampled, total=said["total"], images=images, **arrays)
    return Share(parts, branches, tokens, **{name: said[name] for name in _PLAIN})


_ARRAYS = tuple(field.name for field in fields(TokenColumns) if field.name not in ("sampled", "total", "images"))
_PLAIN = ("places", "row_tokens", "normalizer", "version", "notes")


def _own_part(share: Share) -> Share:
    """Reduces a share to the branches and tokens of its own rows."""
    used = sorted({index for part in share.parts for rows in part for row in rows for index in row.branches})
    messages = sorted({message for index in used for message in share.branches[index].messages})
    number = {index: place for place, index in enumerate(used)}
    place = {message: index for index, message in enumerate(messages)}
    branches = [
        replace(share.branches[index], messages=tuple(place[m] for m in share.branches[index].messages))
        for index in used
    ]
    parts = [
        [[replace(row, branches=[number[i] for i in row.branches]) for row in rows] for rows in part]
        for part in share.parts
    ]
    return replace(share, parts=parts, branches=branches, tokens=share.tokens.select(messages))


def _send(data: bytes, rank: int) -> None:
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.send(torch.tensor([len(payload)]), rank)
    dist.send(payload, rank)


def _receive() -> bytes:
    size = torch.zeros(1, dtype=torch.long)
    dist.recv(size, 0)
    payload = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.recv(payload, 0)
    return payload.numpy().tobytes()
