"""The operators of the fast path: those of torch and oneDNN, or compiled ones.

Guarantees: both compute the same up to float rounding; parameters are neither moved nor changed, except by
:meth:`Product.adopt`. Call :meth:`Product.pack` after every other change of the parameters.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from agentrl.engine.attention import Attend, DecodeAttention, rotated
from agentrl.engine.forward_batch import Decode
from agentrl.engine.native.library import Native
from agentrl.engine.packed_weights import matrix_units
from agentrl.engine.slots import SlotCache

ROWS_HINT = 32  # number of rows for which oneDNN chooses its layout; measured to be good from 2 to 512
Norms = tuple[Tensor | None, Tensor | None]


class Product(Protocol):
    """Linear layers with the same input, computed as one matrix product; inputs are ``[rows, depth]``."""

    def pack(self) -> None:
        """Copy the parameters into the packed layout again, unless all were adopted since the last call."""

    def adopt(self, linear: nn.Linear, weight: Tensor) -> bool:
        """Copy a new weight into a linear layer and the packed layout at once; returns False if it is not possible."""
        ...

    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute the product, with the layers' biases."""
        ...

    def swish(self, inputs: Tensor) -> Tensor:
        """Compute the product and apply the swish activation."""
        ...

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        """Compute the product plus ``other``."""
        ...

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        """Compute the product times ``other``, elementwise."""
        ...


class Operators(Protocol):
    """Operators that a decoder layer uses."""

    name: str

    def product(self, linears: Sequence[nn.Linear], *, wide: bool = False) -> Product:
        """Pack some linear layers.

        Args:
            linears: Linear layers that share an input.
            wide: Whether the product is returned in float32 if that costs no time.
        """
        ...

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of ``[rows, width]``."""
        ...

    def rotate(self, mixed: Tensor, turn: tuple[Tensor, Tensor], norms: Norms, kv_heads: int, epsilon: float) -> Tensor:
        """Norm and rotate the queries and keys of ``mixed``.

        Args:
            mixed: ``[tokens, heads + 2 * kv_heads, head_dim]``; may be written to.
            turn: Cosines and sines, ``[tokens, head_dim / 2]``.
            norms: Weights of the norms of queries and keys; ``None`` for a norm that the model lacks.
            kv_heads: Number of key heads.
            epsilon: Epsilon of the norms.
        """
        ...

    def decode_attention(self, cache: SlotCache, batch: Decode) -> Attend:
        """Returns the attention function of a decode step."""
        ...


class TorchOperators:
    """Operators of torch; oneDNN computes the products, together with the activation or sum that follows."""

    name = "torch"

    def product(self, linears: Sequence[nn.Linear], *, wide: bool = False) -> Product:
        """Pack some linear layers."""
        return _OneDnnProduct(linears)

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm in float32, as in the models; torch's own norm runs seven operators on a CPU."""
        single = states.float()
        squares = torch.linalg.vector_norm(single, dim=-1, keepdim=True).square_()
        return weight * (single * torch.rsqrt(squares / single.shape[-1] + epsilon)).to(states.dtype)

    def rotate(self, mixed: Tensor, turn: tuple[Tensor, Tensor], norms: Norms, kv_heads: int, epsilon: float) -> Tensor:
        """Norm and rotate queries and keys."""
        heads = mixed.shape[1] - 2 * kv_heads
        for norm, part in zip(norms, (mixed[:, :heads], mixed[:, heads : heads + kv_heads]), strict=True):
            if norm is not None:
                part.copy_(self.rms_norm(part, norm, epsilon))
        return rotated(mixed, turn, heads + kv_heads)

    def decode_attention(self, cache: SlotCache, batch: Decode) -> Attend:
        """Returns the attention function of a decode step."""
        return DecodeAttention(cache, batch)


class _OneDnnProduct:
    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self.pack()

    @torch.inference_mode()
    def pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(_joined(self._linears), ROWS_HINT)
        self._bias = _biases(self._linears)

    def adopt(self, linear: nn.Linear, weight: Tensor) -> bool:
        return False

    def __call__(self, inputs: Tensor, activation: str = "none") -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, activation, [], "")

    def swish(self, inputs: Tensor) -> Tensor:
        return self(inputs, "swish")

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, self._bias, "add")

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, self._bias, "mul")


class NativeOperators:
    """Compiled operators; some products are oneDNN's.

    oneDNN computes products of a dtype that the library does not multiply on this CPU, bfloat16 products of odd depth,
    and all bfloat16 products on a CPU with matrix units (AMX).

    Args:
        native: Compiled library.
    """

    name = "compiled"

    def __init__(self, native: Native) -> None:
        """Keep the library."""
        self.native = native

    def product(self, linears: Sequence[nn.Linear], *, wide: bool = False) -> Product:
        """Pack some linear layers."""
        weight = linears[0].weight
        halves = weight.dtype == torch.bfloat16
        if weight.dtype not in self.native.products or (halves and (matrix_units() or weight.shape[1] % 2)):
            return _OneDnnProduct(linears)
        return _NativeProduct(self.native, linears, wide=wide)

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm."""
        return self.native.rms_norm(states, weight, epsilon)

    def rotate(self, mixed: Tensor, turn: tuple[Tensor, Tensor], norms: Norms, kv_heads: int, epsilon: float) -> Tensor:
        """Norm and rotate queries and keys, in place."""
        self.native.rotate(mixed, *turn, norms, kv_heads, epsilon)
        return mixed

    def decode_attention(self, cache: SlotCache, batch: Decode) -> Attend:
        """Returns the attention function of a decode step; each row reads its own length of its slot in place."""
        slots = batch.write_slots if batch.rows is None else batch.rows
        lines = batch.write_slots if batch.write_tokens is None else batch.write_tokens
        writes = batch.write_slots, batch.write_positions, lines
        lengths = torch.tensor(batch.lengths)

        def attend(layer: int, mixed: Tensor, scale: float) -> Tensor:
            keys, values = cache.keys(layer), cache.values(layer)
            return self.native.store_and_attend(mixed, keys, values, writes, slots, lengths, scale)

        return attend


class _NativeProduct:
    def __init__(self, native: Native, linears: Sequence[nn.Linear], *, wide: bool) -> None:
        self._native, self._linears, self._wide = native, linears, wide
        self._columns = sum(linear.out_features for linear in linears)
        self._packed: Tensor | None = None
        self._adopted: set[int] = set()
        self.pack()

    @torch.inference_mode()
    def pack(self) -> None:
        if len(self._adopted) < len(self._linears):
            self._packed = self._native.pack(_joined(self._linears), self._packed)
        self._adopted.clear()
        bias = _biases(self._linears)
        self._bias = None if bias is None else nn.functional.pad(bias, (0, -self._columns % self._native.panel))

    @torch.inference_mode()
    def adopt(self, linear: nn.Linear, weight: Tensor) -> bool:
        number = next(n for n, own in enumerate(self._linears) if own is linear)
        first = sum(own.out_features for own in self._linears[:number])
        last = number == len(self._linears) - 1
        whole = not first % self._native.panel and (last or not linear.out_features % self._native.panel)
        if self._packed is None or weight.dtype != linear.weight.dtype or not whole:
            return False
        self._native.pack(weight, self._packed[first * linear.in_features :], linear.weight)
        self._adopted.add(number)
        return True

    def _product(self, inputs: Tensor, mode: str, other: Tensor | None = None) -> Tensor:
        assert self._packed is not None
        return self._native.multiply(inputs, self._packed, self._columns, self._bias, mode, other, wide=self._wide)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, "none")

    def swish(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, "swish")

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        return self._product(inputs, "plus", other)

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        return self._product(inputs, "times", other)


def _joined(linears: Sequence[nn.Linear]) -> Tensor:
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases: list[Tensor] = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None
