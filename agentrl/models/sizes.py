"""Counts the parameters, operations and bytes of a decoder from its ``config.json`` alone.

Guarantees: the number of parameters is exact for Llama, Mistral, Qwen 2, Qwen 3, Mixtral and Qwen 3 MoE. Operations are
those that the model needs: a multiply-add is two, the backward pass needs twice those of the forward pass,
recomputation is not counted; attention counts the query-key pairs that the mask allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FULL_ATTENTION_ALONE = "linear_num_key_heads"  # of models with linear attention between


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder with gated MLPs.

    Attributes:
        kind: ``model_type`` of its config.
        hidden: Width of the hidden states.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        head_dim: Width of a head.
        vocab: Vocabulary size.
        tied: Whether the head is the embedding.
        inner: Width of a dense layer's MLP.
        sparse_layers: Number of layers with experts in place of the MLP.
        experts: Number of experts of such a layer.
        experts_used: Number of experts that a token goes through.
        expert_inner: Width of an expert.
        qk_norm: Whether queries and keys have a norm.
        attention_bias: Whether queries, keys and values have a bias.
        output_bias: Whether attention's output has a bias.
        mlp_bias: Whether the MLP has biases.
        longest: Longest sequence that the model was made for; 0 if its config does not say.
    """

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    inner: int
    sparse_layers: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_inner: int = 0
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    longest: int = 0

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = 2 * self.hidden * (queries + keys)
        found += (queries + 2 * keys) * self.attention_bias + self.hidden * self.output_bias
        return found + 2 * self.head_dim * self.qk_norm

    def _mlp(self, inner: int) -> int:
        return 3 * self.hidden * inner + (2 * inner + self.hidden) * self.mlp_bias

    def _layers(self, experts: int) -> int:
        """Returns the parameters of all layers if a sparse one had ``experts`` experts."""
        dense = (self.layers - self.sparse_layers) * self._mlp(self.inner)
        router = self.hidden * self.experts
        sparse = self.sparse_layers * (experts * self._mlp(self.expert_inner) + router)
        return self.layers * (self.attention + 2 * self.hidden) + dense + sparse

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and output head; tied ones count once."""
        return self.head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        return self._layers(self.experts) + self.hidden + self.embeddings

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without their routers."""
        return self.sparse_layers * self.experts * self._mlp(self.expert_inner)

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with, without embedding and head."""
        return self._layers(self.experts_used) + self.hidden

    def read(self, sequences: float) -> float:
        """Returns the parameters that a decode step of so many sequences reads: all but the experts nobody is sent to.

        Each sequence is taken to choose its experts at random.
        """
        if not self.sparse_layers:
            return self.active + self.head
        reached = self.experts * (1 - (1 - self.experts_used / self.experts) ** sequences)
        each = self.sparse_layers * self._mlp(self.expert_inner)
        return self._layers(0) + each * reached + self.hidden + self.head

    @property
    def linear_sides(self) -> int:
        """Rows and columns of all linear layers but the head: the parameters of an adapter of rank 1."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        dense = (self.layers - self.sparse_layers) * 3 * (self.hidden + self.inner)
        sparse = self.sparse_layers * self.experts * 3 * (self.hidden + self.expert_inner)
        return self.layers * attention + dense + sparse

    def kv_bytes(self, width: int) -> int:
        """Returns the bytes of a token's keys and values in all layers, with ``width`` bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    @property
    def kept(self) -> int:
        """Activations of a token that the backward pass of all layers needs, with the trainer's memory-saving layers.

        Per layer: both norms' inputs and results, queries, keys, values, attention's result, gate and up.
        """
        return int(self.kept_by(1))

    def kept_by(self, tensor: int) -> float:
        """Returns :attr:`kept` on one of ``tensor`` ranks that share each matrix.

        Hidden states are not split, and the memory-saving MLP needs whole matrices: the activated gate and the product
        are kept then, too.
        """
        whole = self.hidden * (4 * self.layers + self.sparse_layers * self.experts_used)
        dense = (self.layers - self.sparse_layers) * (2 if tensor == 1 else 4) * self.inner
        split = self.layers * 2 * (self.heads + self.kv_heads) * self.head_dim + dense
        return whole + (split + self.sparse_layers * self.experts_used * 2 * self.expert_inner) / tensor

    def forward_flops(self, tokens: float, predicted: float, pairs: float) -> float:
        """Returns the operations of a forward pass.

        Args:
            tokens: Tokens that the layers compute.
            predicted: Tokens that go through the head.
            pairs: Query-key pairs that the mask allows, in one layer and head.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return 2 * self.active * tokens + 2 * self.head * predicted + attention


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Reads the sizes of a Llama-like decoder, dense or with experts, from its ``config.json``.

    Raises:
        ValueError: The config lacks a key, or its layers are not of this kind.
    """
    config = config.get("text_config") or config
    kind = str(config.get("model_type", "model"))
    try:
        hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads = config["num_attention_heads"]
        experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
        inner = config["intermediate_size"] if not experts else config.get("intermediate_size", 0)
    except KeyError as error:
        raise ValueError(f"config.json of a {kind!r} has no {error}") from error
    if _FULL_ATTENTION_ALONE in config or config.get("kv_lora_rank") or config.get("n_shared_experts"):
        raise ValueError(f"a {kind!r} has layers of another kind (linear or latent attention, shared experts)")
    bias = bool(config.get("attention_bias"))
    return Decoder(
        kind=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", kind in ("smollm3", "gemma", "gemma2", "gemma3_text"))),
        inner=inner,
        sparse_layers=_sparse_layers(config) if experts else 0,
        experts=experts,
        experts_used=config.get("num_experts_per_tok", 0) if experts else 0,
        expert_inner=(config.get("moe_intermediate_size") or inner) if experts else 0,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        attention_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")),
        longest=config.get("max_position_embeddings") or 0,
    )


def _sparse_layers(config: Mapping[str, Any]) -> int:
    every, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    return sum(1 for layer in range(config["num_hidden_layers"]) if layer not in dense and (layer + 1) % every == 0)
