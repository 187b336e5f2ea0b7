"""The rollout controller: tasks in, episodes out, weights through."""
