"""`context`: what is gathered of a reply, and what is refused of a request."""

from dataclasses import replace

import numpy as np
import pytest

from proxy.errors import RequestError, UpstreamError
from proxy.llamacpp.props import RunnerProps
from proxy.ollama.events import NOTHING, Piece, TurnTotals
from proxy.ollama.reply_context import (
    ReplyContext,
    check_context,
    special_start,
    without_start,
)
from proxy.prefix.hashing import TokenIds
from tests.fakes.scripted_turns import FACTS, ScriptedModel, last_event, text_event

BOS = 1


class BosModel(ScriptedModel):
    """A model whose tokenizer puts a BOS in front: one token per character else."""

    async def tokenize(self, text: str) -> TokenIds:
        """Make the tokens, or fail."""
        if self.failure is not None:
            raise self.failure
        return ids(BOS, *map(ord, text))


def ids(*values: int) -> TokenIds:
    """Make a row of ids."""
    return np.array(values, dtype=np.int32)


def totals(num_decoded: int) -> TurnTotals:
    """Make the totals of a turn that has decoded so many tokens."""
    return TurnTotals(
        done_reason="stop",
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_decoded_tokens=num_decoded,
        prefill_ns=1,
        decode_ns=1,
    )


def bos_model(**fields: object) -> BosModel:
    """Make a model with a BOS; the fields are those of its facts."""
    values = {"add_bos": True, "bos_id": BOS, "vocabulary_size": 256, **fields}
    return BosModel(facts=replace(FACTS, **values))  # type: ignore[arg-type]


def begun(model: ScriptedModel, text: str) -> ReplyContext:
    """Begin with a prompt of two tokens, and a BOS."""
    return ReplyContext(model, prompt=ids(BOS, 65, 66), text=text, special=ids(BOS))


@pytest.mark.parametrize(("stop_type", "num_decoded"), [("limit", 2), ("eos", 3)])
async def test_the_ids_are_those_that_were_generated(
    stop_type: str, num_decoded: int
) -> None:
    """Without BOS, and without the end of the turn, which says nothing."""
    context = begun(bos_model(), "AB")
    for text in ("x", "y"):
        context.note(text_event(text), Piece(text))
    context.note(last_event(stop_type=stop_type), NOTHING)
    assert await context.finish(totals(num_decoded)) == [65, 66, 5, 5]


@pytest.mark.parametrize("text", ["AB", ""])
async def test_a_text_of_which_ids_are_missing_is_tokenized(text: str) -> None:
    """With its prompt where that is a text, by itself otherwise."""
    context = begun(bos_model(), text)
    context.note(text_event("é!"), Piece("é!"))
    context.note(last_event(), NOTHING)
    assert await context.finish(totals(7)) == [65, 66, ord("é"), ord("!")]


async def test_thinking_is_written_as_the_model_has_written_it() -> None:
    """Between its marks; the first of them may be the prompt's."""
    model = bos_model()
    model.props = RunnerProps("<think></think>", False, frozenset())
    for prompt, opening in (("AB", "<think>\n"), ("A<think>\n", "")):
        context = begun(model, prompt)
        context.note({}, Piece("", "Hm.\n"))
        context.note({}, Piece("Yes"))
        found = await context.finish(totals(7))
        expected = f"{prompt}{opening}Hm.\n</think>\n\nYes"
        assert found == list(map(ord, expected))


async def test_a_runner_that_died_costs_the_context_only() -> None:
    """The reply itself is whole."""
    model = bos_model()
    model.failure = UpstreamError(500, "gone")
    context = begun(model, "AB")
    assert await context.finish(totals(7)) is None


async def test_what_a_tokenizer_begins_with() -> None:
    """The facts tell it; of a model that nobody can read the runner does."""
    assert (await special_start(bos_model())).tolist() == [BOS]
    assert (await special_start(bos_model(add_bos=False))).tolist() == []
    unknown = bos_model(tokenizer_model="", add_bos=False, bos_id=None)
    assert (await special_start(unknown)).tolist() == [BOS]
    assert without_start(ids(BOS, 65), ids(BOS)).tolist() == [65]
    assert without_start(ids(65), ids(BOS)).tolist() == [65]
    assert without_start(ids(65), ids()).tolist() == [65]


def test_ids_are_those_of_the_vocabulary() -> None:
    """Where its size is not known, any that the engine can be told."""
    assert check_context([0, 255], bos_model()).tolist() == [0, 255]
    assert check_context([256], bos_model(vocabulary_size=0)).tolist() == [256]
    for context in ([256], [-1], [2**31], [2**70]):
        with pytest.raises(RequestError, match="is no token of the model") as caught:
            check_context(context, bos_model())
        assert caught.value.status == 400
    with pytest.raises(RequestError, match="is no token of the model"):
        check_context([2**31], bos_model(vocabulary_size=0))
