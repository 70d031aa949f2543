"""Prompts of all kinds over real runners: suffix, context, template, truncate."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Kvbus
from tests.models import write_tiny_model
from tests.ollama_models import write_ollama_model
from tests.runners import running
from tests.scripted_model import Script, write_scripted_model

BEFORE, AFTER = "The keeper of the ", " wrote down the weather."
TEMPLATE = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n"
    "{{ .Response }}<|im_end|>\n"
)
INSERT = b"<|im_start|>{{ .Prompt }}<|im_end|>{{ .Suffix }}<|endoftext|>"
CONTEXT_TOKENS = 512


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models that fill in, with a BOS or without, and one without a template."""
    folder = tmp_path_factory.mktemp("prompts")
    return {
        "fills": write_tiny_model(
            folder / "fills.gguf", seed=3, is_endless=True, fills_in="present"
        ),
        "older": write_tiny_model(
            folder / "older.gguf",
            seed=3,
            is_endless=True,
            fills_in="older",
            add_bos=True,
        ),
        "known": write_tiny_model(
            folder / "known.gguf",
            seed=3,
            is_endless=True,
            fills_in="texts",
            tokenizer="spm",
            add_bos=True,
        ),
        "sayer": write_scripted_model(
            folder / "sayer.gguf", Script(to_user="Hi there, you.", thinks=False)
        ),
        "thinker": write_scripted_model(
            folder / "thinker.gguf", Script(to_user="<think>\nAdd them.\n</think>\n\n4")
        ),
        "bare": write_tiny_model(
            folder / "bare.gguf", seed=3, is_endless=True, has_chat_template=False
        ),
    }


@pytest.fixture(scope="module")
def served(
    files: dict[str, Path], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kvbus]:
    """Serve them all, the bare one with a TEMPLATE out of Ollama's folder."""
    folder = tmp_path_factory.mktemp("ollama")
    for name, template in (("told", TEMPLATE.encode()), ("inserts", INSERT)):
        write_ollama_model(
            folder,
            [("model", files["bare"]), ("template", template)],
            place=f"registry.ollama.ai/library/{name}/latest",
        )
    named = [f"{name}={path}" for name, path in files.items() if name != "bare"]
    models = [*named, "ollama:told", "ollama:inserts"]
    arguments = [word for model in models for word in ("--model", model)]
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            *arguments,
            *("--store", "none", "--slots", "1", "--ctx", str(CONTEXT_TOKENS)),
            OLLAMA_MODELS=str(folder),
        )
        yield kvbus


def generated(served: Kvbus, model: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """Generate greedily; returns the answer, which is a good one."""
    options = {"temperature": 0, "num_predict": 6, **fields.pop("options", {})}
    body = {"model": model, "stream": False, "options": options, **fields}
    answer = served.post("/api/generate", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def shown(served: Kvbus, route: str, model: str, **fields: Any) -> str:  # noqa: ANN401
    """Return the rendered prompt of a request."""
    body = {"model": model, "_debug_render_only": True, **fields}
    answer = served.post(route, body).json()
    return str(answer["_debug_info"]["rendered_template"])


@pytest.mark.parametrize("name", ["fills", "older", "known"])
def test_a_suffix_is_filled_in_as_by_the_engine(
    served: Kvbus, files: dict[str, Path], name: str
) -> None:
    """The prompt is that of llama-server's own route, token for token."""
    ours = generated(served, name, prompt=BEFORE, suffix=AFTER)
    with running(files[name], ctx_size=CONTEXT_TOKENS, parallel=1) as runner:
        theirs = runner.post(
            "/infill",
            input_prefix=BEFORE,
            input_suffix=AFTER,
            n_predict=6,
            temperature=0.0,
            return_tokens=True,
        )
        prompt = runner.post("/tokenize", content=theirs["prompt"], add_special=False)
    assert ours["response"] == theirs["content"]
    assert ours["prompt_eval_count"] == theirs["tokens_evaluated"]
    if name != "known":  # whose texts do not tell where spaces are
        bos = 1 if name == "older" else 0
        num_tokens = len(prompt["tokens"])
        assert ours["context"][: num_tokens - bos] == prompt["tokens"][bos:]
    assert "insert" in served.post("/api/show", {"model": name}).json()["capabilities"]
    text = shown(served, "/api/generate", name, prompt=BEFORE, suffix=AFTER)
    assert text == f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"


@pytest.mark.parametrize("name", ["fills", "inserts"])
def test_a_suffix_is_filled_in_for_openais_clients_too(
    served: Kvbus, name: str
) -> None:
    """The prompt is that of the native route; what cannot be filled in is told."""
    ours = generated(served, name, prompt=BEFORE, suffix=AFTER)
    body = {"model": name, "prompt": BEFORE, "suffix": AFTER, "max_tokens": 6}
    answer = served.post("/v1/completions", {**body, "temperature": 0}).json()
    assert answer["choices"][0]["text"] == ours["response"]
    assert answer["usage"]["prompt_tokens"] == ours["prompt_eval_count"]
    for change, text in (
        ({"model": "sayer"}, "sayer:latest does not support insert"),
        ({"prompt": [1, 2]}, "prompt and suffix must be strings"),
    ):
        answer = served.post("/v1/completions", body | change)
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]


def test_a_template_with_a_place_for_a_suffix_fills_in(served: Kvbus) -> None:
    """A model without tokens for it is able to insert by its TEMPLATE."""
    text = shown(served, "/api/generate", "inserts", prompt="a", suffix="b")
    assert text == "<|im_start|>a<|im_end|>b<|endoftext|>"
    assert generated(served, "inserts", prompt="a", suffix="b")["response"]
    refused = served.post(
        "/api/generate", {"model": "told", "prompt": "a", "suffix": "b"}
    )
    assert refused.status_code == 400
    assert refused.json() == {
        "error": "registry.ollama.ai/library/told:latest does not support insert"
    }


@pytest.mark.parametrize("name", ["fills", "older", "known", "told"])
def test_a_context_comes_before_the_next_prompt(served: Kvbus, name: str) -> None:
    """What is returned has no BOS; put before a prompt its ids are unchanged."""
    first = generated(served, name, prompt="What is the answer?")
    context = first["context"]
    bos = 1 if name in ("older", "known") else 0
    assert len(context) >= first["prompt_eval_count"] - bos
    again = generated(served, name, prompt="And then?", context=context)
    fresh = generated(served, name, prompt="And then?")
    assert again["prompt_eval_count"] == len(context) + fresh["prompt_eval_count"]
    assert again["context"][: len(context)] == context


def test_a_context_is_what_the_engine_has(served: Kvbus) -> None:
    """The ids of a reply are those that were generated: all of its KV is reused."""
    first = generated(served, "sayer", prompt="What is the answer?")
    context = first["context"]
    assert first["response"] == "Hi there, you."
    assert len(context) == first["prompt_eval_count"] + first["eval_count"] - 1
    again = generated(served, "sayer", prompt="And then?", context=context)
    num_tokens = str(again["prompt_eval_count"])

    def found() -> list[dict[str, str]]:
        return [turn for turn in served.turns() if turn["prompt_tokens"] == num_tokens]

    served.wait(lambda: bool(found()), what="the turn's line")
    # the engine has not evaluated the last token of a reply
    assert int(found()[-1]["reused_tokens"]) >= len(context) - 1


def test_the_context_of_a_thinking_model_holds_what_it_thought(served: Kvbus) -> None:
    """Between the marks of its template, as the model has written it."""
    first = generated(served, "thinker", prompt="2+2?")
    assert (first["thinking"], first["response"]) == ("Add them.\n", "4")
    prompt = shown(served, "/api/generate", "thinker", prompt="2+2?")
    whole = generated(
        served,
        "thinker",
        prompt=prompt + "<think>\nAdd them.\n</think>\n\n4",
        raw=True,
    )
    assert len(first["context"]) == whole["prompt_eval_count"]
    again = generated(served, "thinker", prompt="2+2?", context=first["context"])
    assert (again["thinking"], again["response"]) == ("Add them.", "4")
    assert again["context"][: len(first["context"])] == first["context"]


def test_only_the_last_line_has_a_context(served: Kvbus) -> None:
    """It stands where Ollama has it; a raw prompt has none."""
    body = {"model": "fills", "prompt": "Hi", "options": {"num_predict": 2, "seed": 1}}
    answer = served.post("/api/generate", body)
    *lines, last = [json.loads(line) for line in answer.text.splitlines()]
    assert all("context" not in line for line in lines)
    assert list(last)[:7] == [
        "model", "created_at", "response", "done", "done_reason", "context",
        "total_duration",
    ]  # fmt: skip
    assert all(isinstance(token_id, int) for token_id in last["context"])
    assert "context" not in generated(served, "fills", prompt="Hi", raw=True)


@pytest.mark.parametrize(
    ("context", "says"),
    [
        ([1, 10**6], "invalid context: 1000000 is no token of the model"),
        ([-1], "invalid context: -1 is no token"),
        (["1"], "json: cannot unmarshal string into Go struct field"),
        ("1", "json: cannot unmarshal string into Go struct field"),
    ],
)
def test_a_context_of_other_tokens_is_refused(
    served: Kvbus, context: object, says: str
) -> None:
    """Status 400, and the text says what is wrong."""
    body = {"model": "fills", "prompt": "Hi", "context": context}
    answer = served.post("/api/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(says)


def test_a_template_of_the_request_makes_the_prompt(served: Kvbus) -> None:
    """What it writes is evaluated as raw text would be; a wrong one is refused."""
    template = "<|im_start|>{{ .System }}|{{ .Prompt }}<|im_end|>{{ .Response }}!"
    fields = {"prompt": "Hi", "system": "Be brief", "template": template}
    text = "<|im_start|>Be brief|Hi<|im_end|>"
    assert shown(served, "/api/generate", "older", **fields) == text
    made = generated(served, "older", **fields)
    raw = generated(served, "older", prompt=text, raw=True)
    assert made["response"] == raw["response"]
    assert made["prompt_eval_count"] == raw["prompt_eval_count"]
    assert made["context"]
    wrong = {"model": "older", "prompt": "Hi", "template": "a\n{{ if .Prompt }}b"}
    answer = served.post("/api/generate", wrong)
    assert answer.status_code == 400
    assert answer.json() == {"error": "template: :2: unexpected EOF"}


def test_the_models_own_template_makes_the_prompts(served: Kvbus) -> None:
    """Where the file has no chat template; turn by turn, as it reads no messages."""
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    assert shown(served, "/api/chat", "told", messages=messages) == (
        "<|im_start|>system\nBe brief<|im_end|>\n"
        "<|im_start|>user\nOne\n\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n"
        "<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert served.post("/api/show", {"model": "told"}).json()["template"] == TEMPLATE
    answer = served.post(
        "/api/chat",
        {"model": "told", "messages": messages, "stream": False},
    ).json()
    assert answer["prompt_eval_count"] > 20
    tool = {"type": "function", "function": {"name": "now"}}
    for fields, says in (({"tools": [tool]}, "tools"), ({"think": True}, "thinking")):
        body = {"model": "told", "messages": messages, **fields}
        refused = served.post("/api/chat", body)
        assert refused.status_code == 400
        assert refused.json()["error"].endswith(f"does not support {says}")


@pytest.mark.parametrize("name", ["fills", "told"])
def test_the_oldest_messages_are_dropped(served: Kvbus, name: str) -> None:
    """As few as possible; the system and the last message stay."""
    said = [
        {"role": role, "content": f"Number {number}: {'x ' * 9}"}
        for number in range(500)
        for role in ("user", "assistant")
    ]
    messages = [
        {"role": "system", "content": "Be brief"},
        *said,
        {"role": "user", "content": "The last"},
    ]
    text = shown(served, "/api/chat", name, messages=messages)
    assert "Be brief" in text
    assert "The last" in text
    assert "Number 499" in text
    numbers = [number for number in range(500) if f"Number {number}:" in text]
    assert all(next_ == number + 1 for number, next_ in pairwise(numbers))
    body = {"model": name, "messages": messages, "stream": False}
    options = {"num_predict": 1}
    answer = served.post("/api/chat", {**body, "options": options})
    assert answer.status_code == 200, answer.text
    evaluated = answer.json()["prompt_eval_count"]
    assert CONTEXT_TOKENS - 80 < evaluated < CONTEXT_TOKENS
    refused = served.post("/api/chat", {**body, "truncate": False})
    assert refused.status_code == 400
    error = json.loads(refused.json()["error"])["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == CONTEXT_TOKENS


def test_a_last_message_that_is_too_long_is_refused(served: Kvbus) -> None:
    """Nothing of it is left out silently; the system's message counts, too."""
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "old"},
        {"role": "user", "content": "x " * CONTEXT_TOKENS},
    ]
    answer = served.post("/api/chat", {"model": "fills", "messages": messages})
    assert answer.status_code == 400
    assert "exceeds the available context size" in answer.json()["error"]


@pytest.mark.parametrize("fields", [{"raw": True}, {}, {"template": "{{ .Prompt }}"}])
@pytest.mark.parametrize("repeated", [CONTEXT_TOKENS, 100_000])
def test_a_single_prompt_that_is_too_long_is_cut(
    served: Kvbus, fields: dict[str, Any], repeated: int
) -> None:
    """Its first tokens and the newest stay, about half of the context is free."""
    options = {"num_keep": 12, "num_predict": 2}
    prompt = "x " * repeated
    made = generated(served, "older", prompt=prompt, options=options, **fields)
    kept = 12 + 1
    room = CONTEXT_TOKENS - (CONTEXT_TOKENS - kept) // 2
    assert made["prompt_eval_count"] == room
    body = {"model": "older", "prompt": prompt, **fields}
    refused = served.post("/api/generate", {**body, "truncate": False})
    assert refused.status_code == 400
    assert "exceeds the available context size" in refused.json()["error"]
    refused = served.post("/api/generate", {**body, "shift": False})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("the prompt is longer than the context")


def test_a_long_prompt_with_a_suffix_keeps_what_is_next_to_the_gap(
    served: Kvbus,
) -> None:
    """Both parts are cut at their far ends, and the marks stay."""
    made = generated(
        served, "older", prompt="x " * 600 + BEFORE, suffix=AFTER + " y" * 600
    )
    assert made["prompt_eval_count"] < CONTEXT_TOKENS
    whole = generated(served, "older", prompt=BEFORE, suffix=AFTER)
    first, last = whole["context"][0], whole["context"][-7]
    assert made["context"][0] == first
    assert made["context"][-7] == last


def test_a_hostile_template_ends_soon(served: Kvbus) -> None:
    """It costs a second or two at most, and is told what is wrong."""
    loop = "{{ range 1000000 }}" * 3 + "{{ end }}" * 3
    body = {"model": "fills", "prompt": "Hi", "template": loop}
    answer = served.post("/api/generate", body)
    assert answer.status_code == 400
    assert answer.json() == {"error": "template: the template takes too many steps"}
    growing = '{{ $x := "xxxx" }}{{ range 100 }}{{ $x = print $x $x }}{{ end }}'
    answer = served.post("/api/generate", {**body, "template": growing})
    assert answer.json() == {"error": "template: the template makes too much text"}
