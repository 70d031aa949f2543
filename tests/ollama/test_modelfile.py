"""What a Modelfile adds to requests, and how it is shown."""

from typing import Any

import pytest

from proxy.ollama.listing import show_reply
from proxy.ollama.modelfile import with_messages, with_parameters
from proxy.ollama.protocol import parse_chat, parse_generate
from proxy.ollama_folder import Modelfile
from tests.fakes.scripted_turns import ScriptedModel

MODELFILE = Modelfile(
    source="ollama:smol",
    system="Be kind",
    template="{{ .Prompt }}",
    parameters={"temperature": 0.5, "stop": ["<a>", "b"], "num_ctx": 2048},
    messages=({"role": "user", "content": "Hi"},),
    licenses=("One", "Two"),
)


def roles(messages: Any) -> list[str]:  # noqa: ANN401 - whatever it is
    """Return what is said, in order."""
    return [message["content"] for message in messages]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt":"Yes?"}', ["Be kind", "Hi", "Yes?"]),
        (b'{"prompt":"Yes?","system":"No"}', ["No", "Hi", "Yes?"]),
        (b'{"prompt":"Yes?","context":[1]}', ["Be kind", "Yes?"]),
    ],
)
def test_messages_of_generate(body: bytes, said: list[str]) -> None:
    """SYSTEM, unless there is another, MESSAGE, unless there is a context, prompt."""
    assert roles(with_messages(parse_generate(body), MODELFILE)) == said


def test_messages_of_chat() -> None:
    """A system message of the client's takes the place of SYSTEM, after MESSAGE."""
    asked = parse_chat(b'{"messages":[{"role":"user","content":"Yes?"}]}')
    assert roles(with_messages(asked, MODELFILE)) == ["Be kind", "Hi", "Yes?"]
    own = parse_chat(b'{"messages":[{"role":"system","content":"No"}]}')
    assert roles(with_messages(own, MODELFILE)) == ["Hi", "No"]
    assert roles(with_messages(asked, Modelfile())) == ["Yes?"]


def test_parameters_are_defaults() -> None:
    """What a request states wins; null states nothing; num_ctx is for loading."""
    options = {"temperature": 1, "stop": None, "seed": 3}
    assert with_parameters(options, MODELFILE) == {
        "temperature": 1,
        "stop": ["<a>", "b"],
        "seed": 3,
    }


def test_show_tells_all_of_it() -> None:
    """Texts as Ollama shows them; the template that is used is the model file's."""
    shown = show_reply(ScriptedModel(modelfile=MODELFILE))
    assert shown["license"] == "One\nTwo"
    assert shown["system"] == "Be kind"
    assert shown["template"] == "{{ messages }}"
    assert shown["messages"] == [{"role": "user", "content": "Hi"}]
    assert shown["parameters"].splitlines() == [
        "num_ctx                        2048",
        'stop                           "<a>"',
        'stop                           "b"',
        "temperature                    0.5",
    ]
    lines = shown["modelfile"].splitlines()
    assert lines[0] == "# ollama:smol"
    assert "# The TEMPLATE is that of the model file, not Ollama's" in lines
    assert "FROM smol.gguf" in lines
    assert 'PARAMETER stop "<a>"' in lines
    assert 'MESSAGE user """Hi"""' in lines
    plain = show_reply(ScriptedModel())
    assert {"system", "parameters", "messages"}.isdisjoint(plain)
