"""A loss of chunked logprobs with its backward pass against a plain ``log_softmax``: extra memory and time.

Guarantees: 4,096 tokens, 49,152 words and 576 hidden units in float32, as in the 135M model; both sides in processes of
their own, interleaved; extra memory is the peak above what stood before the call.
"""

import json
import os
import resource
import subprocess
import sys
import time

TOKENS, VOCABULARY, HIDDEN = 4096, 49152, 576
SPREAD = 3.0  # standard deviation of the logits, as of the model's; far larger ones give denormal numbers


def run(repeats: int = 5) -> dict[str, list[float]]:
    """Measure both sides ``repeats`` times.

    Returns:
        Of the loss as a trainer takes it: ``extra_mib``, forward and backward, gradients of both inputs left out, and
        ``time_vs_plain``. The same of logprobs for any loss (``any_loss_extra_mib``, ``any_loss_time_vs_plain``), and
        ``plain_extra_mib``.
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
    environment = os.environ | CPU_ENV  # as a trainer has it
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def measure(side: str) -> dict[str, float]:
    """Extra MiB and seconds of one side, in this process."""
    import torch

    from agentrl.train.logprobs import chunked_logprobs, chunked_loss

    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # as a trainer does
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(SPREAD / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)  # both sides need them

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

    once(8)  # threads, kernels and the gradient of the weight, which backward makes anew
    before = _peak_kib()
    once(TOKENS)
    extra = (_peak_kib() - before) / 1024
    return {"mib": extra, "seconds": once(TOKENS)}  # the second time: a trainer keeps its memory


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
