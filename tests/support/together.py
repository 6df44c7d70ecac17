"""Requests over HTTP that are all there before the engine's first step, and so share its batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from support.local_client import LocalClient


def posted(
    client: LocalClient, app: Any, asked: Sequence[tuple[str, dict[str, Any]]], expected: int
) -> list[dict[str, Any]]:
    """The bodies of the answers.

    Args:
        asked: the paths, and what else httpx is told of each request.
        expected: so many things the engine is asked for before its first step.
    """

    async def ask() -> list[httpx.Response]:
        client.forget()
        client.held = True
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            tasks = [asyncio.create_task(http.post(path, **options)) for path, options in asked]
            while len(client.asked) < expected and not any(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            client.held = False
            return await asyncio.gather(*tasks)

    answers = asyncio.run(asyncio.wait_for(ask(), 60))
    assert [answer.status_code for answer in answers] == [200] * len(asked), [answer.text for answer in answers]
    return [answer.json() for answer in answers]
