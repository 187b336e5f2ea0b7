"""Compiles the operators of a decode step, once per machine, where there is a C++ compiler.

Guarantees: the operators are optional: without a compiler, or where the compiled code does not give torch's results,
the engine uses torch alone. The library is in the cache folder under a name that covers all its inputs, and is never
there half written; it shares torch's OpenMP threads.
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

from agentrl.engine.native.library import ELEMENTS, Native
from agentrl.host.cache_folder import cache_folder

HERE = Path(__file__).parent
SOURCE = HERE / "operators.cpp"
FLAGS = (
    "-O2", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120.0
SWITCH = "AGENTRL_NATIVE"  # environment variable; 0 disables compilation
log = logging.getLogger(__name__)


@cache
def native() -> Native | None:
    """Returns the compiled operators of this machine; ``None`` if there are none, which the log explains once."""
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
    if not difference < 1e-3:  # also true for NaN
        log.warning("the compiled operators differ from torch's by %g: they are not used", difference)
        return None
    return found


def _compiled(compiler: list[str]) -> Path:
    """Returns the path of the library, and compiles it if it does not exist."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    sources = [file.read_text() for file in (SOURCE, *sorted(HERE.glob("*.h")))]
    parts = [*sources, *FLAGS, version, platform.machine(), _processor(), torch.__version__]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = cache_folder() / "native" / f"operators-{name}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        output = Path(folder) / "operators.so"
        command = [*compiler, *FLAGS, "-I", str(HERE), str(SOURCE), "-o", str(output)]
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
        output.replace(target)
    return target


def _processor() -> str:
    """Returns the CPU properties that ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@torch.inference_mode()
def largest_difference(operators: Native) -> float:
    """Largest difference from torch, over small cases of each operator whose sizes are no multiples of its blocks.

    For bfloat16, only the difference beyond rounding counts.
    """
    generator = torch.Generator().manual_seed(0)
    found = [torch.zeros(())]
    for dtype in ELEMENTS:

        def some(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        for rows in (1, 5, 13):
            if dtype in operators.products:
                found.append(_product_difference(operators, some, rows))
            inputs, weight = some(rows, 40), some(40)
            norm = torch.nn.functional.rms_norm(inputs.float(), (40,), weight.float(), 1e-5)
            found.append(_beyond_rounding(operators.rms_norm(inputs, weight, 1e-5), norm))
            found += [_attention_difference(operators, some, rows, dim) for dim in (24, 32, 64, 128)]
            found.append(_sampling_difference(operators, some, rows))
    return torch.stack(found).max().item()


def _beyond_rounding(found: Tensor, expected: Tensor) -> Tensor:
    difference = (found.float() - expected).abs()
    return (difference - (expected.abs() / 128 if found.dtype == torch.bfloat16 else 0.0)).max()


def _product_difference(operators: Native, some: Callable[..., Tensor], rows: int) -> Tensor:
    inputs, weight, bias, other = some(rows, 40), some(70, 40), some(70), some(rows, 70)
    plain = inputs.float() @ weight.float().T + bias.float()
    wanted = {"none": plain, "swish": plain * plain.sigmoid(), "plus": plain + other, "times": plain * other}
    padded = torch.nn.functional.pad(bias, (0, -70 % operators.panel))
    packed = operators.pack(weight)
    found = [
        _beyond_rounding(operators.multiply(inputs, packed, 70, padded, mode, other), answer)
        for mode, answer in wanted.items()
    ]
    found.append((operators.multiply(inputs, packed, 70, padded, "none", wide=True) - plain).abs().max())
    return torch.stack(found).max()


def _attention_difference(operators: Native, some: Callable[..., Tensor], rows: int, dim: int) -> Tensor:
    heads, kv_heads, room = 8, 2, 37
    mixed = some(rows, heads + 2 * kv_heads, dim)
    turned = mixed.clone()
    cosine, sine = some(rows, dim // 2), some(rows, dim // 2)
    operators.rotate(turned, cosine, sine, (None, None), kv_heads, 1e-5)
    first, second = mixed[:, :-kv_heads].float().chunk(2, dim=-1)
    c, s = cosine[:, None].float(), sine[:, None].float()
    difference = _beyond_rounding(
        turned[:, :-kv_heads], torch.cat((first * c - second * s, second * c + first * s), -1)
    )
    keys, values = some(rows, kv_heads, room, dim), some(rows, kv_heads, room, dim)
    slots = torch.arange(rows).flip(0)
    lengths = torch.arange(rows) * 3 % room + 1
    got = operators.store_and_attend(mixed, keys, values, (slots, lengths - 1, torch.arange(rows)), slots, lengths, 0.3)
    rows_of = []
    for row in range(rows):
        slot, length = int(slots[row]), int(lengths[row])
        query = mixed[row, :heads].view(1, kv_heads, heads // kv_heads, dim).float()
        seen = keys[None, slot, :, :length].float(), values[None, slot, :, :length].float()
        rows_of.append(scaled_dot_product_attention(query, *seen, scale=0.3).flatten())
    stored = (keys[slots, :, lengths - 1] - mixed[:, heads : heads + kv_heads]).abs().max().float()
    return torch.stack([difference, stored, _beyond_rounding(got, torch.stack(rows_of))]).max()


def _sampling_difference(operators: Native, some: Callable[..., Tensor], rows: int) -> Tensor:
    """Errors of the logprobs; 1 where a token is not the inverse CDF at its uniform number."""
    logits = some(rows, 300)
    temperatures, greedy = torch.linspace(0.5, 2.0, rows), torch.arange(rows) % 3 == 2
    uniforms = torch.linspace(0.0, 0.999, rows, dtype=torch.float64)
    tokens, logprobs, broken = operators.sample(logits, temperatures, greedy, uniforms)
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures.double())[:, None]
    expected = scaled.log_softmax(-1)
    after = expected.exp().cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    before = after - expected.exp().gather(-1, tokens[:, None])[:, 0]
    drawn = (before <= uniforms + 1e-5) & (uniforms <= after + 1e-5)
    right = torch.where(greedy, tokens == logits.argmax(-1), drawn) & ~broken
    return (
        torch.stack([(logprobs - expected.gather(-1, tokens[:, None])[:, 0]).abs().max(), (~right).any().double()])
        .max()
        .float()
    )
