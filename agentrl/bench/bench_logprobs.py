"""Compares memory and time of a loss on chunked logprobs, with backward pass, to those of a plain ``log_softmax``.

Guarantees: 4,096 tokens, a vocabulary of 49,152 and a hidden size of 576 in float32, as in the 135M model; each side
runs in a process of its own, interleaved; extra memory is the peak above the memory before the call.
"""

import json
import os
import resource
import subprocess
import sys
import time

TOKENS, VOCABULARY, HIDDEN = 4096, 49152, 576
SPREAD = 3.0  # standard deviation of the logits, as in the model; much larger values give denormal numbers


def run(repeats: int = 5) -> dict[str, list[float]]:
    """Measure all sides ``repeats`` times.

    Returns:
        For a token-wise loss, as the trainer computes it: ``extra_mib``, the extra memory of forward and backward
        without the gradients of both inputs, and ``time_vs_plain``. The same for logprobs that any loss can use:
        ``any_loss_extra_mib`` and ``any_loss_time_vs_plain``. For plain ``log_softmax``: ``plain_extra_mib``.
    """
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        loss, logprobs, plain = (_side(side) for side in ("loss", "logprobs", "plain"))
        for key, value in {
            "extra_mib": loss["mib"],
            "time_vs_plain": loss["seconds"] / plain["seconds"],
            "any_loss_extra_mib": logprobs["mib"],
            "any_loss_time_vs_plain": logprobs["seconds"] / plain["seconds"],
            "plain_extra_mib": plain["mib"],
        }.items():
            figures.setdefault(key, []).append(value)
    return figures


def _side(side: str) -> dict[str, float]:
    from agentrl.host.cpu_env import CPU_ENV

    command = [sys.executable, "-m", "agentrl.bench.bench_logprobs", side]
    environment = os.environ | CPU_ENV  # as in a trainer
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def measure(side: str) -> dict[str, float]:
    """Measures extra MiB and seconds of one side, in this process."""
    import torch

    from agentrl.train.logprobs import chunked_logprobs, chunked_loss

    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # as a trainer does
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(SPREAD / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)  # all sides need the gradients

    def once(rows: int) -> float:
        begun = time.perf_counter()
        states, wanted = hidden[:rows], targets[:rows]
        match side:
            case "loss":
                total = chunked_loss(
                    states, weight, wanted, lambda rows, logprobs, entropies: logprobs.sum(), chunk=256
                )
            case "logprobs":
                total = chunked_logprobs(states, weight, wanted, chunk=256)[0].sum()
            case _:
                total = (states @ weight.t()).log_softmax(-1).gather(-1, wanted[:, None]).sum()
        total.backward()
        return time.perf_counter() - begun

    once(8)  # starts threads, loads kernels, and allocates the weight's gradient, which backward computes separately
    before = _peak_kib()
    once(TOKENS)
    extra = (_peak_kib() - before) / 1024
    return {"mib": extra, "seconds": once(TOKENS)}  # timed in the second call, because a trainer keeps its memory


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
