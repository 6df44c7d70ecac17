"""The asyncio client: what one request does wrong harms no other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import reference
from support.checkpoints import Checkpoint
from support.peft_folders import adapter_tensors, matrices, merged, write_adapter

from engine import LLM, EngineConfig, EngineDeadError, InvalidRequestError, SamplingParams
from engine.errors import AdapterError
from engine.process.client import EngineClient, ProcessEngineClient, RestartPolicy, start_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, num_beams=1, ignore_eos=True)


def load(checkpoint: Callable[[str], Checkpoint]) -> EngineClient:
    path = str(checkpoint("llama-grouped").path)
    return start_engine(EngineConfig(model=path, device="cpu", show_progress=False, max_loras=2))


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


def test_adapters_are_loaded_and_unloaded(
    checkpoint: Callable[[str], Checkpoint], client: EngineClient, tmp_path: Path
) -> None:
    """Answers are those of the merged model; a request whose adapter is unloaded ends with an error, others go on."""
    model = checkpoint("llama-grouped").model
    tensors = adapter_tensors({name: size for name, size in matrices(model).items() if name != "lm_head"}, by=1.0)
    folder = str(write_adapter(tmp_path / "a", tensors))
    long = replace(GREEDY, max_tokens=1000)

    async def scenario() -> None:
        base = await ask(client, "base")
        await client.load_adapter("a", folder)
        assert client.adapters["a"].path == folder
        assert await ask(client, "other", adapter="a") == list(answer.tokens)
        assert await ask(client, "base again") == base != list(answer.tokens)
        with pytest.raises(AdapterError, match="an adapter named 'a' is loaded"):
            await client.load_adapter("a", folder)
        with pytest.raises(AdapterError, match="is not a folder"):
            await client.load_adapter("b", str(tmp_path / "b"))
        running = client.generate("long", [1, 2, 3], long, adapter="a")
        await anext(running)
        beside = asyncio.create_task(ask(client, "beside"))
        await client.unload_adapter("a")
        assert client.adapters == {}
        errors = [delta.error async for delta in running if delta.error is not None]
        assert errors == ["the adapter 'a' was unloaded while the request ran."]
        assert await beside == base
        with pytest.raises(AdapterError, match="no adapter named 'a' is loaded"):
            await client.unload_adapter("a")
        with pytest.raises(InvalidRequestError, match="no adapter named 'a' is loaded"):
            await ask(client, "late", adapter="a")

    expected = reference.greedy(merged(model, tensors), [1, 2, 3], None, 24)
    assert expected.margin > reference.MIN_MARGIN
    answer = expected.answers[0]
    asyncio.run(scenario())


@pytest.mark.slow
async def test_adapters_outlive_the_engine(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """A new engine has what its predecessor had loaded, without what was unloaded or has gone."""
    sizes = {name: size for name, size in matrices(checkpoint("llama-grouped").model).items() if name != "lm_head"}
    folders = [write_adapter(tmp_path / name, adapter_tensors(sizes, seed=seed)) for seed, name in enumerate("abc")]
    config = EngineConfig(
        model=str(checkpoint("llama-grouped").path),
        device="cpu",
        show_progress=False,
        lora_modules=(f"a={folders[0]}", f'{{"name": "b", "path": "{folders[1]}"}}'),
        max_loras=3,
    )
    client = ProcessEngineClient(config, RestartPolicy(first_delay=0.0))
    assert sorted(client.adapters) == ["a", "b"]
    await client.load_adapter("c", str(folders[2]))
    before = await ask(client, "before", adapter="c")
    await client.unload_adapter("a")
    folders[1].rename(tmp_path / "gone")
    again = asyncio.Event()
    client.on_change = lambda: again.set() if client.is_alive else None
    os.kill(client.pid, signal.SIGKILL)
    await again.wait()
    assert list(client.adapters) == ["c"]
    assert await ask(client, "after", adapter="c") == before
    await client.close()


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
