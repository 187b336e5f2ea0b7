"""What ``agentrl plan --probe`` makes of its measurements: a side that is as fast as told is found to be so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.bench import machine_probe
from agentrl.bench.machine_probe import measured, probe_work
from agentrl.bench.probe_side import batch_of, plain
from agentrl.plan.mesh import Mesh
from agentrl.plan.published import PUBLISHED
from agentrl.plan.times import compute_seconds, decode_seconds, optimizer_seconds
from agentrl.plan.work import Work
from tests.plan.planned import SMOL, case_for

TRUE = {"peak_tflops": 0.2, "serving_tflops": 0.2, "bandwidth_gbs": 20.0, "mfu": 0.6, "prefill_mfu": 0.5,
        "decode_mfu": 0.3, "mbu": 0.7, "decode_step_ms": 0.0, "host_gbs": 4.0}  # fmt: skip


class Machine:
    """A side that takes the seconds that a plan with true efficiencies predicts."""

    def __init__(self, case: Any) -> None:
        few = replace(case.decoder, layers=machine_probe.MOST_LAYERS)
        self.case = replace(case, decoder=few, known=case.known.replaced(TRUE, "true"))

    def cpu_seconds(self) -> float:
        return 0.0

    def do(self, task: dict[str, Any]) -> dict[str, Any]:
        what = task["what"]
        if what == "products":
            return {"flops": 0.2e12, "of": "64 x 64"}
        if what == "copy":
            return {"rate": 20e9}
        if what == "host":
            return {"rate": 4e9 * self.case.known["link_share"]}
        if what == "update":
            work = Work(task["groups"], task["members"], task["prompt"], (task["answer"],))
            case = replace(self.case, work=work)
            return {"seconds": compute_seconds(case, Mesh()) + optimizer_seconds(case, Mesh())}
        count, new, (prompt, _) = task["count"], task["new"], task["lengths"]
        prompts = self.case.decoder.forward_flops(count * prompt, count, count * prompt**2 / 2)
        seconds = prompts / (0.2e12 * 0.5)
        for step in range(1, new):  # the first token comes with the prompt
            case = replace(self.case, work=Work(1, 1, prompt + step, (1.0,)))
            seconds += decode_seconds(case, count)
        return {"value": count * new / seconds}


def test_efficiencies_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_for(SMOL, "inference.engine=embedded", "inference.max_running=64", "trainer.kl_coef=0",
                    "sampling.max_new_tokens=64", gpu="cpu", prompt=60, answer=40)  # fmt: skip
    machine = Machine(case)

    def run(work: Any, module: str, *arguments: str, seconds: float) -> None:
        if "probe_side" in module:
            (Path(arguments[0]) / "config.json").write_text("{}")
        work(machine)

    monkeypatch.setattr(machine_probe, "_run", run)
    monkeypatch.setattr(machine_probe, "_load", lambda device: "")
    values, sources = measured(case.recipe, case.decoder, dict(PUBLISHED[SMOL]), case.known, 60.0)
    for name, value in TRUE.items():
        if name != "decode_step_ms":
            assert values[name] == pytest.approx(value, rel=0.05), name
            assert sources[name].startswith("measured: ")


def test_what_was_not_reached_stays_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_for(SMOL, gpu="cpu")

    class Slow:
        alive = True

        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def hear(self) -> None:
            while self.alive:
                machine_probe.time.sleep(0.001)
            raise RuntimeError("ended")

        def end(self) -> None:
            self.alive = False

    monkeypatch.setattr(machine_probe, "Side", Slow)
    assert measured(case.recipe, case.decoder, dict(PUBLISHED[SMOL]), case.known, 0.2) == ({}, {})


def test_the_tried_update_fits_a_micro_batch() -> None:
    case = case_for(SMOL, "trainer.tokens_per_microbatch=2048", gpu="cpu", prompt=3000, answer=4000)
    work = probe_work(case.recipe, case.known)
    assert work.groups == 1 and work.computed <= 2048 + work.members + 1
    few = case_for(SMOL, "trainer.tokens_per_microbatch=2048", gpu="cpu", prompt=40, answer=10, distinct=0.5)
    work = probe_work(few.recipe, few.known)
    assert work.computed == pytest.approx(few.work.computed, rel=0.6) and work.members == few.work.members


def test_a_made_batch_has_the_counted_tokens() -> None:
    task = {"config": {"vocab_size": 100}, "prompt": 10, "answer": 5, "groups": 2, "members": 3}
    batch = batch_of(task)
    assert len(batch.branches) == 6 and batch.tokens.total == 30


def test_what_a_probe_does_not_measure_is_turned_off() -> None:
    case = case_for(SMOL, "trainer.kl_coef=0.1", "trainer.lora_rank=8", "trainer.minibatches=2", gpu="cpu")
    trainer = plain(case.recipe).trainer
    assert (trainer.kl_coef, trainer.lora_rank, trainer.minibatches, trainer.metric_share) == (0.0, None, 1, 0.0)
