"""The process that packs the earlier parts of an episodes file: ``python -m agentrl.rollout.packer FILE``.

Guarantees: the run's tokenizer is loaded once, when the first message with ids comes; without one on this machine,
texts are kept beside the ids that say them, and the log says so.
"""

import json
import logging
import sys
from functools import cached_property
from pathlib import Path

from agentrl.core.packed_episodes import pack_parts

log = logging.getLogger(__name__)


class RunPieces:
    """Bytes of the ids of a run's tokenizer.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, token: int) -> bytes:
        """Returns the bytes of an id.

        Raises:
            LookupError: The run's tokenizer is not on this machine.
        """
        if self._pieces is None:
            raise LookupError(token)
        return self._pieces(token)

    @cached_property
    def _pieces(self):
        from agentrl.inference.local_tokenizer import local_tokenizer
        from agentrl.inference.token_bytes import TokenBytes

        try:
            config = json.loads((self._folder / "config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        tokenizer, said = local_tokenizer(self._folder, config)
        if tokenizer is None:
            log.warning("episodes are packed with their texts beside the ids: %s", said)
            return None
        return TokenBytes(tokenizer)


def main(file: Path) -> None:
    """Packs the earlier parts of an episodes file.

    Args:
        file: ``episodes.jsonl`` or ``eval-episodes.jsonl`` of a run.
    """
    pack_parts(file, RunPieces(file.parent))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
