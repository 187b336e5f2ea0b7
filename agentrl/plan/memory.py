"""Memory of a trainer rank and of an inference server, item by item.

Guarantees: pure; every item names its dtype and how many ranks share it. AdamW's states are float32, as the trainer's
are: 16 bytes a parameter with the gradient. The largest micro-batch and context follow from the same items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.recipe import Recipe
from agentrl.inference.kinds.kind import server_kind
from agentrl.models.sizes import Decoder
from agentrl.plan.assumptions import Assumptions
from agentrl.plan.mesh import Mesh

BYTES = {"float32": 4, "bfloat16": 2}
GB = 1e9
PAGED = ("sglang", "vllm")  # servers whose cache grows with what sequences have, not with what they may have


@dataclass(frozen=True)
class Item:
    """Line of a memory estimate.

    Attributes:
        what: Name of the part, and who shares it.
        dtype: Dtype of the values; empty for a mixture.
        nbytes: Bytes of one rank or one card.
        host: Whether it stands in the host's memory.
    """

    what: str
    dtype: str
    nbytes: float
    host: bool = False


def total(items: Sequence[Item]) -> float:
    """Returns the bytes on the card."""
    return sum(item.nbytes for item in items if not item.host)


def trainer_memory(
    recipe: Recipe, decoder: Decoder, mesh: Mesh, known: Assumptions, tokens: float | None = None, updates: float = 2
) -> list[Item]:
    """Returns the memory of a trainer rank.

    Args:
        recipe: Recipe with resolved dtypes.
        decoder: The model.
        mesh: Mesh of the ranks that share it.
        known: Assumptions.
        tokens: Tokens of a micro-batch; by default the recipe's, for each rank that shares them.
        updates: Micro-batches of an update on a rank; with more than one, gradients are summed before they are reduced.
    """
    trainer = recipe.trainer
    tokens = microbatch_tokens(recipe, mesh) if tokens is None else tokens
    items = _states(recipe, decoder, mesh) + _gathered(recipe, decoder, mesh, updates)
    per_token = activation_bytes(recipe, decoder, mesh)
    checkpointed = ", layers recomputed" if trainer.gradient_checkpointing else ""
    items.append(Item(f"activations of {tokens:,.0f} tokens{checkpointed}", trainer.dtype, per_token * tokens))
    logits = 2 * 4 * trainer.logprob_chunk * decoder.vocab
    items.append(Item(f"logits of {trainer.logprob_chunk:,} tokens and their gradient", "float32", logits))
    if trainer.lora_rank is None:
        items.append(Item("gradient of the output head while it is summed", "float32", 4 * decoder.head))
    items.append(Item("runtime, buffers, gaps (reserve_gb)", "", known["reserve_gb"] * GB))
    return items


def _states(recipe: Recipe, decoder: Decoder, mesh: Mesh) -> list[Item]:
    """Returns what lasts from step to step: parameters, gradients, moments, reference, critic."""
    trainer, owners = recipe.trainer, mesh.owners
    shared = f", 1/{owners} of each" if owners > 1 else ""
    if mesh.tensor > 1:
        shared += f", embeddings 1/{mesh.sharing}" if mesh.sharing > 1 else ", embeddings whole"
    parameters, host = mesh.own(decoder), trainer.cpu_offload
    trained = parameters if trainer.lora_rank is None else trainer.lora_rank * decoder.linear_sides / owners
    items = []
    if trainer.lora_rank is not None:
        items.append(Item(f"frozen parameters{shared}", "float32", 4 * parameters, host))
    named = "adapters" if trainer.lora_rank is not None else "parameters"
    items += [
        Item(f"{named}{shared}", "float32", 4 * trained, host),
        Item(f"gradients{shared}", "float32", 4 * trained, host),
        Item(f"AdamW's two moments{shared}", "float32", 8 * trained, host),
    ]
    if trainer.kl_coef > 0 and trainer.lora_rank is None:
        items.append(Item(f"reference model (trainer.kl_coef){shared}", "float32", 4 * parameters, host))
    if trainer.advantage == "gae":
        items.append(Item(f"critic with gradients and moments{shared}", "float32", 16 * parameters, host))
    return items


def _gathered(recipe: Recipe, decoder: Decoder, mesh: Mesh, updates: float) -> list[Item]:
    """Returns whole copies that a rank holds while it computes."""
    trainer, alone = recipe.trainer, mesh.owners == mesh.tensor
    whole = mesh.whole(decoder)
    if alone and trainer.dtype == "float32":
        return []
    models = 1 + (trainer.kl_coef > 0 and trainer.lora_rank is None) + (trainer.advantage == "gae")
    width = BYTES[trainer.dtype]
    if mesh.reshard and not alone:
        held = 2 * mesh.whole_layers(decoder) / decoder.layers + decoder.embeddings
        items = [Item("gathered parameters of two layers and the embeddings", trainer.dtype, held * width)]
        if experts := mesh.whole_experts(decoder):
            items.append(Item("experts of a rank, which are not freed", trainer.dtype, experts * width))
        return items
    items = [Item("all parameters, gathered for compute", trainer.dtype, models * whole * width)]
    if not alone and updates > 1 and trainer.lora_rank is None:
        items.append(Item("gradients summed over micro-batches, not yet reduced", "float32", 4 * whole))
    return items


def microbatch_tokens(recipe: Recipe, mesh: Mesh) -> int:
    """Returns the tokens of a micro-batch, which the ranks of a context group share."""
    return recipe.trainer.tokens_per_microbatch * mesh.context


def activation_bytes(recipe: Recipe, decoder: Decoder, mesh: Mesh) -> float:
    """Returns the bytes that the backward pass needs of one token of a micro-batch, on each rank."""
    kept = decoder.kept_by(mesh.tensor)
    if recipe.trainer.gradient_checkpointing:  # the states between layers, and one layer that is computed again
        kept = decoder.layers * decoder.hidden + kept / decoder.layers
    return kept * BYTES[recipe.trainer.dtype] / mesh.context


def largest_microbatch(
    recipe: Recipe, decoder: Decoder, mesh: Mesh, known: Assumptions, beside: float = 0, updates: float = 2
) -> int:
    """Returns the most tokens of a micro-batch that a rank's memory takes; 0 if nothing fits.

    Args:
        recipe: Recipe with resolved dtypes.
        decoder: The model.
        mesh: Mesh of the ranks that share it.
        known: Assumptions.
        beside: Bytes that a server takes on the same card.
        updates: Micro-batches of an update on a rank.
    """
    free = known["memory_gb"] * GB - beside - total(trainer_memory(recipe, decoder, mesh, known, 0, updates))
    return max(0, int(free / activation_bytes(recipe, decoder, mesh)))


def server_memory(
    recipe: Recipe, decoder: Decoder, cards: int, known: Assumptions, sequences: float, length: float
) -> list[Item]:
    """Returns the memory of one card of an inference server.

    Args:
        recipe: Recipe with resolved dtypes.
        decoder: The model.
        cards: Cards of the server, which share each matrix.
        known: Assumptions.
        sequences: Sequences that it decodes at a time.
        length: Tokens that each of them has on average. Both matter for a cache that grows; the embedded engine's is
            laid out for ``inference.max_running`` sequences of ``inference.context_length`` tokens.
    """
    inference = recipe.inference
    width = BYTES[inference.dtype]
    if inference.engine not in PAGED:
        sequences, length = inference.max_running, inference.context_length
    token = decoder.kv_bytes(width)
    weights = decoder.parameters * width
    shared = f", 1/{cards} of each" if cards > 1 else ""
    items = [
        Item(f"weights{shared}", inference.dtype, weights / cards),
        Item(f"keys and values of {sequences:,.0f} x {length:,.0f} tokens{shared}", inference.dtype,
             sequences * length * token / cards),
    ]  # fmt: skip
    more = server_kind(inference.engine).more_memory(weights, token, recipe.launch.device)
    items += [Item(what, inference.dtype, nbytes / cards) for what, nbytes in more]
    return [*items, Item("runtime, buffers, gaps (reserve_gb)", "", known["reserve_gb"] * GB)]


def cache_tokens(recipe: Recipe, decoder: Decoder, cards: int, known: Assumptions) -> int:
    """Returns the tokens whose keys and values a server has room for."""
    width = BYTES[recipe.inference.dtype]
    room = known["memory_gb"] * known["server_share"] * GB - decoder.parameters * width / cards
    room -= known["reserve_gb"] * GB
    return max(0, int(room * cards / decoder.kv_bytes(width)))


def largest_context(
    recipe: Recipe, decoder: Decoder, mesh: Mesh, cards: int, known: Assumptions, beside: float = 0
) -> tuple[int, str]:
    """Returns the longest sequence that model, server and trainer can have, and which of them sets it."""
    bounds = {
        "the server's cache holds one such sequence": cache_tokens(recipe, decoder, cards, known),
        "a micro-batch of the trainer is one such sequence": largest_microbatch(recipe, decoder, mesh, known, beside),
    }
    if decoder.longest:
        bounds["max_position_embeddings of the model"] = decoder.longest
    name = min(bounds, key=lambda one: bounds[one])
    return bounds[name], name
