"""What each route of `/v1` asks a runner, and the prompt that this will be.

Rules:
1. Checks come before conversions, in Ollama's order and words.
2. The prompt is found by the runner's own template and tokenizer. Where that fails,
   as for images that nobody can see, it is not known: the request goes on all the
   same, and the runner's own error is the answer.
3. With media in it a prompt is more than its tokens: nothing is restored for it and
   nothing of it is stored.
4. A text that is too long whatever its tokens are is left to the runner, which refuses
   it: to tokenize it twice would take a minute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.ollama.abilities import check_inserts
from proxy.ollama.backend import CHAT_PATH, ReuseOptions, ServedModel
from proxy.ollama.prompt_length import least_tokens
from proxy.ollama.prompt_texts import write_gap
from proxy.prefix.hashing import TokenIds
from proxy.v1 import anthropic, responses
from proxy.v1.bodies import has_images, has_media

COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"

_UNKNOWN: TokenIds = np.empty(0, dtype=np.int32)

Prompt = str | TokenIds | Mapping[str, Any] | None
"""Text, token ids, the body for a chat template, or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request as a runner gets it."""

    path: str
    body: Mapping[str, Any]
    prompt: Prompt
    has_media: bool = False
    has_images: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is to come in events."""
        return bool(self.body.get("stream"))

    def allowed(self, reuse: ReuseOptions) -> ReuseOptions:
        """Return what of `reuse` can be had for it.

        An adapter of its own makes KV that is none of the model's. A request that
        wants its whole prompt evaluated has no use for a restore.
        """
        if self.has_media or self.body.get("lora") is not None:
            return replace(reuse, read=False, write=False)
        if self.body.get("cache_prompt") is False:
            return replace(reuse, read=False)
        return reuse


Ask = Callable[[dict[str, Any]], Question]


def ask_chat(body: dict[str, Any]) -> Question:
    """Read a body of `/v1/chat/completions`. Raises RequestError."""
    if not body.get("messages"):
        raise RequestError(400, "[] is too short - 'messages'")
    if not isinstance(body["messages"], list):
        raise RequestError(400, "messages must be an array")
    return _chat(body)


def ask_completion(body: dict[str, Any]) -> Question:
    """Read a body of `/v1/completions`. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(map(_is_token, prompt)):
        if len(prompt) > 1 and all(
            isinstance(part, str | list | dict) for part in prompt
        ):
            raise RequestError(
                400, "one prompt a request: send the others by themselves"
            )
        prompt = prompt[0] if len(prompt) == 1 else None
    known: Prompt = None
    if isinstance(prompt, str):
        known = prompt
    elif isinstance(prompt, list) and all(map(_is_token, prompt)):
        known = np.array(prompt, dtype=np.int32)
    return Question(
        path=COMPLETIONS_PATH,
        body=body,
        prompt=known,
        has_media=isinstance(prompt, dict),
    )


def ask_responses(body: dict[str, Any]) -> Question:
    """Read a body of `/v1/responses`."""
    mended = responses.mend(body)
    return Question(
        path=RESPONSES_PATH,
        body=mended,
        prompt=responses.to_chat(mended),
        has_media=has_media(mended.get("input")),
        has_images=has_images(mended.get("input")),
    )


def ask_messages(body: dict[str, Any]) -> Question:
    """Read a body of `/v1/messages`. Raises RequestError."""
    anthropic.check_messages_body(body)
    return _chat(anthropic.to_chat(body))


def _chat(body: dict[str, Any]) -> Question:
    messages = body["messages"]
    return Question(
        path=CHAT_PATH,
        body=body,
        prompt=body,
        has_media=has_media(messages),
        has_images=has_images(messages),
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 31


async def fill_in_gap(model: ServedModel, question: Question) -> Question:
    """Return the question with its `suffix`, if it has one, in its prompt.

    The runner's `/v1/completions` knows no suffix. Raises RequestError (400) and
    UpstreamError.
    """
    suffix = question.body.get("suffix")
    if question.path != COMPLETIONS_PATH or not suffix:
        return question
    if not isinstance(suffix, str) or not isinstance(question.prompt, str):
        raise RequestError(400, "prompt and suffix must be strings")
    check_inserts(model)
    prompt = await write_gap(model, prompt=question.prompt, suffix=suffix)
    body = {name: value for name, value in question.body.items() if name != "suffix"}
    sent = prompt if isinstance(prompt, str) else prompt.tolist()
    return replace(question, body={**body, "prompt": sent}, prompt=prompt)


async def find_prompt(model: ServedModel, question: Question) -> TokenIds:
    """Return the ids that a runner will make of a question; empty where not known.

    Raises RunnerGone where no runner answers.
    """
    if question.has_media:
        return _UNKNOWN
    try:
        text = await _text_of(model, question.prompt)
        if not isinstance(text, str):
            return text
        longest = model.facts.longest_token_bytes
        if least_tokens(text, longest_token_bytes=longest) > model.context_tokens:
            return _UNKNOWN
        return await model.tokenize(text)
    except RunnerGone:
        raise
    except UpstreamError:
        return _UNKNOWN


async def tokenize(model: ServedModel, prompt: Prompt) -> TokenIds:
    """Return the ids of a prompt; empty where it is None. Raises UpstreamError."""
    text = await _text_of(model, prompt)
    return await model.tokenize(text) if isinstance(text, str) else text


async def _text_of(model: ServedModel, prompt: Prompt) -> str | TokenIds:
    """Return a prompt as text, or as the token ids that it is made of."""
    match prompt:
        case None:
            return _UNKNOWN
        case np.ndarray() | str():
            return prompt
        case _:
            extra = {key: prompt[key] for key in prompt if key != "messages"}
            return await model.render_chat(prompt["messages"], extra=extra)
