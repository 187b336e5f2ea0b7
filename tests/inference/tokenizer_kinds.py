"""Small real tokenizers, one of each kind that treats the pieces of a conversation in a way of its own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
_WORDS = ("he", "the", "an", "in", "er", "us", "user", "yes", "more", "12")
_BYTES = [f"<0x{number:02X}>" for number in range(256)]
_LETTERS = [*map(chr, range(32, 127)), "▁", "\n", "é", "ü", "日", "本"]

Build = Callable[[Sequence[str]], Any]
"""Makes a tokenizer that has these special tokens besides ``<s>`` and ``</s>``."""


def _finished(backend: Tokenizer, special: Iterable[str], **flags: bool) -> Any:
    """The backend as a tokenizer of transformers; the flags are those of its special tokens."""
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=AddedToken(BOS, special=True), eos_token=AddedToken(EOS, special=True)
    )
    words = [word for word in special if word not in (BOS, EOS)]
    given: dict[str, Any] = {"normalized": False, **flags}
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(word, special=True, **given) for word in words]}
    )
    return tokenizer


def _merges(words: Iterable[str], first: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Symbols and merges that build these words letter by letter."""
    symbols, merges = list(dict.fromkeys(first)), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in symbols:
                symbols.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return symbols, merges


def _byte_backend(*, lines: bool = False) -> Tokenizer:
    """Byte-level BPE; with ``lines`` its tokens cross line breaks (``e\\n``, ``:\\n``, ``\\n\\n``)."""
    crossing = ("ĊĊ", "eĊ", ".Ċ", ":Ċ", "ĊU", "Ġa", ">Ċ") if lines else ("ĊĊ", "Ġa", "Ġthe")
    symbols, merges = _merges((*_WORDS, *crossing), sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)
    backend.pre_tokenizer = level  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _piece_backend() -> Tokenizer:
    """BPE on letters with the word mark ``▁``; other letters fall back to bytes."""
    symbols, merges = _merges(
        (*_WORDS, *(f"▁{word}" for word in _WORDS), "▁▁", "\n\n", ".\n"), ["<unk>", *_BYTES, *_LETTERS]
    )
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))


def _metaspace(scheme: str, special: Sequence[str]) -> Any:
    """Llama 2's and Mistral's: words begin with ``▁``, which text gets once, everywhere or never."""
    backend = _piece_backend()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[assignment]
    backend.decoder = _piece_decoder(strip=scheme != "never")  # type: ignore[assignment]
    return _finished(backend, special)


def _piece_decoder(*, strip: bool) -> Any:
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)


def _prepending(special: Sequence[str], **flags: bool) -> Any:
    """Llama 2's older form: a normalizer puts ``▁`` before each text."""
    backend = _piece_backend()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    backend.decoder = _piece_decoder(strip=True)  # type: ignore[assignment]
    return _finished(backend, special, **flags)


def _unigram(special: Sequence[str]) -> Any:
    """SentencePiece's unigram model: NFKC, spaces in a row become one, a dummy prefix."""
    pieces = [("<unk>", 0.0), *((letter, -8.0) for letter in _LETTERS)]
    pieces += [(f"▁{word}", -3.0) for word in _WORDS] + [("▁", -5.0), ("\n\n", -4.0), ("se", -6.0)]
    backend = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0, byte_fallback=False))
    steps = [normalizers.NFKC(), normalizers.Replace("  ", " ")]
    backend.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    backend.decoder = decoders.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    return _finished(backend, special)


def _word_piece(special: Sequence[str]) -> Any:
    """BERT's: lower case, words with ``##`` inside, no white space at all."""
    letters = [chr(number) for number in range(33, 127)]
    symbols = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), *_WORDS, "##er", "##es"]
    backend = Tokenizer(models.WordPiece({s: i for i, s in enumerate(dict.fromkeys(symbols))}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    backend.decoder = decoders.WordPiece()  # type: ignore[assignment]
    return _finished(backend, special)


class _Letters(PreTrainedTokenizer):
    """A tokenizer in Python, without a backend: letters, and the pairs ``he``, ``ne`` and line breaks."""

    def __init__(self, **kwargs: Any) -> None:
        symbols = ["<unk>", *map(chr, range(10, 127)), "he", "ne", "\n\n", "日"]
        self._ids = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
        super().__init__(unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        found: list[str] = []
        while text:
            size = 2 if text[:2] in self._ids else 1
            found.append(text[:size])
            text = text[size:]
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def _slow(special: Sequence[str], **flags: bool) -> Any:
    tokenizer: Any = _Letters(bos_token=BOS, eos_token=EOS)
    words = [AddedToken(word, special=True, normalized=False, **flags) for word in special if word not in (BOS, EOS)]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    return tokenizer


def _with_bos(special: Sequence[str]) -> Any:
    """Begins each text with ``<s>``, unless told not to."""
    tokenizer = _finished(_byte_backend(), special)
    begin = (BOS, tokenizer.bos_token_id)
    processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _limited(special: Sequence[str]) -> Any:
    """Was saved with a limit of 8 tokens, and pads to 32."""
    tokenizer = _finished(_byte_backend(), special)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=32)
    return tokenizer


def _nfkc(special: Sequence[str]) -> Any:
    backend = _byte_backend()
    backend.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    return _finished(backend, special, normalized=True)


KINDS: dict[str, Build] = {
    "bytes": lambda special: _finished(_byte_backend(), special),
    "bytes across lines": lambda special: _finished(_byte_backend(lines=True), special),
    "bytes, rstrip": lambda special: _finished(_byte_backend(), special, rstrip=True),
    "bytes, lstrip": lambda special: _finished(_byte_backend(), special, lstrip=True),
    "bytes, both strips": lambda special: _finished(_byte_backend(lines=True), special, lstrip=True, rstrip=True),
    "bytes with bos": _with_bos,
    "bytes, limited": _limited,
    "bytes, NFKC, normalized specials": _nfkc,
    "metaspace first": lambda special: _metaspace("first", special),
    "metaspace always": lambda special: _metaspace("always", special),
    "metaspace never": lambda special: _metaspace("never", special),
    "prepended mark": _prepending,
    "prepended mark, rstrip": lambda special: _prepending(special, rstrip=True),
    "unigram": _unigram,
    "word pieces": _word_piece,
    "Python": _slow,
    "Python, rstrip": lambda special: _slow(special, rstrip=True),
}
"""Kinds whose pieces can be made equal to the whole, by name."""

ODD: dict[str, Build] = {
    "single word": lambda special: _finished(_byte_backend(), special, single_word=True),
    "prepended mark, normalized specials": lambda special: _prepending(special, normalized=True),
}
"""Kinds that read a special token inside a text as letters, by name."""
