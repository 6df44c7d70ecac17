"""Answers the lines of batches while clients leave the engine idle."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI

from engine import MAX_PRIORITY
from server.batches.backdoor import BackDoor
from server.batches.lines import LinePlace, Problem, check_file, places, read_line
from server.batches.store import BatchStore, Row
from server.context import ANY_MODEL, Service
from server.door.keys import ApiKey
from server.errors import ApiError, shown
from server.models.seen import no_model

logger = logging.getLogger("octavo.server")

_LOOK_INTERVAL = 1.0  # seconds between two looks for batches of other processes
_IDLE_INTERVAL = 0.05  # seconds until another look whether clients have gone
_RETRY_INTERVAL = 0.5  # seconds before a line that found no room is sent again
_RETRIED = (503,)  # no answers: the service had no room, no engine, or stopped
_HOPELESS = 60.0  # seconds for which a model cannot be loaded, after which its lines get that error as their answer
_PATIENCE = 30.0  # seconds of clients' requests without an answered line, after which a line is an ordinary request


@dataclass(slots=True, eq=False)
class _Active:
    """A batch whose lines are being answered, oldest of its tenant."""

    row: Row
    waiting: list[LinePlace]  # the next one last
    running: set[asyncio.Task[None]] = field(default_factory=set)


class BatchRunner:
    """Answers batches until it is stopped; the oldest batch of each tenant, tenants in turn.

    Args:
        door: the way to the routes.
        most: lines that are answered at the same time while no client waits for the model. While one does, no line
            begins. But once clients have kept all lines from ending for `_PATIENCE`, one line at a time is sent as an
            ordinary request.
    """

    def __init__(self, app: FastAPI, service: Service, store: BatchStore, door: BackDoor, most: int):
        self.store = store
        self._app, self._service, self._store, self._door = app, service, store, door
        self._most = most
        self._active: dict[str, _Active] = {}
        self._turn = 0
        self._rests_until = 0.0  # of the loop's clock; after a failure
        self._kept = 0.0  # seconds of clients' requests since a line ended
        self._ordinary: asyncio.Task[None] | None = None  # the line that waits behind no client
        self._failing: dict[str, float] = {}  # since when models cannot be loaded, by the loop's clock
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Look for new batches and cancelled ones."""
        self._news.set()

    async def run(self) -> None:
        """Answer batches until the task is cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except Exception as problem:  # the next look may find the store, or the disk, in order again
                    logger.error("Batches wait: %s", problem, exc_info=not isinstance(problem, ApiError))
                await self._work(_LOOK_INTERVAL)
        finally:
            running = [task for active in self._active.values() for task in active.running]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _look(self) -> None:
        """Look for batches that are new, cancelled or expired, and end those without remaining lines."""
        if not await self._store.do(self._store.hold):
            return
        tenants: set[str | None] = set()
        for row in await self._store.do(self._store.unfinished):
            first = row["tenant"] not in tenants
            tenants.add(row["tenant"])
            try:
                await self._look_at(row, first=first)
            except Exception as problem:  # other batches go on
                _report(row, problem)
        for active in list(self._active.values()):
            if not active.waiting and not active.running:
                try:
                    await self._store.do(self._finalize, active.row)
                    await self._end(active.row, "completed")
                except Exception as problem:
                    _report(active.row, problem)

    async def _look_at(self, row: Row, *, first: bool) -> None:
        if row["status"] == "cancelling":
            await self._end(row, "cancelled")
        elif row["expires_at"] <= self._store.now():
            await self._end(row, "expired", _expired)
        elif row["status"] == "finalizing":
            await self._end(row, "completed")
        elif first and row["id"] not in self._active:
            await self._begin(row)

    def _finalize(self, row: Row) -> None:
        self._store.update(row["id"], "in_progress", status="finalizing", finalizing_at=self._store.now())

    async def _begin(self, row: Row) -> None:
        path = self._store.path(row["input_file_id"])
        if row["status"] == "validating":
            now = self._store.now
            try:
                count, problems = await asyncio.to_thread(
                    check_file, path, row["endpoint"], partial(self._unserved, row.get("models"))
                )
            except OSError as problem:
                count, problems = 0, [Problem("file_not_found", f"The input file cannot be read: {problem}.")]
            if problems:
                errors = {"object": "list", "data": [problem.shown() for problem in problems]}
                await self._store.do(self._update, row, {"status": "failed", "failed_at": now(), "errors": errors})
                return
            counts = {"total": count, "completed": 0, "failed": 0}
            fields = {"status": "in_progress", "in_progress_at": now(), "request_counts": counts}
            if not await self._store.do(self._update, row, fields):
                return  # it was cancelled meanwhile
            row |= fields
        done = await self._store.do(self._store.answered, row["number"])
        left = await asyncio.to_thread(lambda: [place for place, _ in places(path) if place.number not in done])
        self._active[row["id"]] = _Active(row, left[::-1])

    def _update(self, row: Row, fields: Row) -> bool:
        return self._store.update(row["id"], row["status"], **fields)

    def _seen(self, allowed: list[str] | None) -> Service:
        """The service as the batch's API key sees it."""
        return self._service.seen_by(None if allowed is None else ApiKey(b"", models=frozenset(allowed)))

    def _unserved(self, allowed: list[str] | None, model: Any) -> str | None:
        if not isinstance(model, str | None):
            return f"body.model must be a string, got {shown(model)}."
        models = self._seen(allowed).models
        if models is not None:
            names = ANY_MODEL if not self._service.settings.strict_model_name else ()
            if model is None or model in names or models.find(model) is not None:
                return None
            return no_model(model, [status.name for status in models.statuses()]).message
        try:
            self._service.check_model(model)
        except ApiError as problem:
            return problem.message
        return None

    async def _end(self, row: Row, status: str, missing: Callable[[str], str] | None = None) -> None:
        active = self._active.pop(row["id"], None)
        running = list(active.running) if active is not None else []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._store.do(self._store.finish, row, status, missing)
        logger.info("The batch %s is %s.", row["id"], status)

    # ---------------------------------------------------------------- lines

    async def _work(self, seconds: float) -> None:
        """Begin lines, for at most `seconds`. Ends earlier if there is news, or if a batch has no line left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            running = {task for active in self._active.values() for task in active.running}
            while (ready := self._ready()) and len(running) < self._room():
                running.add(self._start(self._next(ready)))
            if self._kept >= _PATIENCE and self._is_able and (self._ordinary is None or self._ordinary.done()):
                if ready:
                    self._kept = 0.0
                    self._ordinary = self._start(self._next(ready), background=False)
                    running.add(self._ordinary)
                elif running and not any(task.cancelling() for task in running):
                    running.pop().cancel()  # all remaining lines have begun in the background; one begins again
            self._news.clear()
            began = loop.time()
            news = asyncio.ensure_future(self._news.wait())
            pause = min(left, _IDLE_INTERVAL) if ready and len(running) < self._most else left
            try:
                await asyncio.wait({news, *running}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            finally:
                heard = not news.cancel()
                if self._door.num_inside and (ready or running):
                    self._kept += loop.time() - began
            if heard:
                return
            if any(not active.waiting and not active.running for active in self._active.values()):
                return

    def _ready(self) -> list[_Active]:
        return [active for active in self._active.values() if active.waiting]

    def _next(self, ready: list[_Active]) -> _Active:
        self._turn += 1
        return ready[self._turn % len(ready)]

    @property
    def _is_able(self) -> bool:
        """Whether the service can answer a line now."""
        service = self._service
        if asyncio.get_running_loop().time() < self._rests_until:
            return False
        return not service.drain.draining and not service.memory.exceeded() and service.client.is_alive

    def _room(self) -> int:
        return 0 if self._door.num_inside or not self._is_able else self._most

    def _start(self, active: _Active, *, background: bool = True) -> asyncio.Task[None]:
        place = active.waiting.pop()
        task = asyncio.create_task(self._answer(active, place, MAX_PRIORITY if background else 0))
        active.running.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            active.running.discard(task)
            if task.cancelled() or task.exception() is not None:
                active.waiting.append(place)
                if not task.cancelled():
                    self._rests_until = asyncio.get_running_loop().time() + _RETRY_INTERVAL
                    logger.error("A line of %s was not answered: %s", active.row["id"], task.exception())

        task.add_done_callback(ended)
        return task

    async def _answer(self, active: _Active, place: LinePlace, priority: int) -> None:
        row = active.row
        line = await self._store.do(self._read, row["input_file_id"], place)
        asked = read_line(line)
        body = {**asked["body"], "priority": priority}
        while True:
            status, request_id, answer = await self._door.post(
                self._app, row["endpoint"], body, row["tenant"], row.get("models")
            )
            if status not in _RETRIED or self._is_hopeless(row.get("models"), body.get("model")):
                break
            await asyncio.sleep(_RETRY_INTERVAL)
        response = {"status_code": status, "request_id": request_id, "body": answer}
        text = json.dumps(_entry(asked["custom_id"], response, None))
        await self._store.do(self._store.answer, row["number"], place.number, status < 400, text)
        self._kept = 0.0

    def _is_hopeless(self, allowed: list[str] | None, name: str | None) -> bool:
        """Whether a model, one of several, has failed for so long that its lines should not keep others waiting."""
        models, now = self._seen(allowed).models, asyncio.get_running_loop().time()
        if models is None:
            return False
        found = models.find(name) if name else next(iter(models.statuses()), None)
        if found is None or found.state == "loaded":
            self._failing.pop("" if found is None else found.name, None)
            return False
        if found.state != "failed":  # it is tried again
            return False
        return now - self._failing.setdefault(found.name, now) >= _HOPELESS

    def _read(self, id_: str, place: LinePlace) -> bytes:
        with self._store.path(id_).open("rb") as file:
            file.seek(place.begin)
            return file.read(place.size)


def _report(row: Row, problem: Exception) -> None:
    """A look at a batch has failed; the next one may find the store, or the disk, in order again."""
    logger.error("The batch %s waits: %s", row["id"], problem, exc_info=not isinstance(problem, ApiError))


def _entry(custom_id: str, response: Row | None, error: Row | None) -> Row:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _expired(custom_id: str) -> str:
    error = {"code": "batch_expired", "message": "The request was not answered before the batch expired."}
    return json.dumps(_entry(custom_id, None, error))
