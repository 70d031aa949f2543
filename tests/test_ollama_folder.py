"""Models out of Ollama's own folder: what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import ConfigError
from proxy.model_sources import ModelSource
from proxy.ollama_folder import OllamaName, default_folders, find_model
from tests.models import write_tiny_llama
from tests.ollama_models import write_ollama_model

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a tiny model file."""
    return write_tiny_llama(tmp_path / "m.gguf", seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that does not exist yet."""
    return tmp_path / "models"


def test_all_layers_are_read(folder: Path, model: Path) -> None:
    """Each part comes from its layer, and what needs Ollama itself is told."""
    write_ollama_model(
        folder,
        [
            ("model", model),
            ("projector", b"GGUF and more"),
            ("template", b"{{ .Prompt }}"),
            ("system", "You are \u00e9".encode()),
            ("params", b'{"stop":["<|im_end|>"],"temperature":0.5}'),
            ("messages", b'[{"role":"user","content":"Hi"}]'),
            ("license", b"One"),
            ("license", b"Two"),
            ("something-new", b"?"),
        ],
        config={"model_format": "gguf", "renderer": "qwen3-coder"},
    )
    found = find_model("tiny", [folder])
    weights, projector = found.layer("model"), found.layer("projector")
    assert weights is not None
    assert projector is not None
    assert weights.path.read_bytes() == model.read_bytes()
    assert weights.path.name == f"sha256-{weights.sha256}"
    assert found.source == "ollama:tiny"
    assert found.template == "{{ .Prompt }}"
    assert found.system == "You are \u00e9"
    assert found.parameters == {"stop": ["<|im_end|>"], "temperature": 0.5}
    assert found.messages == ({"role": "user", "content": "Hi"},)
    assert found.licenses == ("One", "Two")
    assert found.needs_ollama == ("RENDERER qwen3-coder",)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest"),
        ("Tiny:7B", "registry.ollama.ai/library/tiny/7b"),
        ("me/tiny", "registry.ollama.ai/me/tiny/latest"),
        ("hf.co/You/Tiny-GGUF:Q4_0", "hf.co/you/Tiny-GGUF/Q4_0"),
        ("localhost:5000/me/tiny", "localhost:5000/me/tiny/latest"),
    ],
)
def test_names(folder: Path, model: Path, name: str, place: str) -> None:
    """Host, namespace and tag may be left out; case does not matter."""
    write_ollama_model(folder, [("model", model)], place=place)
    assert find_model(name, [folder / "elsewhere", folder]).layer("model")


@pytest.mark.parametrize(
    "name",
    ["", ":x", "a/b/c/d", "..", "../tiny", "tiny:..", "ti ny", "a//b", "/tiny", "t:"],
)
def test_bad_names(folder: Path, name: str) -> None:
    """What is no name never becomes a path."""
    with pytest.raises(ConfigError, match="that is no name of a model"):
        find_model(name, [folder])


def test_a_model_that_is_not_there(folder: Path, model: Path) -> None:
    """The line names the places that were looked at."""
    write_ollama_model(folder, [("model", model)])
    with pytest.raises(ConfigError) as caught:
        find_model("tiny:8b", [folder, folder / "other"])
    assert str(caught.value) == (
        f"ollama:tiny:8b: there is no such model in {folder} or {folder}/other"
    )


def _set(index: int, name: str, value: object) -> Change:
    return lambda document: document["layers"][index].update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document.pop("layers"), "lists no layers"),
        (lambda document: document.update(layers=[3]), "without a type"),
        (lambda document: document.update(layers=[]), "names no model file"),
        (lambda document: document["layers"].append(document["layers"][0]), "2 model"),
        (_set(0, "mediaType", None), "without a type"),
        (_set(0, "size", "1"), "without a size"),
        (_set(0, "size", 1), "instead of 1: pull the model again"),
        (_set(0, "digest", "sha256:" + "0" * 64), "No such file"),
        (_set(0, "digest", "sha256:" + "0" * 63), "a digest that is none"),
        (_set(0, "digest", "sha256:../../../etc/passwd"), "a digest that is none"),
        (_set(0, "digest", None), "a digest that is none"),
        (_set(1, "mediaType", "application/vnd.ollama.image.adapter"), "ADAPTER"),
        (_set(1, "mediaType", "application/vnd.ollama.image.projector"), "not a GGUF"),
        (_set(1, "mediaType", "application/vnd.ollama.image.params"), "is not JSON"),
        (_set(1, "mediaType", "application/vnd.ollama.image.messages"), "is not JSON"),
        (lambda document: document.update(config={"digest": "x"}), "that is none"),
    ],
)
def test_bad_manifests_are_one_clear_line(
    folder: Path, model: Path, change: Change, says: str
) -> None:
    """Missing, cut-off and foreign blobs, and what is no manifest at all."""
    manifest = write_ollama_model(folder, [("model", model), ("system", b"Be kind")])
    document = json.loads(manifest.read_text())
    change(document)
    manifest.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=says) as caught:
        find_model("tiny", [folder])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("ollama:tiny: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_no_json_object(folder: Path, text: str) -> None:
    """Bad JSON is one clear line, however deep it goes."""
    manifest = write_ollama_model(folder, [])
    manifest.write_text(text)
    with pytest.raises(ConfigError, match="is not"):
        find_model("tiny", [folder])


async def test_damaged_blobs_are_noticed(folder: Path, model: Path) -> None:
    """A text of the right length is compared by its digest, the model when read."""
    write_ollama_model(folder, [("model", model), ("system", b"Be kind")])
    found = find_model("tiny", [folder])
    system, weights = found.layer("system"), found.layer("model")
    assert system is not None
    assert weights is not None
    system.path.write_bytes(b"Be evil")
    with pytest.raises(ConfigError, match="is damaged"):
        find_model("tiny", [folder])
    system.path.write_bytes(b"Be kind")
    data = bytearray(weights.path.read_bytes())
    data[-1] ^= 1
    weights.path.unlink()
    weights.path.write_bytes(data)
    source = ModelSource(model=OllamaName("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLLAMA_MODELS", str(folder))
        with pytest.raises(ConfigError, match="is damaged"):
            await source.look(folder / "cache")


def test_where_ollama_keeps_models() -> None:
    """Its own variable wins; else the user's folder, then the service's."""
    assert default_folders({"OLLAMA_MODELS": "/m"}) == [Path("/m")]
    assert [str(path) for path in default_folders({})] == [
        str(Path.home() / ".ollama/models"),
        "/usr/share/ollama/.ollama/models",
    ]
