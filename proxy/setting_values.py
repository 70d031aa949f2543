"""How the values of settings are written: each function reads one form.

All raise ValueError with what is wrong; who calls says where the value came from.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

from proxy.durations import parse_go_duration
from proxy.ollama_folder import OLLAMA_PREFIX, OllamaName

_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w./-]*(:[\w.-]+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that "3G", "512MiB" or "1000" mean (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 4G")
    exponent = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * 1024**exponent)


def parse_listen(text: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT, [::1]:PORT, :PORT or PORT."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def parse_model(text: str) -> tuple[str, Path | OllamaName]:
    """Return (name, source) of NAME=PATH.gguf, NAME=ollama:MODEL or ollama:MODEL."""
    name, separator, place = text.partition("=")
    if not separator and text.startswith(OLLAMA_PREFIX):
        place = text
        name = text.removeprefix(OLLAMA_PREFIX)
    if not place and separator:
        raise ValueError(f"{text!r} names no file")
    if not place or not _MODEL_NAME.fullmatch(name):
        raise ValueError(f"{text!r} is not NAME=PATH.gguf or ollama:NAME:TAG")
    if place.startswith(OLLAMA_PREFIX):
        return name, OllamaName(place.removeprefix(OLLAMA_PREFIX))
    return name, Path(place).expanduser()


def parse_projector(text: str) -> tuple[str, Path]:
    """Return (name, path) of NAME=PATH.gguf."""
    name, separator, path = text.partition("=")
    if not separator or not path or not _MODEL_NAME.fullmatch(name):
        raise ValueError(f"{text!r} is not NAME=PATH.gguf")
    return name, Path(path).expanduser()


def parse_count(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ValueError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def parse_keep_alive(text: str) -> float:
    """Return the seconds that "5m" or "300" mean; infinity for a negative value."""
    try:
        seconds = float(int(text))
    except ValueError:
        seconds = parse_go_duration(text)
    return math.inf if seconds < 0 else seconds


def parse_word(*words: str) -> Callable[[str], str]:
    """Return a reader that takes one of `words`."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return parse


def parse_flag(text: str) -> bool:
    """Return what true, on, no, 0 and the like mean."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_block_size(text: str) -> int | None:
    """Return tokens of a block; None for auto."""
    if text == "auto":
        return None
    size = int(text) if text.isdigit() else 0
    if not 1 <= size <= 4096:
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to 4096")
    return size


def parse_store(text: str) -> str:
    """Check where KV blocks are to live."""
    kind, separator, rest = text.partition(":")
    plain = text in ("embedded", "none")
    pool = text.startswith("mooncake://") and re.fullmatch(r"[^/]+:\d+", text[11:])
    disk = kind == "disk" and separator and rest
    if not (plain or pool or disk):
        raise ValueError(
            f"{text!r} is not embedded, mooncake://HOST:PORT, disk:DIR or none"
        )
    return text


def parse_path(text: str) -> Path:
    """Return a path; ~ is the home directory."""
    return Path(text).expanduser()
