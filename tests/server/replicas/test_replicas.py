"""What a replica of Ray Serve is made of, without Ray."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_client import FakeClient, byte_tokenizer
from support.asgi import Call

from engine import ConfigError, TokenInput
from engine.process.client import Progress
from server.app import create_app
from server.assembly import Assembly
from server.config.settings import ServerSettings, Settings
from server.door.drain import Drain
from server.replicas import scaling
from server.replicas.carried import CarriedByServe
from server.replicas.options import _SERVES_OWN, DeploymentOptions, read_arguments
from server.replicas.prefixes import LONGEST, PIECE, Prefixes, chain
from server.replicas.replica import Replica, UnhealthyError


def body(*texts: str, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return json.dumps({"model": "m", **fields, "messages": messages, "temperature": 0.5}).encode()


class TestChain:
    def test_a_conversation_goes_on_from_its_earlier_turns(self) -> None:
        first, second = body("a" * 500), body("a" * 500, "b" * 500, "c" * 500)
        shorter, longer = chain(first), chain(second)
        whole = len(b'"messages": [{"role": "user", "content": "' + b"a" * 500) // PIECE
        assert longer[:whole] == shorter[:whole]
        assert len(longer) > whole

    def test_what_stands_before_the_prompt_does_not_count(self) -> None:
        assert chain(body("a" * 500)) == chain(body("a" * 500, model="other", stream=True))

    def test_the_first_of_the_prompts_fields_begins_it(self) -> None:
        one, other = (body("a" * 500, system=letter * 200) for letter in "xy")
        assert set(chain(one)).isdisjoint(chain(other))

    def test_tenants_have_nothing_in_common(self) -> None:
        assert set(chain(body("a" * 500), b"one")).isdisjoint(chain(body("a" * 500), b"other"))

    def test_the_billing_block_of_claude_code_counts_for_nothing(self) -> None:
        def asked(**block: Any) -> bytes:
            return json.dumps({"model": "m", "system": [block, {"type": "text", "text": "a" * 2000}]}).encode()

        one, other = (
            chain(asked(type="text", text=f"x-anthropic-billing-header: cc_version=2.1; cch={name};"))
            for name in ("1a2b", '"quoted"')
        )
        assert one == other != chain(asked(type="text", text="x-other-header: cch=1a2b;"))
        assert len(one) > 10

    def test_only_whole_pieces_count_and_not_without_end(self) -> None:
        assert chain(b"") == chain(b'{"model": "m"}') == chain(b'{"prompt": "short"}') == []
        assert len(chain(b'{"prompt": "' + b"a" * 10 * LONGEST)) == LONGEST // PIECE
        assert len(chain(b'{"prompt": "' + b"a" * PIECE)) == 1


class TestPrefixes:
    def test_the_replica_that_has_seen_most_is_found(self) -> None:
        prefixes = Prefixes(100)
        digests = [bytes([number]) for number in range(5)]
        prefixes.add(digests[:2], "a")
        prefixes.add(digests[:4], "b")
        assert prefixes.deepest(digests, {"a", "b", "c"}) == (4, {"b"})
        assert prefixes.deepest(digests[:2], {"a", "b"}) == (2, {"a", "b"})
        assert prefixes.deepest(digests, {"a"}) == (2, {"a"})
        assert prefixes.deepest(digests, {"c"}) == (0, set())

    def test_a_replica_that_is_gone_is_forgotten(self) -> None:
        prefixes = Prefixes(100)
        prefixes.add([b"1", b"2"], "a")
        prefixes.add([b"1"], "b")
        prefixes.forget("a")
        assert prefixes.deepest([b"1", b"2"], {"a", "b"}) == (1, {"b"})
        assert len(prefixes) == 1

    def test_the_oldest_and_longest_is_forgotten_first(self) -> None:
        prefixes = Prefixes(4)
        prefixes.add([b"1", b"2", b"3"], "a")
        prefixes.add([b"4", b"5"], "a")
        assert len(prefixes) == 4
        assert prefixes.deepest([b"1", b"2", b"3"], {"a"}) == (2, {"a"})

    def test_it_agrees_with_a_search_of_all(self) -> None:
        rng = random.Random(1)
        prefixes, seen = Prefixes(10**6), dict[str, list[list[bytes]]]()
        for _ in range(300):
            texts = [bytes([rng.randrange(3)]) * place for place in range(1, 6)]
            digests = [b"".join(texts[:place]) for place in range(1, rng.randrange(2, 6))]
            known = {
                name: max((self.common(digests, other) for other in others), default=0) for name, others in seen.items()
            }
            depth = max(known.values(), default=0)
            found = {name for name, common in known.items() if common == depth and depth}
            assert prefixes.deepest(digests, list(seen)) == (depth, found)
            name = rng.choice("abc")
            prefixes.add(digests, name)
            seen.setdefault(name, []).append(digests)

    @staticmethod
    def common(one: list[bytes], other: list[bytes]) -> int:
        return sum(a == b for a, b in zip(one, other, strict=False))


class TestScaling:
    def wanted(self, requests: float, waiting: tuple[float, ...], *, current: int = 2) -> float:
        context = SimpleNamespace(
            config=SimpleNamespace(target_ongoing_requests=8),
            total_num_requests=requests,
            current_num_replicas=current,
            aggregated_metrics={scaling.WAITING: dict(enumerate(waiting))} if waiting else None,
        )
        return scaling.num_replicas(context)[0]

    def test_requests_decide_where_none_wait(self) -> None:
        assert self.wanted(24, ()) == self.wanted(24, (0, 0)) == 3
        assert self.wanted(4, (0, 1)) == 0.5

    def test_waiting_ones_decide_where_requests_are_few(self) -> None:
        assert self.wanted(8, (4, 4)) == 3
        assert self.wanted(80, (4, 4)) == 10


class TestArguments:
    def test_settings_and_options_are_told_apart(self) -> None:
        settings, options = read_arguments({"max-num-seqs": "4", "max_replicas": "3", "num_cpus": 2})
        assert settings.engine.max_num_seqs == 4
        assert options == DeploymentOptions(max_replicas=3, num_cpus=2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_num_seq": 4}, "unknown setting or option max_num_seq;.*max_num_seqs"),
            ({"max_replicas": 0}, "max_replicas: .*got 0"),
            ({"min_replicas": 2}, r"max_replicas \(1\) must be at least min_replicas \(2\)"),
            ({"max_num_seqs": "many"}, "max_num_seqs must be"),
            ({"request_router": "random"}, "request_router: .*'prefix' or 'power-of-two'"),
            ({"config": "file"}, "unknown setting or option config"),
            ({"port": 9000}, "port has no effect on a replica of Ray Serve. Set http_options: port"),
            ({"response_store": "file"}, "response_store has no effect on a replica.*Serve has no such option"),
        ],
    )
    def test_what_is_wrong_is_named(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_arguments(arguments)

    def test_a_variable_for_another_way_to_serve_is_no_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("OCTAVO_HOST", "0.0.0.0")
        read_arguments({})
        assert "host has no effect on a replica of Ray Serve" in caplog.text

    def test_serves_own_settings_are_settings(self) -> None:
        assert _SERVES_OWN.keys() <= ServerSettings.model_fields.keys() <= Settings.model_fields.keys()


class TestCarriedByServe:
    async def test_a_cancelled_request_is_told_that_its_client_left(self) -> None:
        """And counted so; the task ends as cancelled."""
        begun = asyncio.Event()

        def script(request_id: str, prompt: TokenInput, params: Any) -> list[asyncio.Event]:
            begun.set()
            return [asyncio.Event()]

        client = FakeClient(script)
        app = create_app(client, byte_tokenizer(), "m", settings=ServerSettings(max_queue_time=0))
        call = Call(CarriedByServe(app), "/v1/completions", {"prompt": "a"})  # type: ignore[arg-type]
        await begun.wait()
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        metrics = app.state.service.metrics
        assert b'octavo_requests_aborted_total{reason="disconnect"} 1.0' in metrics.render(None)[0]
        assert not client.running

    async def test_other_requests_pass_and_have_one_id(self) -> None:
        app = create_app(FakeClient(lambda *_: []), byte_tokenizer(), "m")
        call = Call(CarriedByServe(app), "/version", method="GET")  # type: ignore[arg-type]
        await call.wait_end()
        assert call.status == 200
        names = [name for name, _ in call.sent[0]["headers"]]
        assert b"x-request-id" not in names  # Serve adds it
        assert b"x-content-type-options" in names


class Client(FakeClient):
    """One whose progress and end are set from outside."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [])
        self.told = Progress(idle=True, seconds=0)
        self.failed = asyncio.Event()

    @property
    def progress(self) -> Progress:
        return self.told

    async def wait_failed(self) -> str:
        await self.failed.wait()
        return "no memory"


class TestReplica:
    def replica(self, **settings: Any) -> tuple[Replica, Client]:
        client, made = Client(), ServerSettings(**settings)
        app = create_app(client, byte_tokenizer(), "m", settings=made)
        assembly = Assembly(app, client, Drain())  # type: ignore[arg-type]
        return Replica(assembly, made), client

    async def test_an_engine_that_hangs_or_has_failed_makes_it_unhealthy(self) -> None:
        replica, client = self.replica(liveness_timeout=5)
        replica.check()
        client.told = Progress(idle=True, seconds=100)
        replica.check()
        client.told = Progress(idle=False, seconds=4)
        replica.check()
        client.told = Progress(idle=False, seconds=6)
        with pytest.raises(UnhealthyError, match="no progress for 6 seconds; the limit is 5"):
            replica.check()
        client.told = Progress(idle=True, seconds=0)
        client.failed.set()
        await asyncio.sleep(0.01)
        with pytest.raises(UnhealthyError, match="no memory"):
            replica.check()
        replica.stop()
