r"""Thinking that stands in the text of a reply, told apart from what is said.

The engine does that for conversations. Where a prompt goes to it as token ids (a
template of the request, a `context`, a suffix) the text is all that there is. Rules:
1. Thinking is what stands between the marks at the beginning of a reply, or at once
   where the prompt ends in the opening mark.
2. White space around the marks belongs to nobody.
3. What may be the beginning of a mark is held back until it is one or not.

>>> splitter = ThinkingSplitter(ThinkingMarks("<think>", "</think>"), is_open=False)
>>> [splitter.feed(text) for text in ("<thi", "nk>\nHm", ".\n</think>\n\nYes", "!")]
[('', ''), ('', 'Hm'), ('Yes', '.'), ('!', '')]
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """What stands around the thinking of a model."""

    opening: str
    closing: str


_KNOWN = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("[THINK]", "[/THINK]"))


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Find the marks in a template, of either language."""
    return next((marks for marks in _KNOWN if marks.closing in template), None)


class _Stage(Enum):
    BEFORE = 0
    BEGINNING = 1
    """Behind the opening mark, in white space."""
    THINKING = 2
    BETWEEN = 3
    """Behind the closing mark, in white space."""
    SAYING = 4


class ThinkingSplitter:
    """Splits one reply, as it comes."""

    def __init__(self, marks: ThinkingMarks, *, is_open: bool) -> None:
        """Begin with a reply that is (`is_open`) in its thinking already, or not."""
        self._marks = marks
        # the mutable state
        self._stage = _Stage.BEGINNING if is_open else _Stage.BEFORE
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Take a piece of the reply; return what was said and what was thought."""
        self._held += text
        said = thought = ""
        stage = None
        while stage is not self._stage:
            stage = self._stage
            match stage:
                case _Stage.BEFORE:
                    self._look_for_opening()
                case _Stage.BEGINNING | _Stage.BETWEEN:
                    self._held = self._held.lstrip()
                    if self._held:
                        begins = stage is _Stage.BEGINNING
                        self._stage = _Stage.THINKING if begins else _Stage.SAYING
                case _Stage.THINKING:
                    thought += self._take_thinking()
                case _Stage.SAYING:
                    said, self._held = said + self._held, ""
        return said, thought

    def finish(self) -> tuple[str, str]:
        """Return what was held back, as what it is without more text."""
        held, self._held = self._held, ""
        if self._stage is _Stage.THINKING:
            return "", held.rstrip()
        return held, ""

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opening = self._marks.opening
        if begun.startswith(opening):
            self._held = begun[len(opening) :]
            self._stage = _Stage.BEGINNING
        elif not opening.startswith(begun):
            self._stage = _Stage.SAYING

    def _take_thinking(self) -> str:
        closing = self._marks.closing
        thought, mark, rest = self._held.partition(closing)
        if mark:
            self._held, self._stage = rest, _Stage.BETWEEN
            return thought.rstrip()
        kept = len(thought) - _overlap(thought, closing)
        kept = len(thought[:kept].rstrip())
        self._held = thought[kept:]
        return thought[:kept]


def _overlap(text: str, mark: str) -> int:
    """Tell how much of the end of a text may begin a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
