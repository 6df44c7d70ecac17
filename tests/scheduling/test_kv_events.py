"""KV events: a subscriber's mirror never disagrees with the pool, whatever happens to pages and to messages."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from paged_simulator import VOCAB, FakeModel, Simulator, make_request
from support.ahead import AheadSimulator
from support.checkpoints import Checkpoint
from support.driving import BOTH_DEPTHS, Job, make_engine, run
from support.jobs import CHECKPOINT
from support.mirror import Mirror
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES
from support.service import Service, serving, wait_for
from test_scheduler_properties import may_fit

from engine import ConfigError, Engine, EngineConfig, SamplingParams, default_topic
from engine.interface.kv_events import KVEventsConfig, parse_kv_events
from engine.process.kv_events import KVEventPublisher, public_hash
from engine.scheduling.block_pool import BlockPool, PageHash, PageHasher
from engine.scheduling.page_events import PagesRemoved

_numbers = itertools.count()


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="octavo-kv-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def published(endpoint: str | None = None, **settings: Any) -> KVEventPublisher:
    """A publisher in this process, which sends nothing yet."""
    given = {"endpoint": endpoint or f"inproc://kv-{next(_numbers)}", **settings}
    return KVEventPublisher(parse_kv_events({"enable_kv_cache_events": True, **given}), "kv@here@model", 2)


def check_chain(mirror: Mirror, hasher: PageHasher) -> None:
    """Every page of the mirror has the hash of what it is said to hold."""
    whole: dict[int, PageHash] = {}
    for page, (parent, tokens, keys) in mirror.told.items():  # parents come before their children
        if parent is not None:
            above = whole[parent]
            assert keys is None, "what a page's beginning depends on is told with the first one"
        else:
            above = bytes.fromhex(keys[0]) if keys else hasher.root(None)
        whole[page] = hasher.extend(above, np.array(tokens, dtype=np.int32))
        assert public_hash(whole[page]) == page


def check_mirror(mirror: Mirror, pool: BlockPool) -> None:
    assert set(mirror.pages) == {public_hash(known) for known in pool._page_of}


# ---------------------------------------------------------------- over random work


def random_request(rng: random.Random, name: str, texts: list[list[int]]) -> Any:
    kind = rng.choice(["greedy", "sample", "beam"])
    how: dict[str, Any] = {}
    if kind == "sample":
        how = {"n": rng.randint(1, 3), "temperature": 1.0, "seed": rng.randint(0, 9)}
    elif kind == "beam":
        how = {"num_beams": 3, "n": rng.randint(1, 3)}
    prompt = rng.choice(texts)[: rng.randint(1, 24)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
    return make_request(
        name,
        prompt,
        max_tokens=rng.randint(1, 12),
        stop_ids=frozenset({0}),
        eos_ids=frozenset({0}),
        priority=rng.choice([0, 0, 1]),
        cache_salt=rng.choice([None, None, None, "a", "b"]),
        **how,
    )


def random_work(kind: type[Simulator], seed: int, steps: int) -> dict[str, int]:
    """Requests that come, go and fail in a small pool, with a mirror over ZeroMQ that is compared after each step;
    what happened."""
    rng = random.Random(seed)
    texts = [[rng.randrange(2, VOCAB) for _ in range(30)] for _ in range(3)]
    window = rng.choice([None, None, 5])
    made = kind(num_pages=14, block_size=2, max_num_seqs=6, max_num_batched_tokens=12, model=FakeModel(), window=window)
    endpoint = f"inproc://kv-{next(_numbers)}"
    # Hardly any room: some messages are dropped, and had by replay.
    publisher = published(endpoint, max_queue_size=rng.choice([1, 2, 1000]), replay_endpoint=endpoint + "-replay")
    with made as simulator, Mirror(endpoint, replay=endpoint + "-replay") as mirror:
        events = simulator.scheduler.record_events()
        publisher.start("CPU")
        names = itertools.count()
        for _ in range(steps):
            simulator.now += 0.25
            alive = [name for name in simulator.requests if name not in simulator.over]
            if len(alive) < 8 and rng.random() < 0.4:
                request = random_request(rng, str(next(names)), texts)
                if may_fit(request, simulator):
                    simulator.add(request)
            chance = rng.random()
            if alive and chance < 0.03:
                simulator.abort(rng.choice(alive))
            elif alive and chance < 0.05:
                simulator.fail_apart(rng.choice("0123456789"))
            elif chance < 0.06:
                simulator.pool.clear()
            elif not alive and chance < 0.3:
                assert simulator.pool.clear()
            else:
                simulator.step()
            if events.events:
                publisher.publish(events.take())
            if rng.random() < 0.5:  # else several messages come at once
                if publisher.num_dropped:
                    mirror.catch_up()
                mirror.read(publisher.num_messages)
                check_mirror(mirror, simulator.pool)
        mirror.catch_up()
        check_mirror(mirror, simulator.pool)
        check_chain(mirror, simulator.scheduler._hasher)
        publisher.close()
        assert mirror.numbers == list(range(publisher.num_messages))
        return mirror.counts | {
            "preempted": simulator.scheduler.stats.num_preemptions,
            "salted": sum(bool(keys) for _, _, keys in mirror.told.values()),
            "dropped": publisher.num_dropped,
        }


def happened(kinds: list[type[Simulator]], seeds: range, steps: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for kind, seed in itertools.product(kinds, seeds):
        for name, count in random_work(kind, seed, steps).items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.slow
def test_a_mirror_agrees_with_the_pool_after_every_step() -> None:
    found = happened([Simulator, AheadSimulator], range(3), 250)
    assert all(found.values()), found  # evictions, preemptions, clearing, salts, drops


@pytest.mark.slow
def test_a_mirror_agrees_with_the_pool_for_long() -> None:
    """MIRROR_STEPS=100000 makes it take hours."""
    found = happened([Simulator, AheadSimulator], range(100, 108), int(os.environ.get("MIRROR_STEPS", "500")))
    assert found.pop("dropped"), found  # how many depends on the threads
    assert min(found.values()) > 100, found


def test_nothing_is_recorded_where_nobody_asked() -> None:
    with Simulator(num_pages=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=8) as simulator:
        simulator.add(make_request("a", [2, 3, 4, 5, 6]))
        simulator.step()
        assert simulator.scheduler.events is None
        assert simulator.pool.listener is None


def test_a_cache_is_cleared_only_while_nothing_is_held() -> None:
    with Simulator(num_pages=8, block_size=2, max_num_seqs=2, max_num_batched_tokens=8) as simulator:
        events = simulator.scheduler.record_events()
        simulator.add(make_request("a", [2, 3, 4, 5, 6], max_tokens=3))
        simulator.step()
        assert not simulator.pool.clear()
        while simulator.scheduler.has_unfinished():
            simulator.step()
        assert simulator.pool.num_cached
        events.take()
        assert simulator.pool.clear()
        simulator.pool.check_integrity([])
        assert (simulator.pool.num_cached, simulator.pool.num_free) == (0, 8)
        assert [type(event).__name__ for event in events.take()] == ["PagesCleared"]


# ---------------------------------------------------------------- messages


def test_what_the_queue_does_not_hold_is_dropped_and_replayed() -> None:
    publisher = published("inproc://kv-drops", max_queue_size=2, buffer_steps=4, replay_endpoint="inproc://kv-drops-r")
    with Mirror("inproc://kv-drops", replay="inproc://kv-drops-r") as mirror:
        hashes = [bytes([number]) * 16 for number in range(6)]
        for page_hash in hashes:  # nothing is sent yet
            publisher.publish([PagesRemoved([page_hash])])
        assert (publisher.num_messages, publisher.num_dropped) == (6, 4)
        publisher.start("GPU")
        again = mirror.fetch(0)
        assert [number for number, _ in again] == [2, 3, 4, 5]  # of 6, 4 are kept
        assert mirror.fetch(5) == again[3:]
        assert mirror.fetch(6) == mirror.fetch(2**64 - 1) == []
        live = [mirror._live.recv_multipart() for _ in range(2)]
        assert [(topic, int.from_bytes(number, "big")) for topic, number, _ in live] == [
            (b"kv@here@model", 0),
            (b"kv@here@model", 1),
        ]
        assert not mirror._live.poll(50)
        publisher.close()


@pytest.mark.slow
def test_long_replays_reach_several_clients_whole() -> None:
    """More messages than a socket buffers, to clients that begin to read late, and one that goes away."""
    publisher = published("inproc://kv-long", max_queue_size=10**5, replay_endpoint="inproc://kv-long-r")
    publisher.start("GPU")
    for number in range(9000):
        publisher.publish([PagesRemoved([number.to_bytes(16, "big")])])
    context = zmq.Context.instance()
    clients = [context.socket(zmq.DEALER) for _ in range(12)]
    for client in clients:
        client.connect("inproc://kv-long-r")
        client.send_multipart([b"", (7).to_bytes(8, "big")])
    clients[0].close(linger=0)
    for client in clients[1:]:
        numbers = []
        while True:
            assert client.poll(60_000)
            _, number, _ = client.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
            if numbers[-1] == -1:
                break
        assert numbers == [*range(7, 9000), -1]
        client.close(linger=0)
    publisher.close()


def test_a_request_for_replay_that_is_none_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    publisher = published("inproc://kv-odd", replay_endpoint="inproc://kv-odd-r")
    publisher.start("GPU")
    publisher.publish([PagesRemoved([b"1" * 16])])
    odd = zmq.Context.instance().socket(zmq.DEALER)
    odd.connect("inproc://kv-odd-r")
    for parts in ([b""], [b"", b"12"], [b"", b"", b"x" * 9], [b"", b"x" * 7, b"y"]) * 5:
        odd.send_multipart(parts)
    odd.send((0).to_bytes(8, "big"))  # without the empty part
    assert odd.poll(60_000)
    assert odd.recv_multipart()[0] == (0).to_bytes(8, "big")
    assert sum("8 bytes, big-endian" in line for line in caplog.messages) == 1, "of many, one is logged"
    odd.close(linger=0)
    publisher.close()


def test_events_stay_on_this_machine_unless_an_address_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    default = KVEventsConfig()
    assert default.binds
    assert "127.0.0.1" in default.endpoint
    for endpoint, bind, expected in (
        ("tcp://*:5557", None, True), ("tcp://[::]:5557", None, True), ("ipc:///run/kv", None, True),
        ("tcp://127.0.0.1:6000", None, False), ("tcp://127.0.0.1:6000", True, True), ("tcp://*:6000", False, False),
    ):  # fmt: skip
        assert KVEventsConfig(endpoint=endpoint, bind=bind).binds is expected
    published(f"tcp://127.0.0.1:{free_port()}", bind=True).close()
    assert not caplog.messages
    published(f"tcp://*:{free_port()}").close()
    (warning,) = caplog.messages
    assert all(part in warning for part in ("endpoint tcp://*:", "other machines", "127.0.0.1"))


def test_a_publisher_may_connect_to_its_subscriber() -> None:
    with Mirror("tcp://127.0.0.1:*", bind=True) as mirror:
        publisher = published(mirror.endpoint)
        publisher.start("GPU")
        wait_for(lambda: publisher.publish([PagesRemoved([])]) or mirror._live.poll(10), "nothing came")
        publisher.close()


def test_a_subscriber_that_reads_nothing_holds_nobody_up() -> None:
    publisher = published("inproc://kv-slow", hwm=10, replay_endpoint="inproc://kv-slow-r")
    with Mirror("inproc://kv-slow", replay="inproc://kv-slow-r") as mirror:
        mirror._live.rcvhwm = 10
        publisher.start("GPU")
        for number in range(5000):
            publisher.publish([PagesRemoved([number.to_bytes(16, "big")])])
        assert [number for number, _ in mirror.fetch(0)] == list(range(5000))
        assert publisher.num_dropped == 0
        publisher.close()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "kv_events_config must be a JSON object, got '{': Expecting property name"),
        ("[]", r"kv_events_config must be a JSON object, got '\[\]'"),
        (7, "kv_events_config must be a JSON object, got 7: it is not text"),
        (
            {"endpoints": "tcp://*:1"},
            "kv_events_config has no field 'endpoints'; its fields are enable_kv_cache_events, ",
        ),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false, got 1"),
        ({"publisher": "kafka"}, 'publisher must be "zmq" or "null", got \'kafka\''),
        ({"endpoint": "localhost:5557"}, "endpoint must be a ZeroMQ address such as .*, got 'localhost:5557'"),
        ({"bind": 1}, "bind must be true or false, got 1"),
        ({"endpoint": None}, "endpoint must be a ZeroMQ address"),
        ({"replay_endpoint": ""}, "replay_endpoint must be a ZeroMQ address"),
        ({"buffer_steps": 0}, "buffer_steps must be an integer from 1 to 2147483647, got 0"),
        ({"hwm": True}, "hwm must be an integer from 1"),
        ({"max_queue_size": 2**31}, "max_queue_size must be an integer from 1 to 2147483647, got 2147483648"),
        ({"topic": 5}, "topic must be a text, got 5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", kv_events_config=given)


def test_events_need_a_prefix_cache() -> None:
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="but enable_prefix_caching is false"):
        EngineConfig(model="m", kv_events_config=on, enable_prefix_caching=False)  # type: ignore[arg-type]
    off = EngineConfig(model="m", kv_events_config='{"endpoint": "tcp://*:1"}', enable_prefix_caching=False)
    assert off.kv_events is None
    nowhere = EngineConfig(model="m", kv_events_config=json.dumps(on | {"publisher": "null"}))
    assert nowhere.kv_events is None
    assert nowhere.with_kv_topic("t") is nowhere


def test_topics() -> None:
    config = EngineConfig(model="m", kv_events_config='{"enable_kv_cache_events": true, "hwm": 5}')
    named = config.with_kv_topic("kv@pod@m")
    assert named.kv_events == KVEventsConfig(enable_kv_cache_events=True, hwm=5, topic="kv@pod@m")
    assert named.with_kv_topic("other") is named
    assert default_topic("org/m", 8000, {"POD_IP": "10.0.0.7"}) == "kv@10.0.0.7:8000@org/m"
    assert default_topic("org/m", None, {"POD_IP": "10.0.0.7"}) == "kv@10.0.0.7@org/m"
    assert default_topic("m", 8000, {}) == f"kv@{socket.gethostname()}@m"


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_is_taken_is_an_error_before_the_model_loads(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = {"endpoint": "inproc://kv-taken"}
        with pytest.raises(ConfigError, match=rf"{name} 'tcp://\*:{port}' cannot be bound: .* Set another {name}"):
            make_engine("nowhere", kv_events_config=other | {"enable_kv_cache_events": True, name: f"tcp://*:{port}"})


def test_models_with_an_encoder_have_no_events(tmp_path: Path) -> None:
    source = make_seq2seq_checkpoint(SHAPES["t5"], tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"decoder-only models, but .* has an encoder"):
        make_engine(source.path, kv_events_config={"enable_kv_cache_events": True, "endpoint": "inproc://kv-t5"})


# ---------------------------------------------------------------- engines


@BOTH_DEPTHS
def test_an_engine_tells_what_it_keeps(engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]) -> None:
    source = checkpoint(CHECKPOINT)
    endpoint = f"inproc://kv-{next(_numbers)}"
    where = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": endpoint + "-r"}
    engine = engines(num_gpu_blocks_override=24, block_size=4, kv_events_config=where)
    with Mirror(endpoint, replay=endpoint + "-r") as mirror:
        mirror.catch_up()
        assert mirror.counts["AllBlocksCleared"] == 1
        rng = random.Random(3)
        prompts = [[rng.randrange(3, source.vocab) for _ in range(20)] for _ in range(6)]

        def compare(step: int) -> None:
            mirror.read(engine.stats().num_kv_event_messages)
            check_mirror(mirror, engine.scheduler.pool)

        for number in range(3):
            params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            run(
                engine,
                [Job(prompt, params, {"cache_salt": "s" if number == 1 else None}) for prompt in prompts],
                compare,
            )
        assert mirror.counts["BlockStored"] > 10
        assert mirror.counts["BlockRemoved"] > 5
        assert mirror.media == {"CPU"}
        assert mirror.topics == {f"kv@{socket.gethostname()}@{source.path}"}
        check_chain(mirror, engine.scheduler._hasher)
        assert any(keys for _, _, keys in mirror.told.values())
        assert engine.reset_prefix_cache()
        compare(0)
        assert mirror.pages == {}
        run(engine, [Job(prompts[0], params)], compare)
        assert mirror.begins(prompts[0], 4) == 5
        stats = engine.stats()
        assert stats.num_kv_event_drops == 0
        engine.close()
        mirror.read(stats.num_kv_event_messages + 1)
        assert mirror.pages == {}


@pytest.mark.slow
def test_a_service_tells_what_it_keeps_and_a_new_engine_begins_anew(tmp_path: Path, folder: Path) -> None:
    live, replay = f"ipc://{folder}/live", f"tcp://127.0.0.1:{free_port()}"
    given = json.dumps({"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay})
    flags = ("--kv-cache-memory", "16MiB", "--kv-events-config", given)
    with (
        serving(*flags, log=tmp_path / "log") as service,
        Mirror(live, replay=replay) as mirror,
        httpx.Client(base_url=service.url, timeout=100) as client,
    ):
        text = "Once upon a time there was a girl who lived in a house by the sea with a dog and a cat. " * 3
        tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]

        def ask(**more: Any) -> int:
            body = {"prompt": text, "max_tokens": 20, "temperature": 0, **more}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return int(cached)

        def catch_up() -> None:
            mirror.catch_up()
            assert mirror.next == service.metric("octavo_kv_event_messages_total")

        assert ask(cache_salt="mine") == 0
        catch_up()
        assert mirror.pages
        assert mirror.begins(tokens, 16) == 0, "pages of a salted prompt count for one without the salt"
        assert ask() == 0
        catch_up()
        whole = len(tokens) // 16
        assert mirror.begins(tokens, 16) >= whole
        assert ask() == 16 * ((len(tokens) - 1) // 16), "what the mirror says is cached, is"
        assert service.metric("octavo_kv_event_drops_total") == 0
        # Live, too: what comes now is on the subscriber's socket without a replay.
        before = mirror.next
        ask(prompt=text[::-1])
        mirror.read(before + 1)
        (topic,) = mirror.topics
        kind, pod, model = topic.split("@")
        assert (kind, pod, model) == ("kv", socket.gethostname(), "octavo-demo")

        old = service.engine()
        os.kill(old, signal.SIGKILL)
        service.engine(but=old)
        wait_for(lambda: client.get("/health/ready").status_code == 200, "no new engine")
        with Mirror(live, replay=replay) as fresh:
            fresh.catch_up()
            assert (fresh.counts["AllBlocksCleared"], fresh.pages) == (1, {})
            ask()
            fresh.catch_up()
            assert fresh.begins(tokens, 16) >= whole


@pytest.mark.slow
def test_a_service_does_not_start_with_settings_that_mean_nothing(tmp_path: Path) -> None:
    service = Service("--kv-events-config", '{"enable_kv_cache_events": true, "port": 1}', log=tmp_path / "log")
    assert service.process.wait(100) == 2
    assert "--kv-events-config has no field 'port'; its fields are enable_kv_cache_events" in service.log.read_text()
