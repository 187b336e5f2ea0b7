import json

from agentrl.bench.report import json_line


def test_the_json_line_has_median_and_spread():
    line = json_line({"decode_vs_generate": [1.0, 3.0, 2.0]})
    assert "\n" not in line
    assert json.loads(line) == {"decode_vs_generate": {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}}
