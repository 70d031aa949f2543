"""Facts of model files: what is read, refused, kept and told apart."""

import asyncio
import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from proxy.errors import ConfigError
from proxy.llamacpp import gguf_facts
from proxy.llamacpp.gguf_facts import ModelFacts, load_facts, read_facts
from tests.models import CHAT_TEMPLATE, CONTROL_TOKENS, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the usual tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", seed=1)


def test_it_agrees_with_the_packages_reader(model: Path) -> None:
    """Scalars, tensors and tokens are what the gguf package reads."""
    facts = read_facts(model)
    reader = gguf.GGUFReader(model)
    count = sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert facts.parameter_count == count
    for key, field in reader.fields.items():
        if field.types[:1] == [gguf.GGUFValueType.ARRAY]:
            assert facts.metadata[key] == []
        elif not key.startswith("GGUF.") and key != "tokenizer.chat_template":
            assert facts.metadata[key] == field.contents()


def test_the_fields_of_a_model(model: Path) -> None:
    """Each field says what the model was written with."""
    facts = read_facts(model)
    assert facts.path == str(model)
    assert facts.size_bytes == model.stat().st_size
    assert facts.mtime_ns == model.stat().st_mtime_ns
    assert facts.architecture == "llama"
    assert facts.name == "Tiny llama 1"
    assert facts.quantization_level == "F32"
    assert facts.context_length == 131072
    assert (facts.embedding_length, facts.block_count) == (128, 2)
    assert (facts.head_count, facts.head_count_kv) == (4, 2)
    assert facts.chat_template == CHAT_TEMPLATE
    assert (facts.tokenizer_model, facts.tokenizer_pre) == ("gpt2", "gpt-2")
    assert (facts.bos_id, facts.eos_id, facts.add_bos) == (0, 2, False)
    assert facts.control_tokens[:3] == tuple(enumerate(CONTROL_TOKENS))
    assert [text for _, text in facts.control_tokens[3:]] == [
        "<tool_call>",
        "</tool_call>",
    ]
    assert facts.longest_token_bytes == len("<|endoftext|>")
    assert facts.license == "apache-2.0"
    assert facts.file_sha256 == facts.content_digest


def test_a_tokenizer_that_adds_bos(tmp_path: Path) -> None:
    """An SPM model that adds BOS says so, and its spaces count as one byte."""
    path = write_tiny_model(tmp_path / "m.gguf", seed=1, tokenizer="spm", add_bos=True)
    facts = read_facts(path)
    assert facts.add_bos
    assert facts.tokenizer_model == "llama"
    assert facts.longest_token_bytes == len("<|endoftext|>")


def test_heads_of_a_hybrid(tmp_path: Path) -> None:
    """Where layers differ in their KV heads, the largest number is given."""
    path = write_tiny_model(tmp_path / "m.gguf", seed=1, architecture="lfm2")
    assert read_facts(path).head_count_kv == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (134_515_008, "134.52M"),
        (7_615_616_512, "7.6B"),
        (8_000_000_000, "8B"),
        (70_553_706_496, "70.6B"),
        (999, "999"),
        (428_416, "428K"),
    ],
)
def test_numbers_are_written_as_ollama_does(count: int, text: str) -> None:
    """Parameter counts are abbreviated the way Ollama's clients expect."""
    assert gguf_facts._human_number(count) == text


@pytest.mark.parametrize(
    ("file_type", "text"),
    [
        (gguf.LlamaFileType.MOSTLY_Q4_1, "Q4_1"),
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, "Q4_K_M"),
        (gguf.LlamaFileType.ALL_F32, "F32"),
        (1024 + gguf.LlamaFileType.MOSTLY_F16, "F16"),
        (12345, "unknown"),
        (None, "unknown"),
    ],
)
def test_quantization_levels(file_type: int | None, text: str) -> None:
    """The file type becomes the name that users know; a new one is unknown."""
    assert gguf_facts._quantization_level(file_type) == text


def test_json_round_trip(model: Path) -> None:
    """Facts survive JSON; anything else is a ValueError."""
    facts = read_facts(model)
    assert ModelFacts.from_json(facts.to_json()) == facts
    for text in (b"", b"{}", b"[]", b'{"path": 1}', facts.to_json()[:-1]):
        with pytest.raises(ValueError):
            ModelFacts.from_json(text)


def test_the_digest_tells_finetunes_apart(tmp_path: Path) -> None:
    """Equal contents have equal digests; other weights or metadata another."""
    paths = [
        write_tiny_model(tmp_path / "a.gguf", seed=1),
        write_tiny_model(tmp_path / "same.gguf", seed=1),
        write_tiny_model(tmp_path / "weights.gguf", seed=2),
        write_tiny_model(tmp_path / "bos.gguf", seed=1, add_bos=True),
    ]
    weights = bytearray(paths[2].read_bytes())
    start = weights.index(b"Tiny llama 2")
    weights[start : start + 12] = b"Tiny llama 1"
    paths[2].write_bytes(weights)
    digests = [read_facts(path).content_digest for path in paths]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    assert digests[0] == hashlib.sha256(paths[0].read_bytes()).hexdigest()


def test_each_byte_of_a_large_file_counts(tmp_path: Path) -> None:
    """One changed value in the middle of 300 MiB of weights changes the digest."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(path, 300 << 20)  # a hole
    digests = {read_facts(path).content_digest}
    for offset in (257 << 20, 257 << 20 | 4097, (300 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\1")
        digests.add(read_facts(path).content_digest)
    assert len(digests) == 4


def test_a_split_model_is_read_whole(tmp_path: Path) -> None:
    """All parts count, for the size, the parameters and the digest."""
    first, second = split_model(tmp_path)
    facts = read_facts(first)
    assert facts.parameter_count == 2 * 64
    assert facts.size_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert facts.file_sha256 is None
    write_part(second, number=2, value=2.0)
    assert read_facts(first).content_digest != facts.content_digest
    second.unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00002\.gguf: No such file"):
        read_facts(first)


async def test_a_later_part_is_part_of_the_state(tmp_path: Path) -> None:
    """Facts are read again when only the last part of a model is another."""
    first, second = split_model(tmp_path)
    before = await load_facts(first, tmp_path / "cache")
    write_part(second, number=2, value=2.0)
    after = await load_facts(first, tmp_path / "cache")
    assert after.content_digest == read_facts(first).content_digest
    assert after.content_digest != before.content_digest


async def test_a_split_model_of_links(tmp_path: Path) -> None:
    """Parts are found by their names, wherever the names lead."""
    parts = split_model(tmp_path)
    (tmp_path / "named").mkdir()
    links = []
    for part in parts:
        blob = part.rename(tmp_path / f"blob-{part.name[5:7]}")
        links.append(tmp_path / "named" / part.name)
        links[-1].symlink_to(blob)
    facts = await load_facts(links[0], tmp_path / "cache")
    assert facts.parameter_count == 2 * 64


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    """Names and contents that disagree about parts give a ConfigError."""
    first, second = split_model(tmp_path)
    with pytest.raises(ConfigError, match="one of 2 parts, but its name"):
        read_facts(second)
    other = first.rename(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"does not end in -00001-of-00002\.gguf"):
        read_facts(other)
    whole = write_tiny_model(first, seed=1)
    with pytest.raises(ConfigError, match="its name tells of 2 parts"):
        read_facts(whole)


def split_model(directory: Path) -> list[Path]:
    """Write a model of two parts; give their paths."""
    paths = [directory / f"m-{n:05d}-of-00002.gguf" for n in (1, 2)]
    for number, path in enumerate(paths, 1):
        write_part(path, number=number, value=1.0)
    return paths


def write_part(path: Path, *, number: int, value: float) -> None:
    """Write one part of a split model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number - 1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor(f"part{number}", np.full((8, 8), value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bad_files(model: Path) -> dict[str, tuple[bytes, str]]:
    """Give contents that are no model, and what is to be said of them."""
    data = model.read_bytes()
    return {
        "empty": (b"", "not a GGUF file"),
        "foreign": (b"<html>" * 100, "not a GGUF file"),
        "magic": (b"GGUF", "damaged or truncated"),
        "old": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not known"),
        "new": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9 is not known"),
        "header": (data[:5000], "damaged or truncated header"),
        "weights": (data[:-100], "truncated: tensor"),
        "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "damaged or truncated"),
        "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged or trunc"),
    }


def test_bad_files_are_named_in_one_line(model: Path, tmp_path: Path) -> None:
    """Each bad file is a ConfigError of one line that names the file and why."""
    for name, (data, reason) in bad_files(model).items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            read_facts(path)
        message = str(caught.value)
        assert message.startswith(f"model {path}: ")
        assert reason in message
        assert "\n" not in message


def test_damaged_headers_raise_nothing_else(model: Path, tmp_path: Path) -> None:
    """Bytes flipped anywhere in the header give facts or a ConfigError."""
    data = model.read_bytes()
    random = np.random.default_rng(1)
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(150):
        changed = bytearray(data)
        offset = int(random.integers(4, 6000))
        changed[offset] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        try:
            assert read_facts(path).size_bytes == len(data)
        except ConfigError:
            refused += 1
    assert refused


async def test_load_reads_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load comes out of the kept file, also through a symlink."""
    facts = await load_facts(model, tmp_path)
    assert facts == read_facts(model)
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o077 == 0

    async def refuse(path: Path, *, num_bytes: int) -> bytes:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(gguf_facts, "_read_elsewhere", refuse)
    assert await load_facts(model, tmp_path) == facts
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert await load_facts(link, tmp_path) == facts


async def test_a_changed_file_is_read_again(model: Path, tmp_path: Path) -> None:
    """A file of another time or size has other facts."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    before = await load_facts(path, tmp_path)
    os.utime(path, ns=(1, 1))
    after = await load_facts(path, tmp_path)
    assert after == replace(before, mtime_ns=1)
    write_tiny_model(path, seed=9)
    changed = await load_facts(path, tmp_path)
    assert changed.content_digest != before.content_digest


@pytest.mark.parametrize("in_place", [True, False])
async def test_times_that_lie(model: Path, tmp_path: Path, in_place: bool) -> None:
    """Other weights of the same size and modification time have other facts."""
    path, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    contents = bytearray(model.read_bytes())
    path.write_bytes(contents)
    os.utime(path, ns=(1, 1))
    before = await load_facts(path, tmp_path)
    contents[-1] ^= 1
    if in_place:
        path.write_bytes(contents)
        os.utime(path, ns=(1, 1))
    else:
        other.write_bytes(contents)
        os.utime(other, ns=(1, 1))
        other.replace(path)
    after = await load_facts(path, tmp_path)
    assert (after.size_bytes, after.mtime_ns) == (before.size_bytes, before.mtime_ns)
    assert after.content_digest == hashlib.sha256(contents).hexdigest()
    assert after.content_digest != before.content_digest


async def test_a_file_that_changes_meanwhile_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts that were read while the file changed are not kept for its old state."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    read = gguf_facts._read_elsewhere

    async def change(path: Path, *, num_bytes: int) -> bytes:
        text = await read(path, num_bytes=num_bytes)
        os.utime(path, ns=(1, 1))
        return text

    monkeypatch.setattr(gguf_facts, "_read_elsewhere", change)
    await load_facts(path, tmp_path)
    assert not (tmp_path / "facts").exists()


async def test_a_long_read_is_told(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that takes seconds to read is named in one line, the first time."""
    caplog.set_level("INFO", "proxy.llamacpp.gguf_facts")
    await load_facts(model, tmp_path)
    assert caplog.messages == []
    monkeypatch.setattr(gguf_facts, "LONG_READ_BYTES", 1000)
    for _ in range(2):
        await load_facts(model, tmp_path / "cold")
    (line,) = caplog.messages
    assert line.startswith(f"event=model.read path={model} gib=")


async def test_a_damaged_kept_file_is_no_answer(model: Path, tmp_path: Path) -> None:
    """What cannot be read back is read from the model again, and put right."""
    facts = await load_facts(model, tmp_path)
    (kept,) = (tmp_path / "facts").iterdir()
    text = kept.read_bytes()
    for damage in (b"", text[:-5], b"{}", b"\xff\xfe"):
        kept.write_bytes(damage)
        assert await load_facts(model, tmp_path) == facts
        assert kept.read_bytes() == text


async def test_without_a_place_to_keep_them(model: Path, tmp_path: Path) -> None:
    """Facts are given even where they cannot be kept."""
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    facts = await load_facts(model, blocked)
    assert facts.architecture == "llama"


async def test_load_refuses_like_read(tmp_path: Path) -> None:
    """Missing and bad files raise ConfigError out of the process of its own."""
    with pytest.raises(ConfigError, match="No such file"):
        await load_facts(tmp_path / "missing.gguf", tmp_path)
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"bad\.gguf: not a GGUF file$"):
        await load_facts(path, tmp_path)


async def test_a_cancelled_load_leaves_no_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling a load ends the process that reads."""
    started: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
    spawn = asyncio.create_subprocess_exec

    async def spy(
        *args: str,
        **pipes: Any,  # noqa: ANN401 - as given
    ) -> asyncio.subprocess.Process:
        process = await spawn(*args, **pipes)
        started.put_nowait(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spy)
    task = asyncio.create_task(load_facts(model, tmp_path))
    process = await started.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.returncode is not None
