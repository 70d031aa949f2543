"""Requests to prompts: the route, the ids, the body, and the bounds."""

import doctest
import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.llamacpp.props import RunnerProps
from proxy.ollama import prompts
from proxy.ollama.backend import CHAT_PATH, COMPLETION_PATH
from proxy.ollama.options import SamplingOptions
from proxy.ollama.prompts import Prompt, prepare
from proxy.ollama.protocol import parse_chat, parse_generate
from tests.fakes.scripted_turns import FACTS, ScriptedModel

TOOL = {"type": "function", "function": {"name": "now"}}
QUESTION = {"role": "user", "content": "Hi"}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}
RESULT = {"role": "tool", "content": "12:00", "tool_name": "now"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def model_that(*abilities: str, architecture: str = "llama") -> ScriptedModel:
    """Make a model with these abilities."""
    template = "<think></think>" if "thinks" in abilities else ""
    props = RunnerProps(template, "calls" in abilities, frozenset())
    return ScriptedModel(facts=replace(FACTS, architecture=architecture), props=props)


async def prepared(model: ScriptedModel, **fields: Any) -> Prompt:  # noqa: ANN401
    """Prepare a request: a chat, unless there is a prompt."""
    parse = parse_generate if "prompt" in fields else parse_chat
    wanted = parse(json.dumps({"model": "m", **fields}).encode())
    return await prepare(wanted, model, options=SamplingOptions())


@pytest.mark.parametrize(
    ("abilities", "fields", "path"),
    [
        ("", {"messages": [QUESTION]}, COMPLETION_PATH),
        ("", {"prompt": "Hi"}, COMPLETION_PATH),
        ("calls", {"messages": [QUESTION]}, COMPLETION_PATH),
        ("calls", {"prompt": "Hi"}, COMPLETION_PATH),
        ("calls", {"messages": [QUESTION], "tools": [TOOL]}, CHAT_PATH),
        ("calls", {"messages": [QUESTION, CALLED]}, CHAT_PATH),
        ("calls", {"messages": [QUESTION, RESULT]}, CHAT_PATH),
        ("thinks", {"messages": [QUESTION]}, CHAT_PATH),
        ("thinks", {"messages": [QUESTION], "think": False}, CHAT_PATH),
        ("thinks", {"prompt": "Hi"}, CHAT_PATH),
        ("thinks", {"prompt": "Hi", "raw": True}, COMPLETION_PATH),
    ],
)
async def test_the_engine_parses_where_it_has_to(
    abilities: str, fields: dict[str, Any], path: str
) -> None:
    """Tools, calls, results, and models that think; raw prompts never."""
    prompt = await prepared(model_that(abilities), **fields)
    assert prompt.path == path
    assert "".join(map(chr, prompt.token_ids)) == prompt.text
    assert ("messages" in prompt.body) == (path == CHAT_PATH)
    assert prompt.body["n_predict"] == 10 * 4096
    assert not {"prompt", "id_slot", "cache_prompt", "stream"} & set(prompt.body)


async def test_the_rendering_is_asked_for_with_the_same_fields() -> None:
    """What the chat route gets is what the token ids were made of."""
    model = model_that("calls", "thinks")
    fields = {"tools": [TOOL], "think": "low", "format": SCHEMA}
    prompt = await prepared(model, messages=[QUESTION, CALLED, RESULT], **fields)
    (extra,) = model.extras
    assert model.rendered == [prompt.body["messages"]]
    assert {**prompt.body, **extra} == prompt.body
    assert prompt.body["reasoning_format"] == "auto"
    assert extra == {
        "tools": prompt.body["tools"],
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "schema", "schema": SCHEMA},
        },
    }


@pytest.mark.parametrize(
    ("abilities", "think", "variables"),
    [
        ("thinks", None, {"enable_thinking": True}),
        ("thinks", True, {"enable_thinking": True}),
        ("thinks", False, {"enable_thinking": False}),
        ("thinks", "max", {"enable_thinking": True, "reasoning_effort": "max"}),
        ("", False, {"enable_thinking": False}),
        ("", None, None),
    ],
)
async def test_thinking_is_a_variable_of_the_template(
    abilities: str, think: bool | str | None, variables: dict[str, Any] | None
) -> None:
    """Models that think do so by default; for others nothing is said by itself."""
    model = model_that(abilities)
    await prepared(model, messages=[QUESTION], think=think)
    assert model.extras[0].get("chat_template_kwargs") == variables


async def test_one_architecture_has_no_highest_level() -> None:
    """Its `max` is `high`."""
    model = model_that("thinks", architecture="gpt-oss")
    await prepared(model, messages=[QUESTION], think="max")
    assert model.extras[0]["chat_template_kwargs"]["reasoning_effort"] == "high"


async def test_thinking_in_the_text_of_earlier_replies_is_cut() -> None:
    """Of one architecture, as Ollama does; later replies and others are left alone."""
    said = {"role": "assistant", "content": "<think>Hm.</think>\n\nYes."}
    messages = [QUESTION, said, QUESTION, said]
    model = model_that("thinks", architecture="qwen3")
    await prepared(model, messages=messages)
    texts = [message["content"] for message in model.rendered[0]]
    assert texts == ["Hi", "Yes.", "Hi", said["content"]]
    model = model_that("thinks")
    await prepared(model, messages=messages)
    assert model.rendered == [messages]


async def test_formats_and_logprobs_of_both_routes() -> None:
    """Each route has its own words for them."""
    asked = {"format": "json", "logprobs": True, "top_logprobs": 3}
    plain = await prepared(model_that(), messages=[QUESTION], **asked)
    assert plain.body["json_schema"] == {"type": "object"}
    assert plain.body["n_probs"] == 3
    assert "response_format" not in plain.body
    chat = await prepared(model_that("thinks"), messages=[QUESTION], **asked)
    assert chat.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (chat.body["logprobs"], chat.body["top_logprobs"]) == (True, 3)
    assert "json_schema" not in chat.body
    for model, name in ((model_that(), "n_probs"), (model_that("thinks"), "logprobs")):
        without = await prepared(model, messages=[QUESTION], top_logprobs=3)
        assert name not in without.body
        only = await prepared(model, messages=[QUESTION], logprobs=True)
        assert only.body[name] == 1


async def test_a_prompt_that_is_only_shown_may_be_too_long() -> None:
    """Nothing is measured where nothing is evaluated."""
    long = {"role": "user", "content": "x" * 10_000}
    shown = await prepared(model_that(), messages=[long], _debug_render_only=True)
    assert long["content"] in shown.text
    for model in (model_that(), model_that("thinks")):
        with pytest.raises(RequestError, match="exceed_context_size_error"):
            await prepared(model, messages=[long])


def test_worked_example() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(prompts).failed == 0


def sampling_body(room: int | None = 90, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Build the body for a prompt of ten tokens in a context of a hundred."""
    return prompts.sampling_body(SamplingOptions(**options), limit=100, room=room)


def test_all_sampling_values_are_sent() -> None:
    """Nothing is left to llama-server's own defaults, which differ."""
    assert sampling_body() == {
        "n_predict": 90,
        "n_keep": 4,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0xFFFFFFFF,
        "stop": [],
    }


@pytest.mark.parametrize(
    ("num_predict", "sent"), [(-1, 90), (-2, 90), (0, 90), (5, 5), (90, 90), (91, 90)]
)
def test_a_reply_ends_with_the_context(num_predict: int, sent: int) -> None:
    """However many tokens are wanted, prompt and reply fit into the context."""
    assert sampling_body(num_predict=num_predict)["n_predict"] == sent


@pytest.mark.parametrize(
    ("num_predict", "sent"), [(-1, 1000), (0, 1000), (5, 5), (999, 999), (1001, 1000)]
)
def test_a_reply_goes_on_past_the_context(num_predict: int, sent: int) -> None:
    """Where the context may be shifted ten times the context is the bound."""
    assert sampling_body(None, num_predict=num_predict)["n_predict"] == sent


@pytest.mark.parametrize(
    ("shift", "architecture", "shifts"),
    [
        (None, "llama", True),
        (False, "llama", False),
        (None, "deepseek2", False),
        (True, "deepseek2", True),
    ],
)
async def test_who_shifts(shift: bool | None, architecture: str, shifts: bool) -> None:
    """Where a request does not say, all do but one architecture."""
    model = ScriptedModel(facts=replace(FACTS, architecture=architecture))
    body = json.dumps({"model": "smol", "prompt": "Hi", "shift": shift}).encode()
    options = SamplingOptions(num_predict=50_000)
    prompt = await prompts.prepare(parse_generate(body), model, options=options)
    room = model.context_tokens - len(prompt.token_ids)
    assert prompt.body["n_predict"] == (10 * model.context_tokens if shifts else room)


def test_values_are_put_into_the_engines_ranges() -> None:
    """-1 for the whole context, 64-bit numbers and empty stops reach no runner."""
    body = sampling_body(
        repeat_last_n=-1, top_k=2**40, seed=2**32 + 7, stop=("", "END")
    )
    assert body["repeat_last_n"] == 100
    assert body["top_k"] == 2**31 - 1
    assert body["seed"] == 7
    assert body["stop"] == ["END"]


@pytest.mark.parametrize("abilities", ["", "calls"])
@pytest.mark.parametrize(
    "fields",
    [
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "x" * 5000},
                QUESTION,
            ]
        },
        {"prompt": "x" * 5000},
        {"prompt": "x" * 5000, "raw": True},
        {"prompt": "x" * 5000, "shift": False},
        {"prompt": "x" * 5000, "truncate": True},
    ],
)
async def test_a_request_for_more_context_loses_nothing_of_its_prompt(
    abilities: str, fields: dict[str, Any]
) -> None:
    """It is served where it fits what there is, else refused with the three numbers."""
    model = model_that(abilities)
    parse = parse_generate if "prompt" in fields else parse_chat
    wanted = parse(json.dumps({"model": "m", **fields}).encode())
    options = SamplingOptions(num_ctx=6000)
    with pytest.raises(
        RequestError, match=r"num_ctx 6000 .* 4096, .* 5\d\d\d"
    ) as caught:
        await prepare(wanted, model, options=options)
    assert caught.value.status == 400
    short = parse_generate(b'{"model": "m", "prompt": "Hi"}')
    prompt = await prepare(short, model, options=options)
    assert prompt.body["n_predict"] == 10 * 4096
