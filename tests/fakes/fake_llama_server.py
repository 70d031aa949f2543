"""A llama-server that misbehaves on request, for what a real one can't be made to do.

It keeps token lists per slot and reads and writes real sequence-state files; all else
is scripted. Each quirk is an attribute, named after what has been reported of real
servers.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from proxy.llamacpp import state
from proxy.llamacpp.state import RowFormat, StateLayout

LAYOUT = StateLayout(
    version=4,
    has_packed_tokens=True,
    has_extended_cells=False,
    n_stream=1,
    v_trans=0,
    n_rot_k=0,
    n_rot_v=0,
    k_layers=(RowFormat(1, 64),) * 2,
    v_layers=(RowFormat(1, 64),) * 2,
)
REPLY = (7, 8, 9)


class FakeLlamaServer:
    """One slot, greedy, always the same three tokens."""

    def __init__(self, slot_directory: Path) -> None:
        self.slot_directory = slot_directory
        self.tokens: list[int] = []
        self.calls: list[str] = []
        self.url = ""
        # quirks
        self.reuses_nothing = False
        """A restore that says success, after which all is prefilled."""
        self.refuses_restores = False
        """400 for every restore; the slot is empty then."""
        self.refuses_erasing = False
        """As a server does that was started without a slot directory."""
        self.restores_less = False
        """n_restored is smaller than what was in the file."""
        self.saves_nothing = False
        """n_written 0 and no file."""
        self.may_save = asyncio.Event()
        self.may_save.set()
        """Cleared, a save takes until it is set."""
        self.saves_other_tokens = False
        """Another task has got at the slot before the save."""
        self.has_no_timings = False
        """A final event that cannot be understood."""
        self.is_dying = False
        """Connections break off before an answer, and its health is gone."""
        self.breaks_off = False
        """The same of completions, while it is healthy."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeLlamaServer"]:
        """Serve on a free port of loopback."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/props", self._props),
                web.get("/slots", self._slots),
                web.get("/lora-adapters", self._adapters),
                web.post("/tokenize", self._tokenize),
                web.post("/completion", self._completion),
                web.post("/v1/completions", self._completion),
                web.post("/slots/0", self._slot),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        status = 503 if self.is_dying else 200
        return web.json_response({"status": "ok"}, status=status)

    async def _props(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "total_slots": 1,
                "default_generation_settings": {"n_ctx": 4096},
                "build_info": "b1-fake",
            }
        )

    async def _slots(self, request: web.Request) -> web.Response:
        return web.json_response([{"id": 0, "is_processing": False}])

    async def _adapters(self, request: web.Request) -> web.Response:
        return web.json_response([])

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["content"]
        return web.json_response({"tokens": [ord(letter) for letter in text]})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.is_dying or self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        prompt: list[int] = body["prompt"]
        cached = 0
        while cached < min(len(prompt) - 1, len(self.tokens)):
            if prompt[cached] != self.tokens[cached]:
                break
            cached += 1
        if self.reuses_nothing or not body.get("cache_prompt", True):
            cached = 0
        self.calls.append(f"completion {cached}")
        self.tokens = [*prompt, *REPLY[:-1]] if body["n_predict"] else prompt
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        final: dict[str, Any] = {
            "content": "",
            "stop": True,
            "stop_type": "limit",
            "timings": {
                "cache_n": cached,
                "prompt_n": len(prompt) - cached,
                "prompt_ms": 1.0,
                "predicted_n": len(REPLY),
                "predicted_ms": 1.0,
            },
        }
        if request.path != "/completion":
            final["choices"] = [{"finish_reason": "length"}]
        if self.has_no_timings:
            final["timings"] = None
        events = [{"content": "x", "tokens": [t], "stop": False} for t in REPLY]
        for event in [*events, final]:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        return response

    async def _slot(self, request: web.Request) -> web.Response:
        action = request.query["action"]
        self.calls.append(action)
        name = (await request.json()).get("filename", "")
        if action == "erase" and self.refuses_erasing:
            return web.json_response({"error": {"code": 501}}, status=501)
        if action == "erase":
            self.tokens = []
            return web.json_response({"id_slot": 0, "n_erased": 0})
        if action == "save":
            await self.may_save.wait()
            return self._save(self.slot_directory / name)
        return self._restore(self.slot_directory / name)

    def _save(self, path: Path) -> web.Response:
        token_ids = [5] * 40 if self.saves_other_tokens else self.tokens
        data = bytearray(state.file_bytes(LAYOUT, len(token_ids)))
        state.write_frame(data, LAYOUT, token_ids=token_ids)
        if not self.saves_nothing:
            path.write_bytes(data)
        return web.json_response(
            {
                "id_slot": 0,
                "n_saved": len(token_ids),
                "n_written": 0 if self.saves_nothing else len(data),
                "timings": {"save_ms": 1.0},
            }
        )

    def _restore(self, path: Path) -> web.Response:
        self.tokens = []
        if self.refuses_restores:
            return web.json_response(
                {"error": {"code": 400, "message": "Unable to restore slot"}},
                status=400,
            )
        data = path.read_bytes()
        size = _content_bytes(data)
        self.tokens = state.parse(data, size).token_ids.tolist()
        num_tokens = len(self.tokens) - (16 if self.restores_less else 0)
        return web.json_response({"id_slot": 0, "n_restored": num_tokens})


def _content_bytes(data: bytes) -> int:
    """Return how long the state in a restore file is: the file may be longer."""
    words = np.frombuffer(data, dtype="<i4", count=6)
    return state.file_bytes(LAYOUT, int(words[5]))


@asynccontextmanager
async def fake_llama_server() -> AsyncIterator[FakeLlamaServer]:
    """Run one with a slot directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvbus-fake-") as directory:
        async with FakeLlamaServer(Path(directory)).running() as server:
            yield server
