"""The page's own files: one document, one script and one style, put together from their parts.

Guarantees: nothing comes from the network. The script is our modules in the order of :data:`MODULES` behind the two
libraries; a module uses only what earlier ones export, so that the same text serves the page and its static copy.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).resolve().parent / "static"
LIBRARIES = ("htmPreact", "uPlot")
MODULES = (
    "base",
    "data",
    "format",
    "parts",
    "charts",
    "overview",
    "table",
    "messages",
    "tokens",
    "episode",
    "group",
    "evaluations",
    "compare",
    "keys",
    "app",
)
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def script() -> str:
    """Returns the page's script."""
    libraries = [(STATIC / "vendor" / f"{name}.js").read_text(encoding="utf-8") for name in LIBRARIES]
    own = [_EXPORT.sub("", _IMPORT.sub("", (STATIC / f"{name}.js").read_text(encoding="utf-8"))) for name in MODULES]
    return "\n;".join(libraries) + '\n;(() => {\n"use strict";\n' + "\n".join(own) + "\n})();\n"


@cache
def style() -> str:
    """Returns the page's style."""
    files = (STATIC / "vendor" / "uPlot.css", STATIC / "view.css")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def document(title: str = "agentrl view") -> str:
    """Returns the page for a server."""
    return _document(title, '<link rel="stylesheet" href="/view.css">', '<script src="/view.js" defer></script>')


def whole_document(title: str, data: str) -> str:
    """Returns a page that needs no server.

    Args:
        title: Title, as HTML.
        data: Answers to the page's requests, as JSON; it is text for the browser, whatever it holds.
    """
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    code = script().replace("</", "<\\/")
    hashes = f"'sha256-{_hash(code)}'"
    policy = f"default-src 'none'; script-src {hashes}; style-src '{_style_source()}'; img-src data:; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style()}</style>'
    body = f'<script type="application/json" id="data">{safe}</script><script>{code}</script>'
    return _document(title, head, "", body)


def _style_source() -> str:
    return f"sha256-{_hash(style())}"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _document(title: str, head: str, script_tag: str, body: str = "") -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n{head}\n{script_tag}\n</head>\n<body>\n"
        '<div id="app"><p class="boot">Loading…</p></div>\n<noscript>This page needs JavaScript.</noscript>\n'
        f"{body}\n</body>\n</html>\n"
    )
