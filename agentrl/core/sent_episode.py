"""Episodes that came from another process: the record is read at once, the conversations only if somebody asks.

Guarantees: a sent episode is an :class:`~agentrl.core.episode.Episode` with the same values as where it ran, to the
last bit of a logprob. What every episode is asked for costs no reading of its messages: reward, metrics, stop reason,
numbers of messages and tokens, versions, whether it was cut, its columns and its line of ``episodes.jsonl``. A changed
copy is an ordinary episode, so that no columns or line of the unchanged one remain with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from agentrl.core.columns import Columns, EpisodeRecord, concatenate, known_experts
from agentrl.core.episode import Episode

_LAZY = "trajectories"


class SentEpisode(Episode):
    """An episode with its columns and its line of ``episodes.jsonl``, which the process that ran it has made."""

    _columns: Columns = PrivateAttr()
    _line: str = PrivateAttr()
    _cut: bool = PrivateAttr()

    @classmethod
    def of(cls, columns: Columns, line: str, *, cut: bool, **more: Any) -> "SentEpisode":
        """Makes an episode from its parts.

        Args:
            columns: Columns of this episode alone, with its record.
            line: The whole episode as JSON.
            cut: Whether the episode was cut, see :func:`agentrl.core.ending.episode_cut`.
            more: Fields that the record lacks: ``task``, ``started``, ``version``, ``attempt``, ``sampling``.
        """
        record: EpisodeRecord = columns.episodes[0]
        values = {name: value for name, value in record if name in cls.model_fields}
        episode = cls.model_construct(**values, **more)
        del vars(episode)[_LAZY]  # read from the line when it is asked for
        episode._columns, episode._line, episode._cut = columns, line, cut
        return episode

    @property
    def columns(self) -> Columns:
        """Columns of this episode."""
        return self._columns

    @property
    def line(self) -> str:
        """The episode as one line of JSON, without the end of the line."""
        return self._line

    @property
    def cut(self) -> bool:
        """Whether the episode was cut before its own end."""
        return self._cut

    @property
    def roles(self) -> dict[str, int]:
        """Role -> number of its messages."""
        return self._columns.episodes[0].roles

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self._columns.versions)

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest sampled token; ``None`` without one."""
        return int(self._columns.versions.min()) if len(self._columns.versions) else None

    def __getattr__(self, name: str) -> Any:
        if name != _LAZY:
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it from type checkers
        found = Episode.model_validate_json(self._line).trajectories
        if len(self._columns.experts):  # which the line lacks
            nodes, first = [node for one in found.values() for node in one.nodes], 0
            for node in nodes:
                end = first + len(node.token_ids)
                node.experts, first = known_experts(self._columns.experts[first:end]), end
        vars(self)[_LAZY] = found
        return found

    @model_serializer(mode="wrap")
    def _serialized(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Reads the conversations before the episode is written: pydantic leaves out what was not read yet."""
        getattr(self, _LAZY)
        return handler(self)

    def whole(self) -> Episode:
        """Returns the same episode without columns and line."""
        return Episode.model_construct(**{name: getattr(self, name) for name in Episode.model_fields})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Episode:  # type: ignore[override]
        """Returns a copy; a changed one is an ordinary episode."""
        return self.whole().model_copy(update=update, deep=deep)


def columns_of(episodes: Sequence[Episode]) -> Columns:
    """Returns the columns of episodes, as :meth:`Columns.of` does; those of sent ones exist already."""
    if not any(isinstance(one, SentEpisode) for one in episodes):
        return Columns.of(episodes)
    return concatenate([one.columns if isinstance(one, SentEpisode) else Columns.of([one]) for one in episodes])
