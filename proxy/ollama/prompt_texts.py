"""The prompt of a request, as text and as token ids, of whatever it is made.

Rules:
1. A raw prompt is the text itself. With a suffix it is made of the model's own tokens,
   or by the template that has a place for it; with a template by that one; else by the
   model's chat template, or by its TEMPLATE where its file has none.
2. A conversation that is too long loses its oldest messages, unless `truncate` is off.
   What is too long all the same is returned as it is: the caller cuts or refuses it.
3. A template's own BOS is left out where the tokenizer adds one.
4. The ids of `context` come before the prompt, unchanged.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from proxy.errors import RunnerGone, UpstreamError
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.ollama.backend import ServedModel
from proxy.ollama.fill_in import (
    FillTokens,
    cut_around,
    fill_in,
    fill_in_text,
    fill_tokens,
)
from proxy.ollama.model_template import (
    Conversation,
    TooMuchTextError,
    reads,
    render_conversation,
    render_insert,
)
from proxy.ollama.modelfile import own_template
from proxy.ollama.prompt_length import (
    Tried,
    drop_oldest,
    fits,
    least_tokens,
    room_for_prompt,
    without_middle,
    without_oldest,
)
from proxy.ollama.protocol import ChatMessage, ChatRequest, GenerateRequest
from proxy.ollama.reply_context import check_context, special_start, without_start
from proxy.prefix.hashing import TokenIds

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt."""

    text: str
    token_ids: TokenIds
    """Empty where the text is too long whatever its tokens are."""
    num_tokens: int
    """At least so many, if they are not known."""
    messages: Sequence[Message] = ()
    """Those that are left of a conversation."""
    is_text: bool = True
    """Whether the ids are those of the text, and nothing else."""


@dataclass(frozen=True, slots=True)
class Room:
    """How long a prompt may be."""

    limit: int
    """Tokens of prompt and reply."""
    may_cut: bool
    """Whether the caller cuts tokens off what is too long."""


async def write_plain(text: str, model: ServedModel, room: Room) -> Written:
    """Tokenize a text. Raises UpstreamError."""
    longest = model.facts.longest_token_bytes
    least = least_tokens(text, longest_token_bytes=longest)
    if least > room.limit:
        if not room.may_cut:
            return Written(text=text, token_ids=NO_TOKENS, num_tokens=least)
        text = without_middle(text, limit=room.limit, longest_token_bytes=longest)
    token_ids = await model.tokenize(text)
    return Written(text=text, token_ids=token_ids, num_tokens=len(token_ids))


async def write_by_template(
    wanted: GenerateRequest,
    messages: Sequence[Message],
    model: ServedModel,
    *,
    think: bool | str | None,
    room: Room,
) -> Written:
    """Make the prompt by the request's own template.

    Raises RequestError (400) and UpstreamError.
    """
    text = await _by_template(wanted.template, think)(messages)
    return await write_plain(_without_bos(text, model.facts), model, room)


async def write_insert(
    wanted: GenerateRequest,
    model: ServedModel,
    *,
    think: bool | str | None,
    room: Room,
) -> Written:
    """Make the prompt for what lies between a prompt and its suffix.

    Raises RequestError (400) and UpstreamError.
    """
    source = wanted.template
    if not source and reads(model.modelfile.template, "suffix"):
        source = model.modelfile.template
    tokens = fill_tokens(model.facts)
    if source or tokens is None:
        text = await render_insert(
            source, prompt=wanted.prompt, suffix=wanted.suffix, think=think
        )
        return await write_plain(_without_bos(text, model.facts), model, room)
    return await _fill_in(wanted, model, tokens, room=room)


async def write_gap(model: ServedModel, *, prompt: str, suffix: str) -> str | TokenIds:
    """Make the prompt for what lies between two texts, of a model that can insert.

    Raises RequestError (400) and UpstreamError.
    """
    template = model.modelfile.template
    tokens = fill_tokens(model.facts)
    if tokens is None or reads(template, "suffix"):
        text = await render_insert(template, prompt=prompt, suffix=suffix, think=None)
        return _without_bos(text, model.facts)
    special = await special_start(model)
    before, after = await _around(model, special, prompt, suffix)
    return fill_in(tokens, special=special, prompt=before, suffix=after)


async def _around(
    model: ServedModel, special: TokenIds, prompt: str, suffix: str
) -> tuple[TokenIds, TokenIds]:
    """Return the ids of the texts around a gap, without a BOS."""
    before = await model.tokenize(prompt)
    after = await model.tokenize(suffix)
    return without_start(before, special), without_start(after, special)


async def _fill_in(
    wanted: GenerateRequest, model: ServedModel, tokens: FillTokens, *, room: Room
) -> Written:
    special = await special_start(model)
    prompt, suffix = await _around(model, special, wanted.prompt, wanted.suffix)
    whole = fill_in(tokens, special=special, prompt=prompt, suffix=suffix)
    if wanted.truncate and not fits(len(whole), limit=room.limit):
        num_marks = len(whole) - len(prompt) - len(suffix)
        left = max(0, room_for_prompt(room.limit, kept=num_marks) - num_marks)
        prompt, suffix = cut_around(prompt, suffix, room=left)
        whole = fill_in(tokens, special=special, prompt=prompt, suffix=suffix)
    text = fill_in_text(model.facts, tokens, prompt=wanted.prompt, suffix=wanted.suffix)
    return Written(text=text, token_ids=whole, num_tokens=len(whole), is_text=False)


async def write_conversation(
    wanted: GenerateRequest | ChatRequest,
    fields: Mapping[str, Any],
    model: ServedModel,
    *,
    room: Room,
) -> Written:
    """Make the prompt of a conversation; `fields` is what a chat template is given.

    Raises RequestError (400) and UpstreamError.
    """
    messages: Sequence[Message] = fields["messages"]
    render = _renderer(fields, model, think=wanted.think)

    can_drop = wanted.truncate and len(messages) > 1

    async def write(num_dropped: int, *, may_cut: bool = False) -> Written:
        kept = without_oldest(messages, num_dropped, _is_system)
        text = await render(kept)
        written = await write_plain(text, model, Room(room.limit, may_cut))
        return replace(written, messages=kept)

    async def attempt(num_dropped: int) -> Tried[Written]:
        try:
            written = await write(num_dropped)
        except RunnerGone:
            raise
        except (TooMuchTextError, UpstreamError):
            # not every template takes a conversation that begins anywhere
            return Tried(None, 0)
        is_short = fits(written.num_tokens, limit=room.limit)
        return Tried(written if is_short else None, written.num_tokens)

    try:
        whole = await write(0, may_cut=room.may_cut and not can_drop)
    except TooMuchTextError:
        if not can_drop:
            raise
        whole_tokens = 0
    else:
        if not can_drop or fits(whole.num_tokens, limit=room.limit):
            return whole
        whole_tokens = whole.num_tokens
    sizes = [0 if _is_system(m) else len(str(m.get("content"))) for m in messages]
    found = await drop_oldest(
        attempt, sizes=sizes, whole_tokens=whole_tokens, limit=room.limit
    )
    return found or await write(len(messages) - 1, may_cut=room.may_cut)


async def put_context_before(
    written: Written, context: Sequence[int], model: ServedModel
) -> Written:
    """Put the ids of an earlier reply's `context` before a prompt.

    Raises RequestError (400) and UpstreamError.
    """
    special = await special_start(model)
    earlier = check_context(context, model)
    rest = without_start(written.token_ids, special)
    token_ids = np.concatenate([special, earlier, rest])
    num_tokens = written.num_tokens + len(token_ids) - len(written.token_ids)
    return replace(written, token_ids=token_ids, num_tokens=num_tokens, is_text=False)


def _renderer(
    fields: Mapping[str, Any], model: ServedModel, *, think: bool | str | None
) -> Render:
    source = own_template(model)
    if source:
        render = _by_template(source, think)

        async def by_model_template(messages: Sequence[Message]) -> str:
            return _without_bos(await render(messages), model.facts)

        return by_model_template
    extra = {name: value for name, value in fields.items() if name != "messages"}

    async def by_chat_template(messages: Sequence[Message]) -> str:
        return await model.render_chat(messages, extra=extra)

    return by_chat_template


def _by_template(source: str, think: bool | str | None) -> Render:
    async def render(messages: Sequence[Message]) -> str:
        given = [
            ChatMessage(
                role=message["role"],
                content=message["content"],
                tool_name=message.get("name", ""),
                tool_call_id=message.get("tool_call_id", ""),
            )
            for message in messages
        ]
        return await render_conversation(
            source, Conversation(messages=given, think=think)
        )

    return render


def _without_bos(text: str, facts: ModelFacts) -> str:
    """Leave out a BOS that the tokenizer will add anyway."""
    if not facts.add_bos:
        return text
    bos = dict(facts.control_tokens).get(-1 if facts.bos_id is None else facts.bos_id)
    return text.removeprefix(bos) if bos else text


def _is_system(message: Message) -> bool:
    return bool(message["role"] == "system")
