"""One llama-server: whether it is up, what it is, and whether its KV can be shared.

A `Runner` is told apart from the process behind it: the process may be restarted
(embedded) or come and go (attached), the runner stays. Rules:
1. `is_ready` is False from the moment its end is noticed until it was inspected anew;
   listeners hear of both. Between the two nothing is known of its slots.
2. Its KV is shared only when all of it is certain: the flags of the process, the model
   file, and a layout learned from a real slot file that parses to its very end. Else
   `sharing` is None and `refusal` says why in words for the operator.
3. A runner that repeatedly did not reuse what was restored is refused until it is
   restarted (`refuse`).
4. The end of one process is one failure, however many turns notice it.
5. Whoever is about to put KV into it, or has just taken KV out of it, asks first
   whether it still is the process that was inspected (`check_process`): another one
   behind the same address may have another model.
6. A runner of ours can be parked: its process is ended on purpose, which is no failure,
   and started when somebody wants it. Whoever parks it has seen that nobody uses it.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from proxy.blocks import Fingerprint
from proxy.errors import KvbusError, RunnerGone, StateFormatError, UpstreamError
from proxy.llamacpp import state
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.fingerprint import (
    default_block_size,
    fingerprint,
    inexact_flags,
    kv_flags,
    rope_context,
    shifts_context,
)
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.props import RunnerProps, read_props
from proxy.llamacpp.slot_files import SlotDirectory, remove_stale_files

logger = logging.getLogger(__name__)

PROBE_TEXT = "a b c d e f g h i j k l"
"""Long enough for a checkpoint of the engine's, which it makes four tokens before the
end, where the memory needs any."""
PROBE_TIMEOUT_SECONDS = 30.0


class RunnerListener(Protocol):
    """Who wants to know when a runner comes and goes."""

    def runner_ready(self, runner: "Runner") -> None:
        """Hear that the runner can be used; its slots are empty."""
        ...

    def runner_gone(self, runner: "Runner", reason: str) -> None:
        """Hear that the runner cannot be used now (again, for each failed start)."""
        ...

    def runner_parked(self, runner: "Runner") -> None:
        """Hear that the runner is not used until it is wanted again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """All that is needed to move KV into and out of a runner's slots."""

    layout: state.StateLayout
    block_size: int
    fields: Mapping[str, bytes | str | int]
    window_tokens: int = 0
    """How far layers look back that do not look back to the beginning; 0: none."""

    def fingerprint(self, namespace: str) -> Fingerprint:
        """Return what the keys of this runner's blocks start from."""
        return fingerprint({**self.fields, "namespace": namespace})

    def with_block_size(self, block_size: int | None) -> "Sharing":
        """Return the same with blocks of another size; None: as they are."""
        if block_size is None or block_size == self.block_size:
            return self
        fields = {**self.fields, "block_size": block_size}
        return replace(self, block_size=block_size, fields=fields)

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block."""
        return self.block_size * self.layout.kv_bytes_per_token


def _never_ends() -> bool:
    """Answer for a process that cannot be watched; its KV is not shared."""
    return True


class Runner:
    """One llama-server of one model."""

    def __init__(
        self,
        *,
        runner_id: str,
        facts: ModelFacts,
        listener: RunnerListener,
        block_size: int | None,
        patience: int,
        can_park: bool = False,
        is_opaque: bool = False,
    ) -> None:
        """Describe a runner; after `patience` failures in a row it has failed.

        `can_park` tells whether its process is ours to end and to start, `is_opaque`
        whether slot files that are not understood may be stored as they are.
        """
        self.runner_id = runner_id
        self.can_park = can_park
        self.facts = facts
        self._listener = listener
        self._block_size = block_size
        self._is_opaque = is_opaque
        self._patience = patience
        # the mutable state, changed by the methods below only
        self.is_ready = False
        self.num_slots = 0
        self.context_tokens = 0
        self.props: RunnerProps | None = None
        self.pid: int | None = None
        self.sharing: Sharing | None = None
        self.refusal = "not inspected yet"
        self.failure = ""
        self._is_same_process: Callable[[], bool] = _never_ends
        self.lost = asyncio.Event()
        """Set while a turn could not reach it and its owner has not seen to it."""
        self.parked = asyncio.Event()
        """Set while its process shall not run."""
        self.shifts_context = False
        """Whether it goes on with a reply when the context is full."""
        self.vram_bytes = 0
        """Device memory that its process took when it loaded."""
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._ended = asyncio.Event()
        self._ended.set()
        self._num_failures = 0
        self._client: LlamaServerClient | None = None
        self._directory: SlotDirectory | None = None

    def __repr__(self) -> str:
        what = "ready" if self.is_ready else "away"
        return f"<Runner {self.runner_id} {what} pid={self.pid}>"

    @property
    def client(self) -> LlamaServerClient:
        """The runner's HTTP client; only of a runner that is or was ready."""
        assert self._client is not None, "the runner was never reached"
        return self._client

    @property
    def directory(self) -> SlotDirectory:
        """The runner's slot files; only where `sharing` is not None."""
        assert self._directory is not None, "the runner has no slot directory"
        return self._directory

    def check_process(self) -> None:
        """Raise RunnerGone unless the process that was inspected still runs."""
        if not self._is_same_process():
            reason = "its process has ended"
            self.report_lost(reason)
            raise RunnerGone(reason)

    def refuse(self, reason: str) -> None:
        """Share no KV of this runner until it is restarted."""
        self.sharing = None
        self.refusal = reason
        logger.warning(
            "runner=%s event=sharing.refused model=%r reason=%r",
            self.runner_id,
            self.facts.name,
            reason,
        )

    @property
    def has_failed(self) -> bool:
        """Whether it makes no sense to wait for it."""
        return self._num_failures >= self._patience

    def report_lost(self, reason: str) -> None:
        """Note, for a turn, that the runner cannot be reached, before its owner does.

        Whoever started it or watches it has to see to it: end it, look for another.
        """
        if self.is_ready:
            self._leave(reason)
            self.lost.set()

    def report_gone(self, reason: str) -> None:
        """Note, for its owner, that the runner ended, or did not start."""
        if self.lost.is_set():
            self.failure = reason
            self.lost.clear()
        else:
            self._leave(reason)

    def park(self) -> None:
        """Have the process ended, and none started until somebody wants it."""
        if self.can_park and not self.parked.is_set():
            self.is_ready = False
            self.failure, self._num_failures = "", 0
            self.lost.clear()
            self._ended.clear()
            self._wanted.clear()
            self.parked.set()
            self._listener.runner_parked(self)

    def want(self) -> None:
        """Have a parked runner started."""
        self.parked.clear()
        self._ended.set()
        self._wanted.set()

    async def wait_wanted(self) -> None:
        """Wait, for its owner, until the process shall run; none runs now."""
        if self.parked.is_set():
            self.close_files()
            self.pid = None
            self._ended.set()
            logger.info("event=runner.parked runner=%s", self.runner_id)
        await self._wanted.wait()

    async def wait_ended(self) -> None:
        """Wait until the process of a parked runner has ended, or is wanted again."""
        await self._ended.wait()

    def _leave(self, reason: str) -> None:
        self.failure = reason
        self._num_failures += 1
        self.is_ready = False
        self._listener.runner_gone(self, reason)

    def close_files(self) -> None:
        """Give back the slot files of the process that was inspected last."""
        if self._directory is not None:
            self._directory.close()

    async def inspect(
        self,
        client: LlamaServerClient,
        *,
        slot_directory: Path | None,
        flags: Sequence[str],
        engine: str,
        pid: int | None,
        vram_bytes: int = 0,
        refusal: str = "",
        is_same_process: Callable[[], bool] = _never_ends,
    ) -> None:
        """Learn all about a llama-server that just came up, then tell the listener.

        `flags` is its command line without the program; `engine` tells its build
        where it does not do so itself; `refusal` why its KV must not be shared, if it
        is known already; `is_same_process` whether it has not ended, at once. Raises
        RunnerGone or UpstreamError.
        """
        props = await client.props()
        self._client = client
        self._is_same_process = is_same_process
        self.pid = pid
        self.vram_bytes = vram_bytes
        self.shifts_context = shifts_context(flags)
        self.num_slots, self.context_tokens = _read_props(props)
        self.props = read_props(props)
        self.close_files()
        self._directory = SlotDirectory(slot_directory) if slot_directory else None
        self.sharing, self.refusal = None, refusal
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                if not refusal:
                    self.refusal = await self._learn_sharing(props, flags, engine)
        except TimeoutError:
            self.refusal = "saving a slot for a look at its layout takes too long"
        except RunnerGone:
            raise
        except KvbusError as exc:
            self.refusal = str(exc)
        self.check_process()
        if self.refusal:
            logger.warning(
                "runner=%s event=sharing.off reason=%r", self.runner_id, self.refusal
            )
        self.failure = ""
        self._num_failures = 0
        self.is_ready = True
        self._listener.runner_ready(self)

    async def _learn_sharing(
        self, props: Mapping[str, Any], flags: Sequence[str], engine: str
    ) -> str:
        """Set `sharing`, or return why it cannot be."""
        if self._directory is None:
            return "the runner's slot directory is not known (--slot-save-path)"
        inexact = inexact_flags(flags)
        if inexact:
            return f"its KV depends on more than the prompt: {inexact}"
        if await self.client.lora_adapters():
            return "the runner has LoRA adapters loaded"
        await asyncio.to_thread(remove_stale_files, self._directory.path)
        layout = await self._probe_layout()
        if layout is None:
            return "saving a slot does not work on this runner"
        is_unified = layout.has_attention and layout.n_stream == 1
        if is_unified and self.num_slots > 1:
            return (
                "the runner's slots share one unified KV buffer, which empties idle"
                " slots: start it with -np N --no-kv-unified"
            )
        build = str(props.get("build_info", ""))
        if "unknown" in build or not build:
            build = f"{build} {engine}"
        block_size = self._block_size or default_block_size(
            layout.kv_bytes_per_token,
            is_by_element=bool(layout.v_trans and layout.v_layers),
        )
        self.sharing = Sharing(
            layout=layout,
            block_size=block_size,
            window_tokens=self.facts.window_tokens,
            fields={
                "model": self.facts.content_digest,
                "layout": layout.digest_fields(),
                # of a file that is not understood nothing can be adapted
                "slots": self.num_slots if layout.is_opaque else 0,
                "build": build,
                "flags": "\0".join(kv_flags(flags)),
                "rope_context": rope_context(
                    self.facts.metadata,
                    architecture=self.facts.architecture,
                    trained_tokens=self.facts.context_length,
                    context_tokens=self.context_tokens,
                ),
                "block_size": block_size,
            },
        )
        return ""

    async def _probe_layout(self) -> state.StateLayout | None:
        """Save a few tokens from an idle slot and learn the file's layout from it."""
        directory, client = self.directory, self.client
        slot_id = _slot_to_probe(await client.slots(), self.num_slots)
        prompt = await client.tokenize(PROBE_TEXT, add_special=True)
        body = {
            "prompt": prompt.tolist(),
            "n_predict": 0,
            "id_slot": slot_id,
            "cache_prompt": False,
            "stream": True,
        }
        async with client.stream_completion("/completion", body) as events:
            async for event in events:
                if event.get("stop"):
                    break
        name = directory.new_name("probe")
        try:
            saved = await client.save_slot(
                slot_id, name, timeout_seconds=PROBE_TIMEOUT_SECONDS
            )
            file = await directory.open_saved(name, expected_bytes=saved.num_bytes)
            await client.erase_slot(slot_id)
        except StateFormatError:
            raise
        except KvbusError as exc:
            logger.info(
                "runner=%s event=probe.failed reason=%r", self.runner_id, str(exc)
            )
            return None
        try:
            data = os.pread(file.fd, file.size, 0)  # few tokens
        finally:
            file.close()
        try:
            return _readable_layout(data, self.facts.window_tokens)
        except StateFormatError as exc:
            if not self._is_opaque:
                raise
            logger.info(
                "runner=%s event=sharing.opaque reason=%r", self.runner_id, str(exc)
            )
            return state.read_tokens(data, len(data))[0]


def _readable_layout(data: bytes, window_tokens: int) -> state.StateLayout:
    """Return the layout of a save. Raises StateFormatError if it cannot be shared."""
    parsed = state.parse(data, len(data), window_tokens=window_tokens)
    if parsed.layout.tail is not None and not parsed.tails:
        raise StateFormatError(
            "the memory has a window or a recurrent state, and the engine saves no"
            " checkpoints of it (it is too old, or --ctx-checkpoints is 0)"
        )
    return parsed.layout


def _read_props(props: Mapping[str, Any]) -> tuple[int, int]:
    """Return (slots, tokens of each). Raises UpstreamError."""
    try:
        context_tokens = int(props["default_generation_settings"]["n_ctx"])
        return int(props["total_slots"]), context_tokens
    except (KeyError, TypeError, ValueError) as exc:
        raise UpstreamError(502, f"/props lacks {exc}: is it a llama-server?") from exc


def _slot_to_probe(slots: Sequence[Mapping[str, Any]], num_slots: int) -> int:
    """Choose the slot whose contents are the least loss."""
    idle = [slot for slot in slots if not slot.get("is_processing")]
    if not idle:
        return num_slots - 1
    least = min(idle, key=lambda slot: int(slot.get("n_prompt_tokens") or 0))
    return int(least["id"])
