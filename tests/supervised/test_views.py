"""What a person sees of a training on lines: plan, step lines, picture, table."""

import io
import json
from pathlib import Path

from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.launch.dry_run import memory, plan
from agentrl.launch.model_shape import model_shape
from agentrl.launch.resolve import resolve
from agentrl.observe.curve import draw_curve
from agentrl.observe.live import LiveView
from agentrl.observe.summary import summary_table

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
PARAMETERS = 134_515_008
BEFORE = {"step": 0, "eval/loss": 0.7, "eval/margin": 0.0, "eval/examples": 16.0}
STEP = {"step": 1, "train/loss": 0.65, "train/pair_accuracy": 0.75, "train/margin": 0.1, "train/tokens": 500.0}
SHARE = {"eval/pair_accuracy": 0.75, "eval/pair_accuracy_low": 0.51, "eval/pair_accuracy_high": 0.9}
AFTER = {"step": 1, "eval/loss": 0.6, "eval/margin": 0.2, "eval/examples": 16.0, **SHARE}


def test_the_plan_has_no_controller_and_counts_the_reference_model():
    recipe = load_recipe("gsm8k_dpo", ["trainer.dtype=float32", "trainer.nproc=2"], device="cpu")
    text = "\n".join(plan(recipe, SMOLLM2, "a model")[1])
    for word in ("2 x trainer rank, dpo (TRL)", "4 pairs, none longer than 160 tokens", "100 steps or 240 s", "32"):
        assert word in text
    assert "controller" not in text and "server" not in text
    shape = model_shape(SMOLLM2)
    items = {item.what.split(",")[0]: item.nbytes for item in memory(resolve(recipe, shape), shape)}
    assert items["parameters"] == 16 * PARAMETERS, "each rank holds the whole model"
    assert items["reference model"] == items["buffers of gradients for the other ranks"] == 4 * PARAMETERS


def test_the_plan_of_sft_has_a_server_before_and_after():
    text = "\n".join(plan(load_recipe("gsm8k_sft", device="cpu"), SMOLLM2, "a model")[1])
    assert "inference server, embedded" in text and "before and after" in text and "48 tasks x 1 episodes" in text


def test_steps_and_held_out_lines_are_one_line_each():
    out = io.StringIO()
    with LiveView(load_recipe("gsm8k_dpo", device="cpu"), Path("runs/x"), Console(file=out, width=200)) as view:
        for record in (BEFORE, STEP, AFTER):
            view.update(record)
        console = Console(file=out, width=200)
        console.print(view.render())
    shown = out.getvalue()
    assert "step 1/100  loss 0.650  pair_accuracy 0.750  margin 0.100  tokens 500" in shown
    assert "evaluation at step 1  loss 0.600  margin 0.200  pair_accuracy 0.750 [0.510, 0.900]  examples 16" in shown
    assert "invalid" not in shown, "nothing was sampled"
    assert "loss ▁" in shown


def test_the_table_and_the_picture_need_no_episodes(tmp_path: Path):
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(BEFORE, AFTER))
    shown = out.getvalue()
    assert "pair accuracy" in shown and "75.0% [51.0%, 90.0%]" in shown and "not measured" in shown
    assert "16 held-out examples" in shown and "judged" not in shown
    assert not any(line.split("│")[1:2] == ["examples"] for line in shown.replace(" ", "").splitlines()), (
        "a count is no row"
    )
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in (BEFORE, STEP, AFTER)))
    assert draw_curve(metrics, tmp_path / "loss.png", "x")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
