"""Sums over the trained tokens of a step, for its metrics.

Guarantees: sums include all ranks and updates of the step; they stay on the device until the step ends.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.config.recipe import TrainerConfig

SUMS = ("loss", "entropy", "clipped", "kl_behavior", "kl_reference", "correction", "masked_ratio", "rejected", "tokens")


class TokenSums:
    """Sums over the trained tokens of a step, kept on the device, because reading one would synchronize.

    Attributes:
        values: ``[9]`` float64, in the order of :data:`SUMS`.
        worst: ``[2]`` float64, the largest ``|ratio - 1|`` and the id of its token.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.worst = torch.tensor([0.0, -1.0], dtype=torch.float64, device=device)

    def add(self, **sums: Tensor) -> None:
        """Adds scalars by name; a missing name of :data:`SUMS` adds 0."""
        nothing = self.values.new_zeros(())
        self.values += torch.stack([sums.get(name, nothing).detach().double() for name in SUMS])

    def see(self, deviations: Tensor, tokens: Tensor) -> None:
        """Remembers the largest deviation and its token id."""
        if len(deviations):
            largest, place = deviations.max(0)
            found = torch.stack([largest.double(), tokens[place].double()])
            self.worst = torch.where(found[0] > self.worst[0], found, self.worst)

    def metrics(self, config: TrainerConfig, normalizer: float) -> dict[str, float]:
        """Computes means over the step's trained tokens, the same on every rank; a collective."""
        every = [torch.empty_like(self.worst) for _ in range(dist.get_world_size())]
        dist.all_reduce(self.values)
        dist.all_gather(every, self.worst)
        deviation, token = max(tuple(one.tolist()) for one in every)
        sums = dict(zip(SUMS, self.values.tolist(), strict=True))
        count = max(sums["tokens"], 1.0)
        found = {
            "train/loss": sums["loss"] / normalizer,
            "train/entropy": sums["entropy"] / count,
            "train/clip_fraction": sums["clipped"] / count,
            "train/kl_behavior": sums["kl_behavior"] / count,
            "train/ratio_deviation_max": deviation,
            "train/ratio_deviation_token": token,
            "train/tokens": sums["tokens"],
        }
        if config.correction != "none":
            found["train/correction"] = sums["correction"] / count
        if config.kl_coef > 0 and config.kl_in == "loss":
            found["train/kl_reference"] = sums["kl_reference"] / count
        if config.token_mask_low is not None or config.token_mask_high is not None:
            found["train/masked_ratio"] = sums["masked_ratio"] / count
        if config.reject_by is not None:
            found["train/rejected"] = sums["rejected"] / count
        return found
