"""A model out of Ollama's own folder: its files, and what its Modelfile says.

`manifests/HOST/NAMESPACE/NAME/TAG` is JSON that lists layers, each with a media type,
a size and a digest; `blobs/sha256-...` hold their contents. Rules:
1. Only names and digests of the strict form become parts of a path: no manifest leads
   out of the folder.
2. What is cheap to verify is verified: the size of each layer, the SHA-256 of the small
   ones, the magic of model and projector. The model's own SHA-256 is compared by
   whoever reads all of it anyway (`check_digest`).
3. Every fault is one line that names the model and the file. What cannot be served (an
   adapter, several models) is refused; what has no effect here is logged by the caller.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.errors import ConfigError

OLLAMA_PREFIX = "ollama:"
DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
FOLDER_VARIABLE = "OLLAMA_MODELS"
SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama keeps its models when it runs as a service of its own user."""

_LARGEST_TEXT_BYTES = 16 << 20
_GGUF_MAGIC = b"GGUF"
_MEDIA_TYPE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PART = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,78}[A-Za-z0-9_])?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_][\w.:-]{0,348}", re.ASCII)
_NAMES_ONE_FILE = ("model", "projector")
_NEEDS_OLLAMA = ("renderer", "parser")
"""Of the manifest's configuration: code inside Ollama that makes prompts."""


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model in Ollama's own folder, by its name there."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One blob of a model."""

    kind: str
    """`model`, `template`, `system`, `params`, `license`, ..."""
    path: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelfile:
    """What a model brings along besides its weights; of a plain file nothing.

    Each comes from the layer of its own kind.
    """

    source: str = ""
    """As in `ollama:NAME:TAG`; empty for a plain file."""
    layers: tuple[Layer, ...] = ()
    system: str = ""
    template: str = ""
    """In Go's template language. The chat template of the GGUF file goes first."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Options of requests that do not state them, not checked yet."""
    messages: tuple[Mapping[str, str], ...] = ()
    """`role` and `content` of what precedes every conversation."""
    licenses: tuple[str, ...] = ()
    needs_ollama: tuple[str, ...] = ()
    """Parts of Ollama that this model's prompts are made with, as `RENDERER qwen3`."""

    def layer(self, kind: str) -> Layer | None:
        """Return the first layer of a kind."""
        return next((layer for layer in self.layers if layer.kind == kind), None)


NO_MODELFILE = Modelfile()
"""That of a plain file."""


def default_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return where Ollama may keep its models; a folder that is named is the only one.

    >>> default_folders({"OLLAMA_MODELS": "/models"})
    [PosixPath('/models')]
    """
    named = environment.get(FOLDER_VARIABLE, "").strip().strip("\"'")
    if named:
        return [Path(named).expanduser()]
    return [Path.home() / ".ollama" / "models", SYSTEM_FOLDER]


def find_model(name: str, folders: Sequence[Path] | None = None) -> Modelfile:
    """Find a model by the name that Ollama knows it by, and read it (blocking).

    Its `model` layer is there; a `projector` layer may be. Raises ConfigError.
    """
    source = f"{OLLAMA_PREFIX}{name}"
    parts = _split(name)
    looked = default_folders(os.environ) if folders is None else folders
    for folder in looked:
        manifest = _descend(folder / "manifests", parts)
        if manifest is not None:
            return _read_model(source, manifest, folder / "blobs")
    places = " or ".join(str(folder) for folder in looked)
    raise ConfigError(f"{source}: there is no such model in {places}")


def _split(name: str) -> tuple[str, str, str, str]:
    """Return (host, namespace, name, tag) of a name. Raises ConfigError."""
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = name, DEFAULT_TAG
    *place, model = rest.split("/")
    namespace = place.pop() if place else DEFAULT_NAMESPACE
    host = place.pop() if place else DEFAULT_HOST
    is_good = all(_PART.fullmatch(part) for part in (namespace, model, tag))
    if place or not is_good or not _HOST.fullmatch(host):
        raise ConfigError(f"ollama:{name}: that is no name of a model")
    return host, namespace, model, tag


def _descend(directory: Path, parts: Sequence[str]) -> Path | None:
    """Follow the parts of a name, whatever their case; None where one is missing."""
    for part in parts:
        found = directory / part
        if not found.exists():
            try:
                names = sorted(entry.name for entry in directory.iterdir())
            except OSError:
                return None
            alike = (name for name in names if name.lower() == part.lower())
            other = next(alike, None)
            if other is None:
                return None
            found = directory / other
        directory = found
    return directory


def _read_model(source: str, manifest: Path, blobs: Path) -> Modelfile:
    document = _json_object(source, manifest, _read(source, manifest))
    layers = tuple(_layers(source, manifest, blobs, document))
    for kind in _NAMES_ONE_FILE:
        found = [layer for layer in layers if layer.kind == kind]
        if len(found) > 1:
            raise ConfigError(f"{source}: {len(found)} {kind} files; one can be served")
    if not any(layer.kind == "model" for layer in layers):
        raise ConfigError(f"{source}: {manifest} names no model file")
    for layer in layers:
        _check_layer(source, layer)
    texts = {
        kind: [_text(source, layer) for layer in layers if layer.kind == kind]
        for kind in ("system", "template", "license")
    }
    return Modelfile(
        source=source,
        layers=layers,
        system=texts["system"][-1] if texts["system"] else "",
        template=texts["template"][-1] if texts["template"] else "",
        parameters=_parameters(source, layers),
        messages=tuple(_messages(source, layers)),
        licenses=tuple(texts["license"]),
        needs_ollama=_needs_ollama(source, blobs, document),
    )


def _layers(
    source: str, manifest: Path, blobs: Path, document: Mapping[str, Any]
) -> Iterator[Layer]:
    listed = document.get("layers")
    if not isinstance(listed, list):
        raise ConfigError(f"{source}: {manifest} lists no layers")
    for entry in listed:
        media_type = entry.get("mediaType") if isinstance(entry, dict) else None
        if not isinstance(media_type, str):
            raise ConfigError(f"{source}: {manifest} has a layer without a type")
        num_bytes = entry.get("size")
        if not isinstance(num_bytes, int):
            raise ConfigError(f"{source}: {manifest} has a layer without a size")
        sha256 = _sha256(source, manifest, entry.get("digest"))
        yield Layer(
            kind=media_type.partition(";")[0].removeprefix(_MEDIA_TYPE),
            path=blobs / f"sha256-{sha256}",
            sha256=sha256,
            num_bytes=num_bytes,
        )


def _sha256(source: str, manifest: Path, digest: object) -> str:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ConfigError(f"{source}: {manifest} has a digest that is none: {digest!r}")
    return match[1]


def _check_layer(source: str, layer: Layer) -> None:
    if layer.kind == "adapter":
        raise ConfigError(f"{source}: models with an ADAPTER are not served")
    try:
        with layer.path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as exc:
        raise ConfigError(f"{source}: {layer.path}: {exc.strerror}") from exc
    if num_bytes != layer.num_bytes:
        raise ConfigError(
            f"{source}: {layer.path} has {num_bytes} bytes instead of"
            f" {layer.num_bytes}: pull the model again"
        )
    if layer.kind in _NAMES_ONE_FILE and magic != _GGUF_MAGIC:
        raise ConfigError(f"{source}: {layer.path} is not a GGUF file")


def check_digest(modelfile: Modelfile, sha256: str | None) -> None:
    """Compare the digest of the model file that was read. Raises ConfigError."""
    layer = modelfile.layer("model")
    if layer is not None and sha256 is not None and sha256 != layer.sha256:
        raise ConfigError(
            f"{modelfile.source}: {layer.path} is damaged: pull the model again"
        )


def _parameters(source: str, layers: Sequence[Layer]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer.kind == "params":
            data = _verified(source, layer)
            merged |= _json_object(source, layer.path, data)
    return merged


def _messages(source: str, layers: Sequence[Layer]) -> Iterator[dict[str, str]]:
    for layer in layers:
        if layer.kind != "messages":
            continue
        listed = _json(source, layer.path, _verified(source, layer))
        for entry in listed if isinstance(listed, list) else [None]:
            fields = entry if isinstance(entry, dict) else {}
            role, content = fields.get("role"), fields.get("content", "")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ConfigError(f"{source}: {layer.path} holds no messages")
            yield {"role": role, "content": content}


def _needs_ollama(
    source: str, blobs: Path, document: Mapping[str, Any]
) -> tuple[str, ...]:
    """Read the model's configuration, if it has any."""
    entry = document.get("config")
    if not isinstance(entry, dict):
        return ()
    path = blobs / f"sha256-{_sha256(source, blobs, entry.get('digest'))}"
    if not path.exists():
        return ()
    fields = _json_object(source, path, _read(source, path))
    return tuple(
        f"{name.upper()} {fields[name]}" for name in _NEEDS_OLLAMA if fields.get(name)
    )


def _text(source: str, layer: Layer) -> str:
    return _verified(source, layer).decode(errors="replace")


def _verified(source: str, layer: Layer) -> bytes:
    data = _read(source, layer.path)
    if hashlib.sha256(data).hexdigest() != layer.sha256:
        raise ConfigError(f"{source}: {layer.path} is damaged: pull the model again")
    return data


def _read(source: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_TEXT_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{source}: {path}: {exc.strerror}") from exc
    if len(data) > _LARGEST_TEXT_BYTES:
        raise ConfigError(f"{source}: {path} is too large for what it should hold")
    return data


def _json(source: str, path: Path, data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{source}: {path} is not JSON") from exc


def _json_object(source: str, path: Path, data: bytes) -> dict[str, Any]:
    document = _json(source, path, data)
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: {path} is not a JSON object")
    return document
