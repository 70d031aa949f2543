"""What models are able to do, by their template, file and runner."""

import doctest
from dataclasses import replace
from typing import Any

import pytest

from proxy.llamacpp import props
from proxy.llamacpp.props import RunnerProps, read_props
from proxy.ollama import abilities
from proxy.ollama.abilities import abilities_of
from tests.fakes.scripted_turns import FACTS, ScriptedModel
from tests.scripted_model import Script, chat_template


def model_with(
    runner: RunnerProps | None = None,
    **facts: Any,  # noqa: ANN401 - any fact
) -> ScriptedModel:
    """Make a model with other facts."""
    return ScriptedModel(facts=replace(FACTS, **facts), props=runner)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", "completion"),
        ("{{ messages }}", "completion"),
        ("{% if tools %}", "completion tools"),
        ("<think></think>", "completion thinking"),
        ("{{ message.content.split('</think>')[1] }}", "completion thinking"),
        ("{{ content.split('</think>') }} reasoning_content", "completion"),
        ("{% if enable_thinking %}", "completion thinking"),
        ("<|channel|>analysis", "completion thinking"),
        (chat_template(Script(to_user="")), "completion tools thinking"),
        (chat_template(Script(to_user="", thinks=False)), "completion tools"),
        (chat_template(Script(to_user="", knows_tools=False)), "completion thinking"),
    ],
)
def test_the_template_tells_of_tools_and_thinking(template: str, expected: str) -> None:
    """Before a runner was up the file's template counts."""
    assert " ".join(abilities_of(model_with(chat_template=template))) == expected


def test_the_runner_knows_better() -> None:
    """A runner's own template and what it found out outrank the file."""
    runner = RunnerProps("<think></think>", True, frozenset({"vision"}))
    model = model_with(runner=runner, chat_template="")
    assert " ".join(abilities_of(model)) == "completion tools vision thinking"
    plain = RunnerProps("mentions tools", False, frozenset())
    model = model_with(runner=plain, chat_template="<think></think> tools")
    assert " ".join(abilities_of(model)) == "completion"


def test_fill_in_the_middle_needs_its_tokens() -> None:
    """Three tokens, by their texts or by the ids that the file names."""
    texts = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokens = tuple(enumerate(texts))
    assert "insert" in abilities_of(model_with(control_tokens=tokens))
    assert "insert" not in abilities_of(model_with(control_tokens=tokens[:2]))
    named = {f"tokenizer.ggml.fim_{kind}_token_id": 7 for kind in ("pre", "suf", "mid")}
    assert "insert" in abilities_of(model_with(metadata=named))


def test_a_model_that_pools_makes_embeddings_only() -> None:
    """It neither completes nor fills in."""
    model = model_with(metadata={"llama.pooling_type": 1})
    assert abilities_of(model) == ("embedding",)


def test_props_of_other_servers_are_read() -> None:
    """What a server does not tell of itself it is not taken to be able to do."""
    assert read_props({}) == RunnerProps("", False, frozenset())
    given = {"chat_template": "tools", "modalities": {"vision": True, "audio": False}}
    assert read_props(given) == RunnerProps("tools", True, frozenset({"vision"}))
    odd = {"chat_template": 1, "chat_template_caps": {}, "modalities": []}
    assert read_props(odd) == RunnerProps("", False, frozenset())


def test_worked_examples() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(abilities).failed == 0
    assert doctest.testmod(props).failed == 0
