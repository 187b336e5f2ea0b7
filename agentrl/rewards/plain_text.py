r"""Writes the numbers of TeX and of Unicode in plain ASCII: ``\frac{1}{2}`` and ``½`` as ``1/2``, ``10⁵`` as ``10^5``.

Guarantees: a term without a rational value (``\sqrt{3}``, ``\pi``) becomes :data:`OPAQUE`, so that no digit of it is
taken for a number; runs of spaces become one; the work grows linearly with the text.
"""

import re
import unicodedata

OPAQUE = "\ue000"
"""Stands for a term whose value is not read."""

_SIGNED = re.compile(r" ?([-+]?) ?((?:\d[\d,]*)?\.?\d+) ?")
_SPACES = re.compile(r"\s+")
_SUPERSCRIPT = re.compile(r"[⁺⁻]?[⁰¹²³⁴-⁹]+")
_RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_VULGAR = re.compile(r"(\d?)([¼-¾⅐-⅞↉])")
_THIN = re.compile(r"\{,\}|\\[,!]|\\(?:left|right)(?![A-Za-z])|\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))")
_ROOT = re.compile(r"\\sqrt ?(?:\[[^\]]{0,20}\])? ?(?:\{[^{}]*\}|\d|[A-Za-z])|√ ?(?:\d+(?:\.\d+)?|\([^()]{0,40}\))?")
_GROUP = r"(?:\{([^{}]*)\}|(\d))"
_FRACTION = re.compile(rf"(\d)? ?\\[dtc]?frac ?{_GROUP} ?{_GROUP}")
_SCRIPT = re.compile(r"([_^]) ?\{ ?([^{} ]{1,40}) ?\}")
_POWER = re.compile(r"(?<=\d)\*\*(?=[-+]?\d)")
_TIMES = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[\u00d7\u00b7\u22c5\u2219\u2715]")
_TERM = re.compile(
    r"\\(?:pi|pm|mp|sqrt|[dtc]?frac|d?binom|log|ln|exp|sin|cos|tan|sum|prod|int|lim|overline|bar|theta|alpha|beta|phi"
    r"|lambda|infty)(?![A-Za-z])|[π±∓∞]"
)
_EQUALS = re.compile(r"\\(?:approx|equiv|implies|Rightarrow|rightarrow|to)(?![A-Za-z])|[≈→⇒]")
_COMMAND = re.compile(r"\\(?:[A-Za-z]++|[;: ])|[{}~]")
_RAISE = re.compile(r"(?<! ) {0,2}\^ ?")
_CURRENCY = re.compile(r"((?<![\w)])[-+]|) ?(?:\b(?:US|CA|AU|C|A))?[$£€¥₹₩] ?", re.ASCII)


class _Characters(dict[int, str]):
    """Maps a character to plain ASCII, where there is such a form."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        digit = unicodedata.decimal(char, None)
        if char.isascii() or char == "\n":
            self[code] = char
        elif digit is not None:
            self[code] = str(digit)
        elif char.isspace():
            self[code] = "\n" if char in "\x85\u2028\u2029" else " "
        elif 0xFF01 <= code <= 0xFF5E:  # full width
            self[code] = chr(code - 0xFEE0)
        else:
            self[code] = char
        return self[code]


_CHARACTERS = _Characters(
    {ord(char): "-" for char in "\u2212\u2010\u2011\u2013\ufe63"}
    | {ord(char): "/" for char in "\u2044\u2215"}
    | {ord(char): "" for char in "\u200b\u200e\u200f\u2060\ufeff"}
    | {0x066B: ".", 0x066C: ",", 0x2019: "'"}
)


def ascii_numbers(text: str) -> str:
    """Returns a text with digits, signs, fractions and exponents of Unicode in ASCII; TeX stays as it is."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_RAISED)}}}", text.translate(_CHARACTERS))
    return _VULGAR.sub(_vulgar, text)


def plain_text(text: str) -> str:
    """Returns a text with its numbers in ASCII, without TeX commands, braces and currency signs."""
    text = _SPACES.sub(lambda match: "\n" if "\n" in match[0] else " ", ascii_numbers(text))
    text = _ROOT.sub(OPAQUE, _THIN.sub("", text))
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace(r"\{", "(").replace(r"\}", ")")
    text = _SCRIPT.sub(r"\1\2", _FRACTION.sub(_fraction, text))
    text = _TIMES.sub("*", _POWER.sub("^", text))
    text = _EQUALS.sub(" = ", _TERM.sub(OPAQUE, text))
    text = _CURRENCY.sub(r" \1", _RAISE.sub("^", _COMMAND.sub(" ", text)))
    return _SPACES.sub(lambda match: "\n" if "\n" in match[0] else " ", text)


def _vulgar(match: re.Match[str]) -> str:
    before, fraction = match.groups()
    plain = unicodedata.normalize("NFKC", fraction).replace("\u2044", "/")
    return f"{before} {plain}" if before else plain


def _fraction(match: re.Match[str]) -> str:
    r"""Returns ``a/b`` for a ``\frac`` of two numbers, else :data:`OPAQUE`."""
    whole = match[1] or ""
    above, below = (_SIGNED.fullmatch(one or other) for one, other in (match.group(2, 3), match.group(4, 5)))
    if above is None or below is None:
        return whole + OPAQUE
    sign = "-" if (above[1] == "-") is not (below[1] == "-") else ""
    return f"{whole} {sign}{above[2]}/{below[2]}" if whole else f"{sign}{above[2]}/{below[2]}"
