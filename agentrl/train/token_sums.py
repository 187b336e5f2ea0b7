"""Sums over the tokens that a step's updates train, for its metrics.

Guarantees: sums include all ranks and updates of the step; they stay on the device until the step ends; a mean is
absent where no token was trained. What is measured before the first update is in :mod:`agentrl.train.measured`.
"""

import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.train.measured import merged
from agentrl.train.mesh import RankMesh

SUMS = (
    "loss", "clipped", "kl_reference", "correction", "masked_ratio", "rejected", "update_ratio", "tokens",
    "router_loss",
)  # fmt: skip


class TokenSums:
    """Sums over the tokens that a step trains, kept on the device, because reading one would synchronize.

    Attributes:
        values: ``[9]`` float64, in the order of :data:`SUMS`.
        worst: ``[2]`` float64, the largest ``|ratio - 1|`` of the loss and the id of its token.
    """

    def __init__(self, device: torch.device, mesh: RankMesh) -> None:
        self._mesh = mesh
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

    def metrics(self, config: TrainerConfig, normalizer: float, sampled: float) -> dict[str, float]:
        """Computes means over the tokens that the step trained, the same on every rank; a collective.

        ``train/update_ratio_mean`` and ``_max`` are of ``|r - 1|``, with ``r`` the importance ratio of the loss in the
        update that trains the token: it holds what the step's earlier updates changed.

        Args:
            config: The recipe's trainer section.
            normalizer: Divisor of the loss's weighted sum.
            sampled: Number of tokens that the loss of the global batch counts, also those that need no gradient.
        """
        values, worst = merged(self.values[None], self.worst[None], self._mesh)
        sums = dict(zip(SUMS, values[0].tolist(), strict=True))
        deviation, token = worst[0].tolist()
        count = sums["tokens"]
        found = {"train/tokens": count}
        if sampled:
            found |= {"train/loss": sums["loss"] / normalizer, "train/tokens_share": count / sampled}
        if not count:
            return found
        found |= {
            "train/clip_fraction": sums["clipped"] / count,
            "train/update_ratio_mean": sums["update_ratio"] / count,
            "train/update_ratio_max": deviation,
            "train/update_ratio_token": token,
        }
        if config.router_aux_loss:
            found["train/router_loss"] = sums["router_loss"]
        if config.correction != "none":
            found["train/correction"] = sums["correction"] / count
        if config.kl_coef > 0 and config.kl_in == "loss":
            found["train/kl_reference"] = sums["kl_reference"] / count
        if config.token_mask_low is not None or config.token_mask_high is not None:
            found["train/masked_ratio"] = sums["masked_ratio"] / count
        if config.reject_by is not None:
            found["train/rejected"] = sums["rejected"] / count
        return found
