"""`/v1/embeddings`: what a body may say, and the shape of the answer."""

import base64
from typing import Any

import numpy as np
import pytest

from proxy.errors import RequestError
from proxy.go_json import to_json
from proxy.llamacpp.embeddings import EngineEmbeddings
from proxy.v1.embeddings import list_object, parse_request

MADE = EngineEmbeddings((np.array([3.0, 0.0, 4.0], np.float32),), 7)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("x", ("x",)),
        ("", ("",)),
        (["x", ""], ("x", "")),
        ([5, 6], ([5, 6],)),
        ([[5, 6], [7]], ([5, 6], [7])),
    ],
)
def test_inputs(given: Any, inputs: tuple[Any, ...]) -> None:  # noqa: ANN401 - JSON
    """A text, texts, the token ids of a text, or of several."""
    assert parse_request({"model": "m", "input": given}).inputs == inputs


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "m"}, 400, "invalid input"),
        ({"model": "m", "input": []}, 400, "invalid input"),
        ({"model": "m", "input": {}}, 400, "invalid input type"),
        ({"model": "m", "input": ["x", 5]}, 400, "invalid input type"),
        ({"model": "m", "input": [True]}, 400, "invalid input type"),
        ({"model": "m", "input": [[5], ["x"]]}, 400, "invalid input type"),
        ({"input": "x"}, 404, "model '' not found"),
        (
            {"model": "m", "input": "x", "encoding_format": "hex"}, 400,
            "Invalid value for 'encoding_format' = hex. Supported values: "
            "['float', 'base64'].",
        ),
        (
            {"model": "m", "input": "x", "dimensions": 1.5}, 400,
            "json: cannot unmarshal number into Go struct field "
            "EmbedRequest.dimensions of type int",
        ),
    ],
)  # fmt: skip
def test_mistakes(body: dict[str, Any], status: int, text: str) -> None:
    """Each gets Ollama's status and text."""
    with pytest.raises(RequestError) as caught:
        parse_request(body)
    assert (caught.value.status, caught.value.message) == (status, text)


def test_the_answer_in_numbers() -> None:
    """OpenAI's fields; vectors are cut to the dimensions and have length 1."""
    wanted = parse_request({"model": "m", "input": "x", "dimensions": 2})
    assert to_json(list_object(wanted, MADE)) == (
        b'{"object":"list","data":[{"object":"embedding","embedding":[1.0,0.0],'
        b'"index":0}],"model":"m","usage":{"prompt_tokens":7,"total_tokens":7}}'
    )


def test_the_answer_in_base64() -> None:
    """Little-endian float32; the format's name counts in any case."""
    wanted = parse_request({"model": "m", "input": "x", "encoding_format": "Base64"})
    (entry,) = list_object(wanted, MADE)["data"]
    packed = base64.b64decode(entry["embedding"])
    assert np.allclose(np.frombuffer(packed, "<f4"), [0.6, 0.0, 0.8])
