"""What operators and monitors ask: is it alive, is it ready, what does it hold.

`/livez` answers as soon as the process does, `/healthz` with 200 only when models and
store were brought up. Rules:

1. `/kvcache/*` is for this host alone: other hosts get 403.
2. Where the front listens on loopback, `/metrics` and `/kvcache/*` answer a `Host` of
   loopback alone. The front itself lets in every name that Ollama takes for this
   machine's, and pages of strangers can point such a name here.
3. What changes something wants a `Host` of loopback wherever the front listens.
4. Nothing here tells text of a prompt, token ids or namespaces.
"""

import ipaddress
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.errors import StoreError
from proxy.metrics import Metrics
from proxy.reuse.models import Model, ModelCatalog
from proxy.reuse.request_log import RequestLog
from proxy.reuse.switch import SharingSwitch
from proxy.store.base import BlockStore

logger = logging.getLogger(__name__)

DEFAULT_LISTED = 50
MAX_LISTED = 1000


class Admin:
    """The routes that are not Ollama's."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        metrics: Metrics,
        store: BlockStore | None,
        switch: SharingSwitch,
        log: RequestLog,
        upstreams: Callable[[], Mapping[str, str]],
        transports: Callable[[], Sequence[str]],
        is_ready: Callable[[], bool],
        is_loopback_listener: bool,
    ) -> None:
        """Answer by these parts.

        `upstreams` tells why each given URL is not used ("" where it is), and
        `transports` which ways the store has.
        """
        self._catalog = catalog
        self._metrics = metrics
        self._store = store
        self._switch = switch
        self._log = log
        self._upstreams = upstreams
        self._transports = transports
        self._is_ready = is_ready
        self._is_loopback_listener = is_loopback_listener

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.get("/livez", self._handle_livez),
            web.get("/healthz", self._handle_healthz),
            web.get("/metrics", self._handle_metrics),
            web.get("/kvcache/status", self._handle_status),
            web.get("/kvcache/requests", self._handle_requests),
            web.get("/kvcache/requests/{id}", self._handle_request),
            web.post("/kvcache/pause", self._handle_pause),
            web.post("/kvcache/resume", self._handle_resume),
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
        if not self._is_allowed(request):
            return _refusal()
        return _json(
            {
                "ready": self._is_ready(),
                "sharing": self._sharing_status(),
                "store": await self._store_status(),
                "models": [_model_status(model) for model in self._catalog.models()],
                "upstreams": [
                    {"url": url, "away": bool(reason), "reason": reason or None}
                    for url, reason in self._upstreams().items()
                ],
            }
        )

    async def _handle_requests(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return _refusal()
        text = request.query.get("limit", str(DEFAULT_LISTED))
        limit = int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0
        if not 1 <= limit <= MAX_LISTED:
            return _json({"error": f"limit must be from 1 to {MAX_LISTED}"}, status=400)
        recent = itertools.islice(self._log.recent(), limit)
        return _json({"requests": [record.brief() for record in recent]})

    async def _handle_request(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return _refusal()
        record = self._log.find(request.match_info["id"])
        if record is None:
            return _json({"error": "no recent request has this id"}, status=404)
        return _json(record.to_dict())

    async def _handle_pause(self, request: web.Request) -> web.Response:
        return self._set_paused(request, is_paused=True)

    async def _handle_resume(self, request: web.Request) -> web.Response:
        return self._set_paused(request, is_paused=False)

    def _set_paused(self, request: web.Request, *, is_paused: bool) -> web.Response:
        if not self._is_allowed(request) or not _is_asked_by_loopback_name(request):
            return _refusal()
        if self._switch.set_paused(is_paused):
            event = "sharing.paused" if is_paused else "sharing.resumed"
            logger.warning("event=%s", event)
        return _json(self._sharing_status())

    def _is_allowed(self, request: web.Request) -> bool:
        return _is_local(request.remote) and (
            not self._is_loopback_listener or _is_asked_by_loopback_name(request)
        )

    def _sharing_status(self) -> dict[str, Any]:
        changed = self._switch.changed_at
        since = None if changed is None else datetime.fromtimestamp(changed, UTC)
        return {"paused": self._switch.is_paused, "since": since}

    async def _store_status(self) -> dict[str, Any] | None:
        if self._store is None:
            return None
        try:
            status = await self._store.status()
            transports = list(self._transports())
            return {"available": True, "transports": transports, **status}
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
                "parked": runner.parked.is_set(),
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


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json"
    )


def _is_local(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address(remote or "").is_loopback
    except ValueError:
        return False


def _refusal() -> web.Response:
    return _json({"error": "this route answers its own host only"}, status=403)


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
