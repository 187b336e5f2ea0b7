"""A reward, an advantage, an objective and a trainer of a user's own, named by path."""

import torch

from agentrl.train.advantages import group
from agentrl.train.trainer import Trainer


def judge(task, messages, reward):
    """Twice the environment's reward."""
    return 2 * reward, {"judged": float(len(messages))}


def halved(scored, config):
    """Half of the group's advantage."""
    return [value / 2 for value in group(scored, config)]


def reinforce(tokens):
    """Plain policy gradient."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.mask)


class CountingTrainer(Trainer):
    """Says how many steps it made."""

    def run(self):
        """Train, and leave a note."""
        super().run()
        (self.run_dir / "steps.txt").write_text(str(self.step))
