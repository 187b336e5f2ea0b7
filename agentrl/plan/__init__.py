"""Plans of runs: memory and step times from a recipe, a model's ``config.json`` and a card's published figures."""
