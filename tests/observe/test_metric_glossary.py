"""The glossary knows every metric that the code writes; the page in docs is made from it."""

import ast
import json
import re
from pathlib import Path

from agentrl.observe.metric_glossary import GLOSSARY, described, entry_of, page

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "reward", "metrics", "metrics_kept", "rollout", "tokens", "staleness", "dropped", "trained", "drift", "distill",
    "curriculum", "weights", "train", "critic", "mismatch", "routing", "time", "checkpoint", "eval",
)  # fmt: skip
WRITERS = ("rollout", "train", "weights", "evaluate", "supervised", "launch")
NAME = re.compile(rf"(?:{'|'.join(FAMILIES)})/[a-z][a-z0-9_@+/]*")


def written_names():
    """Names of metrics that stand as texts in the modules that write them."""
    for package in WRITERS:
        for file in sorted((ROOT / "agentrl" / package).rglob("*.py")):
            tree = ast.parse(file.read_text())
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) and id(node) not in inside else None
                if isinstance(text, str) and NAME.fullmatch(text):
                    yield text, file


def test_every_metric_that_the_code_names_is_in_the_glossary():
    names = dict(written_names())
    assert len(names) > 60
    assert [f"{name} in {file.name}" for name, file in names.items() if entry_of(name) is None] == []


def test_every_metric_of_real_runs_is_in_the_glossary():
    files = sorted((ROOT / "tests" / "observe" / "real_runs").rglob("*.jsonl"))
    names = {name for file in files for line in file.read_text().splitlines() for name in json.loads(line)}
    assert files and len(names) > 30
    assert sorted(name for name in names - {"step", "time"} if entry_of(name) is None) == []


def test_the_most_special_entry_of_a_name_is_found():
    assert entry_of("mismatch/kl_k1/age_0").name == "mismatch/kl_k1*"
    assert entry_of("mismatch/kl/age_2+").name == "mismatch/kl*"
    assert entry_of("eval/pass@4_low").name == "eval/*_low"
    assert entry_of("reward/white/mean_kept").name == "reward/*/mean_kept"
    assert entry_of("no/such") is None and described("no/such")["unit"] == ""


def test_every_entry_says_what_it_is_over():
    assert [metric.name for metric in GLOSSARY if not metric.meaning or not metric.over] == []
    assert len({metric.name for metric in GLOSSARY}) == len(GLOSSARY)


def test_the_page_in_docs_is_the_glossary():
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), (
        "python -m agentrl.observe.metric_glossary > docs/metrics.md"
    )
