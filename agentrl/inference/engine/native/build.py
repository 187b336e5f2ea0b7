"""Operators of a decode step that are compiled on this machine, once, where it has a C++ compiler.

Guarantees: nothing needs them: without a compiler, or where the compiled code does not give torch's results, the
engine runs on torch alone. The library is kept under the cache folder, named by everything that it depends on, and is
complete when it is there; it shares torch's OpenMP threads.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.core.cache_folder import cache_folder
from agentrl.inference.engine.native.library import Native

SOURCE = Path(__file__).with_name("operators.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120.0
SWITCH = "AGENTRL_NATIVE"  # 0 in the environment leaves the compiler alone
log = logging.getLogger(__name__)


@cache
def native() -> Native | None:
    """The operators of this machine; ``None`` where they cannot be had, which the log explains once."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = shlex.split(os.environ.get("CXX", "")) or list(filter(None, map(shutil.which, COMPILERS)))[:1]
    if not compiler:
        log.info("no C++ compiler was found: the engine decodes with torch alone, some 1.5 times slower")
        return None
    try:
        found = Native(_compiled(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or ""
        log.warning("the engine's operators cannot be compiled, torch alone is used: %s %s", error, detail[-500:])
        return None
    difference = largest_difference(found)
    if not difference < 1e-3:  # NaN too
        log.warning("the compiled operators differ from torch's by %g: they are not used", difference)
        return None
    return found


def _compiled(compiler: list[str]) -> Path:
    """The library, compiled if it is not there yet."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    parts = [SOURCE.read_text(), *FLAGS, version, platform.machine(), _processor(), torch.__version__]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = cache_folder() / "native" / f"operators-{name}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        output = Path(folder) / "operators.so"
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(output)]
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
        output.replace(target)
    return target


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@torch.inference_mode()
def largest_difference(operators: Native) -> float:
    """Largest difference from torch, over small cases of each operator with all kinds of remainders."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = [torch.zeros(())]
    for rows in (1, 5, 13):
        inputs, weight, bias, other = some(rows, 40), some(70, 40), some(70), some(rows, 70)
        plain = inputs @ weight.T + bias
        wanted = {"none": plain, "swish": plain * plain.sigmoid(), "plus": plain + other, "times": plain * other}
        padded = torch.nn.functional.pad(bias, (0, -70 % operators.panel))
        for mode, answer in wanted.items():
            got = operators.multiply(inputs, operators.pack(weight), 70, padded, mode, other)
            found.append((got - answer).abs().max())
        norm = operators.rms_norm(inputs, bias[:40].contiguous(), 1e-5)
        found.append((norm - torch.nn.functional.rms_norm(inputs, (40,), bias[:40], 1e-5)).abs().max())
        found.append(_attention_difference(operators, some, rows))
    return torch.stack(found).max().item()


def _attention_difference(operators: Native, some: Callable[..., Tensor], rows: int) -> Tensor:
    heads, kv_heads, dim, room = 6, 2, 24, 37
    mixed = some(rows, heads + 2 * kv_heads, dim)
    keys, values = some(rows, kv_heads, room, dim), some(rows, kv_heads, room, dim)
    slots = torch.arange(rows).flip(0)
    lengths = torch.arange(rows) * 3 % room + 1
    got = operators.store_and_attend(mixed, keys, values, (slots, lengths - 1, torch.arange(rows)), slots, lengths, 0.3)
    rows_of = []
    for row in range(rows):
        slot, length = int(slots[row]), int(lengths[row])
        query = mixed[row, :heads].view(1, kv_heads, heads // kv_heads, dim)
        seen = keys[None, slot, :, :length], values[None, slot, :, :length]
        rows_of.append(scaled_dot_product_attention(query, *seen, scale=0.3).flatten())
    stored = (keys[slots, :, lengths - 1] - mixed[:, heads : heads + kv_heads]).abs().max()
    return torch.maximum((got - torch.stack(rows_of)).abs().max(), stored)
