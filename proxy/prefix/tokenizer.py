"""Exact token ids of a prompt, asking the runner only about its new tail.

A prompt of an agent is the last one plus a turn. llama.cpp cuts a text at its
control tokens before it tokenizes the stretches between them, so the ids up to the
end of a control token do not depend on what follows. They are remembered by the
text that they stand for, and only the rest is sent to the runner.

Rules:
1. The result equals tokenizing the whole text, always. A cut is made only after a
   control token whose end no other special token can straddle; the first cut after
   each such token is checked against the whole, and a token that fails is never cut
   at again (some models strip the white space after a control token).
2. Memory is bounded: the least recently used texts are forgotten.
"""

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from proxy.prefix.hashing import TokenIds

Tokenize = Callable[[str, bool], Awaitable[TokenIds]]
"""(text, whether to add BOS and the like) -> token ids."""

MAX_REMEMBERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of one control token in a text."""

    end: int
    token_id: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Text:
    """One tokenized text and the digests of the prefixes that it answers for."""

    token_ids: TokenIds
    digests: tuple[bytes, ...]


class PrefixTokenizer:
    """Tokenizes prompts of one model; remembers prefixes that end in control tokens."""

    def __init__(
        self, tokenize: Tokenize, control_tokens: Sequence[tuple[int, str]]
    ) -> None:
        self._tokenize = tokenize
        texts = {text: token_id for token_id, text in control_tokens if text}
        self._ids = texts
        self._all_ids = np.array(sorted(texts.values()), dtype=np.int32)
        self._pattern = _pattern(texts)
        self._straddled = _straddled(texts)
        # the mutable state, touched on the event loop only
        self._texts: OrderedDict[bytes, _Text] = OrderedDict()
        self._prefixes: dict[bytes, tuple[bytes, int]] = {}
        self._remembered_bytes = 0
        self._checked: set[tuple[int, bool]] = set()
        self._refused: set[int] = set()
        self.tokens_reused = 0

    async def tokenize(self, text: str) -> TokenIds:
        """Return the ids of `text` with BOS and special tokens, as the runner has it.

        Raises what the runner's tokenizer raises (UpstreamError).
        """
        marks = self._marks(text)
        known = self._longest_known(text, marks)
        if known is None:
            token_ids = await self._tokenize(text, True)
        else:
            token_ids = await self._extend(text, *known)
        self._remember(text, marks, token_ids)
        return token_ids

    def _marks(self, text: str) -> list[_Mark]:
        if self._pattern is None:
            return []
        digest = blake2b(digest_size=16)
        marks: list[_Mark] = []
        start = 0
        for match in self._pattern.finditer(text):
            digest.update(text[start : match.end()].encode("utf-8", "surrogatepass"))
            start = match.end()
            marks.append(_Mark(start, self._ids[match.group()], digest.copy().digest()))
        return marks

    def _longest_known(
        self, text: str, marks: list[_Mark]
    ) -> tuple[_Mark, TokenIds] | None:
        for mark in reversed(marks):
            if mark.token_id in self._refused or mark.token_id in self._straddled:
                continue
            found = self._prefixes.get(mark.digest)
            if found is not None:
                owner, num_tokens = found
                self._texts.move_to_end(owner)
                return mark, self._texts[owner].token_ids[:num_tokens]
        return None

    async def _extend(self, text: str, mark: _Mark, prefix: TokenIds) -> TokenIds:
        tail = text[mark.end :]
        rest = await self._tokenize(tail, False) if tail else prefix[:0]
        token_ids = np.concatenate([prefix, rest])
        shape = (mark.token_id, tail[:1].isspace())
        if shape not in self._checked:
            whole = await self._tokenize(text, True)
            if not np.array_equal(whole, token_ids):
                self._refused.add(mark.token_id)
                return whole
            self._checked.add(shape)
        self.tokens_reused += len(prefix)
        return token_ids

    def _remember(self, text: str, marks: list[_Mark], token_ids: TokenIds) -> None:
        if not marks:
            return
        ends = self._token_ends(marks, token_ids)
        if ends is None:
            return
        digest = blake2b(marks[-1].digest, digest_size=16)
        digest.update(text[marks[-1].end :].encode("utf-8", "surrogatepass"))
        owner = digest.digest()
        if owner in self._texts:
            self._texts.move_to_end(owner)
            return
        entry = _Text(token_ids, tuple(mark.digest for mark in marks))
        self._texts[owner] = entry
        self._remembered_bytes += _text_bytes(entry)
        for mark, end in zip(marks, ends, strict=True):
            self._prefixes[mark.digest] = (owner, end)
        while self._remembered_bytes > MAX_REMEMBERED_BYTES and len(self._texts) > 1:
            self._forget_oldest()

    def _token_ends(self, marks: list[_Mark], token_ids: TokenIds) -> list[int] | None:
        """Return how many ids lie up to each mark; None where they do not line up."""
        places = np.flatnonzero(np.isin(token_ids, self._all_ids))
        expected = np.array([mark.token_id for mark in marks], dtype=np.int32)
        if len(places) == len(expected) + 1 and places[0] == 0:
            places = places[1:]  # a BOS that the tokenizer put in front
        if not np.array_equal(token_ids[places], expected):
            return None
        return [int(place) + 1 for place in places]

    def _forget_oldest(self) -> None:
        owner, entry = self._texts.popitem(last=False)
        self._remembered_bytes -= _text_bytes(entry)
        for digest in entry.digests:
            if self._prefixes.get(digest, (b"", 0))[0] == owner:
                del self._prefixes[digest]


def _text_bytes(entry: _Text) -> int:
    return entry.token_ids.nbytes + 200 * len(entry.digests)


def _pattern(texts: dict[str, int]) -> re.Pattern[str] | None:
    if not texts:
        return None
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _straddled(texts: dict[str, int]) -> set[int]:
    """Return the tokens whose end may lie inside another special token."""
    beginnings = {text[:stop] for text in texts for stop in range(1, len(text))}
    return {
        token_id
        for text, token_id in texts.items()
        if any(text[start:] in beginnings for start in range(len(text)))
    }
