"""How a child process of a run tells its launcher that what the user gave cannot work.

Guarantees: the launcher ends the run with the child's own line and exit code 2, as for what it finds itself.
"""

import sys

from agentrl.config.errors import UserError

REFUSED = 2  # exit code
MARK = "refused: "  # begins the line in the child's log


def refuse(error: UserError) -> int:
    """Print a refusal; returns the exit code."""
    print(f"{MARK}{error}", file=sys.stderr)
    return REFUSED


def refusal(log: str) -> str:
    """Returns the latest refusal in a log, without its mark."""
    return log.rpartition(MARK)[2].strip()
