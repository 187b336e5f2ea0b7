"""The routers of a mixture of experts: records the experts that they choose, or has them take given ones.

Guarantees: routers are found by running the model, never by names: they are the modules that take the largest of a
fixed number of scores for each token. A router that is given experts computes their weights from its own scores of
them, as for its own choice, so gradients flow through the weights; with its own choice nothing changes. A model whose
hidden states do not follow the given experts is refused. What was given stays until the next is, so that layers that
are computed again in the backward pass choose the same.

Replaying the rollout's experts in the update is Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers, arXiv:2510.11370.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.models.decoder import decoder_of
from agentrl.models.probe import COARSE, FAULTS, TOLERANCE
from agentrl.models.tree_support import ids_of

TRIED = (7, 11)  # tokens of the two trials: a router chooses among as many in both
_TOPK = (torch.topk, Tensor.topk)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class NoRouters(ValueError):
    """A model has no routers that can be given experts; the message says why."""


@dataclass(frozen=True)
class _Call:
    """A choice of the largest scores: the module that makes it, the scores of each token, and how many are taken."""

    module: nn.Module
    scores: int
    chosen: int


class Routers:
    """The routers of a model, in the order in which its forward pass calls them; see :func:`find_routers`.

    Args:
        calls: Their choices.
        depths: Number of the decoder layer that each router is in.
        layers: Number of decoder layers.

    Attributes:
        chosen: Number of experts that each chooses for a token.
        experts: Number of experts that it chooses from.
    """

    def __init__(self, calls: list[_Call], depths: list[int], layers: int) -> None:
        self.chosen, self.experts = calls[0].chosen, calls[0].scores
        self._calls, self._depths, self._layers = calls, depths, layers
        self._given: Tensor | None = None
        self._taken: list[Tensor | None] | None = None
        self._own: Tensor | None = None  # [tokens, routers] whether the own choice differs
        for number, call in enumerate(calls):
            _around(call.module, lambda number=number: _Choosing(self, number), lambda: self._active)

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def width(self) -> int:
        """Numbers of a token's experts in all layers."""
        return len(self) * self.chosen

    @property
    def _active(self) -> bool:
        return self._given is not None or self._taken is not None

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yields a list that holds, after each forward pass within the context, int16 ``[tokens, width]`` experts."""
        found: list[Tensor] = []
        self._given = None
        self._taken = list[Tensor | None]([None]) * len(self)

        def collect(*_: Any) -> None:
            found.append(self._collect())

        hook = self._calls[-1].module.register_forward_hook(collect)
        try:
            yield found
        finally:
            hook.remove()
            self._taken = None

    def _collect(self) -> Tensor:
        assert self._taken is not None
        parts = [part for part in self._taken if part is not None]
        self._taken = list[Tensor | None]([None]) * len(self)
        return torch.cat(parts, dim=1).to(torch.int16)

    def give(self, experts: Tensor | None) -> None:
        """Has the routers take these experts from now on.

        Args:
            experts: Integers ``[tokens, width]``, where a token without known experts has negative ones and chooses
                itself; a row may also name experts of all decoder layers, as servers do, of which those without a
                router are left out. ``None``: all choose themselves.

        Raises:
            ValueError: They are not of this model.
        """
        self._given, self._own = None, None
        if experts is None:
            return
        count = experts.shape[1] if experts.ndim == 2 else -1
        by_layers = len(set(self._depths)) == len(self)
        if by_layers and count == self._layers * self.chosen and count != self.width:
            by_layer = experts.view(-1, self._layers, self.chosen)
            experts = by_layer[:, self._depths].reshape(-1, self.width)
        elif count != self.width:
            raise ValueError(
                f"experts of shape {list(experts.shape)} for a model of {len(self)} routers that choose {self.chosen}"
            )
        if experts.numel() and int(experts.max()) >= self.experts:
            raise ValueError(f"expert {int(experts.max())} of a model that has {self.experts}: it is another model's")
        self._given = experts
        self._own = torch.zeros(len(experts), len(self), dtype=torch.bool, device=experts.device)

    def differences(self) -> tuple[Tensor, Tensor] | None:
        """Compares the routers' own choice with the given experts, in the forward pass since they were given.

        Returns:
            Bool ``[tokens, routers]`` whether a router would have chosen other experts, in whatever order, and bool
            ``[tokens]`` whether experts were given; ``None`` if none were.
        """
        if self._given is None or self._own is None:
            return None
        return self._own, self._given[:, 0] >= 0

    def choose(self, number: int, scores: Tensor, own: Any) -> Any:
        """Returns what a router's call of ``topk`` shall return.

        Args:
            number: Number of the router.
            scores: ``[..., experts]`` scores of each token.
            own: What the call returned: the largest scores and their indices.
        """
        if self._taken is not None:
            self._taken[number] = own[1].detach().reshape(-1, self.chosen)
            return own
        assert self._given is not None and self._own is not None
        mine = own[1].reshape(-1, self.chosen)
        given = self._given[:, number * self.chosen : (number + 1) * self.chosen].to(mine.dtype)
        known = given[:, :1] >= 0
        taken = torch.where(known, given, mine)
        with torch.no_grad():
            differs = (taken.sort(-1).values != mine.sort(-1).values).any(-1)
            self._own[:, number] = differs
        indices = taken.view_as(own[1])
        return torch.return_types.topk((scores.gather(-1, indices), indices))  # type: ignore[attr-defined]


class _Choosing(TorchFunctionMode):
    """Within a router's forward pass: replaces what its choice of the largest scores returns."""

    def __init__(self, routers: Routers, number: int) -> None:
        super().__init__()
        self._routers, self._number = routers, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, and has the routers decide over a choice among all experts."""
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._routers.experts or found[1].shape[-1] != self._routers.chosen:
            return found
        return self._routers.choose(self._number, scores, found)


def _around(module: nn.Module, make: Callable[[], TorchFunctionMode], active: Callable[[], bool]) -> None:
    """Has each forward pass of a module run within a mode, while ``active`` says so."""
    open_modes: list[ExitStack] = []

    def enter(*_: Any) -> None:
        stack = ExitStack()
        if active():
            stack.enter_context(make())
        open_modes.append(stack)

    def leave(*_: Any) -> None:
        open_modes.pop().close()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


@torch.no_grad()
def find_routers(model: Any) -> Routers:
    """Finds the routers of a model by trying it, and tries that they take given experts.

    Args:
        model: Causal LM, or its decoder, with its weights; not sharded.

    Raises:
        NoRouters: It has none, or none that can be given experts.
    """
    decoder, name = decoder_of(model), type(model).__name__
    try:
        short, long = (_choices(decoder, ids_of(model, count)) for count in TRIED)
    except FAULTS as error:
        raise NoRouters(f"the decoder of {name} cannot be called alone ({type(error).__name__}: {error})") from error
    if len(short) != len(long):
        raise NoRouters(f"the routers of {name} choose more often in longer sequences")
    calls = [one for one, other in zip(short, long, strict=True) if one == other and one.chosen < one.scores]
    latest = {id(one.module): one for one in calls}  # before its experts, a router may choose groups of them
    calls = [one for one in calls if latest[id(one.module)] is one]
    if not calls:
        raise NoRouters(f"no layer of {name} chooses experts by their largest scores (torch.topk)")
    if any(count > 1 for count in Counter(id(one.module) for one in calls).values()):
        raise NoRouters(f"layers of {name} share a router")
    if len({(one.scores, one.chosen) for one in calls}) > 1:
        kinds = sorted({f"{one.chosen} of {one.scores}" for one in calls})
        raise NoRouters(f"the routers of {name} choose differently: {', '.join(kinds)}")
    names = {id(module): name for name, module in decoder.named_modules()}
    found = [_LAYER.search(names[id(one.module)]) for one in calls]
    depths = [int(one[1]) if one else number for number, one in enumerate(found)]
    layers = decoder.config.get_text_config(decoder=True).num_hidden_layers
    routers = Routers(calls, depths, layers)
    if why := _wrong(decoder, routers):
        raise NoRouters(f"the routers of {name} cannot be given experts: {why}")
    return routers


def _choices(decoder: Any, ids: list[int]) -> list[_Call]:
    """Lists the choices of the largest scores of each token in a forward pass."""
    inside: list[nn.Module] = []
    found: list[_Call] = []

    class Listing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func in _TOPK:
                scores = args[0] if args else (kwargs or {})["input"]
                if scores.numel() == len(ids) * scores.shape[-1] and inside:
                    found.append(_Call(inside[-1], scores.shape[-1], made[1].shape[-1]))
            return made

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = []
    for module in decoder.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, *_: inside.append(module)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Listing():
            _states(decoder, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _wrong(decoder: Any, routers: Routers) -> str | None:
    """Returns why given experts do not decide the hidden states; ``None`` if they do."""
    ids = ids_of(decoder, TRIED[0])
    tolerance = TOLERANCE.get(next(decoder.parameters()).dtype, COARSE)

    def states(experts: Tensor) -> Tensor:
        routers.give(experts)
        try:
            return _states(decoder, ids)
        finally:
            routers.give(None)

    def gap(one: Tensor, other: Tensor) -> float:
        return ((one - other).abs().mean() / other.abs().mean()).item()

    try:
        with routers.recorded() as taken:
            own = _states(decoder, ids)
        if len(taken) != 1 or taken[0].shape != (len(ids), routers.width):
            return "they do not all choose in each pass"
        if not gap(states(taken[0]), own) <= tolerance:
            return "with their own choice the hidden states become others"
        others = (taken[0] + 1) % routers.experts
        if not gap(states(others), own) > tolerance:
            return "with other experts the hidden states stay as they are"
    except FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _states(decoder: Any, ids: list[int]) -> Tensor:
    rows = torch.tensor([ids], device=next(decoder.parameters()).device)
    return decoder(input_ids=rows, use_cache=False).last_hidden_state.float()
