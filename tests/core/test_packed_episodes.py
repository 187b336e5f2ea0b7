"""Packed episodes: what comes out is what went in, and small."""

import io
import json
import lzma
import random
import zipfile
from pathlib import Path

import numpy as np
import orjson
import pytest

from agentrl.bench.made_run import made_episode
from agentrl.core.packed_episodes import PRECISION, all_lines, comment_of, earlier_parts, pack, pack_parts
from agentrl.core.packed_part import PackedPart


def _lines(count, tokens=60):
    drawn = random.Random(3)
    return [orjson.dumps(made_episode(number, drawn, tokens)) + b"\n" for number in range(count)]


def _compare(packed: dict, plain: dict) -> None:
    """The records are equal, but for the precision of logprobs."""
    for of in (packed, plain):
        assert list(of["trajectories"]) == list(plain["trajectories"])
    for role, given in plain["trajectories"].items():
        for got, node in zip(packed["trajectories"][role]["nodes"], given["nodes"], strict=True):
            for name in ("logprobs", "teacher_logprobs"):
                assert np.allclose(got[name], node[name], rtol=PRECISION, atol=1e-37)
                assert [value == 0 for value in got[name]] == [value == 0 for value in node[name]]
            assert got | {"logprobs": 0, "teacher_logprobs": 0} == node | {"logprobs": 0, "teacher_logprobs": 0}
    assert packed | {"trajectories": 0} == plain | {"trajectories": 0}


def _packed(tmp_path, lines):
    file = tmp_path / "part.zip"
    file.write_bytes(pack(b"".join(lines)))
    return file


def test_every_record_comes_back(tmp_path):
    lines = _lines(20)
    record = json.loads(lines[3])
    node = record["trajectories"]["assistant"]["nodes"][1]
    node["teacher_logprobs"] = [-0.5 * mask for mask in node["loss_mask"]]
    node["token_ids"][0] = 200_000  # of a large vocabulary
    lines[3] = orjson.dumps(record) + b"\n"
    found = PackedPart(_packed(tmp_path, lines))
    assert [line.place for line in found] == [sum(map(len, lines[:at])) for at in range(20)]
    for line, plain in zip(found, lines, strict=True):
        _compare(orjson.loads(line.data), orjson.loads(plain))


@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": [1, 2], "loss_mask": [1], "logprobs": [0.0], "versions": [1]},
        {"token_ids": [1], "loss_mask": [0], "logprobs": [-1.0], "versions": [-1]},
        {"token_ids": [1], "loss_mask": [0], "logprobs": [0.0], "versions": [4]},
        {"token_ids": [-1], "loss_mask": [1], "logprobs": [0.0], "versions": [1]},
        {"token_ids": None},
        {},
    ],
)
def test_tokens_of_another_kind_stay_as_they_are(tmp_path, odd):
    record = {"trajectories": {"a": {"nodes": [{"message": {"role": "user"}, **odd}]}}}
    (line,) = PackedPart(_packed(tmp_path, [orjson.dumps(record) + b"\n"]))
    assert orjson.loads(line.data) == record


def test_lines_that_are_no_records_stay_as_they_are(tmp_path):
    odd = [b'{"trajectories": {}}\n', b'{"trajectories": {"a": 1, "b": {"nodes": 2}}}\n', b'{"trajectories": [1]}\n']
    lines = [b"no json\n", b"[1]\n", *_lines(1), *odd]
    found = PackedPart(_packed(tmp_path, lines))
    assert [line.data for line in found[:2]] == lines[:2] and len(found) == 6


def test_odd_texts_and_line_ends_stay_as_they_are(tmp_path):
    record = json.loads(_lines(1)[0])
    record["trajectories"]["assistant"]["nodes"][1]["message"]["content"] = "a\r\n\u2028\x85é\U0001f600"
    (line,) = PackedPart(_packed(tmp_path, [orjson.dumps(record) + b"\n"]))
    _compare(orjson.loads(line.data), record)


def test_a_task_with_a_long_integer_stays_exact(tmp_path):
    record = json.loads(_lines(1)[0]) | {"task": {"answer": 2**64 + 1}}
    record["trajectories"]["assistant"]["nodes"][1]["logprobs"][0] = -0.00012345678901234567
    line = json.dumps(record).encode() + b"\n"
    assert [one.data for one in PackedPart(_packed(tmp_path, [line]))] == [line]
    record["trajectories"]["assistant"]["nodes"][1]["message"]["content"] = "3" * 30  # a text, and no integer
    short = json.dumps(record | {"task": {"answer": 1}}).encode() + b"\n"
    with zipfile.ZipFile(_packed(tmp_path, [short])) as part:
        assert b"token_ids" not in part.read("episodes.jsonl"), "the digits of a fraction are no integer"


def test_a_part_says_what_it_was_and_numpy_reads_it(tmp_path):
    lines = _lines(5)
    file = _packed(tmp_path, lines)
    comment = {"bytes": sum(map(len, lines)), "episodes": 5, "head": lines[0][:200].hex(), "shift": 17}
    assert comment_of(file) == comment
    ids = [
        i
        for line in lines
        for node in json.loads(line)["trajectories"]["assistant"]["nodes"]
        for i in node["token_ids"]
    ]
    with np.load(file) as arrays:
        assert arrays["vocabulary"][arrays["token_ids"]].tolist() == ids
    with zipfile.ZipFile(file) as archive:
        assert len(archive.read("episodes.jsonl").splitlines()) == 5


VOCABULARY = 49_152  # of SmolLM2


def _real():
    """Real episodes, each of eight made problems like GSM8K's in one conversation, and the bytes of their ids.

    SmolLM2-135M-Instruct in bfloat16 at temperature 1, some 2,000 sampled tokens each; logprobs as float32. A larger
    model, or a trained one, is surer of its tokens, and packs better.
    """
    data = lzma.decompress((Path(__file__).parent / "long_made.jsonl.xz").read_bytes())
    head, *lines = data.splitlines(keepends=True)
    return lines, {int(one): text.encode("latin-1") for one, text in json.loads(head)["pieces"].items()}


def test_real_episodes_of_2000_tokens_take_three_bytes_a_token():
    """Those of a whole part find more that repeats; their tables are counted as if they held the whole vocabulary."""
    lines, pieces = _real()
    nodes = [
        node
        for line in lines
        for trajectory in json.loads(line)["trajectories"].values()
        for node in trajectory["nodes"]
    ]
    tokens, sampled = (sum(sum(f(node)) for node in nodes) for f in (_ones, lambda node: node["loss_mask"]))
    assert 2000 < tokens / len(lines) < 3000 and sampled / tokens > 0.7
    assert sum(sum(node["logprobs"]) for node in nodes) / sampled < -1, "as unsure as so small a model is"
    packed = pack(b"".join(lines), pieces.__getitem__)
    with zipfile.ZipFile(io.BytesIO(packed)) as part:
        tables = sum(part.getinfo(name).compress_size for name in ("pieces.json", "vocabulary.npy"))
    whole = 64e6 / sum(map(len, lines))  # parts like this one in a whole one, which share its tables
    size = len(packed) - tables + tables * VOCABULARY / len(pieces) / whole
    print(f"{size / tokens:.2f} bytes a token, {size / sampled:.2f} a sampled one")
    assert size / tokens <= 3 and size / sampled <= 3.2
    assert size < sum(map(len, lines)) / 8


def _ones(node):
    return [1] * len(node["token_ids"])


PIECES = [b"<|im_start|>", b"assistant", b"\n", b"The answer", b" is ", b"caf\xc3", b"\xa9", b" \xf0\x9f", b'{"a": ',
          b"12345678", b"}", b"<|im_end|>", b" \xff", b"again and again"]  # fmt: skip


def _spoken(ids: list[int], message: dict) -> bytes:
    count = len(ids)
    node = {"token_ids": ids, "loss_mask": [1] * count, "logprobs": [-1.0] * count, "versions": [2] * count,
            "teacher_logprobs": []}  # fmt: skip
    return orjson.dumps({"trajectories": {"a": {"nodes": [{"parent": None, "message": message, **node}]}}}) + b"\n"


@pytest.mark.parametrize(
    ("ids", "message", "left_out"),
    [
        ([0, 1, 2, 3, 4, 9, 11], {"role": "assistant", "content": "The answer is 12345678"}, 1),
        ([3, 4, 5, 6, 13, 11], {"content": "The answer is café", "reasoning_content": "again and again"}, 2),
        ([3, 4, 5, 7, 12, 13], {"content": "The answer is caf\ufffd \ufffd \ufffdagain and again"}, 1),
        ([3, 4, 5], {"content": "The answer is caf\ufffd\ufffd"}, 0),  # another decoder's
        (
            [3, 8, 9, 10],
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 12345678}'}}]},
            1,
        ),
        ([13, 13], {"content": [{"type": "text", "text": "again and again"}, {"type": "image_url", "x": None}]}, 1),
        ([3, 4], {"content": "The answer is of other ids"}, 0),
        ([3, 99], {"content": "The answer is "}, 0),  # an id beyond the tokenizer's
        ([3, 4], {"content": "is"}, 0),  # shorter than its place
        ([3, 4], {"same_as": 0}, 0),
        ([3, 4], "The answer is ", 0),
    ],
)
def test_texts_that_the_ids_say_are_left_out_and_come_back(tmp_path, ids, message, left_out):
    lines = [_spoken(ids, message), *_lines(2)]
    file = tmp_path / "part.zip"
    file.write_bytes(pack(b"".join(lines), PIECES.__getitem__))
    with zipfile.ZipFile(file) as part:
        (node,) = json.loads(part.read("episodes.jsonl").splitlines()[0])["trajectories"]["a"]["nodes"]
    assert len(node.get("texts", ())) == left_out
    for line, plain in zip(PackedPart(file), lines, strict=True):
        _compare(orjson.loads(line.data), orjson.loads(plain))
    assert list(orjson.loads(PackedPart(file)[0].data)["trajectories"]["a"]["nodes"][0]) == [
        "parent", "message", *("token_ids", "loss_mask", "logprobs", "versions", "teacher_logprobs"),
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["tokens", "texts", "teacher"])
def test_a_node_with_a_key_of_packed_ones_stays_as_it_is(tmp_path, key):
    record = json.loads(_spoken([3, 4], {"content": "The answer is "}))
    record["trajectories"]["a"]["nodes"][0][key] = [[["content"], 0, 3]]
    file = tmp_path / "part.zip"
    file.write_bytes(pack(orjson.dumps(record) + b"\n", PIECES.__getitem__))
    assert orjson.loads(PackedPart(file)[0].data) == record


def test_parts_of_earlier_versions_are_read(tmp_path):
    """They have no pieces, and 13 bits of a logprob."""
    lines = _lines(3)
    file, old = tmp_path / "part.zip", tmp_path / "old.zip"
    file.write_bytes(pack(b"".join(lines)))
    with zipfile.ZipFile(file) as new, zipfile.ZipFile(old, "w") as written:
        comment = json.loads(new.comment)
        assert comment.pop("shift") == 17 and "pieces.json" not in new.namelist()
        written.comment = json.dumps(comment).encode()
        vocabulary = np.load(io.BytesIO(new.read("vocabulary.npy")))
        earlier = {"logprobs.npy": lambda codes: codes >> 2, "token_ids.npy": lambda places: vocabulary[places]}
        for name in sorted({*new.namelist()} - {"vocabulary.npy"}):
            data = new.read(name)
            if name in earlier:
                buffer = io.BytesIO()
                np.save(buffer, earlier[name](np.load(io.BytesIO(data))))
                data = buffer.getvalue()
            written.writestr(name, data)
    ids = [
        [node["token_ids"] for node in json.loads(line)["trajectories"]["assistant"]["nodes"]]
        for line in (*lines, *(line.data for line in PackedPart(old)))
    ]
    assert ids[:3] == ids[3:]
    for line, plain in zip(PackedPart(old), lines, strict=True):
        got, given = (
            [value for node in orjson.loads(one)["trajectories"]["assistant"]["nodes"] for value in node["logprobs"]]
            for one in (line.data, plain)
        )
        assert np.allclose(got, given, rtol=2.0**-4)


def test_parts_are_packed_in_order_and_read_as_one(tmp_path):
    lines = _lines(30)
    file = tmp_path / "episodes.jsonl"
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "000000.jsonl").write_bytes(b"".join(lines[:10]))
    (tmp_path / "episodes" / "000001.jsonl").write_bytes(b"".join(lines[10:20]))
    file.write_bytes(b"".join(lines[20:]) + b'{"half')
    assert list(all_lines(file)) == lines
    assert pack_parts(file) == 2 and pack_parts(file) == 0
    assert [part.name for part in earlier_parts(file)] == ["000000.zip", "000001.zip"]
    for line, plain in zip(all_lines(file), lines, strict=True):
        _compare(orjson.loads(line), orjson.loads(plain))


def test_a_part_that_was_packed_and_not_removed_is_read_once(tmp_path):
    lines = _lines(4)
    (tmp_path / "episodes").mkdir()
    plain = tmp_path / "episodes" / "000000.jsonl"
    plain.write_bytes(b"".join(lines))
    plain.with_suffix(".zip").write_bytes(pack(b"".join(lines)))
    plain.with_suffix(".partial").write_bytes(b"PK")
    assert len(list(all_lines(tmp_path / "episodes.jsonl"))) == 4
    pack_parts(tmp_path / "episodes.jsonl")
    assert not plain.exists()


def test_the_page_in_docs_reads_a_part_without_our_code(tmp_path, monkeypatch):
    import re

    call = {"function": {"name": "f", "arguments": '{"a": 12345678}'}}
    messages = [{"content": "The answer is café", "tool_calls": [call]}, {"content": "again and again"}]
    record = json.loads(_spoken([3, 4, 5, 6, 8, 9, 10], messages[0]))
    record["trajectories"]["a"]["nodes"].append(
        json.loads(_spoken([12, 13], messages[1]))["trajectories"]["a"]["nodes"][0]
    )
    lines = [orjson.dumps(record) + b"\n"]
    (tmp_path / "runs" / "mine" / "episodes").mkdir(parents=True)
    file = tmp_path / "runs" / "mine" / "episodes" / "000000.zip"
    file.write_bytes(pack(b"".join(lines), PIECES.__getitem__))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "viewing.md").read_text()
    block = next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "zipfile" in text)
    found: dict = {}
    exec(block, found)
    nodes = [node for line in lines for node in json.loads(line)["trajectories"]["a"]["nodes"]]
    sampled = [value for node in nodes for value, mask in zip(node["logprobs"], node["loss_mask"], strict=True) if mask]
    assert found["ids"].tolist() == [one for node in nodes for one in node["token_ids"]]
    assert found["mask"].tolist() == [one for node in nodes for one in node["loss_mask"]]
    assert np.allclose(found["logprobs"], sampled, rtol=PRECISION)
    assert len(found["versions"]) == len(sampled)
    read = [node["message"] for node in found["records"][0]["trajectories"]["a"]["nodes"]]
    assert read == messages
