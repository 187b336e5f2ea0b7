"""The way in which a tool ends the episode."""


class EndEpisode(Exception):
    """Raised by a tool of a :class:`~agentrl.ToolEnvironment` to end the episode: ``raise EndEpisode("done")``.

    The environment judges ``answer`` with its ``reward``, as it judges a message without tool calls. Other calls of the
    same message run to their end, and of several that end the episode the first counts.

    Args:
        answer: Text to judge; empty if the environment's state says it all, such as a paid cart.
    """

    def __init__(self, answer: str = "") -> None:
        if not isinstance(answer, str):
            raise TypeError(
                f"EndEpisode({answer!r:.80}): want the answer as text; its reward is what the method reward returns"
            )
        super().__init__(answer)
        self.answer = answer
