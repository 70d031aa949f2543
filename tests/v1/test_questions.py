"""What each route asks a runner, and how far a request may share."""

from typing import Any

import numpy as np
import pytest

from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.ollama.backend import ReuseOptions
from proxy.v1.questions import (
    ask_chat,
    ask_completion,
    ask_messages,
    ask_responses,
    find_prompt,
)
from tests.fakes.scripted_turns import ScriptedModel

HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]


def test_a_chat_goes_on_as_it_is() -> None:
    """Path, body and what the template gets are the client's."""
    body = {"model": "m", "messages": HELLO, "stream": True, "x": 1}
    question = ask_chat(body)
    assert question.path == "/v1/chat/completions"
    assert question.body == question.prompt == body
    assert question.is_streamed


@pytest.mark.parametrize("messages", [None, [], ""])
def test_a_chat_without_messages(messages: object) -> None:
    """Ollama's own text, odd as it is."""
    with pytest.raises(RequestError) as caught:
        ask_chat({"model": "m", "messages": messages})
    assert (caught.value.status, caught.value.message) == (
        400,
        "[] is too short - 'messages'",
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([5, 6], [5, 6]),
        ([[5, 6]], [5, 6]),
        ([5, "mixed"], None),
        ([], []),
        ([True, -1], None),
        (None, None),
        (7, None),
        ({"prompt_string": "<__media__>", "multimodal_data": []}, None),
    ],
)
def test_the_prompt_of_a_completion(prompt: object, expected: object) -> None:
    """Text and tokens are known; what is neither is the runner's to judge."""
    question = ask_completion({"model": "m", "prompt": prompt})
    known: Any = question.prompt
    if isinstance(known, np.ndarray):
        known = known.tolist()
    assert known == expected
    assert question.body["prompt"] == prompt
    assert question.has_media is isinstance(prompt, dict)


@pytest.mark.parametrize(
    "prompts", [["a", "b"], [[1], [2]], ["a", [1]], ["a", {"prompt_string": "b"}]]
)
def test_several_prompts_at_once(prompts: list[object]) -> None:
    """They would be one lease with several prompts: refused, with what to do."""
    with pytest.raises(RequestError, match="one prompt a request"):
        ask_completion({"model": "m", "prompt": prompts})


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("max_tokens", "max_tokens is required and must be positive"),
        ("messages", "messages is required"),
    ],
)
def test_a_message_lacks_something(missing: str, says: str) -> None:
    """Ollama's own texts for Anthropic's needed fields."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": HELLO}
    del body[missing]
    with pytest.raises(RequestError) as caught:
        ask_messages(body)
    assert (caught.value.status, caught.value.message) == (400, says)


def test_messages_are_asked_in_chat_words() -> None:
    """The engine's own route forgets the slot: it is not used."""
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, "system": "Be brief."}
    question = ask_messages(body)
    assert question.path == "/v1/chat/completions"
    assert question.body["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("fields", "reads", "writes"),
    [
        ({}, True, True),
        ({"cache_prompt": True}, True, True),
        ({"cache_prompt": False}, False, True),
        ({"lora": [{"id": 0, "scale": 0.5}]}, False, False),
        ({"lora": None}, True, True),
        ({"messages": IMAGE}, False, False),
    ],
)
def test_what_may_be_shared(fields: dict[str, Any], reads: bool, writes: bool) -> None:
    """KV of other weights or with media is none of the model's prefixes."""
    question = ask_chat({"messages": HELLO, **fields})
    allowed = question.allowed(ReuseOptions(namespace="n", soft_pin=True))
    assert (allowed.read, allowed.write) == (reads, writes)
    assert (allowed.namespace, allowed.soft_pin) == ("n", True)


def test_more_is_not_allowed_than_was() -> None:
    """What a client forbids stays forbidden."""
    reuse = ReuseOptions(read=False, write=False)
    assert ask_chat({"messages": HELLO}).allowed(reuse) == reuse


async def test_the_prompt_of_a_chat_is_what_the_template_makes() -> None:
    """The messages are rendered and tokenized."""
    model = ScriptedModel()
    token_ids = await find_prompt(model, ask_chat({"messages": HELLO}))
    assert "".join(map(chr, token_ids)).startswith("<|im_start|>user\nHello")
    assert model.rendered == [HELLO]


async def test_a_prompt_that_cannot_be_found_is_not_known() -> None:
    """A template that fails costs reuse; the request goes on."""
    model = ScriptedModel(failure=UpstreamError(500, "no such role"))
    assert len(await find_prompt(model, ask_chat({"messages": HELLO}))) == 0
    model.failure = RunnerGone("dead")
    with pytest.raises(RunnerGone):
        await find_prompt(model, ask_chat({"messages": HELLO}))


async def test_media_is_not_rendered() -> None:
    """Its prompt is more than tokens."""
    model = ScriptedModel()
    assert len(await find_prompt(model, ask_chat({"messages": IMAGE}))) == 0
    assert model.rendered == []


def test_a_response_is_mended_before_it_is_asked() -> None:
    """The body for the runner is the mended one, on the runner's own route."""
    text = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    question = ask_responses({"input": "Hello", "text": text})
    assert question.path == "/v1/responses"
    assert question.body["response_format"]["type"] == "json_schema"
    assert question.prompt["messages"] == HELLO  # type: ignore[index, call-overload]


async def test_a_text_that_is_too_long_anyway_is_not_tokenized() -> None:
    """The runner refuses it; what might just fit is looked at."""
    model = ScriptedModel(context_tokens=100)
    longest = model.facts.longest_token_bytes * model.context_tokens
    for num_chars, is_known in ((longest, True), (longest + 1, False)):
        question = ask_completion({"prompt": "x" * num_chars})
        assert len(await find_prompt(model, question)) == num_chars * is_known
