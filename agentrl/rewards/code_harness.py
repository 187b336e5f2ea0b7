"""Runs a model's solution and its tests inside the sandbox; sent there as text, never imported outside.

It reads one JSON object from stdin before the solution is loaded: ``solution``, and either ``calls`` (expressions; it
returns their values) or ``test`` and ``nonce`` (code; it returns the nonce after the last line of the code). Only the
harness can write to stdout; the solution's output is dropped. It needs Python 3.8 or newer in the sandbox.
"""

import collections.abc
import decimal
import fractions
import json
import math
import os
import sys
import types

STARTED = "started\n"  # printed before the solution is loaded: if missing, the sandbox failed, not the solution


def encode(value):  # noqa: D103 - see the module; code_values.decode is its inverse
    if hasattr(value, "item") and type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy number becomes the equal Python number
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < 2**53 else {"int": hex(value)}  # Python refuses more than 4,300 decimal digits
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, fractions.Fraction):
        return {"fraction": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, collections.abc.Set):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    return {"other": type(value).__name__}


def evaluate(source, namespace):  # noqa: D103
    try:
        return {"value": encode(eval(source, namespace))}
    except BaseException as error:
        return {"raised": type(error).__name__}


def nowhere():  # noqa: D103 - stderr if the sandbox has no /dev/null: the verifier does not read it
    try:
        return os.open(os.devnull, os.O_WRONLY)
    except OSError:
        return 2


def main():  # noqa: D103
    request = json.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(1), "w")
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)
    os.dup2(nowhere(), 1)
    module = types.ModuleType("solution")  # not __main__: skips code under ``if __name__ == "__main__"``
    sys.modules["solution"] = module
    namespace = module.__dict__
    answer.write(STARTED)
    answer.flush()
    exec(compile(request.pop("solution"), "solution.py", "exec"), namespace)
    if "calls" in request:
        answer.write(json.dumps([evaluate(source, namespace) for source in request["calls"]]))
    else:
        exec(compile(request.pop("test"), "test.py", "exec"), namespace)
        answer.write(request["nonce"])
    answer.flush()
    os._exit(0)  # skips exit handlers and threads of the solution


if __name__ == "__main__":
    main()
