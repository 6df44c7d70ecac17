"""The asyncio client: what one request does wrong harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.checkpoints import Checkpoint

from engine import LLM, EngineConfig, EngineDeadError, InvalidRequestError, SamplingParams
from engine.process.client import EngineClient, start_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, num_beams=1, ignore_eos=True)


def load(checkpoint: Callable[[str], Checkpoint]) -> EngineClient:
    return start_engine(EngineConfig(model=str(checkpoint("llama-grouped").path), device="cpu", show_progress=False))


@pytest.fixture(scope="module")
def client(checkpoint: Callable[[str], Checkpoint]) -> Iterator[EngineClient]:
    """One for all tests that leave it as it was."""
    one = load(checkpoint)
    yield one
    asyncio.run(one.close())


async def ask(client: EngineClient, request_id: str, **terms: Any) -> list[int]:
    tokens: list[int] = []
    async for delta in client.generate(request_id, [1, 2, 3], GREEDY, **terms):
        for choice in delta.choices:
            tokens.extend(choice.token_ids)
    return tokens


@pytest.mark.slow
def test_a_taken_id_is_refused_and_its_owner_goes_on(client: EngineClient) -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        owner = asyncio.create_task(ask(client, "same"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="in use"):
            await ask(client, "same")
        return await owner, await ask(client, "same")

    first, again = asyncio.run(scenario())
    assert len(first) == 24
    assert again == first


@pytest.mark.parametrize(
    "terms", [{"priority": "high"}, {"cache_salt": 5}, {"deadline": "soon"}, {"priority": True}, {"tenant": 1}], ids=str
)
def test_terms_of_the_wrong_type_are_refused(terms: dict[str, Any], client: EngineClient) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(terms))):
        asyncio.run(ask(client, "wrong", **terms))
    assert client.is_alive


@pytest.mark.slow
def test_after_close_everything_says_so(checkpoint: Callable[[str], Checkpoint]) -> None:
    client = load(checkpoint)

    async def scenario() -> None:
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError):
            await ask(client, "late")

    asyncio.run(scenario())
    assert not client.is_alive


def test_a_closed_engine_says_so(checkpoint: Callable[[str], Checkpoint]) -> None:
    llm = LLM(str(checkpoint("llama-grouped").path), device="cpu", show_progress=False)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([[1, 2]], GREEDY)
