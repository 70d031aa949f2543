"""Turns over a misbehaving runner and store: always answered, never wrongly counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from proxy.errors import RequestError, RunnerGone, StoreError, StoreTimeout
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.runner import Runner
from proxy.metrics import Metrics
from proxy.ollama.backend import ReuseOptions, TurnRequest
from proxy.reuse.models import Model, ModelCatalog
from proxy.reuse.orchestrator import Orchestrator
from proxy.reuse.plan import RestoreMode
from proxy.reuse.request_log import RequestLog
from proxy.reuse.switch import SharingSwitch
from proxy.reuse.trace import TurnTrace
from proxy.reuse.turn import ActiveTurn
from proxy.store.base import PutOptions, PutOutcome
from tests.fakes.fake_llama_server import FakeLlamaServer, fake_llama_server
from tests.fakes.memory_store import MemoryStore

PROMPT = np.arange(100, 150, dtype=np.int32)
OTHER = np.arange(500, 550, dtype=np.int32)
BLOCK = 16


@dataclass
class Bench:
    """An orchestrator with one model, one fake runner and a store in memory."""

    server: FakeLlamaServer
    store: MemoryStore
    metrics: Metrics
    model: Model
    runner: Runner
    switch: SharingSwitch
    log: RequestLog
    orchestrator: Orchestrator

    async def ask(
        self,
        token_ids: Any = PROMPT,  # noqa: ANN401
        *,
        drains: bool = True,
        **reuse: Any,  # noqa: ANN401
    ) -> TurnTrace:
        """Have a prompt continued and committed; returns what is known of it."""
        request = self.request(token_ids, **reuse)
        async with self.orchestrator.turn(request) as turn:
            assert isinstance(turn, ActiveTurn)
            events = [event async for event in turn.events()]
        assert events[-1]["stop"]
        if drains:
            await self.orchestrator.drain(timeout_seconds=5)
            assert "0/1 leased" in repr(self.model.pool)
        return turn.trace

    def request(
        self,
        token_ids: Any = PROMPT,  # noqa: ANN401
        **reuse: Any,  # noqa: ANN401
    ) -> TurnRequest:
        """Make a request of the model."""
        return TurnRequest(
            model=self.model,
            token_ids=token_ids,
            body={"n_predict": 3},
            route="/api/generate",
            reuse=ReuseOptions(**reuse),
        )

    def value(self, name: str) -> float:
        """Return the sum of a counter over its labels."""
        return sum(
            sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == f"kvbus_{name}_total"
        )


def facts() -> ModelFacts:
    """Return the facts of a model that does not exist."""
    return ModelFacts(
        path="/m.gguf",
        size_bytes=1,
        mtime_ns=0,
        content_digest="d",
        file_sha256=None,
        architecture="llama",
        name="m",
        parameter_count=1,
        parameter_size="1",
        quantization_level="F16",
        context_length=4096,
        embedding_length=1,
        block_count=2,
        head_count=1,
        head_count_kv=1,
        chat_template="",
        tokenizer_model="",
        tokenizer_pre="",
        bos_id=None,
        eos_id=None,
        add_bos=False,
        control_tokens=(),
        longest_token_bytes=1,
        license="",
    )


async def inspected(runner: Runner, server: FakeLlamaServer) -> LlamaServerClient:
    """Make a runner ready; returns its client, to be closed."""
    client = LlamaServerClient(url=server.url)
    await runner.inspect(
        client, slot_directory=server.slot_directory, flags=(), engine="", pid=None
    )
    return client


@asynccontextmanager
async def bench(mode: RestoreMode = RestoreMode.ALWAYS) -> AsyncIterator[Bench]:
    """Build all of it; a restore is made whenever something is stored."""
    async with fake_llama_server() as server:
        metrics, store = Metrics(), MemoryStore()
        catalog = ModelCatalog()
        model = Model(name="m:latest", facts=facts(), metrics=metrics)
        catalog.add(model)
        runner = Runner(
            runner_id="m/0",
            facts=model.facts,
            listener=model,
            block_size=BLOCK,
            patience=1,
        )
        model.runners.append(runner)
        client = await inspected(runner, server)
        switch, log = SharingSwitch(metrics), RequestLog()
        orchestrator = Orchestrator(
            catalog=catalog,
            store=store,
            mode=mode,
            metrics=metrics,
            switch=switch,
            log=log,
        )
        try:
            yield Bench(
                server, store, metrics, model, runner, switch, log, orchestrator
            )
        finally:
            runner.close_files()
            await client.close()


async def test_a_prefix_is_stored_and_restored() -> None:
    """The way it should be: three blocks stored, restored, and confirmed."""
    async with bench() as it:
        await it.ask()
        assert len(it.store.blocks) == 3
        await it.ask(OTHER)
        trace = await it.ask()
        assert (trace.restored_tokens, it.value("avoided_prefill_tokens")) == (48, 48)
        assert it.server.calls[-2:] == ["restore", "completion 48"]
        again = await it.ask()
        assert (again.restored_tokens, again.slot_tokens) == (0, 50)
        assert it.value("failed_open") == 0


async def test_what_the_engine_did_not_reuse_is_not_counted() -> None:
    """Two restores without effect: nothing counted, and no third one is tried."""
    async with bench() as it:
        await it.ask()
        it.server.reuses_nothing = True
        for number in (1, 2):
            await it.ask(OTHER + 100 * number)  # seen for the first time
            trace = await it.ask()
            assert trace.restored_tokens == 48
        assert it.value("avoided_prefill_tokens") == 0
        assert it.value("restore_ineffective") == 2
        assert it.runner.sharing is None
        assert "reused 0 tokens" in it.runner.refusal
        trace = await it.ask()
        assert trace.restored_tokens == 0


@pytest.mark.parametrize("quirk", ["refuses_restores", "restores_less"])
async def test_a_failed_restore_is_a_plain_turn(quirk: str) -> None:
    """It is answered, counted as failed open, and the slot is believed empty."""
    async with bench() as it:
        await it.ask()
        await it.ask(OTHER)
        setattr(it.server, quirk, True)
        trace = await it.ask()
        assert (trace.result, trace.restored_tokens) == ("complete", 0)
        assert trace.plan.reason == "slot failed"
        assert it.value("failed_open") == 1
        assert it.value("avoided_prefill_tokens") == 0
        assert len(it.store.blocks) == 6, "no stored block is given up for it"


@pytest.mark.parametrize("quirk", ["saves_nothing", "saves_other_tokens"])
async def test_a_bad_save_is_not_stored(quirk: str) -> None:
    """An empty save, or one of other tokens, publishes nothing."""
    async with bench() as it:
        setattr(it.server, quirk, True)
        await it.ask()
        assert it.store.blocks == {}
        assert it.value("failed_open") == 1
        assert not list(it.server.slot_directory.glob("*save*"))


async def test_an_answer_that_is_not_understood_frees_its_slot() -> None:
    """A final event without timings is a broken answer, after which all goes on."""
    async with bench() as it:
        it.server.has_no_timings = True
        with pytest.raises(RunnerGone, match="timings"):
            await it.ask()
        it.server.has_no_timings = False
        assert (await it.ask()).slot_tokens == 0


@pytest.mark.parametrize("error", [StoreError("away"), StoreTimeout("slow")])
async def test_a_store_that_fails_costs_no_turn(error: StoreError) -> None:
    """Lookup and commit fail open; with the store back all goes on."""
    async with bench() as it:
        it.store.fail_with = error
        trace = await it.ask()
        assert (trace.result, trace.plan.reason) == ("complete", "store failed")
        assert it.value("failed_open") == 2
        it.store.fail_with = None
        await it.ask(OTHER)
        assert len(it.store.blocks) == 3


async def test_a_commit_waits_for_a_store_that_was_silent_for_a_moment() -> None:
    """The put that failed is made again once the store answers: nothing is lost."""
    async with bench() as it:
        real_put, calls = it.store.put_from, 0

        async def put_from(*args: Any, **kwargs: Any) -> PutOutcome:  # noqa: ANN401
            nonlocal calls
            calls += 1
            if calls == 1:
                await real_put(*args, **kwargs)  # but nobody hears of it
                it.store.is_available = False
                asyncio.get_running_loop().call_later(0.1, come_back)
                raise StoreError("it does not answer")
            return await real_put(*args, **kwargs)

        def come_back() -> None:
            it.store.is_available = True

        it.store.put_from = put_from  # type: ignore[method-assign]
        await it.ask()
        assert (calls, len(it.store.blocks)) == (2, 3)
        assert it.value("failed_open") == 0
        assert it.value("committed_bytes") > 0


async def test_a_prefix_on_its_way_into_the_store_is_waited_for() -> None:
    """A turn on the heels of an answer restores what is just being put."""
    async with bench() as it:
        real_put = it.store.put_from

        async def put_from(*args: Any, **kwargs: Any) -> PutOutcome:  # noqa: ANN401
            await asyncio.sleep(0.01)
            return await real_put(*args, **kwargs)

        it.store.put_from = put_from  # type: ignore[method-assign]
        await it.ask(drains=False)
        it.model.pool.slots[0].token_ids = OTHER  # as if another turn had been there
        trace = await it.ask()
        assert trace.restored_tokens == 48
        assert 0.0 < trace.stages["wait"] < 1.0


async def test_a_wait_in_vain_is_the_last_for_a_while() -> None:
    """A store that is slow to take blocks costs one short wait, not one a turn."""
    async with bench(RestoreMode.AUTO) as it:
        release = asyncio.Event()
        real_put = it.store.put_from

        async def put_from(*args: Any, **kwargs: Any) -> PutOutcome:  # noqa: ANN401
            await release.wait()
            return await real_put(*args, **kwargs)

        it.store.put_from = put_from  # type: ignore[method-assign]
        await it.ask(drains=False)
        waits = []
        for _ in range(2):
            it.model.pool.slots[0].token_ids = OTHER
            trace = await it.ask(drains=False)
            assert trace.restored_tokens == 0
            waits.append(trace.stages.get("wait", 0.0))
        release.set()
        await it.orchestrator.drain(timeout_seconds=5)
        assert 0.0 < waits[0] < 0.5
        assert waits[1] == 0.0


async def test_a_defect_of_ours_costs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised on the way to a restore, the request is answered."""
    async with bench() as it:
        await it.ask()
        await it.ask(OTHER)

        def break_down(*args: object, **kwargs: object) -> None:
            raise ValueError("a defect")

        monkeypatch.setattr("proxy.llamacpp.state.frame_parts", break_down)
        trace = await it.ask()
        assert (trace.result, trace.plan.reason) == ("complete", "defect failed")


async def test_namespaces_do_not_share() -> None:
    """Another namespace gets neither what is stored nor what the slot holds."""
    async with bench() as it:
        await it.ask()
        for namespace in ("tenant", "other"):
            trace = await it.ask(namespace=namespace)
            assert (trace.slot_tokens, trace.restored_tokens) == (0, 0)
            assert it.server.calls[-3:] == ["erase", "completion 0", "save"]
        it.server.refuses_erasing = True
        await it.ask(namespace="third")
        assert it.server.calls[-3:] == ["erase", "completion 0", "save"]
        again = await it.ask(namespace="third")
        assert again.slot_tokens == 50
        assert (await it.ask(namespace="tenant")).restored_tokens == 48
        assert len(it.store.blocks) == 12


async def test_a_request_chooses_the_size_of_its_blocks() -> None:
    """Blocks of another size have other keys; too large ones are neither."""
    async with bench() as it:
        await it.ask(block_size=32)
        assert len(it.store.blocks) == 1
        await it.ask(OTHER)
        assert (await it.ask()).restored_tokens == 0
        await it.ask(OTHER)
        assert (await it.ask(block_size=32)).restored_tokens == 32
        stored = len(it.store.blocks)
        trace = await it.ask(OTHER + 100, block_size=1 << 20)
        assert trace.plan.reason == "blocks of this size are too large"
        assert len(it.store.blocks) == stored


async def test_a_request_says_how_its_blocks_are_kept() -> None:
    """Copies and pins go to the store with the blocks; else they are plain."""
    async with bench() as it:
        await it.ask()
        await it.ask(OTHER, replica_num=2, soft_pin=True)
        assert it.store.put_options == [
            PutOptions(),
            PutOptions(replica_num=2, soft_pin=True),
        ]


async def test_reading_and_writing_are_allowed_apart() -> None:
    """A request that forbids one of them is served without it."""
    async with bench() as it:
        trace = await it.ask(write=False)
        assert (trace.commit and trace.commit.result) == "the request forbids it"
        assert it.store.blocks == {}
        await it.ask()
        await it.ask(OTHER)
        it.store.calls.clear()
        trace = await it.ask(read=False)
        assert trace.plan.reason == "the request forbids restores"
        assert "get" not in [name for name, _ in it.store.calls]
        trace = await it.ask(OTHER + 100, read=False)
        assert trace.commit is not None
        assert (trace.commit.result, trace.commit.stored_blocks) == ("stored", 3)
        assert trace.commit.stored_bytes == 3 * 16 * 4 * 64
        assert (await it.ask(OTHER + 100)).commit is not None


async def test_while_paused_requests_are_forwarded_plainly() -> None:
    """No question to the store, no save; after it all is as before."""
    async with bench() as it:
        await it.ask()
        await it.ask(OTHER)
        it.store.calls.clear()
        it.server.calls.clear()
        it.switch.set_paused(True)
        for prompt in (PROMPT, OTHER + 100):
            trace = await it.ask(prompt)
            assert trace.plan.reason == "sharing is paused"
            assert (trace.commit and trace.commit.result) == "sharing is paused"
        assert it.store.calls == []
        assert it.server.calls == ["completion 0", "completion 0"]
        it.switch.set_paused(False)
        assert (await it.ask()).restored_tokens == 48


async def test_a_turn_is_paused_that_began_before() -> None:
    """What a turn leaves in its slot is not stored once sharing is paused."""
    async with bench() as it:
        async with it.orchestrator.turn(it.request()) as turn:
            it.switch.set_paused(True)
            assert [event async for event in turn.events()][-1]["stop"]
        await it.orchestrator.drain(timeout_seconds=5)
        assert it.store.blocks == {}


async def test_a_turn_is_part_of_its_request() -> None:
    """The record of a request knows the turn by the time that it waits for a slot."""
    async with bench() as it:
        record = it.log.begin("/api/generate")
        async with it.orchestrator.turn(it.request()) as turn:
            assert turn.request_id == record.request_id
            assert record.to_dict()["turn"]["result"] == "running"
            async for _ in turn.events():
                pass
        await it.orchestrator.drain(timeout_seconds=5)
        told = record.to_dict()["turn"]
        assert told["result"] == "complete"
        assert told["commit"]["result"] == "stored"
        assert told["decoded_tokens"] == 3
        it.log.leave()
        assert (await it.ask()).request_id != record.request_id


async def test_a_broken_connection_is_no_death() -> None:
    """A runner that lives was asked once, and its silence is the answer."""
    async with bench() as it:
        it.server.breaks_off = True
        with pytest.raises(RunnerGone):
            await it.ask()
        assert it.runner.is_ready
        it.server.breaks_off = False
        assert (await it.ask()).deaths == 0


@pytest.mark.parametrize("is_relayed", [False, True])
async def test_a_turn_moves_from_a_dead_runner(is_relayed: bool) -> None:
    """Before the first word the next runner is asked, and all is decided anew."""
    async with bench() as it, fake_llama_server() as second:
        await it.ask()
        other = Runner(
            runner_id="m/1",
            facts=it.model.facts,
            listener=it.model,
            block_size=BLOCK,
            patience=1,
        )
        it.model.runners.append(other)
        client = await inspected(other, second)
        second.is_dying = True
        request = it.request()
        if is_relayed:
            body = {"n_predict": 3, "prompt": PROMPT.tolist(), "stream": True}
            request = replace(request, body=body, path="/v1/completions")
        async with it.orchestrator.turn(request) as turn:
            assert turn.slot.runner is other, "the prefix is not long enough to wait"
            assert turn.restored_tokens == 48
            if is_relayed:
                async with turn.forward() as answer:
                    assert answer.status == 200
                    chunks = [chunk async for chunk in answer.chunks()]
                assert b'"timings"' in chunks[-1]
            else:
                assert [event async for event in turn.events()][-1]["stop"]
        await it.orchestrator.drain(timeout_seconds=5)
        trace = turn.trace
        assert (trace.runner_id, trace.deaths, trace.result) == ("m/0", 1, "complete")
        assert (trace.slot_tokens, trace.restored_tokens) == (50, 0)
        assert not other.is_ready
        assert "0/1 leased" in repr(it.model.pool)
        other.close_files()
        await client.close()


@pytest.mark.parametrize("at", ["lookup", "erase"])
async def test_a_turn_that_is_given_up_before_the_slot_is_emptied(at: str) -> None:
    """The next one of its namespace gets nothing of the other namespace's either."""
    async with bench() as it:
        await it.ask()
        reached, goes_on = asyncio.Event(), asyncio.Event()
        owner, name = (
            (it.store, "contains")
            if at == "lookup"
            else (it.runner.client, "erase_slot")
        )
        real = getattr(owner, name)

        async def wait(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            reached.set()
            await goes_on.wait()
            return await real(*args, **kwargs)

        setattr(owner, name, wait)
        leaving = asyncio.create_task(it.ask(namespace="tenant"))
        await reached.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        goes_on.set()
        await it.ask(namespace="tenant")
        assert it.server.calls[-3:] == ["erase", "completion 0", "save"]


@pytest.mark.parametrize("is_relayed", [False, True])
async def test_what_was_heard_and_how_long_its_reader_took(is_relayed: bool) -> None:
    """Events are counted one by one, and the time between them as the reader's."""
    async with bench() as it:
        request = it.request()
        if is_relayed:
            body = {"n_predict": 3, "prompt": PROMPT.tolist(), "stream": True}
            request = replace(request, body=body, path="/v1/completions")
        async with it.orchestrator.turn(request) as turn:
            if is_relayed:
                async with turn.forward() as answer:
                    async for _ in answer.chunks():
                        await asyncio.sleep(0.01)
            else:
                async for _ in turn.events():
                    await asyncio.sleep(0.01)
        assert isinstance(turn, ActiveTurn)
        assert turn.num_events == 4
        assert turn.held_seconds >= 0.009
        await it.orchestrator.drain(timeout_seconds=5)


async def test_tokens_of_one_model_are_not_evaluated_by_another() -> None:
    """A turn fails that waits while the model's file is replaced; its slot is freed."""
    async with bench() as it:
        slot = await it.model.pool.lease(PROMPT)
        waiting = asyncio.create_task(it.ask())
        await asyncio.sleep(0)
        assert it.model.pool.num_waiting == 1
        it.server.calls.clear()
        it.runner.facts = replace(it.model.facts, content_digest="another")
        it.model.renew(it.runner.facts, it.model.modelfile, projector=None)
        it.model.pool.release(slot)
        with pytest.raises(RequestError, match="replaced"):
            await waiting
        assert it.server.calls == []
        assert (await it.ask()).result == "complete"
