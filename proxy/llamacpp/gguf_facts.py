"""What kvbus has to know of a model, out of its GGUF file.

Rules:
1. `ModelFacts.content_digest` depends on the contents alone, on every byte of them:
   KV is shared by it. It is the SHA-256 of the file, and of a split model that over
   the SHA-256 of each part.
2. The event loop never reads a model file: `load_facts` has a process of its own do
   it, once for each state of the files, and keeps the answer. A state is path, device,
   inode, size, time of modification and time of change of every part: tools set sizes
   and times of modification alike for different contents, but not the rest.
3. A kept answer that is damaged, of another version of this module, or read while the
   files changed, is none.
"""

import asyncio
import dataclasses
import hashlib
import logging
import mmap
import os
import re
import sys
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from proxy.errors import ConfigError

if TYPE_CHECKING:
    from proxy.llamacpp.gguf_header import Header

logger = logging.getLogger(__name__)

FACTS_VERSION = 3
LONG_READ_BYTES = 2 << 30
"""From here on the log tells that a model is read: it takes seconds."""

_READ_TIMEOUT_SECONDS = 600
_SLOWEST_READ_RATE = 10 << 20
"""Bytes a second that a large model may take more time by."""
_BAD_FILE_EXIT_CODE = 2
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_GUESSED_FILE_TYPE = 1024
_CONTROL, _USER_DEFINED = 3, 4
_SPACE_OF_SPM = "▁"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a GGUF file says of itself."""

    path: str
    size_bytes: int
    """Of the file, or of all parts of a split model."""
    mtime_ns: int
    content_digest: str
    """64 hex digits, see rule 1 of the module."""
    file_sha256: str | None
    """None for a split model, and for one that only its server can read."""
    architecture: str
    name: str
    parameter_count: int
    parameter_size: str
    """As Ollama writes it: 134.52M, 7.6B."""
    quantization_level: str
    """As Ollama writes it: Q4_K_M, F16, unknown."""
    context_length: int
    embedding_length: int
    block_count: int
    head_count: int
    """The largest, where layers differ. 0 without attention."""
    head_count_kv: int
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    """All scalars but the chat template; an array is an empty list."""
    chat_template: str
    tokenizer_model: str
    tokenizer_pre: str
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    """As the file says; where it is silent, as is usual for its tokenizer."""
    control_tokens: tuple[tuple[int, str], ...]
    """Control and user-defined tokens: text is never split or joined across them."""
    longest_token_bytes: int
    """No token stands for more bytes of text than this."""
    vocabulary_size: int = 0
    """How many tokens there are; 0 where nobody knows."""
    license: str

    @property
    def window_tokens(self) -> int:
        """How far the layers look back that have a sliding window; 0 without any."""
        value = self.metadata.get(f"{self.architecture}.attention.sliding_window")
        return value if isinstance(value, int) and value > 0 else 0

    def to_json(self) -> bytes:
        """Encode as one JSON object."""
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Decode what `to_json` wrote; raises ValueError on anything else."""
        values = orjson.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError("not the facts of a model")
        try:
            pairs = tuple((int(i), str(token)) for i, token in values["control_tokens"])
        except TypeError as error:
            raise ValueError("not the facts of a model") from error
        return cls(**values | {"control_tokens": pairs})


async def load_facts(path: Path, cache_dir: Path) -> ModelFacts:
    """Facts of `path`, kept in `cache_dir`/facts, or read by a process of its own.

    Takes a second or two for each gigabyte where they are not kept. Raises ConfigError
    with one clear line for a file that is missing, truncated or not a GGUF.
    """
    files = _identify(path)
    kept = cache_dir / "facts" / f"{files.key}.json"
    try:
        return ModelFacts.from_json(kept.read_bytes())
    except (OSError, ValueError):
        pass
    if files.num_bytes > LONG_READ_BYTES:
        size = files.num_bytes / (1 << 30)
        logger.info("event=model.read path=%s gib=%.1f (once)", path, size)
    text = await _read_elsewhere(path, num_bytes=files.num_bytes)
    facts = ModelFacts.from_json(text)
    if _identify(path) == files:
        _keep(kept, text)
    return facts


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """The files of a model in their present state."""

    key: str
    """A name for this state, 64 hex digits."""
    num_bytes: int


def _identify(path: Path) -> _Files:
    """Look at all files of the model, without opening one. Raises ConfigError."""
    state: list[object] = [FACTS_VERSION]
    num_bytes = 0
    for part in _part_paths(path):
        try:
            found = part.stat()
            state += [
                *(str(part.resolve()), found.st_dev, found.st_ino, found.st_size),
                *(found.st_mtime_ns, found.st_ctime_ns),
            ]
        except OSError as error:
            raise ConfigError(f"model {part}: {error.strerror}") from error
        num_bytes += found.st_size
    return _Files(hashlib.sha256(repr(state).encode()).hexdigest(), num_bytes)


def _part_paths(path: Path) -> list[Path]:
    """Name the file, or all parts of a split model, as the engine finds them."""
    match = _SPLIT_NAME.search(path.name)
    if not match or int(match[1]) != 1:
        return [path]
    base, count = path.name[: match.start()], int(match[2])
    names = [f"{base}-{n:05d}-of-{count:05d}.gguf" for n in range(2, count + 1)]
    return [path, *(path.with_name(name) for name in names)]


async def _read_elsewhere(path: Path, *, num_bytes: int) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy.llamacpp.gguf_facts", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    limit = _READ_TIMEOUT_SECONDS + num_bytes / _SLOWEST_READ_RATE
    try:
        async with asyncio.timeout(limit):
            text, complaint = await process.communicate()
    except TimeoutError as error:
        raise ConfigError(f"model {path}: reading it takes too long") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"model {path}: cannot be read")
    return text


def _keep(kept: Path, text: bytes) -> None:
    """Write atomically; where that fails, the facts are read again next time."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        Path(name).replace(kept)
    except OSError:
        return


# -- in the process of its own ----------------------------------------------------


def read_facts(path: Path) -> ModelFacts:
    """Read the file here and now (blocks). Raises ConfigError."""
    from proxy.llamacpp.gguf_header import GGUFError

    total_bytes = parameter_count = 0
    digests: list[bytes] = []
    first: Header | None = None
    mtime_ns = 0
    parts = _part_paths(path)
    for part in parts:
        try:
            with part.open("rb") as file:
                status = os.fstat(file.fileno())
                header = _read_header(file)
                if first is None:
                    first, mtime_ns = header, status.st_mtime_ns
                    _check_parts(header, len(parts))
                digests.append(_digest(file))
        except OSError as error:
            raise ConfigError(f"model {part}: {error.strerror}") from error
        except GGUFError as error:
            raise ConfigError(f"model {part}: {error}") from error
        total_bytes += status.st_size
        parameter_count += sum(t.num_elements for t in header.tensors)
    assert first is not None
    whole = digests[0].hex() if len(digests) == 1 else None
    joined = hashlib.sha256(b"kvbus split model 2\0" + b"".join(digests))
    return ModelFacts(
        path=str(path.resolve()),
        size_bytes=total_bytes,
        mtime_ns=mtime_ns,
        content_digest=whole or joined.hexdigest(),
        file_sha256=whole,
        parameter_count=parameter_count,
        parameter_size=_human_number(parameter_count),
        **_described(first.metadata),
    )


def _read_header(file: BufferedReader) -> "Header":
    from proxy.llamacpp.gguf_header import GGUFError, read_header

    if not os.fstat(file.fileno()).st_size:
        raise GGUFError("not a GGUF file (empty)")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return read_header(view)


def _check_parts(header: "Header", num_parts: int) -> None:
    """See that the digest is of all that the engine loads."""
    from proxy.llamacpp.gguf_header import GGUFError

    count = header.metadata.get("split.count", 0)
    if (count if isinstance(count, int) and count > 1 else 1) != num_parts:
        raise GGUFError(
            f"it is one of {count} parts, but its name does not end in"
            f" -00001-of-{count:05d}.gguf"
            if num_parts == 1
            else f"its name tells of {num_parts} parts, its contents do not"
        )


def _digest(file: BufferedReader) -> bytes:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    file.seek(0)
    return hashlib.file_digest(file, "sha256").digest()


def _described(metadata: dict[str, Any]) -> dict[str, Any]:
    """Give the fields that come out of the metadata."""
    architecture = _text(metadata, "general.architecture")
    heads = _largest(metadata.get(f"{architecture}.attention.head_count"), 0)
    kv_heads = _largest(metadata.get(f"{architecture}.attention.head_count_kv"), heads)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    kinds = dict(enumerate(types))
    special = [i for i in range(len(tokens)) if _is_special(kinds.get(i))]
    tokenizer = _text(metadata, "tokenizer.ggml.model")
    pre = _text(metadata, "tokenizer.ggml.pre")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return {
        "architecture": architecture,
        "name": _text(metadata, "general.name"),
        "quantization_level": _quantization_level(metadata.get("general.file_type")),
        "context_length": _largest(metadata.get(f"{architecture}.context_length"), 0),
        "embedding_length": _largest(
            metadata.get(f"{architecture}.embedding_length"), 0
        ),
        "block_count": _largest(metadata.get(f"{architecture}.block_count"), 0),
        "head_count": heads,
        "head_count_kv": kv_heads,
        "metadata": {
            key: [] if isinstance(value, list) else value
            for key, value in metadata.items()
            if key != "tokenizer.chat_template"
        },
        "chat_template": _text(metadata, "tokenizer.chat_template"),
        "tokenizer_model": tokenizer,
        "tokenizer_pre": pre,
        "bos_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "add_bos": _adds_bos(tokenizer, pre) if add_bos is None else bool(add_bos),
        "control_tokens": tuple((i, tokens[i]) for i in special),
        "longest_token_bytes": max(
            (
                _token_bytes(token, tokenizer, is_special=_is_special(kinds.get(i)))
                for i, token in enumerate(tokens)
            ),
            default=0,
        ),
        "vocabulary_size": len(tokens),
        "license": _text(metadata, "general.license"),
    }


def _text(metadata: dict[str, Any], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _largest(value: Any, default: int) -> int:  # noqa: ANN401 - as typed in the file
    """Give a number, or the largest where layers differ."""
    if isinstance(value, list):
        value = max(value, default=default)
    return value if isinstance(value, int) else default


def _is_special(token_type: int | None) -> bool:
    return token_type in (_CONTROL, _USER_DEFINED)


def _token_bytes(token: str, tokenizer: str, *, is_special: bool) -> int:
    if tokenizer == "gpt2" and not is_special:
        return len(token)  # one letter stands for one byte
    return len(token.replace(_SPACE_OF_SPM, " ").encode())


def _adds_bos(tokenizer: str, pre: str) -> bool:
    """Tell what the engine does where the file does not say."""
    with_bos = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "chameleon"}
    return tokenizer in ("llama", "bert") or pre in with_bos


def _quantization_level(file_type: Any) -> str:  # noqa: ANN401 - as typed in the file
    from gguf import LlamaFileType

    try:
        name = LlamaFileType(file_type & ~_GUESSED_FILE_TYPE).name
    except (TypeError, ValueError):
        return "unknown"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _human_number(count: int) -> str:
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            is_round = count % unit == 0
            return f"{count / unit:.{0 if is_round else digits}f}{letter}"
    return str(count)


def main() -> int:
    """Print the facts of the file that is named, as JSON."""
    try:
        facts = read_facts(Path(sys.argv[1]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _BAD_FILE_EXIT_CODE
    sys.stdout.buffer.write(facts.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
