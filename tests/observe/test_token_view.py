"""Rows of tokens: nothing is left out, and all of it can be read without a terminal and without colour."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.backend import SamplingParams
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.inference.token_bytes import TokenBytes
from agentrl.observe.token_view import Block, Origin, TokenRows, answer_view, read_blocks, rows
from tests.flat import flat_branches
from tests.inference.fakes import FakeBackend, answer

SYSTEM: Message = {"role": "system", "content": "  Be brief. "}
HELLO: Message = {"role": "user", "content": "the <user> said: hi"}


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


async def conversation(template: ChatTemplate) -> Trajectory:
    """Two turns; the first answer was cut in the middle of a character."""
    cut = template.encode("no 😀")[:-2]
    answers = iter([answer(cut, version=3, finish="length"), answer([*template.encode("yes"), template.eos_id])])
    settings = SessionSettings(SamplingParams(100), 1000, locked=False, model="m")
    session = ChatSession(FakeBackend(lambda ids, params: next(answers)), template, settings)
    first = await session.create(messages=[SYSTEM, HELLO])
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await session.create(messages=[SYSTEM, HELLO, said, {"role": "user", "content": "more\n"}])
    return session.trajectory


async def blocks_of(template: ChatTemplate, first: int = 0) -> tuple[Trajectory, list[Block]]:
    trajectory = await conversation(template)
    return trajectory, read_blocks(trajectory, first, TokenBytes(template.tokenizer), template.special_ids)


async def test_the_rows_hold_every_token_as_it_is_trained_on(template: ChatTemplate) -> None:
    trajectory, blocks = await blocks_of(template)
    tokens = [token for block in blocks for token in block.tokens]
    (flat,) = flat_branches(trajectory)
    assert [token.id for token in tokens] == flat.token_ids
    assert [token.mask for token in tokens] == flat.loss_mask
    assert [token.logprob for token in tokens] == pytest.approx(flat.logprobs)
    assert [token.version for token in tokens] == flat.versions
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert b"".join(token.data for token in tokens[:40]).startswith(b"<|im_start|>system\n  Be brief. <|im_end|>\n")
    assert [token.id in template.special_ids for token in tokens] == [token.special for token in tokens]


async def test_what_was_given_is_told_from_what_the_template_added(template: ChatTemplate) -> None:
    _, blocks = await blocks_of(template)
    assert [block.node for block in blocks] == [1, 2, 3, 4]
    texts = [
        (origin, b"".join(token.data for token in block.tokens if token.origin is origin))
        for block in blocks
        for origin in dict.fromkeys(token.origin for token in block.tokens)
    ]
    assert texts == [
        (Origin.TEMPLATE, b"<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
        (Origin.GIVEN, b"  Be brief. the <user> said: hi"),
        (Origin.SAMPLED, b"no \xf0\x9f"),
        (Origin.TEMPLATE, b"<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
        (Origin.GIVEN, b"more\n"),
        (Origin.SAMPLED, b"yes<|im_end|>"),
    ]


async def test_a_later_turn_is_shown_alone_with_its_place_in_the_sequence(template: ChatTemplate) -> None:
    trajectory, blocks = await blocks_of(template, first=3)
    before = sum(len(node.token_ids) for node in trajectory.nodes[:3])
    assert [block.node for block in blocks] == [3, 4]
    assert blocks[0].tokens[0].index == before


def test_a_message_that_the_template_dropped_gives_no_given_token() -> None:
    """As tools of a template without tools: then all that is there is the template's."""
    nodes = [
        Node(parent=None, message={"role": "developer", "content": "hidden"}),
        Node(parent=0, message={"role": "user", "content": ""}, token_ids=[65, 66], loss_mask=[0, 0],
             logprobs=[0.0, 0.0], versions=[-1, -1]),
    ]  # fmt: skip
    (block,) = read_blocks(Trajectory(nodes=nodes), 0, lambda token: bytes([token]), ())
    assert {token.origin for token in block.tokens} == {Origin.TEMPLATE}


def test_a_text_that_the_template_strips_is_still_given() -> None:
    node = Node(parent=None, message={"role": "user", "content": " A\n"}, token_ids=[66, 65], loss_mask=[0, 0],
                logprobs=[0.0, 0.0], versions=[-1, -1])  # fmt: skip
    (block,) = read_blocks(Trajectory(nodes=[node]), 0, lambda token: bytes([token]), ())
    assert [token.origin for token in block.tokens] == [Origin.TEMPLATE, Origin.GIVEN]


@pytest.mark.parametrize("width", [36, 60, 100, 200])
async def test_rows_fit_the_terminal_and_read_without_colour(template: ChatTemplate, width: int) -> None:
    _, blocks = await blocks_of(template)
    tokens = [token for block in blocks for token in block.tokens]
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(TokenRows(tokens))
    text = out.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    ids = re.findall(r"(?<=│)\d+\*?(?= *│)", "".join(re.findall(r"id +(│.*)", text)))
    assert ids == [f"{token.id}{'*' * token.special}" for token in tokens]


async def test_a_row_says_origin_version_and_mask_in_words(template: ChatTemplate) -> None:
    _, blocks = await blocks_of(template)
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=False)
    for block in blocks:
        console.print(TokenRows(block.tokens))
    text = out.getvalue()
    assert re.search(r"^ +0 template    0 +│<\|im_start\|>│s +│", text, re.M)
    assert re.search(r"^ +\d+ given       0 +│␣ +│␣ +│B +│e +│␣ +│b +│", text, re.M)
    assert re.search(r"^ +\d+ sampled v3  1 +│n    │o    │␣    │\\xf0 │\\x9f │$", text, re.M)
    assert re.search(r"^ +logprob +│-1.00│-2.00│-3.00│-4.00│-5.00│$", text, re.M)


async def test_rows_hold_one_origin_version_and_mask_each(template: ChatTemplate) -> None:
    _, blocks = await blocks_of(template)
    tokens = [token for block in blocks for token in block.tokens]
    for row in rows(tokens, 40):
        assert len({token.label for token in row}) == 1
    assert [token for row in rows(tokens, 40) for token in row] == tokens


async def test_colours_are_by_origin(template: ChatTemplate) -> None:
    _, blocks = await blocks_of(template)
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True, color_system="standard", no_color=False).print(
        TokenRows(blocks[3].tokens)
    )
    text = out.getvalue()
    assert "\x1b[32my" in text, "sampled"
    assert "\x1b[35m<|im_end|>" in text, "special"


def test_an_answer_is_shown_with_what_was_read_from_it() -> None:
    calls = [
        {"id": "a", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "b", "function": {"name": "", "arguments": "{"}, "error": "not JSON"},
    ]
    message: Message = {"role": "assistant", "content": "x\n\x1b[2J", "reasoning_content": "hm", "tool_calls": calls}
    shown = answer_view(Node(parent=None, message=message, finish_reason="length"), "hermes", "the model's own")
    assert shown.plain.splitlines() == [
        "parsed: finish length, cut at its length limit; parser hermes; template the model's own",
        "  reasoning 'hm'",
        "  content   'x\\n\\x1b[2J'",
        '  call      add({"a": 1})',
        "  call      ({)",
        "  error     not JSON",
    ]
