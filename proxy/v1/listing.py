"""The models as OpenAI's API lists them."""

from collections.abc import Sequence
from typing import Any

from proxy.durations import NANOSECONDS
from proxy.ollama.backend import ServedModel

_DEFAULT_OWNER = "library"


def list_object(models: Sequence[ServedModel]) -> dict[str, Any]:
    """List all models, the newest file first."""
    newest_first = sorted(models, key=lambda model: -model.facts.mtime_ns)
    return {"object": "list", "data": [*map(model_object, newest_first)]}


def model_object(model: ServedModel) -> dict[str, Any]:
    """Describe one model."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.facts.mtime_ns // NANOSECONDS,
        "owned_by": owner(model.name),
    }


def owner(name: str) -> str:
    """Return the namespace in a model's name.

    >>> owner("smol:latest"), owner("hf.co/somebody/smol:latest")
    ('library', 'somebody')
    """
    *_, namespace, _model = ("", *name.split("/"))
    return namespace or _DEFAULT_OWNER
