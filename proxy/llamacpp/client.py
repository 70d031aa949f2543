"""llama-server's HTTP API, as far as kvbus uses it.

Rules:
1. An answer that is no success becomes `UpstreamError` here and nowhere else.
2. No time-out on a generation (a prefill may be silent for minutes); a bounded one
   on everything else.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from proxy.errors import RunnerGone, SlotError, UpstreamError
from proxy.llamacpp.answers import EngineAnswer
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.runner_http import Answer, RunnerHttp

CONTROL_TIMEOUT_SECONDS = 10.0
PROMPT_TIMEOUT_SECONDS = 120.0
"""Of what takes longer the longer a prompt is."""


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
        try:
            async with asyncio.timeout(timeout_seconds):
                status, _ = await self._http.ask("GET", "/health")
        except (RunnerGone, TimeoutError):
            return False
        return status == HTTPStatus.OK

    async def props(self) -> dict[str, Any]:
        """Return the server's properties (slots, context, template, build ...)."""
        return _mapping(await self._ask("GET", "/props"))

    async def slots(self) -> list[dict[str, Any]]:
        """Return what the server tells about its slots."""
        answer = await self._ask("GET", "/slots")
        return [_mapping(slot) for slot in answer] if isinstance(answer, list) else []

    async def lora_adapters(self) -> list[Any]:
        """Return the LoRA adapters that are loaded."""
        answer = await self._ask("GET", "/lora-adapters")
        return answer if isinstance(answer, list) else []

    async def model_facts(self) -> ModelFacts:
        """Return what the server says of its model, whose file is not at hand."""
        answer = _mapping(await self._ask("GET", "/v1/models"))
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
            vocabulary_size=int(meta.get("n_vocab", 0)),
            license="",
        )

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        """Return the prompt that the chat template makes of `body`'s messages."""
        answer = await self._ask(
            "POST", "/apply-template", body, timeout_seconds=PROMPT_TIMEOUT_SECONDS
        )
        return str(_mapping(answer)["prompt"])

    async def tokenize(self, text: str, *, add_special: bool) -> npt.NDArray[np.int32]:
        """Return the token ids of `text`; special tokens in it are parsed."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        answer = await self._ask(
            "POST", "/tokenize", body, timeout_seconds=PROMPT_TIMEOUT_SECONDS
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
            path, content, connect_seconds=CONTROL_TIMEOUT_SECONDS
        ) as answer:
            if answer.status != HTTPStatus.OK:
                raise UpstreamError(answer.status, await answer.read_text())
            yield _Events(answer)

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
            path, content, connect_seconds=CONTROL_TIMEOUT_SECONDS
        ) as answer:
            yield EngineAnswer(
                status=answer.status,
                content_type=answer.content_type,
                chunks=answer,
                keeps_progress=wants_progress,
            )

    async def _slot_action(
        self, slot_id: int, action: str, file_name: str, timeout_seconds: float
    ) -> dict[str, Any]:
        body = {"filename": file_name} if file_name else {}
        path = f"/slots/{slot_id}?action={action}"
        try:
            async with (
                _bounded(timeout_seconds),
                self._http.request(path, orjson.dumps(body)) as answer,
            ):
                return _mapping(_parsed(answer.status, await answer.read()))
        except UpstreamError as exc:
            raise SlotError(f"slot {slot_id}: {action} failed: {exc}") from exc

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float = CONTROL_TIMEOUT_SECONDS,
    ) -> Any:  # noqa: ANN401 - JSON enters here
        """Ask for something that has no effect. Raises RunnerGone, UpstreamError."""
        content = b"" if body is None else orjson.dumps(body)
        async with _bounded(timeout_seconds):
            return _parsed(*await self._http.ask(method, path, content))


@asynccontextmanager
async def _bounded(seconds: float) -> AsyncIterator[None]:
    """Raise RunnerGone where the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        raise RunnerGone("it does not answer") from exc


def _parsed(status: int, content: bytes) -> Any:  # noqa: ANN401 - JSON enters here
    """Return the JSON of an answer. Raises UpstreamError."""
    if status != HTTPStatus.OK:
        raise UpstreamError(status, content.decode(errors="replace"))
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise UpstreamError(502, "the runner's answer is not JSON") from exc


class _Events:
    """The data of the server-sent events of an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        # the mutable state
        self._lines: Iterator[bytes] = iter(())
        self._unfinished: list[bytes] = []
        """Pieces of the last line, whose end has not come."""

    def __aiter__(self) -> "_Events":
        return self

    async def __anext__(self) -> dict[str, Any]:
        """Return the next one. Raises UpstreamError, and RunnerGone at the end."""
        while True:
            for line in self._lines:
                event = _event(line)
                if event is not None:
                    return event
            try:
                self._feed(await anext(self._answer))
            except StopAsyncIteration:
                raise RunnerGone(
                    "the stream ended before the answer was complete"
                ) from None

    def _feed(self, chunk: bytes) -> None:
        *lines, rest = chunk.split(b"\n")
        if lines and self._unfinished:
            lines[0] = b"".join((*self._unfinished, lines[0]))
            self._unfinished = []
        if rest:
            self._unfinished.append(rest)
        self._lines = iter(lines)


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
