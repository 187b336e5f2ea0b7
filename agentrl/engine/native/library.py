"""Wraps the compiled operators as Python functions on tensors.

Guarantees: only tensors that are not contiguous are copied. Shapes are not checked: the caller must give right ones.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

MODES = {"none": 0, "swish": 1, "plus": 2, "times": 3}

ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16"}

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "pack": [_POINTER] * 3 + [_INT] * 2,
    "multiply": [_POINTER] * 5 + [_INT] * 4,
    "rms_norm": [_POINTER] * 3 + [_INT] * 2 + [_FLOAT],
    "rotate": [_POINTER] * 5 + [_INT] * 4 + [_FLOAT],
    "store_and_attend": [_POINTER] * 4 + [_INT] * 2 + [_POINTER] * 3 + [_INT] + [_POINTER] * 2 + [_INT] * 4 + [_FLOAT],
    "sample": [_POINTER] * 7 + [_INT] * 2,
}


class Native:
    """Holds the compiled library. Tensors are on the CPU, contiguous, all float32 or all bfloat16; indices int64.

    Args:
        path: Path of the shared library.
    """

    def __init__(self, path: Path) -> None:
        """Load the library."""
        self._library = ctypes.CDLL(str(path))
        for name in ("panel_width", "multiplies_bf16"):
            getattr(self._library, name).restype = _INT
        self.panel = int(self._library.panel_width())
        self.products = {torch.float32} | ({torch.bfloat16} if self._library.multiplies_bf16() else set())
        self._functions = {
            (name, dtype): self._function(f"{name}_{suffix}", name)
            for dtype, suffix in ELEMENTS.items()
            for name in _SIGNATURES
            if dtype in self.products or name not in ("pack", "multiply")
        }
        if torch.bfloat16 in self.products:
            self._functions["multiply_wide", torch.bfloat16] = self._function("multiply_bf16_f32", "multiply")
        self._functions["multiply_wide", torch.float32] = self._functions["multiply", torch.float32]

    def _function(self, symbol: str, name: str) -> Callable[..., None]:
        function = getattr(self._library, symbol)
        function.argtypes, function.restype = _SIGNATURES[name], None
        return function

    def pack(self, weight: Tensor, into: Tensor | None = None, copy: Tensor | None = None) -> Tensor:
        """Packs a weight into panels for :meth:`multiply`.

        Args:
            weight: Weight, ``[columns, depth]``, with a dtype in :attr:`products`.
            into: Buffer for the packed panels.
            copy: Buffer for a plain copy of the weight.
        """
        columns, depth = weight.shape
        packed = weight.new_empty(-(-columns // self.panel) * self.panel * depth) if into is None else into
        self._functions["pack", weight.dtype](
            packed.data_ptr(), _at(copy), weight.contiguous().data_ptr(), columns, depth
        )
        return packed

    def multiply(
        self, inputs: Tensor, packed: Tensor, columns: int, bias: Tensor | None, mode: str,
        other: Tensor | None = None, *, wide: bool = False,
    ) -> Tensor:  # fmt: skip
        """Multiplies inputs by a packed weight.

        Args:
            inputs: Inputs, ``[rows, depth]``; the depth is even for bfloat16.
            packed: Result of :meth:`pack`.
            columns: Number of columns of the weight.
            bias: Bias, ``[columns]``, padded to whole panels.
            mode: ``none``, ``swish``, ``plus`` or ``times``; the last two combine the product with ``other``.
            other: Second operand, ``[rows, columns]``.
            wide: Return the sums in float32, without rounding.

        Returns:
            Product, ``[rows, columns]``.
        """
        rows, depth = inputs.shape
        out = inputs.new_empty(rows, columns, dtype=torch.float32 if wide else inputs.dtype)
        self._functions["multiply_wide" if wide else "multiply", inputs.dtype](
            out.data_ptr(), inputs.contiguous().data_ptr(), packed.data_ptr(), _at(bias), _at(other), rows, columns,
            depth, MODES[mode],
        )  # fmt: skip
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of ``[rows, width]``."""
        out = torch.empty_like(states)
        rows, width = states.shape
        self._functions["rms_norm", states.dtype](
            out.data_ptr(), states.data_ptr(), weight.data_ptr(), rows, width, epsilon
        )
        return out

    def rotate(
        self, mixed: Tensor, cosine: Tensor, sine: Tensor, norms: tuple[Tensor | None, Tensor | None], kv_heads: int,
        epsilon: float,
    ) -> None:  # fmt: skip
        """Norm and rotate the queries and keys of ``mixed`` ``[tokens, heads + 2 * kv_heads, dim]`` in place."""
        tokens, both, dim = mixed.shape
        self._functions["rotate", mixed.dtype](
            mixed.data_ptr(), cosine.data_ptr(), sine.data_ptr(), _at(norms[0]), _at(norms[1]), tokens,
            both - 2 * kv_heads, kv_heads, dim, epsilon,
        )  # fmt: skip

    def store_and_attend(
        self, mixed: Tensor, keys: Tensor, values: Tensor, writes: tuple[Tensor, Tensor, Tensor], slots: Tensor,
        lengths: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """Store keys and values of new tokens in the slots, then attend.

        Args:
            mixed: Queries, keys and values, ``[rows, heads + 2 * kv_heads, dim]``.
            keys: Keys of a layer, ``[slots, kv_heads, positions, dim]``.
            values: Values of the layer, same shape.
            writes: Slot, position and row of each write, int64 ``[writes]`` each.
            slots: Slot that each row attends to, int64 ``[rows]``.
            lengths: Number of cached positions that each row attends to.
            scale: Factor on the attention scores.

        Returns:
            Attention output, ``[rows, heads * dim]``.
        """
        rows, both, dim = mixed.shape
        kv_heads = keys.shape[1]
        heads = both - 2 * kv_heads
        out = mixed.new_empty(rows, heads * dim)
        slot, position, row = writes
        self._functions["store_and_attend", mixed.dtype](
            out.data_ptr(), mixed.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1),
            slot.data_ptr(), position.data_ptr(), row.data_ptr(), len(slot), slots.data_ptr(), lengths.data_ptr(), rows,
            heads, kv_heads, dim, scale,
        )  # fmt: skip
        return out

    def sample(
        self, logits: Tensor, temperatures: Tensor, greedy: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples one token per row.

        Args:
            logits: Logits, ``[rows, vocab]``.
            temperatures: Sampling temperatures, float32 ``[rows]``, above 0.
            greedy: Rows that take the likeliest token and report its logprob at temperature 1, bool ``[rows]``.
            uniforms: Uniform random numbers in [0, 1), float64 ``[rows]``.

        Returns:
            Tokens (int64), logprobs (float64), and whether the logits were unusable (bool); each ``[rows]``.
        """
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float64)
        broken = torch.empty(rows, dtype=torch.bool)
        self._functions["sample", logits.dtype](
            tokens.data_ptr(), logprobs.data_ptr(), broken.data_ptr(), logits.contiguous().data_ptr(),
            temperatures.data_ptr(), greedy.data_ptr(), uniforms.data_ptr(), rows, vocab,
        )  # fmt: skip
        return tokens, logprobs, broken


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
