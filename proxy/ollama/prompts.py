"""How a request becomes a prompt: the route of the runner, the token ids, the body.

Rules:
1. Plain text goes to `/completion` as exact token ids. Where the engine has to parse
   what the model says (calls of tools, thinking) the request goes to its chat route,
   which renders the prompt itself; the token ids are then those of the same rendering.
   So do images, whose tokens nobody else can tell: their KV is not shared.
2. Sampling values are always sent; llama-server's own defaults are others.
3. A reply is bounded: by the context without `shift`, else by ten times the context,
   where the runner shifts it. One that does not ends the reply with the context.
4. Thinking of earlier messages is left out, as Ollama leaves it out for models whose
   template is their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.ollama.abilities import Ability, is_able
from proxy.ollama.backend import CHAT_PATH, COMPLETION_PATH, ServedModel
from proxy.ollama.events import EventReader
from proxy.ollama.modelfile import own_template, with_messages
from proxy.ollama.options import SamplingOptions
from proxy.ollama.prompt_length import (
    asks_for_more,
    context_limit,
    cut_tokens,
    exceeds_context,
    fits,
    has_less_context,
    must_not_be_cut,
)
from proxy.ollama.prompt_texts import (
    NO_TOKENS,
    Room,
    Written,
    put_context_before,
    write_by_template,
    write_conversation,
    write_insert,
    write_plain,
)
from proxy.ollama.protocol import (
    ANY_OBJECT,
    ChatRequest,
    GenerateRequest,
    parse_format,
)
from proxy.ollama.reply_context import ReplyContext, special_start
from proxy.ollama.thinking import ThinkingSplitter, thinking_marks
from proxy.prefix.hashing import TokenIds

_INT32_LIMIT = 2**31 - 1
_LONGEST_REPLY_CONTEXTS = 10
_UNSHIFTED = "deepseek2"
"""The architecture whose context Ollama does not shift unless asked to."""
_CUTS_THINKING_OFF = "qwen3"
"""The architecture for which Ollama does so, whatever the template does."""
_WITHOUT_MAX = "gpt-oss"
"""The architecture whose highest level of thinking is `high`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a turn is asked, see `TurnRequest`."""

    text: str
    """The rendered prompt."""
    path: str = COMPLETION_PATH
    token_ids: TokenIds
    body: Mapping[str, Any]
    is_text: bool = True
    """Whether the tokens are all that the model reads: there are no images."""
    context: ReplyContext | None = None
    """Gathers the `context` of the reply, where it is to have one."""
    splitter: ThinkingSplitter | None = None
    """Finds the thinking in the reply, where the engine does not."""

    def reader(self, wanted: GenerateRequest | ChatRequest) -> EventReader:
        """Make what reads the turn's events."""
        return EventReader(
            is_chat=self.path == CHAT_PATH,
            num_top_logprobs=wanted.top_logprobs,
            splitter=self.splitter,
        )


async def prepare(
    wanted: GenerateRequest | ChatRequest,
    model: ServedModel,
    *,
    options: SamplingOptions,
) -> Prompt:
    """Render, tokenize and measure what a request wants of a model that is ready.

    Where it only wants to see the prompt there are no tokens and no body. Raises
    RequestError and UpstreamError.
    """
    json_schema = parse_format(wanted.format)
    limit = context_limit(options, context_tokens=model.context_tokens)
    is_short = asks_for_more(
        options, context_tokens=limit, trained_tokens=model.facts.context_length
    )
    if is_short:
        wanted = replace(wanted, truncate=False)
    shifts = wanted.shift
    if shifts is None:
        shifts = model.facts.architecture != _UNSHIFTED
    is_chat = _needs_parsing(wanted, model)
    fields = _chat_fields(wanted, model)
    if is_chat and json_schema is not None:
        # some templates show the schema to the model
        fields["response_format"] = _response_format(json_schema)
    if wanted.has_images and not wanted.debug_render_only:
        body = sampling_body(options, limit=limit, room=None if shifts else limit)
        body |= _chat_body(wanted, fields)
        return Prompt(
            text="", path=CHAT_PATH, token_ids=NO_TOKENS, body=body, is_text=False
        )
    can_cut = isinstance(wanted, GenerateRequest) and wanted.truncate and not is_chat
    room = Room(limit, may_cut=can_cut and shifts)
    written = await _write(wanted, model, fields, room)
    if wanted.debug_render_only:
        return Prompt(text=written.text, token_ids=NO_TOKENS, body={})
    if not fits(written.num_tokens, limit=limit):
        if is_short:
            raise has_less_context(
                written.num_tokens, num_ctx=options.num_ctx, limit=limit
            )
        if can_cut and not shifts:
            raise must_not_be_cut()
        if not room.may_cut:
            raise exceeds_context(written.num_tokens, limit=limit)
        written = await _cut(written, model, options=options, limit=limit)
    left = None if shifts else limit - written.num_tokens
    body = sampling_body(options, limit=limit, room=left)
    if is_chat:
        body |= _chat_body(wanted, {**fields, "messages": written.messages})
    else:
        if json_schema is not None:
            await _check_schema(json_schema, model)
            body["json_schema"] = json_schema
        if wanted.logprobs:
            body["n_probs"] = max(1, wanted.top_logprobs)
    return Prompt(
        text=written.text,
        path=CHAT_PATH if is_chat else COMPLETION_PATH,
        token_ids=written.token_ids,
        body=body,
        context=await _reply_context(wanted, model, written),
        splitter=None if is_chat else _splitter(wanted, model, written.text),
    )


async def _write(
    wanted: GenerateRequest | ChatRequest,
    model: ServedModel,
    fields: Mapping[str, Any],
    room: Room,
) -> Written:
    """Make the prompt, which may still be too long."""
    if not isinstance(wanted, GenerateRequest):
        return await write_conversation(wanted, fields, model, room=room)
    if wanted.raw:
        return await write_plain(wanted.prompt, model, room)
    think = _think(wanted, model)
    if wanted.suffix:
        written = await write_insert(wanted, model, think=think, room=room)
    elif wanted.template:
        written = await write_by_template(
            wanted, fields["messages"], model, think=think, room=room
        )
    else:
        written = await write_conversation(wanted, fields, model, room=room)
    if wanted.context:
        written = await put_context_before(written, wanted.context, model)
    return written


async def _cut(
    written: Written, model: ServedModel, *, options: SamplingOptions, limit: int
) -> Written:
    token_ids = cut_tokens(
        written.token_ids,
        limit=limit,
        num_keep=options.num_keep,
        num_special=len(await special_start(model)),
    )
    return replace(
        written, token_ids=token_ids, num_tokens=len(token_ids), is_text=False
    )


async def _reply_context(
    wanted: GenerateRequest | ChatRequest, model: ServedModel, written: Written
) -> ReplyContext | None:
    """Make what gathers the `context` of the reply, where it has one."""
    if not isinstance(wanted, GenerateRequest) or wanted.raw:
        return None
    return ReplyContext(
        model,
        prompt=written.token_ids,
        text=written.text if written.is_text else "",
        special=await special_start(model),
    )


def _splitter(
    wanted: GenerateRequest | ChatRequest, model: ServedModel, prompt: str
) -> ThinkingSplitter | None:
    """Make what tells thinking apart, where a model that thinks is to think."""
    if not isinstance(wanted, GenerateRequest) or wanted.raw:
        return None
    chat_template = (model.props or model.facts).chat_template
    marks = thinking_marks(wanted.template) or thinking_marks(chat_template)
    if marks is None or not _think(wanted, model):
        return None
    is_open = prompt.rstrip().endswith(marks.opening)
    return ThinkingSplitter(marks, is_open=is_open)


def _needs_parsing(wanted: GenerateRequest | ChatRequest, model: ServedModel) -> bool:
    """Tell whether the engine has to look at images, or for calls and thinking."""
    if isinstance(wanted, GenerateRequest) and (
        wanted.raw or wanted.suffix or wanted.template or wanted.context
    ):
        return False
    if wanted.has_images:
        return True
    if own_template(model):
        return False
    if isinstance(wanted, ChatRequest) and wanted.is_about_tools:
        return True
    return is_able(model, Ability.THINKING)


def _chat_body(
    wanted: GenerateRequest | ChatRequest, chat: Mapping[str, Any]
) -> dict[str, Any]:
    # whatever a given server was started with
    body = {**chat, "reasoning_format": "auto"}
    if wanted.logprobs:
        body |= {"logprobs": True, "top_logprobs": max(1, wanted.top_logprobs)}
    return body


def _chat_fields(
    wanted: GenerateRequest | ChatRequest, model: ServedModel
) -> dict[str, Any]:
    """Make what the chat template is given, in the words of llama-server."""
    messages = with_messages(wanted, model.modelfile)
    if model.facts.architecture == _CUTS_THINKING_OFF:
        messages = without_thinking(messages)
    fields: dict[str, Any] = {"messages": messages}
    if isinstance(wanted, ChatRequest) and wanted.tools:
        fields["tools"] = list(wanted.tools)
    think = _think(wanted, model)
    if think is not None:
        fields["chat_template_kwargs"] = _template_variables(think, model)
    return fields


def _think(
    wanted: GenerateRequest | ChatRequest, model: ServedModel
) -> bool | str | None:
    if wanted.think is None and is_able(model, Ability.THINKING):
        return True
    return wanted.think


def _template_variables(think: bool | str, model: ServedModel) -> dict[str, Any]:
    variables: dict[str, Any] = {"enable_thinking": bool(think)}
    if isinstance(think, str):
        is_beyond = think == "max" and model.facts.architecture == _WITHOUT_MAX
        variables["reasoning_effort"] = "high" if is_beyond else think
    return variables


def without_thinking(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    r"""Cut thinking that stands in the text of replies before the last question.

    >>> said = {"role": "assistant", "content": "<think>Hm.</think>\nYes."}
    >>> without_thinking([said, {"role": "user", "content": "Why?"}])[0]["content"]
    'Yes.'
    """
    asked = max(
        (at for at, message in enumerate(messages) if message["role"] == "user"),
        default=0,
    )
    cut: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        content = message["content"]
        is_reply = message["role"] == "assistant" and isinstance(content, str)
        if at < asked and is_reply:
            opening, mark, rest = content.partition("<think>")
            if mark and not opening.strip():
                content = rest.partition("</think>")[2].lstrip()
        cut.append({**message, "content": content})
    return cut


async def _check_schema(json_schema: Mapping[str, Any], model: ServedModel) -> None:
    """Have the engine refuse a schema that it cannot follow. Raises UpstreamError.

    Its `/completion` would pass over it and let the model say anything.
    """
    if json_schema != ANY_OBJECT:
        nothing = [{"role": "user", "content": ""}]
        asked = {"response_format": _response_format(json_schema)}
        await model.render_chat(nothing, extra=asked)


def _response_format(json_schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "schema", "schema": json_schema},
    }


def sampling_body(
    options: SamplingOptions, *, limit: int, room: int | None
) -> dict[str, Any]:
    """Make what the bodies of both routes say of sampling and of the reply's length.

    `limit` is the context in tokens; `room` what the prompt leaves of it, None where
    the reply may go on past it.
    """
    # Ollama takes 0 for "no limit" as well: it leaves a zero out of the body.
    most = _LONGEST_REPLY_CONTEXTS * limit
    wanted = options.num_predict if 0 < options.num_predict < most else most
    return {
        "n_predict": wanted if room is None else min(wanted, room),
        "n_keep": _as_int32(options.num_keep),
        "temperature": options.temperature,
        "top_k": _as_int32(options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        # The engine refuses the -1 that stands for the whole context, and makes room
        # for as many tokens as it is told.
        "repeat_last_n": (
            limit
            if options.repeat_last_n == -1
            else _as_int32(min(options.repeat_last_n, limit))
        ),
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        # The engine takes the low 32 bits; all ones draw a random seed.
        "seed": options.seed & 0xFFFFFFFF,
        # An empty stop string would end each reply before its first token.
        "stop": [text for text in options.stop if text],
    }


def _as_int32(value: int) -> int:
    return max(-_INT32_LIMIT, min(_INT32_LIMIT, value))
