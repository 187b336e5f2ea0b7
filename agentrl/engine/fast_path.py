"""A faster forward pass on CPU for one family of models (Llama, Mistral, Qwen 2 and 3, SmolLM).

Guarantees: it computes what the model's own forward computes, up to float rounding; both are compared when it is made,
and it is not used if they differ. The parameters are not moved or changed: after a weight change, only
:meth:`FastPath.repack` is needed. Models with another layout, device or dtype use their own forward.

How: a layer is six packed matrix products instead of about fifty operators. Queries, keys and values are one product;
oneDNN computes the gate's activation, its product with the other branch and both residual sums inside the products;
query heads that share keys are one matrix, so no key is repeated.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engine.attention import Attend, parted
from agentrl.engine.native.build import native
from agentrl.engine.operators import NativeOperators, Operators, TorchOperators
from agentrl.engine.packed_weights import can_pack

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
TRIED_TOKENS = 16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # rounding gives 1e-5 and 0.1; a wrong layer gives more than 1
log = logging.getLogger(__name__)


class FastPath:
    """The packed weights of a model, and its forward over them.

    Args:
        model: A causal language model for which :func:`fits` holds.
        operators: Operators that the forward uses.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, operators: Operators) -> None:
        """Pack the weights."""
        self.operators = operators
        self._model = model
        config = model.config.get_text_config()
        attention = model.model.layers[0].self_attn
        self._head = attention.head_dim
        self._kv_heads = config.num_key_value_heads
        self._epsilon = config.rms_norm_eps
        self._layers = [_Layer(layer, operators) for layer in model.model.layers]
        self._output = operators.product([model.lm_head], wide=True)
        packed = [(product, linears) for layer in self._layers for product, linears in layer.packed]
        packed.append((self._output, [model.lm_head]))
        self._products = [product for product, _ in packed]
        self._packed_weights = {
            linear.weight.data_ptr(): (product, linear) for product, linears in packed for linear in linears
        }

    def repack(self) -> None:
        """Copy the parameters into the packed layout again, except those adopted since the last call."""
        for product in self._products:
            product.pack()

    def adopt(self, parameter: Tensor, values: Tensor) -> bool:
        """Copy new values into a parameter and its packed copy at once; returns False where that is not possible."""
        found = self._packed_weights.get(parameter.data_ptr())
        return found is not None and found[0].adopt(found[1], values)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Computes logits of tokens in one packed row, which may hold several sequences.

        Args:
            tokens: Token ids, int64 ``[tokens]``.
            positions: Position of each token in its sequence, int64 ``[tokens]``.
            attend: Attention over the batch.
            keep: Indices of the tokens whose logits are wanted, int64 ``[kept]``; ``None`` for all.

        Returns:
            ``[kept, vocab]``.
        """
        hidden = self._run(tokens, positions, attend)
        return self._output(hidden if keep is None else hidden[keep])

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, ``[tokens, hidden]``."""
        base, ops, epsilon = self._model.model, self.operators, self._epsilon
        hidden = base.embed_tokens(tokens)
        width = self._head // 2  # both halves of the angles are the same
        cosine, sine = (part[0, :, :width].contiguous() for part in base.rotary_emb(hidden[None], positions[None]))
        for number, layer in enumerate(self._layers):
            mixed = layer.qkv(ops.rms_norm(hidden, layer.norm.weight, epsilon))
            mixed = mixed.view(len(tokens), -1, self._head)
            mixed = ops.rotate(mixed, (cosine, sine), layer.norms, self._kv_heads, epsilon)
            hidden = layer.out.plus(attend(number, mixed, layer.scaling), hidden)
            inner = ops.rms_norm(hidden, layer.inner_norm.weight, epsilon)
            hidden = layer.down.plus(layer.up.times(inner, layer.gate.swish(inner)), hidden)
        return ops.rms_norm(hidden, base.norm.weight, epsilon)


class _Layer:
    """Packed products and norms of one decoder layer."""

    def __init__(self, layer: Any, operators: Operators) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attention.scaling
        self.norm, self.inner_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._own_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        parts = (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj],
            [mlp.up_proj],
            [mlp.down_proj],
        )
        self.packed = [(operators.product(linears), linears) for linears in parts]
        self.qkv, self.out, self.gate, self.up, self.down = (product for product, _ in self.packed)

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the norms of queries and keys; ``None`` where the model has none."""
        query, key = self._own_norms
        return (None if query is None else query.weight), (None if key is None else key.weight)


def fits(model: Any) -> bool:
    """Whether a model has this family's layout, and a device and dtype that oneDNN can pack."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not layers or {type(layer).__name__ for layer in layers} - LAYERS:
        return False
    config = model.config.get_text_config()
    linears = [module for layer in layers for module in layer.modules() if "Linear" in type(module).__name__]
    plain = all(type(linear) is nn.Linear and can_pack(linear.weight) for linear in [*linears, model.lm_head])
    return plain and config.hidden_act == "silu" and model.lm_head.bias is None and _qkv_biases_agree(layers[0])


def _qkv_biases_agree(layer: Any) -> bool:
    attention = layer.self_attn
    return len({linear.bias is None for linear in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1


def fast_path(model: Any, *, compiled: bool = True) -> FastPath | None:
    """Builds the fast path of a model; ``None`` if the layout does not fit or the logits differ.

    Args:
        model: A causal language model.
        compiled: Whether to use a C++ compiler where there is one.
    """
    if not fits(model):
        return None
    library = native() if compiled else None
    path = FastPath(model, TorchOperators() if library is None else NativeOperators(library))
    difference = mean_difference(path, model)
    allowed = TOLERANCE.get(model.dtype, 0.0)
    if not difference <= allowed:  # also true for NaN
        log.warning("the fast path differs from the model's own forward by %g on average: it is not used", difference)
        return None
    return path


@torch.inference_mode()
def mean_difference(path: FastPath, model: Any) -> float:
    """Mean difference between the logprobs of both forwards, on a few tokens from the whole vocabulary.

    The first ids are left out: special tokens give some models such large activations that bfloat16 is noise in both.
    """
    vocab = model.config.get_text_config().vocab_size
    tokens = (torch.arange(TRIED_TOKENS) * 2 + 1) * vocab // (2 * TRIED_TOKENS)
    own = model(input_ids=tokens[None], use_cache=False).logits[0]
    attend = partial(_attend_to_itself, kv_heads=model.config.get_text_config().num_key_value_heads)
    fast = path(tokens, torch.arange(TRIED_TOKENS), attend)
    return (own.float().log_softmax(-1) - fast.float().log_softmax(-1)).abs().mean().item()


def _attend_to_itself(layer: int, mixed: Tensor, scale: float, *, kv_heads: int) -> Tensor:
    """Causal attention over one sequence, without a cache."""
    query, key, value = (states.transpose(0, 1)[None] for states in parted(mixed, kv_heads))
    answer = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return answer[0].transpose(0, 1).flatten(1)
