"""One prompt of `mpctl sample` and the text that is written for it, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpctl.rundir.requests import ChosenToken

if TYPE_CHECKING:
    from mpctl.data.prompts import Encoded, TextStream


@dataclass
class WrittenText:
    """A prompt and its text so far.

    stop: strings that end the text and are not part of it; blanks: tokens written, by blank (one
    for gpt and t5); shown: characters that `fresh` has returned; finish: why the text ended
    (runtime/sampling.py), or "stop", None while it goes on; seconds: from the begin of its
    batch to its last token.
    """

    prompt: str
    encoded: Encoded
    stream: TextStream
    stop: tuple[str, ...]
    blanks: list[list[int]] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish: str | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """All tokens that were written, blank after blank."""
        return [token for blank in self.blanks for token in blank]

    @property
    def length(self) -> int:
        """The number of tokens that were written."""
        return sum(map(len, self.blanks))

    def add(self, chosen: ChosenToken, seconds: float) -> None:
        """Add one token as the workers chose it; seconds: since the begin of the batch."""
        _, blank, token, log_probability, is_end, finish = chosen
        if self.finish is not None:
            return
        self.blanks += [[] for _ in range(blank + 1 - len(self.blanks))]
        if not is_end:
            self.blanks[blank].append(token)
            self.log_probabilities.append(log_probability)
            self.text += self.stream.push(token)
        self.finish, self.seconds = finish, seconds
        self._cut_at_stop()

    def _cut_at_stop(self) -> None:
        if self.finish is not None:
            self.text += self.stream.rest()
        starts = [start for stop in self.stop if (start := self.text.find(stop)) >= 0]
        if starts:
            self.text, self.finish = self.text[: min(starts)], "stop"

    def fresh(self) -> str:
        """The text that was not returned before, without an end that may turn out to be the
        beginning of a stop string."""
        uncertain = 0 if self.finish else max((len(stop) - 1 for stop in self.stop), default=0)
        end = max(self.shown, len(self.text) - uncertain)
        text, self.shown = self.text[self.shown : end], end
        return text
