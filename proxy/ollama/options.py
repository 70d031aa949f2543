"""What `options` and `keep_alive` of a request say.

Rules:
1. The defaults are Ollama's, not llama-server's: every sampling value is sent to the
   runner explicitly.
2. Unknown names are ignored, null is "not given", a float for an integer is cut off.
   A wrong type is refused with status 500 and Ollama's text.
3. The options of loading a model (`num_gpu`, `num_thread`, ...) are checked and have
   no effect: the runners are already up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from proxy.durations import parse_go_duration
from proxy.errors import RequestError

_INT64_LIMIT = 2**63

_LOAD_INTEGERS = ("num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The options of one request, with Ollama's defaults."""

    num_ctx: int | None = None
    num_keep: int = 4
    num_predict: int = -1
    seed: int = -1
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    temperature: float = 0.8
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()


_INTEGERS = ("num_ctx", "num_keep", "num_predict", "seed", "top_k", "repeat_last_n")
_FLOATS = (
    "top_p",
    "min_p",
    "typical_p",
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def parse_options(raw: Mapping[str, Any]) -> SamplingOptions:
    """Read the `options` object of a request.

    Raises RequestError (500) for a value of the wrong type.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    values: dict[str, Any] = {}
    for name in _INTEGERS:
        if name in given:
            values[name] = _integer(name, given[name])
    for name in _FLOATS:
        if name in given:
            values[name] = _float(name, given[name])
    if "stop" in given:
        values["stop"] = _strings("stop", given["stop"])
    for name in _LOAD_INTEGERS:
        if name in given:
            _integer(name, given[name])
    if "use_mmap" in given and not isinstance(given["use_mmap"], bool):
        raise _wrong_type("use_mmap", "boolean")
    return SamplingOptions(**values)


def _wrong_type(name: str, kind: str) -> RequestError:
    return RequestError(500, f'option "{name}" must be of type {kind}')


def _is_number(value: object) -> TypeGuard[int | float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _integer(name: str, value: object) -> int:
    if not _is_number(value) or not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise _wrong_type(name, "integer")
    return int(value)


def _float(name: str, value: object) -> float:
    if not _is_number(value):
        raise _wrong_type(name, "float32")
    return float(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _wrong_type(name, "array")
    if not all(isinstance(entry, str) for entry in value):
        raise RequestError(500, f'option "{name}" must be of an array of strings')
    return tuple(value)


def parse_keep_alive(value: object) -> float | None:
    """Read `keep_alive` in seconds; infinity for a negative one, None for null.

    Raises RequestError (400) with Go's text.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        raise RequestError(400, "Unsupported type: 'bool'")
    if isinstance(value, int | float):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = parse_duration(value)
    else:
        kind = (
            "[]interface {}" if isinstance(value, list) else "map[string]interface {}"
        )
        raise RequestError(400, f"Unsupported type: '{kind}'")
    return math.inf if seconds < 0 else seconds


def parse_duration(text: str) -> float:
    """Read a Go duration such as `1h30m` or `-1m`, in seconds.

    Raises RequestError (400) with Go's text.
    """
    try:
        return parse_go_duration(text)
    except ValueError as exc:
        raise RequestError(400, str(exc)) from exc
