"""``python -m agentrl``: the same as ``agentrl``."""

from agentrl.cli.main import main

if __name__ == "__main__":
    main()
