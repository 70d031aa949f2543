"""What kvbus must know of a model file. Signatures first; the bodies follow."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FACTS_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a GGUF file says of itself (JSON round trip by to_json / from_json)."""

    path: str
    size_bytes: int
    mtime_ns: int
    content_digest: str
    file_sha256: str | None
    architecture: str
    name: str
    parameter_count: int
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int
    block_count: int
    head_count: int
    head_count_kv: int
    metadata: dict[str, Any] = field(default_factory=dict)
    chat_template: str
    tokenizer_model: str
    tokenizer_pre: str
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    control_tokens: tuple[tuple[int, str], ...]
    longest_token_bytes: int
    license: str

    def to_json(self) -> bytes:
        """Encode as one JSON object."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: bytes) -> "ModelFacts":
        """Decode; raises ValueError on anything but what to_json wrote."""
        raise NotImplementedError


def read_facts(path: Path) -> ModelFacts:
    """Read the file here and now (blocking, holds the GIL). Raises ConfigError."""
    raise NotImplementedError


async def load_facts(path: Path, cache_dir: Path) -> ModelFacts:
    """Facts of `path`, out of `cache_dir` or read by a subprocess.

    Raises ConfigError with one clear line for a file that is missing, truncated or
    not a GGUF.
    """
    raise NotImplementedError
