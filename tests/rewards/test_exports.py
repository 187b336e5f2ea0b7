import subprocess
import sys

import pytest

import agentrl.rewards


@pytest.mark.parametrize("name", agentrl.rewards.__all__)
def test_every_name_resolves(name):
    assert getattr(agentrl.rewards, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = agentrl.rewards.nothing_here


def test_importing_is_light_even_once_the_names_are_used():
    code = (
        "import sys, agentrl.rewards as rewards\n"
        "before = set(sys.modules)\n"
        "[getattr(rewards, name) for name in rewards.__all__]\n"
        "print('asyncio' in before, *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded[0] == "False"
    assert not set(loaded) & {"sympy", "torch", "openai", "jsonschema", "math_verify", "trl", "numpy", "pydantic"}
