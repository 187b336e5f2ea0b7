"""The benchmark of the data's way, on a small batch; times are not asserted."""

from agentrl.bench.bench_data import run


def test_a_small_batch_gives_all_figures() -> None:
    figures = run(repeats=1, groups=2, prompt=16, answer=48)
    assert {"cpu_per_million_tokens", "cpu_per_million_tokens_of_8", "wire_bytes_per_token"} <= figures.keys()
    assert all(len(values) == 1 for values in figures.values())
    assert figures["cpu_per_million_tokens"][0] > 0
    assert figures["wire_bytes_per_token"][0] > 5, "ids and masks alone take five"
