"""Images: what is read, what is refused, and what the engine is sent."""

import base64
import json
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.ollama.abilities import check_supported
from proxy.ollama.backend import CHAT_PATH
from proxy.ollama.options import parse_options
from proxy.ollama.prompts import prepare
from proxy.ollama.protocol import parse_chat, parse_generate
from tests.fakes.scripted_turns import FACTS, ScriptedModel

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(20)).decode()
IMAGE_PART = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{PNG}"},
}


def body(**fields: Any) -> bytes:  # noqa: ANN401 - JSON
    """Write a body."""
    return json.dumps({"model": "smol", **fields}).encode()


def seeing_model() -> ScriptedModel:
    """Return a model with a projector that no runner has loaded yet."""
    projector = json.loads(FACTS.to_json())
    projector["metadata"] = {"clip.has_vision_encoder": True}
    return ScriptedModel(
        props=None, projector=ModelFacts.from_json(json.dumps(projector).encode())
    )


def test_images_come_before_the_text() -> None:
    """Each is a data URL of its own type; line ends in base64 are left out."""
    lines = PNG[:8] + "\r\n" + PNG[8:]
    message = {"role": "user", "content": "What?", "images": [lines, JPEG]}
    (sent,) = parse_chat(body(messages=[message])).messages()
    text = {"type": "text", "text": "What?"}
    assert sent["content"][0] == IMAGE_PART
    assert sent["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert sent["content"][2] == text
    asked = parse_generate(body(prompt="What?", system="Be kind", images=[PNG]))
    assert [message["content"] for message in asked.messages()] == [
        "Be kind",
        [IMAGE_PART, text],
    ]


@pytest.mark.parametrize(
    ("image", "at"), [("data:image/png;base64,AA==", 4), ("AA=A", 2), ("AAA", 3)]
)
def test_bad_base64(image: str, at: int) -> None:
    """As Go tells: a data URL is none, nor is a text that breaks off."""
    with pytest.raises(RequestError, match=f"illegal base64 data at input byte {at}"):
        parse_generate(body(prompt="x", images=[image]))


def test_who_cannot_see() -> None:
    """A model without a projector gets Ollama's text, also before it is loaded."""
    asked = parse_generate(body(prompt="x", images=[PNG]))
    with pytest.raises(RequestError, match='"smol" does not support images'):
        check_supported(asked, ScriptedModel())
    check_supported(asked, seeing_model())
    raw = parse_generate(body(prompt="x", images=[PNG], raw=True))
    with pytest.raises(RequestError, match="raw mode does not support images"):
        check_supported(raw, seeing_model())


async def test_what_the_engine_is_sent() -> None:
    """The chat route, no token ids, nothing rendered for them, and no sharing."""
    model = seeing_model()
    asked = parse_generate(body(prompt="What?", images=[PNG]))
    prompt = await prepare(asked, model, options=parse_options({"num_predict": 5}))
    assert (prompt.path, len(prompt.token_ids)) == (CHAT_PATH, 0)
    assert not prompt.is_text
    assert prompt.body["messages"][0]["content"][0] == IMAGE_PART
    assert prompt.body["n_predict"] == 5
    assert model.rendered == []
