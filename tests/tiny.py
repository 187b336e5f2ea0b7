"""A tiny random language model in Hugging Face's format, built in about a second.

Guarantees: the same seed gives the same bytes; the byte-level tokenizer encodes any text (ASCII or not) without an
unknown token and decodes it back exactly; the chat template is ChatML and ``<|im_end|>`` ends a turn.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tiny_model(folder: Path, seed: int = 0, hidden: int = 32, positions: int = 512) -> Path:
    """Write a two-layer random Llama (4 heads, 2 key/value heads, float32, tied) and its tokenizer.

    Args:
        folder: Folder to write to; created when missing.
        seed: Seed of the weights.
        hidden: Hidden size.
        positions: Longest context, in tokens (bytes, nearly).

    Returns:
        The folder, loadable by ``AutoModelForCausalLM`` and ``AutoTokenizer``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        initializer_range=0.3 * (32 / hidden) ** 0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def build_tiny_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Write a byte-level BPE tokenizer (256 bytes, a few merges, three special tokens) with a ChatML template.

    Returns:
        The tokenizer, a ``PreTrainedTokenizerFast``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("u", "s"), ("e", "r"), ("us", "er")]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    (Path(folder) / "generation_config.json").write_text(json.dumps(generation))
    return tokenizer
