"""llama-server's HTTP API, as far as kvbus uses it.

Rules:
1. An answer that is no success becomes `UpstreamError` here and nowhere else.
2. No time-out on a generation (a prefill may be silent for minutes); a bounded one
   on everything else.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from proxy.errors import RunnerGone, SlotError, UpstreamError
from proxy.llamacpp.answers import EngineAnswer
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.runner_http import RunnerHttp, read, read_chunks, read_text

CONTROL_TIMEOUT_SECONDS = 10.0
TOKENIZE_TIMEOUT_SECONDS = 120.0
_CONTROL_BOUNDS = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_SECONDS)
_GENERATION_BOUNDS = aiohttp.ClientTimeout(connect=CONTROL_TIMEOUT_SECONDS)


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """What the engine says about a slot that it has saved."""

    num_tokens: int
    num_bytes: int
    seconds: float


class LlamaServerClient:
    """Speaks to one llama-server, over a unix socket or TCP."""

    def __init__(self, *, url: str, socket_path: Path | None = None) -> None:
        self.url = url
        self._http = RunnerHttp(url=url, socket_path=socket_path)

    async def close(self) -> None:
        """Close all connections; whoever waits for an answer gets RunnerGone."""
        await self._http.close()

    async def is_healthy(self, *, timeout_seconds: float = 2.0) -> bool:
        """Tell whether the model is loaded and the server answers."""
        bounds = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._http.request("GET", "/health", bounds=bounds) as response:
                await read(response)
                return response.status == HTTPStatus.OK
        except RunnerGone:
            return False

    async def props(self) -> dict[str, Any]:
        """Return the server's properties (slots, context, template, build ...)."""
        return _mapping(await self._json("GET", "/props"))

    async def slots(self) -> list[dict[str, Any]]:
        """Return what the server tells about its slots."""
        answer = await self._json("GET", "/slots")
        return [_mapping(slot) for slot in answer] if isinstance(answer, list) else []

    async def lora_adapters(self) -> list[Any]:
        """Return the LoRA adapters that are loaded."""
        answer = await self._json("GET", "/lora-adapters")
        return answer if isinstance(answer, list) else []

    async def model_facts(self) -> ModelFacts:
        """Return what the server says of its model, whose file is not at hand."""
        answer = _mapping(await self._json("GET", "/v1/models"))
        model = _mapping(answer["data"][0])
        meta = model.get("meta") or {}
        parameters = int(meta.get("n_params", 0))
        return ModelFacts(
            path="",
            size_bytes=int(meta.get("size", 0)),
            mtime_ns=0,
            content_digest=f"unknown: {self.url}",
            file_sha256=None,
            architecture="unknown",
            name=str(model.get("id", "")),
            parameter_count=parameters,
            parameter_size=f"{parameters / 1e6:.2f}M",
            quantization_level=str(meta.get("ftype", "unknown")),
            context_length=int(meta.get("n_ctx_train", 0)),
            embedding_length=int(meta.get("n_embd", 0)),
            block_count=0,
            head_count=0,
            head_count_kv=0,
            chat_template="",
            tokenizer_model="",
            tokenizer_pre="",
            bos_id=None,
            eos_id=None,
            add_bos=False,
            control_tokens=(),
            longest_token_bytes=1024,
            license="",
        )

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        """Return the prompt that the chat template makes of `body`'s messages."""
        return str(
            _mapping(await self._json("POST", "/apply-template", body))["prompt"]
        )

    async def tokenize(self, text: str, *, add_special: bool) -> npt.NDArray[np.int32]:
        """Return the token ids of `text`; special tokens in it are parsed."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        answer = await self._json(
            "POST", "/tokenize", body, timeout_seconds=TOKENIZE_TIMEOUT_SECONDS
        )
        return np.array(_mapping(answer)["tokens"], dtype=np.int32)

    async def save_slot(
        self, slot_id: int, file_name: str, *, timeout_seconds: float
    ) -> SavedSlot:
        """Save a slot to `file_name` in the slot directory. Raises SlotError."""
        answer = await self._slot_action(slot_id, "save", file_name, timeout_seconds)
        if answer.get("id_slot") != slot_id or not answer.get("n_written"):
            raise SlotError(f"slot {slot_id} was not saved: {answer}")
        return SavedSlot(
            num_tokens=int(answer["n_saved"]),
            num_bytes=int(answer["n_written"]),
            seconds=float(answer["timings"]["save_ms"]) / 1e3,
        )

    async def restore_slot(
        self, slot_id: int, file_name: str, *, timeout_seconds: float
    ) -> int:
        """Restore a slot from `file_name`; returns the tokens that the engine claims.

        Raises SlotError; the slot is then empty.
        """
        answer = await self._slot_action(slot_id, "restore", file_name, timeout_seconds)
        return int(answer.get("n_restored", 0))

    async def erase_slot(self, slot_id: int) -> None:
        """Empty a slot. Raises SlotError."""
        await self._slot_action(slot_id, "erase", "", CONTROL_TIMEOUT_SECONDS)

    @asynccontextmanager
    async def stream_completion(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Generate; yields the parsed server-sent events as they come.

        Leaving the block closes the connection, which stops the generation. Raises
        UpstreamError before the first event, UpstreamError or RunnerGone later.
        """
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._http.request(
            "POST", path, content, bounds=_GENERATION_BOUNDS
        ) as response:
            if response.status != HTTPStatus.OK:
                raise UpstreamError(response.status, await read_text(response))
            yield _events(read_chunks(response))

    @asynccontextmanager
    async def open_answer(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[EngineAnswer]:
        """Send `body`; yields the answer, whatever its status, to be passed on.

        A stream is asked to tell of its progress, so that the engine notices a client
        that leaves during the prefill; the answer drops those events. Leaving the
        block closes the connection. Raises RunnerGone, also while the answer is read.
        """
        wants_progress = bool(body.get("return_progress"))
        if body.get("stream"):
            body = {**body, "return_progress": True}
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._http.request(
            "POST", path, content, bounds=_GENERATION_BOUNDS
        ) as response:
            yield EngineAnswer(
                status=response.status,
                content_type=response.headers.get("Content-Type", ""),
                chunks=read_chunks(response),
                keeps_progress=wants_progress,
            )

    async def _slot_action(
        self, slot_id: int, action: str, file_name: str, timeout_seconds: float
    ) -> dict[str, Any]:
        body = {"filename": file_name} if file_name else {}
        path = f"/slots/{slot_id}?action={action}"
        try:
            answer = await self._json(
                "POST", path, body, timeout_seconds=timeout_seconds
            )
        except UpstreamError as exc:
            raise SlotError(f"slot {slot_id}: {action} failed: {exc}") from exc
        return _mapping(answer)

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Any:  # noqa: ANN401 - JSON enters here
        content = None if body is None else orjson.dumps(body)
        bounds = (
            _CONTROL_BOUNDS
            if timeout_seconds is None
            else aiohttp.ClientTimeout(total=timeout_seconds)
        )
        async with self._http.request(method, path, content, bounds=bounds) as response:
            if response.status != HTTPStatus.OK:
                raise UpstreamError(response.status, await read_text(response))
            answer = await read(response)
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as exc:
            raise UpstreamError(502, "the runner's answer is not JSON") from exc


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each server-sent event; stops after the final one."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        start = 0
        while (stop := buffer.find(b"\n", start)) >= 0:
            line = bytes(buffer[start:stop]).strip()
            start = stop + 1
            event = _event(line)
            if event is None:
                continue
            yield event
        del buffer[:start]
    raise RunnerGone("the stream ended before the answer was complete")


def _event(line: bytes) -> dict[str, Any] | None:
    """Parse one line of a stream; None for comments, blank lines and the end mark."""
    name, _, data = line.partition(b":")
    data = data.strip()
    if name not in (b"data", b"error") or data == b"[DONE]" or not data:
        return None
    try:
        event = _mapping(orjson.loads(data))
    except orjson.JSONDecodeError as exc:
        raise RunnerGone("the stream holds something that is not JSON") from exc
    error = event.get("error", event if name == b"error" else None)
    if error is not None:
        status = error.get("code") if isinstance(error, dict) else None
        text = orjson.dumps({"error": error}).decode()
        raise UpstreamError(status if isinstance(status, int) else 500, text)
    return event


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UpstreamError(502, "the runner's answer is not a JSON object")
    return value
