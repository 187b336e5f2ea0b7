"""Token ids as bytes, for the kinds of tokenizer that models have."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.inference.token_bytes import BYTE_OF_LETTER, TokenBytes

TEXTS = ["hello the user", " two  spaces\n\n", "Grüße 😀 漢字\t\u200b", "a , b .", "<|im_end|>x", "\ufffd", ""]


def metaspace(scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has it: words begin with ``▁``, and what is not in it is spelled in bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abehlorstux", "▁a", "▁hello"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps if scheme != "never" else steps[:-1])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.fixture(params=["byte level", "first", "always", "never"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model) if request.param == "byte level" else metaspace(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_ids_in_a_row_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(map(TokenBytes(tokenizer), ids)).decode()
    before = tokenizer.encode("a", add_special_tokens=False)
    assert whole == tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
    assert whole.replace(" ", "") == text.replace(" ", "")  # a metaspace tokenizer may put a space before a text


def test_a_part_of_a_character_is_its_bytes(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert [TokenBytes(tokenizer)(token) for token in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_the_table_of_byte_letters_is_that_of_the_tokenizers() -> None:
    assert set(BYTE_OF_LETTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    assert (BYTE_OF_LETTER["Ġ"], BYTE_OF_LETTER["Ċ"], BYTE_OF_LETTER["a"]) == (ord(" "), ord("\n"), ord("a"))
