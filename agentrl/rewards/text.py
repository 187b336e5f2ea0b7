r"""Verifies text answers: exact match, regular expression, multiple choice.

Guarantees: any answer gives 1.0 or 0.0, never an error; a reference that no answer can match raises. If an answer
states several choices, the last one is taken.
"""

import re
import string
import unicodedata

_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*\(?\s*([A-Za-z])\s*\)?\s*\}")
_SAID = re.compile(
    r"\b(?:answer|choice|option)\b\s*(?:is|:|=)?\s*(?:option|choice)?\s*[:=]?\s*[*_\"'`]{0,3}"
    r"(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])(?![\w'-])(?!\s+[a-z]))",
    re.IGNORECASE,
)
_LINE = re.compile(r"[*_\"'`]{0,3}(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z]))[).:]?[*_\"'`]{0,3}\.?")


def exact_match_reward(
    answer: str,
    reference: str,
    *,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> float:
    """Returns 1.0 if the texts are equal after normalisation, else 0.0.

    Texts are always converted to Unicode's NFKC form, and runs of white space to one space. With all three options the
    normalisation is SQuAD's.

    Args:
        answer: The model's answer.
        reference: The right answer.
        ignore_case: Whether to compare case-folded texts.
        ignore_punctuation: Whether to drop ASCII punctuation.
        ignore_articles: Whether to drop ``a``, ``an`` and ``the``.

    Raises:
        ValueError: The reference is empty after normalisation.
    """
    options = (ignore_case, ignore_punctuation, ignore_articles)
    expected = _normalised(reference, *options)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} is empty once normalised")
    return float(_normalised(answer, *options) == expected)


def regex_reward(answer: str, reference: str, *, flags: int = 0, whole: bool = False) -> float:
    """Returns 1.0 if the regular expression ``reference`` matches the answer, else 0.0.

    Python's ``re`` can take exponential time on some patterns and cannot be stopped: run patterns that you do not
    trust in a process (``Criterion(..., runs="process")``).

    Args:
        answer: The model's answer.
        reference: Regular expression of Python's ``re``.
        flags: Flags of ``re.compile``.
        whole: Whether the pattern must match the whole answer, without surrounding white space.

    Raises:
        ValueError: ``reference`` is not a valid regular expression.
    """
    try:
        pattern = re.compile(reference, flags)
    except re.error as error:
        raise ValueError(f"the reference {reference!r} is no regular expression: {error}") from error
    return float((pattern.fullmatch(answer.strip()) if whole else pattern.search(answer)) is not None)


def final_choice(answer: str, choices: str = "ABCD") -> str | None:
    r"""Returns the letter that an answer chooses.

    It is taken from the last ``\boxed{B}``, else from the last "answer is B", "Answer: (B)" or "option B", else from
    the last non-empty line if that is a single letter such as ``B``, ``(B)``, ``B.`` or ``**B**``.

    Args:
        answer: The whole answer.
        choices: The letters that can be chosen.

    Returns:
        The letter as in ``choices``; ``None`` if the answer chooses none of them.
    """
    for pattern in (_BOXED, _SAID):
        found = [next(filter(None, match.groups())) for match in pattern.finditer(answer)]
        if found:
            return _among(found[-1], choices)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    match = _LINE.fullmatch(lines[-1]) if lines else None
    return _among(next(filter(None, match.groups())), choices) if match else None


def choice_reward(answer: str, reference: str, *, choices: str = "ABCD") -> float:
    """Returns 1.0 if :func:`final_choice` is the reference's letter, else 0.0.

    Raises:
        ValueError: The reference is none of the choices.
    """
    letter = reference.strip().strip("().").upper()
    if len(letter) != 1 or letter not in choices.upper():
        raise ValueError(f"the reference answer {reference!r} is none of the choices {choices!r}")
    found = final_choice(answer, choices)
    return float(found is not None and found.upper() == letter)


def _among(letter: str, choices: str) -> str | None:
    place = choices.upper().find(letter.upper())
    return choices[place] if place >= 0 else None


def _normalised(text: str, ignore_case: bool, ignore_punctuation: bool, ignore_articles: bool) -> str:
    text = unicodedata.normalize("NFKC", text)
    if ignore_case:
        text = text.casefold()
    if ignore_punctuation:
        text = text.translate(_NO_PUNCTUATION)
    if ignore_articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())
