"""The declaration of the endpoints of one task. The app, capability checks, the refusals of a full service, traces and
the log of refused requests read it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_args, get_type_hints

from fastapi import APIRouter, Body, Request, Response
from fastapi.routing import APIRoute

from server.answering.endpoints import Reason
from server.api.reading import StrictJsonRoute
from server.api.schemas import ServedBody
from server.context import Service, ServiceDep

B = TypeVar("B", bound=ServedBody)
R = TypeVar("R")
Handler = Callable[["TaskCall[B]"], Awaitable[Response]]


class TaskRun(Protocol):
    """An object that answers a request."""

    async def respond(self, request: Request) -> Response:
        """The whole answer, or its stream."""


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[B]):
    """A request with a valid body, to an endpoint that the model can serve."""

    service: Service
    body: B
    request: Request
    arrival: float  # seconds of time.monotonic()

    @classmethod
    def begin(cls, service: Service, body: B, request: Request, endpoint: str, *, refuses: bool = True) -> TaskCall[B]:
        """The call for a request that has just arrived. Raises ApiError if the model cannot serve it, or if it has an
        unsupported field (unless `refuses` is false)."""
        arrival = time.monotonic()
        service.check_model(body.model)
        service.require(endpoint)
        if refuses:
            body.refuse_unsupported()
        return cls(service, body, request, arrival)

    def run(self, kind: Callable[..., R], **fields: Any) -> R:
        """Make the object that answers the request."""
        return kind(self.service, self.body, self.arrival, **fields)

    async def respond(self, kind: Callable[..., TaskRun], **fields: Any) -> Response:
        """Make an object of this class with these fields, and return its answer."""
        return await self.run(kind, **fields).respond(self.request)


class TaskRouter(APIRouter):
    """The endpoints of one task.

    Args:
        gate: the gate of `Commons` that admits the requests.
        one_text: a body holds a single text, so its maximum size grows with the tokens that the model reads.
        route_class: how bodies are read.

    Attributes:
        lacks: by endpoint, the reason why a model cannot serve it.
    """

    def __init__(
        self,
        gate: Literal["generating", "pooling"],
        *,
        one_text: bool = False,
        route_class: type[APIRoute] = StrictJsonRoute,
    ):
        super().__init__(route_class=route_class)
        self.gate, self.one_text = gate, one_text
        self.lacks: dict[str, Reason] = {}

    def endpoint(
        self,
        path: str,
        *names: str,
        lacks: Reason | None = None,
        needs: str | None = None,
        refuses: bool = True,
        examples: dict[str, Any] | None = None,
        events: Mapping[str, Any] | None = None,
        errors: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
        **described: Any,
    ) -> Callable[[Handler[B]], Handler[B]]:
        """A decorator for a function that answers POST requests to a path. Its argument `call` must be annotated as a
        `TaskCall` of the class of the bodies.

        Args:
            names: other paths of the endpoint, which the documentation leaves out.
            lacks: the reason why a model cannot serve the endpoint. Either this or `needs` is required.
            needs: another endpoint, which the model must serve.
            refuses: whether unsupported fields are refused first.
            examples: example bodies.
            events: the content type of a streamed answer, and its description.
            errors: the descriptions of the error responses, if they differ from the app's.
            described: further facts for the documentation. An endpoint without `response_model` is not in it.
        """
        if lacks is not None:
            self.lacks[path] = lacks
        needed = needs or path
        shown: dict[int | str, dict[str, Any]] = {200: {"content": events}} if events else {}

        def declare(answer: Handler[B]) -> Handler[B]:
            async def respond(body: B, request: Request, service: Service) -> Response:
                return await answer(TaskCall.begin(service, body, request, needed, refuses=refuses))

            (kind,) = get_args(get_type_hints(answer)["call"])
            read = Annotated[kind, Body(openapi_examples=examples)]  # type: ignore[valid-type]
            respond.__name__, respond.__doc__ = answer.__name__, answer.__doc__
            respond.__signature__ = _signature(body=read, request=Request, service=ServiceDep)  # type: ignore[attr-defined]
            for place, each in enumerate((path, *names)):
                self.post(
                    each,
                    include_in_schema=place == 0 and "response_model" in described,
                    responses={**shown, **errors},
                    **described,
                )(respond)
            return answer

        return declare


def paths_of(*routers: APIRouter) -> frozenset[str]:
    """The paths of all endpoints, including their other names."""
    return frozenset(route.path for router in routers for route in router.routes if isinstance(route, APIRoute))


def _signature(**annotations: Any) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=value) for name, value in annotations.items()]
    return inspect.Signature(parameters, return_annotation=Response)
