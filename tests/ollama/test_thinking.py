"""Thinking in the text of a reply, however the text comes in pieces."""

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.ollama import thinking
from proxy.ollama.thinking import ThinkingMarks, ThinkingSplitter, thinking_marks

MARKS = ThinkingMarks("<think>", "</think>")
REPLIES = [
    ("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "Hm."),
    (" <think>Hm</think>Yes\n", False, "Yes\n", "Hm"),
    ("Hm, a < b.\n</think>Yes", True, "Yes", "Hm, a < b."),
    ("No <think>x</think>", False, "No <think>x</think>", ""),
    ("<thin ice", False, "<thin ice", ""),
    (" Yes", False, " Yes", ""),
    ("<think>Hm </thi", False, "", "Hm </thi"),
    ("<think>Hm \n", False, "", "Hm"),
    ("<think>\n\n</think>\n\nYes", False, "Yes", ""),
    ("<thi", False, "<thi", ""),
    ("", True, "", ""),
]


@given(st.sampled_from(REPLIES), st.lists(st.integers(0, 30)))
def test_thinking_is_told_apart(
    reply: tuple[str, bool, str, str], cuts: list[int]
) -> None:
    """Wherever the pieces begin, both parts are the same."""
    text, is_open, said, thought = reply
    splitter = ThinkingSplitter(MARKS, is_open=is_open)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [splitter.feed(text[start:stop]) for start, stop in pairwise(places)]
    pieces.append(splitter.finish())
    assert "".join(piece[0] for piece in pieces) == said
    assert "".join(piece[1] for piece in pieces) == thought


def test_text_is_not_held_back_for_long() -> None:
    """Each piece goes on as soon as it can be no mark."""
    splitter = ThinkingSplitter(MARKS, is_open=True)
    assert splitter.feed("One") == ("", "One")
    assert splitter.feed(" two <") == ("", " two")
    assert splitter.feed(" three") == ("", " < three")
    assert splitter.feed("</think>") == ("", "")
    assert splitter.feed("Yes<") == ("Yes<", "")


@pytest.mark.parametrize(
    ("template", "opening"),
    [("{{ '<think>' }}...</think>", "<think>"), ("[/THINK]", "[THINK]"), ("", None)],
)
def test_marks_are_those_of_the_template(template: str, opening: str | None) -> None:
    """Of a model that has none nothing is told apart."""
    marks = thinking_marks(template)
    assert (marks.opening if marks else None) == opening


def test_worked_example() -> None:
    """The example in the docstring holds."""
    assert doctest.testmod(thinking).failed == 0
