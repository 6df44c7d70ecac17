"""Text before and after the engine, which itself handles only ids: the tokenizer, and the processor that turns a
request's deltas into text. Both the offline interface and the server use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.errors import InvalidRequestError
from engine.interface.outputs import ChoiceDelta, CompletionOutput, FinishReason, RequestDelta, TokenLogprobs
from engine.interface.request import SamplingParams
from engine.interface.values import MAX_LISTED_IDS
from engine.text.encoding import Encoding
from engine.text.stop_strings import StopMatcher, StopStrings
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_loading import check_vocabulary, give_template, load_tokenizer

__all__ = [
    "ChoiceText", "Encoding", "OutputProcessor", "Tokenizer", "check_vocabulary", "give_template", "load_tokenizer",
    "spell_bad_words",
]  # fmt: skip


def spell_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with `bad_words` added to `bad_words_ids`: each word as it is at the start of a text, and after a
    space. Raises InvalidRequestError if there is no tokenizer, or the words have too many tokens."""
    if not params.bad_words:
        return replace(params, bad_words=None) if params.bad_words is not None else params
    if tokenizer is None:
        raise InvalidRequestError(
            "bad_words are texts, but the model has no tokenizer; use bad_words_ids.",
            param="bad_words",
            code="no_tokenizer",
        )
    banned = [tuple(word) for word in params.bad_words_ids or ()]
    for word in params.bad_words:
        text = word.lstrip() or word
        banned += [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (text, f" {text}")]
    listed = [word for word in dict.fromkeys(banned) if word]
    if (count := sum(map(len, listed))) > MAX_LISTED_IDS:
        raise InvalidRequestError(
            f"bad_words have {count} tokens (each word counts at the beginning of a text and after a space); at most "
            f"{MAX_LISTED_IDS} are allowed, including bad_words_ids.",
            param="bad_words",
        )
    return replace(params, bad_words=None, bad_words_ids=listed)


@dataclass(slots=True, kw_only=True)
class ChoiceText:
    """News of one choice."""

    index: int  # which of the n answers this is
    text: str = ""  # new text only, without text that may still change or become a stop string
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one entry per new id with `decoded_token` filled in, if asked for
    finish_reason: FinishReason | None = None  # set in the choice's last item
    # the stop string or stop token id that ended the choice, or why it was aborted
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # the sum over the choice's tokens so far (for beams, in the last item)
    score: float | None = None  # a beam's score, in its last item
    # whether a stop string ended the choice here, which the engine cannot know; the caller must abort the choice. Later
    # deltas of the choice are ignored.
    stopped_by_text: bool = False

    def extend(self, later: ChoiceText) -> None:
        """Append later news of the same choice."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        if later.cumulative_logprob is not None:
            self.cumulative_logprob = later.cumulative_logprob
        self.score = later.score
        self.stopped_by_text = later.stopped_by_text


class OutputProcessor:
    """Turns one request's deltas into text, and keeps the answers so far.

    Text is streamed as soon as it is certain; the total does not depend on how the tokens arrive. Without a tokenizer
    it is always "". The id that ended a choice is part of its token_ids; its text is shown only with
    include_stop_str_in_output, an EOS also with skip_special_tokens=False. The text of the first min_tokens tokens
    cannot complete a stop string. Raises InvalidRequestError if stop strings are asked for, but there is no tokenizer.

    Args:
        tokenizer: the model's, or None.
        prompt_token_ids: the prompt that the answer continues (the decoder's prompt for encoder-decoder models).
        keep_logprobs: whether `outputs` include log-probabilities; a stream passes them on and need not keep them.

    Attributes:
        prompt_logprobs: as in `RequestDelta`, with `decoded_token` filled in, once they are known.
        num_cached_tokens: as in `RequestDelta`.
        num_draft_tokens, num_accepted_draft_tokens: as in `RequestDelta`, of all deltas.
        error: why the request failed, if it did.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_logprobs: bool = True,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise InvalidRequestError(
                f"stop strings ({list(params.stop_strings)!r}) need text, but the model has no tokenizer; "
                "use stop_token_ids.",
                param="stop",
                code="no_tokenizer",
            )
        if not params.detokenize:
            tokenizer = None
        stops = StopStrings(params.stop_strings) if params.stop_strings else None
        self._tokenizer = tokenizer
        hidden: frozenset[int] = frozenset()
        if tokenizer is not None and params.skip_special_tokens:
            hidden = tokenizer.special_token_ids - shown_special if shown_special else tokenizer.special_token_ids
        self._choices = [
            _Choice(index, tokenizer, prompt_token_ids, params, stops, keep_logprobs, hidden)
            for index in range(params.n)
        ]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached_tokens = self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all choices are finished."""
        return all(choice.finished for choice in self._choices)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The n answers so far, in the order of their index."""
        return [choice.cumulative() for choice in self._choices]

    def process(self, delta: RequestDelta) -> list[ChoiceText]:
        """Process a delta; returns one item per choice that has news.

        A choice that is unfinished in the request's last delta ends there with "error" or "abort".
        """
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [None if entry is None else self._describe(entry) for entry in delta.prompt_logprobs]
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_draft_tokens += delta.num_draft_tokens
        self.num_accepted_draft_tokens += delta.num_accepted_draft_tokens
        self.error = delta.error or self.error
        news = [
            self._choices[item.index].process(item)
            for item in delta.choices
            if not self._choices[item.index].finished and (item.token_ids or item.finish_reason is not None)
        ]
        if delta.finished:
            reason: FinishReason = "abort" if delta.error is None else "error"
            news += [
                choice.process(ChoiceDelta(index=choice.index, token_ids=(), finish_reason=reason))
                for choice in self._choices
                if not choice.finished
            ]
        return news

    def _describe(self, entry: TokenLogprobs) -> TokenLogprobs:
        return entry if self._tokenizer is None else self._tokenizer.describe(entry)


class _Choice:
    """One answer: ids become text, from which stop strings are removed."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stops: StopStrings | None,
        keep_logprobs: bool,
        hidden: frozenset[int],
    ) -> None:
        self.index = index
        self._keeps_logprobs = keep_logprobs
        self._logprob = 0.0  # of the tokens so far, if a stop string may end them
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(prompt_token_ids)
        self._matcher = None if stops is None else StopMatcher(stops)
        self._skip_special = params.skip_special_tokens
        self._hidden = hidden  # special tokens without text
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens or 0
        self._output = CompletionOutput(index=index)
        self._pieces: list[str] = []

    @property
    def finished(self) -> bool:
        return self._output.finish_reason is not None

    def cumulative(self) -> CompletionOutput:
        if self._pieces:
            self._output.text += "".join(self._pieces)
            self._pieces.clear()
        return self._output

    def process(self, delta: ChoiceDelta) -> ChoiceText:
        text, count, stop = self._advance(delta)
        logprobs = None if delta.logprobs is None else [self._describe(entry) for entry in delta.logprobs[:count]]
        news = ChoiceText(
            index=self.index,
            text=text,
            token_ids=list(delta.token_ids[:count]),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            cumulative_logprob=delta.cumulative_logprob,
            score=delta.score,
        )
        if stop is not None:
            news.finish_reason, news.stop_reason, news.stopped_by_text = "stop", stop, True
            if count < len(delta.token_ids) or delta.cumulative_logprob is None:
                sums = delta.sums
                news.cumulative_logprob = self._sum_logprobs(news) if sums is None else sums[count - 1]
                news.score = None
        self._keep(news)
        return news

    def _advance(self, delta: ChoiceDelta) -> tuple[str, int, str | None]:
        """New text, the number of tokens used, and the stop string found."""
        ids = delta.token_ids
        if self._tokenizer is None or self._detokenizer is None:
            return "", len(ids), None
        shown = ids[:-1] if self._hides_last(delta) else ids
        if self._matcher is None:
            text = self._detokenizer.append(self._tokenizer.without(shown, self._hidden))
            return (text + self._detokenizer.finish() if delta.finish_reason else text), len(ids), None
        before = len(self._output.token_ids)
        pieces = []
        for count, token in enumerate(shown, 1):
            piece = self._detokenizer.append(self._tokenizer.without((token,), self._hidden))
            accept = before + count > self._min_tokens
            piece, stop = self._matcher.feed(piece, accept=accept, include=self._include_stop)
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), count, stop
        if delta.finish_reason is not None:
            accept = before + len(ids) > self._min_tokens
            rest = self._detokenizer.finish()
            piece, stop = self._matcher.feed(rest, accept=accept, include=self._include_stop)
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), len(ids), stop
            pieces.append(self._matcher.release())
        return "".join(pieces), len(ids), None

    def _hides_last(self, delta: ChoiceDelta) -> bool:
        """Whether the last id is the EOS or stop id that ended the choice, and is not to be shown."""
        if delta.finish_reason != "stop" or self._include_stop:
            return False
        return self._skip_special or delta.stop_reason is not None

    def _describe(self, entry: TokenLogprobs) -> TokenLogprobs:
        return entry if self._tokenizer is None else self._tokenizer.describe(entry)

    def _sum_logprobs(self, news: ChoiceText) -> float | None:
        return None if news.logprobs is None else self._logprob + _sum_of(news)

    def _keep(self, news: ChoiceText) -> None:
        output = self._output
        if news.text:
            self._pieces.append(news.text)
        output.token_ids.extend(news.token_ids)
        if news.logprobs is not None:
            if self._matcher is not None:
                self._logprob += _sum_of(news)
            if self._keeps_logprobs:
                if output.logprobs is None:
                    output.logprobs = []
                output.logprobs.extend(news.logprobs)
        if news.finish_reason is not None:
            output.finish_reason = news.finish_reason
            output.stop_reason = news.stop_reason
            output.cumulative_logprob = news.cumulative_logprob
            output.score = news.score


def _sum_of(news: ChoiceText) -> float:
    return sum(entry[token].logprob for token, entry in zip(news.token_ids, news.logprobs or (), strict=True))
