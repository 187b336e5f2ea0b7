"""Times of a step's parts, against formulas written out by hand and the simulated controller."""

import itertools
from statistics import fmean, median

import pytest

from agentrl.config.load import load_recipe
from agentrl.plan.assumptions import assumed
from agentrl.plan.cards import find_card
from agentrl.plan.mesh import Mesh
from agentrl.plan.prediction import choose, layouts, predict
from agentrl.plan.report import line_of
from agentrl.plan.times import (
    Case,
    Layout,
    at_a_time,
    compute_seconds,
    decode_seconds,
    evaluation_seconds,
    exchange_seconds,
    generation_seconds,
    microbatches,
    optimizer_seconds,
    prefill_seconds,
    push_seconds,
    scoring_seconds,
)
from agentrl.plan.work import Work, lognormal, makespan, spread, work_of
from agentrl.sim.choice import Case as SimCase
from agentrl.sim.device import Speed
from agentrl.sim.shapes import Lognormal
from agentrl.sim.simulation import Devices
from tests.plan.planned import LLAMA_8B, SMOL, case_for, decoder

LAYOUT = Layout(4, 1, Mesh(shards=4))


def test_lengths_have_the_distribution_that_the_simulation_draws_from() -> None:
    """The mean of a lognormal variable that is cut at 1,000: 600 F(0.2386) + 1000 (1 - F(1.0386)), F the normal's."""
    quantiles, drawn = lognormal(600, 0.8, 1000), Lognormal(600, 0.8, 1000)
    assert fmean(quantiles) == pytest.approx(600 * 0.59429 + 1000 * (1 - 0.85050), rel=1e-3)
    assert fmean(quantiles) == pytest.approx(drawn.mean(), rel=0.02)
    assert max(quantiles) == 1000 and min(quantiles) >= 1


def test_the_work_of_a_step_is_counted_by_hand() -> None:
    work = Work(groups=3, members=4, prompt=100, lengths=(10.0, 30.0), signal=0.5, shared=40)
    assert work.sampled == 12 * 20
    assert work.computed == 40 + 1.5 * (60 + 4 * 20)
    assert work.predicted == 6 * 20
    own = (100 * 100 - 40 * 40) / 2 + 2 * (10 * 100 + 50) + 2 * (30 * 100 + 450)
    assert work.pairs == pytest.approx(40 * 40 / 2 + 1.5 * own), "what all prompts begin with is computed once"
    assert work.context == pytest.approx(100 + (100 + 900) / 2 / 20 / 2)


def test_lengths_are_spread_evenly_and_each_once() -> None:
    made = spread([1.0, 2.0, 3.0, 4.0], 8)
    assert sorted(made) == [1, 1, 2, 2, 3, 3, 4, 4] and made != sorted(made)


def test_the_last_sequences_run_alone() -> None:
    assert makespan([10, 20, 30], 3, lambda running: running) == 10 * 3 + 10 * 2 + 10 * 1
    assert makespan([10, 20, 30], 1, lambda running: 2.0) == 2 * 60
    assert makespan([10, 10, 10, 10], 2, lambda running: 1.0) == 20


def test_a_decode_step_reads_all_weights_or_multiplies_with_them() -> None:
    """Llama 3.1 8B in bfloat16 on an H100, all of its bandwidth and peak: 15 GB in 4.5 ms, 2 x 7.5 GFLOP a row."""
    case = case_for(LLAMA_8B, mbu=1, decode_mfu=1, decode_step_ms=0)
    read = 2 * (case.decoder.parameters - case.decoder.head) / 3350e9
    cache = case.work.context * 131072 / 3350e9
    assert decode_seconds(case, 1) == pytest.approx(read + cache)
    rows = 512
    flops = 2 * rows * (case.decoder.active + case.decoder.head) + 4 * 32 * 4096 * rows * case.work.context
    assert decode_seconds(case, rows) == pytest.approx(flops / 989e12 + rows * cache)
    assert decode_seconds(case, 1, cards=2) > decode_seconds(case, 1) / 2, "two cards also exchange their sums"


def test_an_update_takes_its_operations_over_the_reached_rate() -> None:
    case = case_for(LLAMA_8B, "trainer.gradient_checkpointing=false", mfu=0.5, sigma=0)
    work = case.work
    by_hand = 6 * (case.decoder.active * work.computed + case.decoder.head * work.predicted)
    by_hand += 12 * 32 * 32 * 128 * work.pairs
    assert compute_seconds(case, Mesh(shards=8)) == pytest.approx(by_hand / (8 * 989e12 * 0.5))
    again = case_for(LLAMA_8B, "trainer.gradient_checkpointing=true", mfu=0.5, sigma=0)
    layers = 2 * case.decoder.active * work.computed + 4 * 32 * 32 * 128 * work.pairs
    assert compute_seconds(again, Mesh()) - compute_seconds(case, Mesh()) == pytest.approx(layers / (989e12 * 0.5))


def test_a_loss_of_whole_sequences_computes_the_logits_once_more() -> None:
    plain, whole = case_for(LLAMA_8B), case_for(LLAMA_8B, "trainer.ratio=sequence")
    more = compute_seconds(whole, Mesh()) - compute_seconds(plain, Mesh())
    assert more == pytest.approx(2 * plain.decoder.head * plain.work.predicted / (989e12 * 0.4))


def test_scoring_is_a_forward_pass_for_each_that_needs_one() -> None:
    case = case_for(LLAMA_8B)
    assert scoring_seconds(case, Mesh()) == 0
    one, two = (
        scoring_seconds(case_for(LLAMA_8B, *settings), Mesh())
        for settings in (["trainer.kl_coef=0.1"], ["trainer.kl_coef=0.1", "trainer.proximal=recomputed"])
    )
    work = case.work
    assert one == pytest.approx(case.decoder.forward_flops(work.computed, work.predicted, work.pairs) / (989e12 * 0.4))
    assert two == pytest.approx(2 * one)


def test_gathering_once_an_update_or_twice_a_micro_batch() -> None:
    case = case_for(LLAMA_8B, link_share=1)
    kept, freed = Mesh(shards=8), Mesh(shards=8, reshard=True)
    count, rounds = case.decoder.parameters, microbatches(case, kept)
    assert rounds > 1
    assert exchange_seconds(case, kept) == pytest.approx((2 + 4) * count * 7 / 8 / 450e9)
    assert exchange_seconds(case, freed) == pytest.approx(rounds * (2 * 2 + 4) * count * 7 / 8 / 450e9)
    far = exchange_seconds(case, Mesh(shards=16))
    assert far == pytest.approx((2 + 4) * count * 15 / 16 / 50e9), "beyond a machine the network carries it"
    assert exchange_seconds(case, Mesh(replicas=2, shards=8)) < far


def test_a_push_is_gathered_sent_and_loaded() -> None:
    case = case_for(LLAMA_8B, link_share=1)
    nbytes = 2 * case.decoder.parameters
    near = nbytes * 3 / 4 / 450e9 + nbytes / 64e9 + nbytes / 64e9
    assert push_seconds(case, LAYOUT) == pytest.approx(near)
    far = Layout(8, 1, Mesh(shards=8))
    assert push_seconds(case, far) == pytest.approx(nbytes * 7 / 8 / 450e9 + nbytes / 50e9 + nbytes / 64e9)


def test_the_optimizer_moves_40_bytes_a_parameter() -> None:
    """The norm reads the gradient, clipping reads and writes it; AdamW reads all four values, and writes three."""
    case = case_for(LLAMA_8B, mbu=1)
    by_hand = 4 + 8 + 4 * 4 + 3 * 4
    assert optimizer_seconds(case, Mesh(shards=8)) == pytest.approx(by_hand * case.decoder.parameters / 8 / 3350e9)


def test_each_tensor_rank_computes_the_head_of_all_its_tokens() -> None:
    case = case_for(LLAMA_8B, "trainer.gradient_checkpointing=false", mfu=0.5)
    more = compute_seconds(case, Mesh(tensor=8)) - compute_seconds(case, Mesh(shards=8))
    head = 6 * 128256 * 4096 * case.work.predicted
    assert more == pytest.approx(7 * head / (8 * 989e12 * 0.5))


def test_what_ranks_exchange_besides_parameters_is_counted_by_hand() -> None:
    plain, again = (
        case_for(LLAMA_8B, f"trainer.gradient_checkpointing={on}", link_share=1, gpus_per_machine=64)
        for on in ("false", "true")
    )
    tokens, hidden = plain.work.computed, 4096
    for case, passes in ((plain, 2), (again, 3)):  # forward, backward, and forward again
        sums = 2 * passes * 32 * tokens * hidden * 2  # attention's and the MLP's result of each layer, in bfloat16
        assert exchange_seconds(case, Mesh(tensor=4)) == pytest.approx(2 * 3 / 4 * sums / 450e9)
        keys = passes * 2 * 32 * 8 * 128 * 2 * tokens
        sharded = exchange_seconds(case, Mesh(shards=4))  # of the same group of ranks
        shared = exchange_seconds(case, Mesh(shards=1, context=4))
        assert shared - sharded == pytest.approx(3 / 4 * keys / 450e9)
    copies = exchange_seconds(plain, Mesh(replicas=2)), exchange_seconds(plain, Mesh(replicas=2, shards=64))
    assert copies[0] == pytest.approx(4 * plain.decoder.parameters / 450e9), "within a machine its links carry them"
    far = copies[1] - exchange_seconds(plain, Mesh(shards=64))
    assert far == pytest.approx(4 * plain.decoder.parameters / 64 / 50e9)
    adapter = case_for(LLAMA_8B, "trainer.lora_rank=16")
    assert exchange_seconds(adapter, Mesh(replicas=2)) == 0, "whole weights have no gradients"


def test_prompts_are_computed_once_on_each_server_that_a_group_reaches() -> None:
    case = case_for(LLAMA_8B, prompt=1000, shared=400)
    one, four = (prefill_seconds(case, Layout(servers, 1, Mesh())) for servers in (1, 4))
    assert four == pytest.approx(one, rel=0.01), "four times the work on four servers"
    more = prefill_seconds(case_for(LLAMA_8B, prompt=1000), Layout(1, 1, Mesh()))
    assert one < 0.7 * more


def test_a_small_cache_lets_fewer_sequences_run() -> None:
    case = case_for(LLAMA_8B, memory_gb=24)
    assert at_a_time(case, LAYOUT) < at_a_time(case_for(LLAMA_8B), LAYOUT)


def test_time_outside_leaves_places_free() -> None:
    assert at_a_time(case_for(LLAMA_8B, outside=30), LAYOUT) < at_a_time(case_for(LLAMA_8B), LAYOUT)


def test_without_staleness_the_parts_follow_one_another() -> None:
    one = predict(case_for(LLAMA_8B, "rollout.max_staleness=0"), LAYOUT)
    assert not one.overlap and one.seconds == pytest.approx(sum(part.seconds for part in one.parts))
    two = predict(case_for(LLAMA_8B), LAYOUT)
    assert two.overlap and two.seconds == pytest.approx(max(two.side("serve"), two.side("train")))


def test_an_evaluation_is_shared_by_the_steps_between() -> None:
    one, two = (predict(case_for(LLAMA_8B, f"eval.every={every}"), LAYOUT) for every in (10, 20))
    parts = [{part.name: part.seconds for part in found.parts} for found in (one, two)]
    assert parts[0]["evaluation"] == pytest.approx(2 * parts[1]["evaluation"])
    assert parts[0]["evaluation"] == pytest.approx(evaluation_seconds(case_for(LLAMA_8B), LAYOUT) / 10)
    none = predict(case_for(LLAMA_8B, "eval.every=0"), LAYOUT)
    assert "evaluation" not in {part.name for part in none.parts}


def test_the_chosen_split_is_the_shortest_of_all() -> None:
    case = case_for(LLAMA_8B)
    found = [predict(case, one) for one in layouts(32, 1, 256, 8)]
    assert [(one.layout.servers, one.layout.mesh.ranks) for one in found] == [(8, 24), (16, 16), (24, 8)]
    chosen = choose(found)
    fitting = [one for one in found if one.fits]
    assert chosen.fits and chosen.seconds <= 1.02 * min(one.seconds for one in fitting)


@pytest.mark.parametrize("staleness", [0, 1])
def test_generation_takes_what_the_simulated_controller_takes(staleness: int) -> None:
    """The controller itself, under a virtual clock, with the plan's lengths and speeds; training takes no time."""
    settings = [
        f"rollout.max_staleness={staleness}", "rollout.batch_size=8", "rollout.group_size=8", "eval.every=0",
        "rollout.max_concurrent=128", "rollout.episode_timeout=100000", "inference.max_running=64",
    ]  # fmt: skip
    case = case_for(LLAMA_8B, *settings, sigma=0.4, prompt=100)
    layout = Layout(2, 1, Mesh(shards=2))
    token, sequence = line_of(case, predict(case, layout))
    devices = Devices(2, 2, Speed(token, sequence), train_seconds=1e-6, slots=64)
    shapes = Lognormal(case.known["answer"], 0.4, case.recipe.sampling.max_new_tokens)
    played = SimCase(case.recipe, devices, shapes, 6).run(2, 2, staleness)
    assert generation_seconds(case, layout) == pytest.approx(played.step_seconds, rel=0.2)


def test_a_documented_run_comes_within_a_factor_of_1_5() -> None:
    """docs/runs.md, `arithmetic_grpo` on the idle Zen 3 machine, float32: medians of steps 2 to 5 of such lengths."""
    recipe = load_recipe("arithmetic_grpo", ["trainer.dtype=float32", "inference.dtype=float32"], device="cpu")
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cpu"})})
    run = {"prompt": 46.2, "shared": 27, "answer": 9.8, "sigma": 0.14, "signal": 0.91, "distinct_rows": 0.56}
    known = assumed(find_card("cpu"), recipe).replaced(run | {"distinct": 0.63}, "a run")
    found = predict(Case(recipe, decoder(SMOL), work_of(recipe, known), known), Layout(1, 1, Mesh(), shared=True))
    parts = {part.name: part.seconds for part in found.parts}
    generation, update = median([7.4, 6.3, 5.3, 4.5]), median([13.8, 12.2, 8.0, 5.8])
    assert 1 / 1.5 < generation / (parts["prompts"] + parts["generation"]) < 1.5
    assert 1 / 1.5 < update / (found.side("train") - parts["push"]) < 1.5
    assert 0.4 / 1.5 < parts["push"] < 0.7 * 1.5, "docs/performance.md: 0.4-0.7 s for 540 MB with repacking"


def test_every_quantile_is_counted_once() -> None:
    work = work_of(case_for().recipe, case_for().known)
    assert work.answer == pytest.approx(sum(work.lengths) / len(work.lengths))
    assert len(list(itertools.groupby(work.lengths))) > 100
