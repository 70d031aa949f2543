"""Incremental tokenization equals tokenizing the whole, and asks for less."""

import asyncio
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.prefix.hashing import TokenIds
from proxy.prefix.tokenizer import PrefixTokenizer

SPECIALS = {"<s>": 900, "<|end|>": 901, "<|user|>": 902, "<<": 903, "<<<": 904}
SPLIT = re.compile("|".join(map(re.escape, sorted(SPECIALS, key=len, reverse=True))))


class PieceTokenizer:
    """Merges pairs of letters within stretches between special tokens.

    It has what makes cutting hard: merges across any position of a stretch, and,
    on request, a token that swallows the white space after it.
    """

    def __init__(self, *, strips_after: str = "", adds_bos: bool = False) -> None:
        self.strips_after = strips_after
        self.adds_bos = adds_bos
        self.asked: list[str] = []

    async def __call__(self, text: str, add_special: bool) -> TokenIds:
        """Answer as the runner would."""
        self.asked.append(text)
        return self.whole(text, add_special=add_special)

    def whole(self, text: str, *, add_special: bool = True) -> TokenIds:
        """Tokenize a text at once."""
        ids = [900] if add_special and self.adds_bos else []
        position = 0
        for match in [*SPLIT.finditer(text), None]:
            stop = match.start() if match else len(text)
            stretch = text[position:stop]
            if self.strips_after and text[:position].endswith(self.strips_after):
                stretch = stretch.lstrip()
            ids += [hash2(stretch[i : i + 2]) for i in range(0, len(stretch), 2)]
            if match:
                ids.append(SPECIALS[match.group()])
                position = match.end()
        return np.array(ids, dtype=np.int32)


def hash2(pair: str) -> int:
    """Return an ordinary token id for a pair of characters."""
    return (ord(pair[0]) + 29 * ord(pair[-1]) * len(pair)) % 800


PARTS = st.lists(
    st.sampled_from([*SPECIALS, "a", "b", " ", "\n", "ab c", "é", "<", ">"]),
    max_size=14,
).map("".join)


@given(st.lists(PARTS, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_ids_equal_those_of_the_whole(
    texts: list[str], strips: bool, adds_bos: bool
) -> None:
    """Whatever was seen before, the ids are those of the whole text."""
    reference = PieceTokenizer(
        strips_after="<|end|>" if strips else "", adds_bos=adds_bos
    )
    tokenizer = PrefixTokenizer(reference, [(i, t) for t, i in SPECIALS.items()])

    async def check() -> None:
        history = ""
        for text in texts:
            for candidate in (text, history + text):
                ids = await tokenizer.tokenize(candidate)
                assert np.array_equal(ids, reference.whole(candidate))
            history += text

    asyncio.run(check())


async def test_only_the_new_tail_is_asked_for() -> None:
    """The third turn of a chat sends no text that was tokenized before."""
    reference = PieceTokenizer()
    tokenizer = PrefixTokenizer(reference, [(i, t) for t, i in SPECIALS.items()])
    history = "<|user|>" + "long " * 50 + "<|end|>"
    for turn in range(3):
        history += f"<|user|>turn {turn}<|end|>"
        ids = await tokenizer.tokenize(history)
        assert np.array_equal(ids, reference.whole(history))
    assert reference.asked[-1] == "<|user|>turn 2<|end|>"
    assert tokenizer.tokens_reused > 100


async def test_a_token_that_strips_white_space_is_never_cut_at() -> None:
    """After one failed check the token is not used as a cut any more."""
    reference = PieceTokenizer(strips_after="<|end|>")
    tokenizer = PrefixTokenizer(reference, [(i, t) for t, i in SPECIALS.items()])
    await tokenizer.tokenize("abc<|end|>")
    for text in ("abc<|end|> x", "abc<|end|> y"):
        assert np.array_equal(await tokenizer.tokenize(text), reference.whole(text))
    assert reference.asked[-1] == "abc<|end|> y"


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old texts are forgotten, with everything that pointed to them."""
    reference = PieceTokenizer()
    tokenizer = PrefixTokenizer(reference, [(i, t) for t, i in SPECIALS.items()])
    monkeypatch.setattr("proxy.prefix.tokenizer.MAX_REMEMBERED_BYTES", 10_000)
    for number in range(100):
        await tokenizer.tokenize(f"{number}<|end|>" + "x" * 200)
    assert tokenizer._remembered_bytes <= 10_000
    assert len(tokenizer._prefixes) == len(tokenizer._texts) < 40
