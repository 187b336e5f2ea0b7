"""A run whose servers and whose teacher are of a kind that the user wrote, through all real processes."""

import json
from pathlib import Path

from tests.end_to_end import metrics, overrides, processes_of, run

KIND = """
import sys
from dataclasses import replace
from pathlib import Path
from agentrl.inference.kinds.embedded import Embedded, EmbeddedBackend

HERE = Path(__file__).parent

class Asked(EmbeddedBackend):
    async def load(self, path, version):
        await super().load(path, version)
        with open(HERE / "loads.txt", "a") as file:
            file.write(f"{version} ")

    async def score(self, token_ids, start):
        (HERE / "scored.txt").write_text(self.url)
        return await super().score(token_ids, start)

class Mine(Embedded):
    capabilities = replace(Embedded.capabilities, weight_names="files")  # so the first push is of unchanged weights
    ready_path = "/ready"

    def command(self, start):
        assert start.port > 0
        return [*super().command(start), "--port", str(start.port)]

    def env(self, start):
        return {**super().env(start), "MINE": "1"}

    def backend(self, url, timeout):
        return Asked(url, timeout)
"""


def test_a_kind_by_its_path_samples_takes_weights_and_scores(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KIND)
    mine = "mine.py:Mine"
    settings = [f"inference.engine={mine}", f"teacher.engine={mine}", f"teacher.model={tiny_model}"]
    settings += ["teacher.threads=1", "teacher.dtype=float32", "trainer.distill_coef=0.1", "trainer.total_steps=2"]
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "own", *settings), cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert [record["step"] for record in metrics(tmp_path / "own")] == [0, 1, 2]
    assert (tmp_path / "loads.txt").read_text().split() == ["0", "1", "2"]
    assert (tmp_path / "scored.txt").is_file()
    assert json.loads((tmp_path / "own" / "config.json").read_text())["inference"]["engine"] == mine
    assert processes_of(tmp_path) == []


TEXT_KIND = """
from dataclasses import replace
from agentrl.inference.kinds.embedded import Embedded
from agentrl.inference.kinds.kind import Capabilities
from agentrl.inference.kinds.openai import OpenAIClient

class Text(Embedded):
    capabilities = Capabilities(starts=True)

    def text_client(self, api):
        return OpenAIClient(replace(api, url=f"{api.url}/v1"))
"""


def test_a_kind_that_takes_text_alone_is_started_and_evaluated(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(TEXT_KIND)
    settings = ["inference.engine=text.py:Text", "trainer.type=null", "eval.tasks=3"]
    result = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "text", *settings), cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    lines = (tmp_path / "text" / "eval-episodes.jsonl").read_text().splitlines()
    nodes = [json.loads(line)["trajectories"]["assistant"]["nodes"] for line in lines]
    assert len(nodes) == 3
    assert all(node["token_ids"] == [] and node["message"]["content"] is not None for turn in nodes for node in turn)
    assert processes_of(tmp_path) == []
    trained = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "t", settings[0]), cwd=tmp_path)
    assert trained.returncode == 2 and "needs token ids and logprobs" in trained.stdout
