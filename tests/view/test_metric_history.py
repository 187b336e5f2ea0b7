"""Curves are read as they are written."""

from agentrl.view.metric_history import MetricHistory


def test_lines_are_read_once_and_half_written_ones_later(tmp_path):
    file = tmp_path / "metrics.jsonl"
    history = MetricHistory(tmp_path)
    assert history.update() == 0 and history.names() == []
    file.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert history.update() == 1
    with file.open("a") as opened:
        opened.write(': 2.0}\n{"step": 1, "b": 3}\nno json\n{"a": 1}\n{"step": 3, "a": null}\n')
    assert history.update() == 3
    assert history.columns(["a", "b"]) == {"step": [1, 2, 3], "a": [1.0, 2.0, None], "b": [3.0, None, None]}


def test_a_file_that_a_resume_shortened_is_read_anew(tmp_path):
    file = tmp_path / "metrics.jsonl"
    history = MetricHistory(tmp_path)
    file.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n')
    history.update()
    file.write_text('{"step": 1, "a": 1.0}\n')
    history.update()
    assert history.columns(["a"]) == {"step": [1], "a": [1.0]}
