"""The models of a service with several: which one a request gets, and when each is loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request

from engine import EngineConfig, ModelLoadError, OctavoError
from engine.host.logs import LogFormat
from engine.process.client import EngineClient
from engine.process.predict import MemoryPrediction, predict
from server.answering.chat_images import ChatImages
from server.answering.images import ImageReading
from server.answering.ollama_facts import capabilities, expected_capabilities
from server.answering.rendering import ChatRenderer
from server.answering.terms import DeadlineError, read_terms
from server.api.multipart import read_form
from server.api.ollama_schemas import OllamaNameRequest
from server.api.reading import READ_BODY
from server.api.schemas import ServedBody
from server.app import make_reader
from server.commons import own_commons
from server.config.settings import ServerSettings
from server.context import ANY_MODEL, Service, key_of
from server.door.auth import routed_path
from server.errors import ApiError
from server.live import LiveFeed
from server.models.budget import Budget, Promise
from server.models.declared import Declared, memory_limit
from server.models.engines import AllEngines, expected_info
from server.models.loading import LoadedModel, load_model
from server.models.seen import SeenModels, no_model, not_allowed
from server.models.served import Running, Served
from server.models.status import ModelStatus
from server.models.using import Use
from server.watchdog import STUCK, restart_when_stuck
from server.workers.pool import shared_workers

logger = logging.getLogger("octavo.server")

_LOOK = 0.5  # seconds between two looks for models that have been idle for too long
_FOREVER = 10.0**9  # seconds
_RETRY = 5  # seconds after which a client may ask again
_LATEST = ":latest"  # Ollama's clients add it to names
_FORMS = "/v1/audio/"
_OLLAMA = "/api/"  # names in its API may have any case
# Endpoints whose streams are server-sent events, in which comments may stand.
_STREAMS = frozenset(
    {
        "/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/inference/v1/generate", "/infill",
    }
)  # fmt: skip


class _UnwantedError(Exception):
    """A load ended because nobody waits for it any more."""


class Registry:
    """Implements `server.context.Models`. One event loop uses it.

    Args:
        models: at least one; the first is the default.
    """

    def __init__(self, models: Sequence[Declared], settings: ServerSettings, log_format: LogFormat):
        self._settings = settings  # the service's settings
        self._log_format = log_format  # the format of the engines' log lines
        self._served = [Served(model, self._stir) for model in models]
        self._names = {
            name: served
            for served in self._served
            for name in (served.name, *served.model.aliases, *served.model.engine.adapters)
        }
        self._folded = {name.casefold(): served for name, served in reversed(self._names.items())}
        self._budget = Budget(memory_limit(settings))
        self._turn = asyncio.Lock()  # held by the load that looks for models to unload
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_look: asyncio.Task[None] | None = None
        self._house: Service | None = None
        self.engines = AllEngines(self._clients, self._close)  # the loaded models' engines as one client

    def attach(self, house: Service) -> None:
        """Take over the parts that all models share, from the service without a model."""
        self._house = house

    def fail(self, name: str, reason: str) -> None:
        """Record that a model cannot be loaded now. A later request tries it again."""
        served = self._names[name]
        served.failed(reason)
        logger.error("The model %s cannot be loaded: %s", served.name, reason)

    @property
    def served(self) -> Sequence[Served]:
        return self._served

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """A context in which models are predicted, loaded if they are pinned, and unloaded when they are idle."""
        self._first_look = asyncio.create_task(self._look_at_all())
        self._tasks.add(asyncio.create_task(self._unload_idle()))
        for served in self._served:
            if served.model.pinned:
                self._bring(served)
        yield
        for task in (*self._tasks, self._first_look, *(served.bringing for served in self._served)):
            if task is not None:
                task.cancel()

    # ---------------------------------------------------------------- the choice of a model

    async def serve(self, request: Request) -> Service:
        use, body = Use.of(request), request.scope.get(READ_BODY)
        if body is not None:
            asked = getattr(body, "model", None)
            if asked is None and isinstance(body, OllamaNameRequest):
                asked = body.name
        elif routed_path(request.scope).startswith(_FORMS):
            asked = await self._of_form(request)
        else:
            asked = request.query_params.get("model")
        served = self._choose(asked if isinstance(asked, str) else None, request)
        use.begin(served)
        if served.state != "loaded":
            await self._wait(request, served, body, use)
        self._keep(served, getattr(body, "keep_alive", None))
        if served.running is None:  # unloaded a moment after it had loaded
            raise _failed(served)
        return served.running.service

    def _keep(self, served: Served, seconds: object) -> None:
        """Keep the model as Ollama's API asks: this long after the request; below 0 or beyond all bounds: forever."""
        if isinstance(seconds, int | float) and not served.model.pinned:
            served.idle_time = float(seconds) if 0 <= seconds < _FOREVER else None

    async def _of_form(self, request: Request) -> str | None:
        assert self._house is not None
        content = await request.body()
        async with self._house.reading:
            form = await asyncio.to_thread(read_form, content, request.headers.get("content-type", ""))
        return next(iter(form.texts.get("model", ())), None)

    def _choose(self, asked: str | None, request: Request) -> Served:
        key = key_of(request)
        allowed = [served for served in self._served if key is None or key.may_use(served.name)]
        served = self._default(asked, allowed) or self._named(asked or "")
        if served is None and routed_path(request.scope).startswith(_OLLAMA):
            served = self._folded.get((asked or "").casefold().removesuffix(_LATEST))
        names = [served.name for served in allowed]
        if served is None:
            raise no_model(asked, names)
        if served not in allowed:
            raise not_allowed(asked, names)
        return served

    def _default(self, asked: str | None, allowed: Sequence[Served]) -> Served | None:
        """The first model, for a request that names none."""
        if asked is None or (asked in ANY_MODEL and not self._settings.strict_model_name and asked not in self._names):
            return allowed[0] if allowed else self._served[0]
        return None

    def _named(self, name: str) -> Served | None:
        found = self._names.get(name) or self._names.get(name.removesuffix(_LATEST))
        if found is not None:
            return found
        loaded = (served for served in self._served if served.running is not None)
        return next((served for served in loaded if served.running and name in served.running.client.adapters), None)

    async def _wait(self, request: Request, served: Served, body: object, use: Use) -> None:
        house = self._house
        assert house is not None
        if served.running is not None:  # its engine starts again; requests meanwhile are refused as in any service
            return
        most = served.model.settings.max_num_queued_reqs
        if served.waiting >= most:
            house.metrics.rejected("queue_full")
            message = (
                f"{served.waiting} requests wait for the model {served.name} to load; the limit is {most} "
                "(max_num_queued_reqs). Try again later."
            )
            raise ApiError(503, message, code="queue_full", headers={"Retry-After": str(_RETRY)})
        limit, due = self._settings.model_load_timeout, None
        if isinstance(body, ServedBody):
            due = read_terms(body, request, self._settings, time.monotonic()).seconds_left
        streams = bool(getattr(body, "stream", False)) and routed_path(request.scope) in _STREAMS
        keepalive = self._settings.stream_keepalive if streams else 0.0
        served.waiting += 1
        try:
            await use.wait(self._in_time(served, limit, due), house.drain, keepalive, house.metrics.aborted)
        finally:
            served.waiting -= 1

    async def _in_time(self, served: Served, limit: float, due: float | None) -> None:
        try:
            async with asyncio.timeout(limit if due is None else min(limit, due)):
                await self._until_loaded(served)
        except TimeoutError:
            if due is not None and due <= limit:
                raise DeadlineError from None
            message = (
                f"The model {served.name} did not load within {limit:g} s (model_load_timeout): {self._obstacle()}. "
                "Try again later."
            )
            raise ApiError(503, message, code="model_loading", headers={"Retry-After": str(_RETRY)}) from None

    def _obstacle(self) -> str:
        """The reason why a model has not loaded in time. It names no other model, because the caller's key may not see
        that."""
        busy = any(served.running is not None and served.uses for served in self._served)
        return "other models have running requests and need the memory" if busy else "it is still loading"

    async def _until_loaded(self, served: Served) -> None:
        """Wait until a model is loaded; starts a load if none is under way. Raises ApiError: 503, it cannot be
        loaded."""
        while served.running is None:
            if served.bringing is None and served.pause:
                raise _failed(served)
            await asyncio.shield(self._bring(served))
            if served.state == "failed":
                raise _failed(served)

    # ---------------------------------------------------------------- what operators ask

    def statuses(self) -> list[ModelStatus]:
        return [served.status() for served in self._served]

    def choose(self, request: Request, name: str) -> ModelStatus:
        return self._choose(name, request).status()

    def find(self, name: str) -> ModelStatus | None:
        served = self._named(name)
        return None if served is None else served.status()

    async def foreseen(self, name: str) -> None:
        await self._looked_at(self._known(name))

    async def load(self, name: str) -> ModelStatus:
        served = self._known(name)
        if served.running is None and served.bringing is None:
            served.forgive()
        with served.using():
            await self._in_time(served, self._settings.model_load_timeout, None)
        return served.status()

    async def unload(self, name: str) -> ModelStatus:
        served = self._known(name)
        if served.bringing is not None:
            message = f"The model {served.name} is loading. Unload it when it has loaded."
            raise ApiError(409, message, param="model", code="model_loading")
        if served.running is not None and not served.may_go:
            message = f"{served.uses} requests use the model {served.name}. Unload it when they have ended."
            raise ApiError(409, message, param="model", code="model_in_use")
        if served.running is not None:
            await self._put_away(served)
        served.forgive()
        return served.status()

    def keep(self, name: str, seconds: float | None) -> None:
        served = self._known(name)
        if served.running is not None:
            served.idle_time = seconds if seconds is None or seconds < _FOREVER else None

    def able(self, endpoint: str) -> list[str]:
        return [served.name for served in self._served if served.running is not None and endpoint in served.endpoints]

    def service_of(self, name: str) -> Service | None:
        """The service of a loaded model; None if it is not loaded, or there is none of this name."""
        served = self._named(name)
        return None if served is None or served.running is None else served.running.service

    def seen_by(self, allowed: Collection[str]) -> SeenModels:
        return SeenModels(self, allowed)

    def _known(self, name: str) -> Served:
        served = self._named(name)
        if served is None:
            raise no_model(name, [served.name for served in self._served])
        return served

    # ---------------------------------------------------------------- memory

    async def _look_at_all(self) -> None:
        """Predict the memory of all models, before the first of them is loaded."""
        try:
            await self._predict([(served, served.model.engine) for served in self._served], download=False)
        except OctavoError as problem:  # each load tries again
            logger.warning("The memory of the models is not known yet: %s", problem)

    async def _predict(self, models: Sequence[tuple[Served, EngineConfig]], *, download: bool) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            found = predict([config for _, config in models], download=download)
            for (served, config), prediction in zip(models, found, strict=True):
                abilities = expected_capabilities(config, served.model.settings, prediction)
                loop.call_soon_threadsafe(self._predicted, served, prediction, abilities)

        await asyncio.to_thread(work)

    def _predicted(self, served: Served, prediction: MemoryPrediction, abilities: Sequence[str]) -> None:
        served.prediction = prediction
        if not served.num_loads and not prediction.problem and not prediction.unknown:
            served.info, served.abilities = expected_info(served.model.engine.model, prediction), tuple(abilities)
        if prediction.problem and served.state == "unloaded":
            self.fail(served.name, prediction.problem)
        if prediction.on_gpu and self._settings.max_memory is None and not self._budget.taken:
            self._budget.limit = int(prediction.free * served.model.engine.gpu_memory_utilization)

    async def _looked_at(self, served: Served) -> None:
        """Wait until the first look at all models has come to this one."""
        assert self._first_look is not None
        while served.prediction is None and not self._first_look.done():
            await asyncio.wait({self._first_look}, timeout=0.05)

    async def _size(self, served: Served) -> int:
        await self._looked_at(served)
        found = served.prediction
        if found is None or found.problem or found.unknown:
            await self._predict([(served, served.model.engine)], download=True)
            await asyncio.sleep(0)  # what the thread has told comes first
            found = served.prediction
        if found is None or found.problem or found.unknown:
            raise ModelLoadError(found.problem if found is not None and found.problem else "its memory is not known.")
        return found.memory

    async def _room(self, served: Served, size: int) -> Promise:
        """Reserve memory for a model; others may be unloaded for it. Raises TooLargeError if there can never be enough,
        and _UnwantedError if no request waits for the model any more."""
        self._budget.check(served.name, size)
        promise = self._budget.promise(size)
        if promise is not None:
            return promise
        async with self._turn:
            while (promise := self._budget.promise(size)) is None:
                others = [other for other in self._served if other.may_go and not other.model.pinned]
                if others:
                    victim = min(others, key=lambda other: other.last_used)
                    logger.info("Unloading %s, because %s needs its memory.", victim.name, served.name)
                    await self._put_away(victim)
                else:
                    self._check_pinned(served, size)
                    if not served.wanted:
                        raise _UnwantedError
                    await self._change()
        return promise

    def _check_pinned(self, served: Served, size: int) -> None:
        pinned = [other for other in self._served if other.model.pinned and other is not served and other.running]
        held = sum(other.running.promise.size for other in pinned if other.running is not None)
        if held:
            self._budget.check(f"{served.name} with the pinned models", held + size)  # names would tell any key

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _stir(self) -> None:
        self._changed.set()

    # ---------------------------------------------------------------- loading and unloading

    def _bring(self, served: Served) -> asyncio.Task[None]:
        if served.bringing is None:
            # In an empty context, so that the log lines of the load do not have the id of the first waiting request.
            served.bringing = asyncio.create_task(self._load(served), context=contextvars.Context())
        return served.bringing

    async def _load(self, served: Served) -> None:
        served.percent = None
        began = time.monotonic()
        try:
            size = await self._size(served)
            promise = await self._room(served, size)
            try:
                loaded = await asyncio.to_thread(load_model, served.model, self._log_format, partial(_tell, served))
                try:
                    running = self._running(served, loaded, promise)
                except Exception:  # a setting does not fit the model
                    await loaded.client.close()
                    raise
            except Exception:
                self._budget.give_back(promise)
                raise
            served.opened(running)
        except _UnwantedError:
            logger.info("%s is not loaded: nobody waits for it any more.", served.name)
        except Exception as problem:
            known = isinstance(problem, OctavoError)
            reason = " ".join(str(problem).split()) if known else f"{type(problem).__name__}: {problem}"
            served.failed(reason)
            logger.error("The model %s could not be loaded: %s", served.name, reason, exc_info=not known)
        else:
            logger.info("%s has loaded in %.1f s.", served.name, time.monotonic() - began)
        finally:
            served.bringing = None
            self._stir()

    def _running(self, served: Served, loaded: LoadedModel, promise: Promise) -> Running:
        client, service = loaded.client, self._service(served, loaded)
        served.endpoints = tuple(service.served_endpoints)
        served.info, served.abilities = client.info, tuple(capabilities(service))
        stuck = restart_when_stuck(client, STUCK * served.model.settings.liveness_timeout)
        watches = (asyncio.create_task(stuck), asyncio.create_task(self._fail_with(served, client)))
        return Running(client, service, promise, watches)

    def _service(self, served: Served, loaded: LoadedModel) -> Service:
        house, client, tokenizer = self._house, loaded.client, loaded.tokenizer
        assert house is not None
        settings = served.model.settings
        alone = settings.model_copy(update={"rate_limit_storage": None})  # keys are counted for all models
        commons = own_commons(client, alone, served.name, house.version)
        if tokenizer is not None and tokenizer.chat_template is not None:
            shared_workers().start()
        aliases = {*served.model.aliases}
        aliases |= {name + _LATEST for name in (served.name, *aliases)}
        return replace(
            house,
            client=client,
            tokenizer=tokenizer,
            model_id=served.name,
            metrics=commons.metrics,
            commons=replace(commons, keys=house.commons.keys, cancel=house.commons.cancel),
            turns=commons.make_turns(client.info),
            live=LiveFeed(client, house.drain, 0.0),
            renderer=ChatRenderer(),
            answers=make_reader(tokenizer, settings),
            images=None if client.info.signal is None else ImageReading(client.info, settings),
            chat_images=None if client.info.vision is None else ChatImages(client.info, settings),
            settings=settings,
            aliases=frozenset(aliases),
            using=served.using,
        )

    async def _fail_with(self, served: Served, client: EngineClient) -> None:
        cause = await client.wait_failed()
        running = served.running
        if running is None or running.client is not client:
            return
        logger.error("The engine of %s keeps failing and is given up: %s", served.name, cause)
        served.failed(f"its engine keeps failing: {cause}")
        running.watches[0].cancel()
        await self._end(running)

    async def _put_away(self, served: Served) -> None:
        running, served.running = served.running, None
        assert running is not None
        for watch in running.watches:
            watch.cancel()
        await self._end(running)

    async def _end(self, running: Running) -> None:
        await running.client.close()
        self._budget.give_back(running.promise)
        self._stir()

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            for served in self._served:
                if served.has_expired:
                    logger.info("Unloading %s, which has been idle for %g s.", served.name, served.idle_time or 0.0)
                    task = asyncio.create_task(self._put_away(served))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    await asyncio.sleep(0)

    def _clients(self) -> Collection[EngineClient]:
        return [served.running.client for served in self._served if served.running is not None]

    async def _close(self) -> None:
        running = [served.running for served in self._served if served.running is not None]
        for one in running:
            for watch in one.watches:
                watch.cancel()
        await asyncio.gather(*(one.client.close() for one in running))


def _tell(served: Served, percent: int) -> None:
    served.percent = percent


def _failed(served: Served) -> ApiError:
    headers = {"Retry-After": str(max(math.ceil(served.pause), 1))}
    message = f"The model {served.name} could not be loaded: {served.failure}"
    return ApiError(503, message, param="model", code="model_failed", headers=headers)
