"""Shows runs: their curves, episodes, groups and evaluations, in a browser, a file or a terminal."""
