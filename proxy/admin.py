"""What operators and monitors ask: is it alive, is it ready, what does it hold.

`/livez` answers as soon as the process does, `/healthz` with 200 only when models and
store were brought up. Rules:

1. `/kvcache/*` is for this host alone: other hosts get 403.
2. Where the front listens on loopback, `/metrics` and `/kvcache/*` answer a `Host` of
   loopback alone. The front itself lets in every name that Ollama takes for this
   machine's, and pages of strangers can point such a name here.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.errors import StoreError
from proxy.metrics import Metrics
from proxy.reuse.models import Model, ModelCatalog
from proxy.store.base import BlockStore


class Admin:
    """The routes that are not Ollama's."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        metrics: Metrics,
        store: BlockStore | None,
        is_ready: Callable[[], bool],
        is_loopback_listener: bool,
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._store = store
        self._is_ready = is_ready
        self._is_loopback_listener = is_loopback_listener

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.get("/livez", self._handle_livez),
            web.get("/healthz", self._handle_healthz),
            web.get("/metrics", self._handle_metrics),
            web.get("/kvcache/status", self._handle_status),
        ]

    async def _handle_livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _handle_healthz(self, request: web.Request) -> web.Response:
        if self._is_ready():
            return web.Response(text="ok")
        return web.Response(text="not ready", status=503)

    async def _handle_metrics(self, request: web.Request) -> web.Response:
        if self._is_loopback_listener and not _is_asked_by_loopback_name(request):
            return _refusal()
        await self._refresh_gauges()
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4},
        )

    async def _handle_status(self, request: web.Request) -> web.Response:
        if not _is_local(request.remote):
            return _refusal()
        if self._is_loopback_listener and not _is_asked_by_loopback_name(request):
            return _refusal()
        status = {
            "ready": self._is_ready(),
            "store": await self._store_status(),
            "models": [_model_status(model) for model in self._catalog.models()],
        }
        return web.Response(body=orjson.dumps(status), content_type="application/json")

    async def _store_status(self) -> dict[str, Any] | None:
        if self._store is None:
            return None
        try:
            return {"available": True, **await self._store.status()}
        except StoreError as exc:
            return {"available": False, "error": str(exc)}

    async def _refresh_gauges(self) -> None:
        metrics = self._metrics
        for model in self._catalog.models():
            slots = model.pool.slots
            metrics.slots.labels(model.name).set(len(slots))
            leased = sum(slot.is_leased for slot in slots)
            metrics.slots_leased.labels(model.name).set(leased)
            metrics.waiting.labels(model.name).set(model.pool.num_waiting)
        status = await self._store_status()
        is_up = bool(status and status["available"])
        metrics.store_up.set(is_up)
        if status is not None and is_up:
            metrics.store_used_bytes.set(status.get("used_bytes", 0))
            metrics.store_capacity_bytes.set(status.get("capacity_bytes", 0))
            metrics.store_blocks.set(status.get("blocks", 0))


def _model_status(model: Model) -> dict[str, Any]:
    slots = model.pool.slots
    return {
        "name": model.name,
        "waiting": model.pool.num_waiting,
        "runners": [
            {
                "id": runner.runner_id,
                "ready": runner.is_ready,
                "pid": runner.pid,
                "context_tokens": runner.context_tokens,
                "sharing": runner.sharing is not None,
                "reason": runner.refusal or runner.failure,
                "block_size": runner.sharing.block_size if runner.sharing else None,
                "slots": [
                    {
                        "id": slot.slot_id,
                        "leased": slot.is_leased,
                        "tokens": len(slot.token_ids),
                    }
                    for slot in slots
                    if slot.runner is runner
                ],
            }
            for runner in model.runners
        ],
    }


def _is_local(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address(remote or "").is_loopback
    except ValueError:
        return False


def _refusal() -> web.Response:
    return web.json_response(
        {"error": "this route answers its own host only"}, status=403
    )


def _is_asked_by_loopback_name(request: web.Request) -> bool:
    """Tell whether all names that a request calls us by are names of loopback."""
    names = request.headers.getall("Host", [""])
    if "://" in request.raw_path.partition("?")[0]:
        names.append(request.url.authority)
    return all(map(_is_loopback_name, names))


def _is_loopback_name(host: str) -> bool:
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?", host)
    if match is None:
        return False
    try:
        address = ipaddress.ip_address(match[1] or match[2])
    except ValueError:
        name = (match[2] or "").lower()
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback
