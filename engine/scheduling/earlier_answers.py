"""Answers that ended, as texts that later answers of the same scope may repeat."""

from __future__ import annotations

from collections import OrderedDict

from engine.interface.request import Request
from engine.scheduling.ngram import NGRAM, KnownTexts
from engine.scheduling.plan import Int32

MOST_TOKENS = 1 << 17
"""Tokens of all scopes together. Each takes about 200 bytes."""

Scope = tuple[str | None, str | None, str | None]


class EarlierAnswers:
    """The last answers of each scope. A scope is a tenant, a cache salt and an adapter: no request has drafts from
    another key's answers, whose presence could be told from the time that an answer takes. `most_tokens`: of all scopes
    together; a scope has at most half of them. The scope that was used longest ago is forgotten first."""

    def __init__(self, most_tokens: int = MOST_TOKENS):
        self._most = most_tokens
        self.num_tokens = 0
        self._scopes: OrderedDict[Scope, KnownTexts] = OrderedDict()

    def of(self, request: Request) -> KnownTexts | None:
        """The answers in the request's scope."""
        scope = _scope(request)
        if scope in self._scopes:
            self._scopes.move_to_end(scope)
        return self._scopes.get(scope)

    def add(self, request: Request, answer: Int32) -> None:
        """Keep an answer, or the end of a long one; the oldest ones make room."""
        if len(answer) <= NGRAM:
            return
        scope = _scope(request)
        texts = self._scopes.setdefault(scope, KnownTexts())
        self._scopes.move_to_end(scope)
        self.num_tokens -= len(texts)
        texts.add(answer[-(self._most // 4) :])
        if len(texts) > self._most // 2:
            texts.forget(self._most // 4)
        self.num_tokens += len(texts)
        while self.num_tokens > self._most:
            _, forgotten = self._scopes.popitem(last=False)
            self.num_tokens -= len(forgotten)


def _scope(request: Request) -> Scope:
    adapter = None if request.adapter is None else request.adapter.name
    return request.tenant, request.cache_salt, adapter
