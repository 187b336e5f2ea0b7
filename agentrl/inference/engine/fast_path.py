"""A leaner forward for the common family (Llama, Mistral, Qwen 2 and 3, SmolLM) on CPU.

Guarantees: it computes what the model's own forward computes, up to float rounding; it is tried against that forward
when it is made, and not used where they differ. Parameters stay what and where they are: :meth:`FastPath.repack` after
a change is all that is needed. Models of another layout, devices or dtypes are left to their own forward.

How: a layer is six packed products instead of some fifty operators. Queries, keys and values are one product; the
gate's activation, its product with the other branch and both residual sums are done by oneDNN inside the products;
query heads that share keys are one matrix, so no key is repeated.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from agentrl.inference.engine.packed import ROWS_HINT, can_pack

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
TRIED_TOKENS = 8
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # rounding makes 1e-3 and 0.2; a wrong layer some units
log = logging.getLogger(__name__)

# (layer, query [tokens, heads, dim], key and value [tokens, kv_heads, dim], scale) -> [tokens, heads * dim]
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


class FastPath:
    """The packed weights of a model, and its forward over them.

    Args:
        model: A causal language model for which :func:`fits` holds.
    """

    @torch.inference_mode()
    def __init__(self, model: Any) -> None:
        """Pack now."""
        self._model = model
        config = model.config.get_text_config()
        attention = model.model.layers[0].self_attn
        self._head = attention.head_dim
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._epsilon = config.rms_norm_eps
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._output = _Product([model.lm_head])

    def repack(self) -> None:
        """Copy the parameters into the packed layout again."""
        for layer in self._layers:
            for product in layer.products:
                product.pack()
        self._output.pack()

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Logits after tokens that lie in one row, of however many sequences.

        Args:
            tokens: int64 ``[tokens]``.
            positions: Position of each in its sequence, int64 ``[tokens]``.
            attend: What a layer attends to.
            keep: Indices whose logits are wanted, int64 ``[kept]``; ``None`` for all.

        Returns:
            ``[kept, vocab]``.
        """
        hidden = self._run(tokens, positions, attend)
        return self._output(hidden if keep is None else hidden[keep])

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, ``[tokens, hidden]``."""
        base = self._model.model
        hidden = base.embed_tokens(tokens)
        cos, sin = (part[0][:, None] for part in base.rotary_emb(hidden[None], positions[None]))
        width, both = self._head // 2, self._heads + self._kv_heads
        cos, sin = cos[..., :width], sin[..., :width]  # both halves are the same
        for number, layer in enumerate(self._layers):
            mixed = layer.qkv(_rms_norm(hidden, layer.norm.weight, self._epsilon))
            mixed = mixed.view(len(tokens), both + self._kv_heads, self._head)
            turned = layer.normed(mixed[:, :both], self._heads, self._epsilon)
            first, second = turned[..., :width], turned[..., width:]
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            query, key, value = turned[:, : self._heads], turned[:, self._heads :], mixed[:, both:]
            hidden = layer.out.plus(attend(number, query, key, value, layer.scaling), hidden)
            inner = _rms_norm(hidden, layer.inner_norm.weight, self._epsilon)
            hidden = layer.down.plus(layer.up.times(inner, layer.gate.swish(inner)), hidden)
        return _rms_norm(hidden, base.norm.weight, self._epsilon)


class _Product:
    """Linear layers with the same input as one packed product."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears = linears
        self.pack()

    @torch.inference_mode()
    def pack(self) -> None:
        weights = [linear.weight.detach() for linear in self._linears]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS_HINT)
        biases: list[Tensor] = [linear.bias for linear in self._linears if linear.bias is not None]
        self._bias = torch.cat(biases).detach() if biases else None

    def __call__(self, inputs: Tensor, activation: str = "none") -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, activation, [], "")

    def swish(self, inputs: Tensor) -> Tensor:
        return self(inputs, "swish")

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, self._bias, "add")

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, self._bias, "mul")


class _Layer:
    """One decoder layer's products and norms."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.scaling: float = attention.scaling
        self.norm, self.inner_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Product([attention.o_proj])
        self.gate, self.up, self.down = _Product([mlp.gate_proj]), _Product([mlp.up_proj]), _Product([mlp.down_proj])
        self.products = (self.qkv, self.out, self.gate, self.up, self.down)

    def normed(self, states: Tensor, heads: int, epsilon: float) -> Tensor:
        """Queries and keys, ``[tokens, heads + kv_heads, head_dim]``, after their own norms where there are some."""
        if self.query_norm is None or self.key_norm is None:
            return states
        query = _rms_norm(states[:, :heads], self.query_norm.weight, epsilon)
        return torch.cat((query, _rms_norm(states[:, heads:], self.key_norm.weight, epsilon)), dim=1)


def _rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In float32, as the models do it; torch's own takes seven operators on a CPU."""
    single = states.float()
    scale = torch.rsqrt(torch.linalg.vector_norm(single, dim=-1, keepdim=True).square_() / single.shape[-1] + epsilon)
    return weight * (single * scale).to(states.dtype)


def fits(model: Any) -> bool:
    """Whether a model has the family's layout, on a device and in a dtype that oneDNN packs."""
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


def fast_path(model: Any) -> FastPath | None:
    """The fast path of a model; ``None`` where the layout is another, or where it does not give the same logits."""
    if not fits(model):
        return None
    path = FastPath(model)
    difference = largest_difference(path, model)
    allowed = TOLERANCE.get(model.dtype, 0.0)
    if not difference <= allowed:  # NaN too
        log.warning("the fast path differs from the model's own forward by %g: it is not used", difference)
        return None
    return path


@torch.inference_mode()
def largest_difference(path: FastPath, model: Any) -> float:
    """Largest difference between both forwards' logits on a few tokens."""
    tokens = torch.arange(TRIED_TOKENS) % model.config.get_text_config().vocab_size
    own = model(input_ids=tokens[None], use_cache=False).logits[0]
    fast = path(tokens, torch.arange(TRIED_TOKENS), _attend_to_itself)
    return (own.float() - fast.float()).abs().max().item()


def _attend_to_itself(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One causal sequence without a cache."""
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    answer = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return answer[0].transpose(0, 1).flatten(1)
