"""Worked calls in prompts: the messages of a real episode."""

import json

from agentrl import worked_call


def test_a_worked_call_is_question_call_result_and_answer() -> None:
    question, call, result, answer = worked_call("How much?", "cost", {"item": "pen"}, {"eur": 2}, "2")
    assert question == {"role": "user", "content": "How much?"}
    (made,) = call["tool_calls"]
    assert made["function"]["name"] == "cost" and json.loads(made["function"]["arguments"]) == {"item": "pen"}
    assert result["tool_call_id"] == made["id"] and result["content"] == '{"eur": 2}'
    assert answer == {"role": "assistant", "content": "2"}
    assert len(made["id"]) == 9 and made["id"].isalnum(), "as templates of some models demand"


def test_calls_with_other_arguments_have_other_ids() -> None:
    ids = {worked_call("?", "f", {"n": n}, "", "")[1]["tool_calls"][0]["id"] for n in range(50)}
    assert len(ids) == 50
