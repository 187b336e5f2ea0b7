"""The program that runs inside the sandbox, around a model's solution; sent there as text, never imported by us.

It reads one JSON object from stdin before the solution exists: ``solution``, and either ``calls`` (expressions to
evaluate; their values go back) or ``test`` and ``nonce`` (code to run; the nonce goes back after its last line). Only
the harness holds stdout; what the solution prints is dropped. Written for any Python from 3.8 on: it is the sandbox's.
"""

import collections.abc
import decimal
import fractions
import json
import math
import os
import sys
import types

STARTED = "started\n"  # comes out before the solution exists: without it the sandbox, not the solution, failed


def encode(value):  # noqa: D103 - see the module; code_values.decode is its inverse
    if hasattr(value, "item") and type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy number is the Python number it equals
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < 2**53 else {"int": hex(value)}  # decimals of more than 4,300 digits are refused
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


def nowhere():  # noqa: D103 - where a sandbox has no /dev/null, stderr: nobody reads it either
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
    module = types.ModuleType("solution")  # not __main__: a script's own end is not part of the solution
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
    os._exit(0)  # nothing that the solution registered or left running has a say


if __name__ == "__main__":
    main()
