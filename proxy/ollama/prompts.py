"""How a request becomes a prompt: the route of the runner, the token ids, the body.

Rules:
1. Plain text goes to `/completion` as exact token ids. Where the engine has to parse
   what the model says (calls of tools, thinking) the request goes to its chat route,
   which renders the prompt itself; the token ids are then those of the same rendering.
   So do images, whose tokens nobody else can tell: their KV is not shared.
2. Sampling values are always sent; llama-server's own defaults are others.
3. A reply is bounded: prompt and reply together never exceed the context, so the
   engine never shifts it.
4. Thinking of earlier messages is left out, as Ollama leaves it out for models whose
   template is their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxy.errors import RequestError
from proxy.ollama.abilities import Ability, is_able
from proxy.ollama.backend import CHAT_PATH, COMPLETION_PATH, ServedModel
from proxy.ollama.events import EventReader
from proxy.ollama.modelfile import with_messages
from proxy.ollama.options import SamplingOptions
from proxy.ollama.protocol import ChatRequest, GenerateRequest, parse_format
from proxy.prefix.hashing import TokenIds

_INT32_LIMIT = 2**31 - 1
_CUTS_THINKING_OFF = "qwen3"
"""The architecture for which Ollama does so, whatever the template does."""
_WITHOUT_MAX = "gpt-oss"
"""The architecture whose highest level of thinking is `high`."""
_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


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

    def reader(self, wanted: GenerateRequest | ChatRequest) -> EventReader:
        """Make what reads the turn's events."""
        return EventReader(
            is_chat=self.path == CHAT_PATH, num_top_logprobs=wanted.top_logprobs
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
    is_raw = isinstance(wanted, GenerateRequest) and wanted.raw
    is_chat = not is_raw and _needs_parsing(wanted, model)
    chat = {} if is_raw else _chat_fields(wanted, model)
    if is_chat and json_schema is not None:
        # some templates show the schema to the model
        chat["response_format"] = _response_format(json_schema)
    if wanted.has_images and not wanted.debug_render_only:
        body = sampling_body(options, num_prompt_tokens=0, limit=limit)
        body |= _chat_body(wanted, chat)
        return Prompt(
            text="", path=CHAT_PATH, token_ids=_NO_TOKENS, body=body, is_text=False
        )
    text = await _render(wanted, model, chat)
    if wanted.debug_render_only:
        return Prompt(text=text, token_ids=_NO_TOKENS, body={})
    check_text_fits(
        text, limit=limit, longest_token_bytes=model.facts.longest_token_bytes
    )
    token_ids = await model.tokenize(text)
    check_tokens_fit(len(token_ids), limit=limit)
    body = sampling_body(options, num_prompt_tokens=len(token_ids), limit=limit)
    if is_chat:
        body |= _chat_body(wanted, chat)
        return Prompt(text=text, path=CHAT_PATH, token_ids=token_ids, body=body)
    if json_schema is not None:
        body["json_schema"] = json_schema
    if wanted.logprobs:
        body["n_probs"] = max(1, wanted.top_logprobs)
    return Prompt(text=text, token_ids=token_ids, body=body)


def _needs_parsing(wanted: GenerateRequest | ChatRequest, model: ServedModel) -> bool:
    """Tell whether the engine has to look at images, or for calls and thinking."""
    if wanted.has_images:
        return True
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


async def _render(
    wanted: GenerateRequest | ChatRequest, model: ServedModel, chat: dict[str, Any]
) -> str:
    if isinstance(wanted, GenerateRequest) and wanted.raw:
        return wanted.prompt
    extra = {name: value for name, value in chat.items() if name != "messages"}
    return await model.render_chat(chat["messages"], extra=extra)


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
    think = wanted.think
    if think is None and is_able(model, Ability.THINKING):
        think = True
    if think is not None:
        fields["chat_template_kwargs"] = _template_variables(think, model)
    return fields


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


def _response_format(json_schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "schema", "schema": json_schema},
    }


def context_limit(options: SamplingOptions, *, context_tokens: int) -> int:
    """Tell how many tokens prompt and reply may have together.

    `num_ctx` narrows what the slot holds (`context_tokens`); it cannot widen it.
    Raises RequestError (400).
    """
    if options.num_ctx is None or options.num_ctx <= 0:
        return context_tokens
    if options.num_ctx > context_tokens:
        raise RequestError(
            400,
            f"num_ctx {options.num_ctx} is larger than the context length that this "
            f"model is served with, {context_tokens}: leave num_ctx out or lower it",
        )
    return options.num_ctx


def check_text_fits(text: str, *, limit: int, longest_token_bytes: int) -> None:
    """Refuse a text that is too long whatever its tokens are.

    Spares the tokenizer a text of megabytes. Raises RequestError (400).
    """
    if longest_token_bytes <= 0:
        return
    num_bytes = len(text.encode("utf-8", "replace"))
    least_tokens = -(-num_bytes // longest_token_bytes)
    if least_tokens > limit:
        raise _too_long(f"at least {least_tokens}", limit)


def check_tokens_fit(num_tokens: int, *, limit: int) -> None:
    """Refuse a prompt that leaves no room for one token. Raises RequestError (400)."""
    if num_tokens >= limit:
        raise _too_long(str(num_tokens), limit)


def _too_long(num_tokens: str, limit: int) -> RequestError:
    return RequestError(
        400,
        f"the prompt is longer than the context length: it has {num_tokens} tokens, "
        f"and the context holds {limit}, one of them for the reply",
    )


def sampling_body(
    options: SamplingOptions, *, num_prompt_tokens: int, limit: int
) -> dict[str, Any]:
    """Make what the bodies of both routes say of sampling and of the reply's length."""
    room = limit - num_prompt_tokens
    # Ollama takes 0 for "no limit" as well: it leaves a zero out of the body.
    wanted = options.num_predict if options.num_predict > 0 else room
    return {
        "n_predict": min(wanted, room),
        "temperature": options.temperature,
        "top_k": _as_int32(options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        # The engine refuses the -1 that stands for the whole context.
        "repeat_last_n": (
            limit if options.repeat_last_n == -1 else _as_int32(options.repeat_last_n)
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
