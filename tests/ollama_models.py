"""Writes models into a folder laid out as Ollama's own."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEDIA_TYPE = "application/vnd.ollama.image."


def write_blob(folder: Path, content: bytes | Path) -> dict[str, Any]:
    """Write a blob, or link a file as one; returns its digest and size."""
    data = content.read_bytes() if isinstance(content, Path) else content
    digest = hashlib.sha256(data).hexdigest()
    path = folder / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if isinstance(content, Path):
            os.link(content, path)
        else:
            path.write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def write_ollama_model(
    folder: Path,
    layers: Sequence[tuple[str, bytes | Path]],
    *,
    place: str = "registry.ollama.ai/library/tiny/latest",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of these layers (kind, content); returns its manifest."""
    manifest = folder / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "layers": [
            {"mediaType": MEDIA_TYPE + kind, **write_blob(folder, content)}
            for kind, content in layers
        ],
    }
    if config is not None:
        document["config"] = {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            **write_blob(folder, json.dumps(config).encode()),
        }
    manifest.write_text(json.dumps(document))
    return manifest
