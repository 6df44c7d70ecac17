"""Stop strings and the output processor: deltas of ids to texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequestError
from engine.interface.outputs import ChoiceDelta, FinishReason, Logprob, RequestDelta
from engine.interface.request import SamplingParams
from engine.text.processor import ChoiceText, OutputProcessor, Tokenizer
from engine.text.stop_strings import StopMatcher, StopStrings


def expected_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first stop string to complete past `start` characters ends, by brute force."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


ab = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=st.lists(ab, min_size=1, max_size=4))
def test_stop_matcher_against_brute_force(pieces: list[str], stops: list[str]) -> None:
    for include in (False, True):
        matcher = StopMatcher(StopStrings(stops))
        seen = shown = ""
        for piece in pieces:
            text, found = matcher.feed(piece, accept=True, include=include)
            seen, shown = seen + piece, shown + text
            where = expected_stop(seen, stops)
            assert (found is None) == (where is None)
            if where is not None:
                end, stop = where
                assert found == stop
                assert shown == (seen[:end] if include else seen[: end - len(stop)])
                break
            # Held back: exactly what may still become a stop string.
            held = max(n for n in range(len(seen) + 1) if n == 0 or any(s.startswith(seen[-n:]) for s in stops))
            assert shown == seen[: len(seen) - held]
        else:
            assert shown + matcher.release() == seen


def test_a_long_stop_string_costs_no_more_than_linear_time() -> None:
    matcher = StopMatcher(StopStrings(["a" * 20_000 + "b"]))
    started = time.thread_time()
    for _ in range(60_000):
        matcher.feed("a", accept=True, include=False)
    assert matcher.feed("b", accept=True, include=False) == ("", "a" * 20_000 + "b")
    assert time.thread_time() - started < 5


# --- the output processor -----------------------------------------------------------------------------

PIECES = ["</s>", "a", "b", "aab", "ba", "c", "<stop>", "bc", "\n"]


@cache
def pieces_tokenizer() -> Tokenizer:
    """Token i is the text PIECES[i], nothing is added between tokens; 0 is EOS and special."""
    model = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="c"))
    model.decoder = decoders.Fuse()
    model.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>"))


def tokens(*names: str) -> list[int]:
    return [PIECES.index(name) for name in names]


def run(
    ids: Sequence[int],
    params: SamplingParams,
    size: int = 1,
    finish: FinishReason = "length",
    stop_reason: int | None = None,
    logprobs: bool = False,
) -> tuple[OutputProcessor, list[ChoiceText]]:
    """One choice's ids in deltas of `size`, the last of which ends it."""
    processor = OutputProcessor(pieces_tokenizer(), [], params)
    news: list[ChoiceText] = []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        last = start + size >= len(ids)
        choice = ChoiceDelta(
            index=0,
            token_ids=part,
            logprobs=[{token: Logprob(-1.0, 1), 5: Logprob(-2.0, 2)} for token in part] if logprobs else None,
            finish_reason=finish if last else None,
            stop_reason=stop_reason if last else None,
            cumulative_logprob=-1.0 * len(ids) if last else None,
        )
        news += processor.process(RequestDelta(request_id="r", choices=[choice], finished=last))
    return processor, news


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_string_over_token_boundaries(size: int) -> None:
    ids = tokens("c", "a", "aab", "c", "a")
    processor, news = run(ids, SamplingParams(stop=["abc"]), size)
    output = processor.outputs[0]
    assert (output.text, output.token_ids) == ("caa", tokens("c", "a", "aab", "c"))
    assert (output.finish_reason, output.stop_reason) == ("stop", "abc")
    assert "".join(item.text for item in news) == "caa"
    assert [item.stopped_by_text for item in news] == [False] * (len(news) - 1) + [True]
    assert [token for item in news for token in item.token_ids] == output.token_ids
    included, _ = run(ids, SamplingParams(stop=["abc"], include_stop_str_in_output=True), size)
    assert included.outputs[0].text == "caaabc"


def test_overlapping_prefixes_and_a_stop_within_one_token() -> None:
    processor, news = run(tokens("a", "a", "a", "b", "c"), SamplingParams(stop="aab"))
    assert processor.outputs[0].text == "a"
    assert [item.text for item in news] == ["", "", "a", ""]
    processor, _ = run(tokens("c", "aab", "c"), SamplingParams(stop=["a", "b"]))
    assert (processor.outputs[0].text, processor.outputs[0].stop_reason) == ("c", "a")
    processor, news = run(tokens("<stop>", "c"), SamplingParams(stop=["<stop>"]))
    assert (processor.outputs[0].text, processor.outputs[0].token_ids, len(news)) == ("", tokens("<stop>"), 1)


def test_of_two_stop_strings_the_first_to_complete_wins_then_the_longest() -> None:
    for stops in (["bcab", "ca"], ["ca", "bcab"]):
        processor, _ = run(tokens("a", "b", "c", "a", "b"), SamplingParams(stop=stops))
        assert (processor.outputs[0].text, processor.outputs[0].stop_reason) == ("ab", "ca")
    for stops in (["ab", "b", "cab"], ["cab", "b", "ab"]):
        processor, _ = run(tokens("a", "c", "aab"), SamplingParams(stop=stops))
        assert (processor.outputs[0].text, processor.outputs[0].stop_reason) == ("aca", "ab")


def test_held_text_is_released_when_it_is_no_stop_string_and_at_the_end() -> None:
    _, news = run(tokens("a", "a", "c", "a"), SamplingParams(stop=["aab"]))
    assert [item.text for item in news] == ["", "", "aac", "a"]
    _, news = run(tokens("c", "a", "a", "</s>"), SamplingParams(stop=["aab"]), finish="stop")
    assert [item.text for item in news] == ["c", "", "", "aa"]
    assert not news[-1].stopped_by_text
    assert news[-1].stop_reason is None


@pytest.mark.parametrize("size", [1, 2, 100])
def test_min_tokens_shields_from_stop_strings(size: int) -> None:
    ids = tokens("b", "a", "b", "c", "b", "a")
    for min_tokens, count in ((0, 1), (1, 3), (2, 3), (3, 5), (5, 6)):
        processor, _ = run(ids, SamplingParams(stop=["b"], min_tokens=min_tokens, max_tokens=9), size)
        assert len(processor.outputs[0].token_ids) == count
    # A match may begin within the shielded tokens, if it completes after them.
    processor, _ = run(tokens("a", "b", "c"), SamplingParams(stop=["abc"], min_tokens=2, max_tokens=9), size)
    assert processor.outputs[0].text == ""


def test_a_stop_string_wins_over_the_engine_ending_the_choice_in_the_same_delta() -> None:
    params = SamplingParams(stop=["b"], logprobs=1)
    processor, news = run(tokens("a", "b", "c"), params, 3, logprobs=True)
    assert (news[0].finish_reason, news[0].stop_reason, news[0].stopped_by_text) == ("stop", "b", True)
    assert (processor.outputs[0].text, len(processor.outputs[0].logprobs or ())) == ("a", 2)
    assert news[0].cumulative_logprob == -2.0  # of the tokens that are kept
    processor, news = run(tokens("a", "b"), params, 2, logprobs=True)
    assert news[0].stopped_by_text
    assert news[0].cumulative_logprob == -2.0


def test_a_stop_string_within_a_delta_leaves_the_sum_up_to_it() -> None:
    """A step may bring several tokens. The sum is the one after the last token that counts, to the last bit."""
    sums = [-0.1, -0.1 - 0.7, -0.1 - 0.7 - 0.3]
    for end in range(3):
        processor = OutputProcessor(pieces_tokenizer(), [], SamplingParams(stop=["c"]))
        ids = tokens("a", "b", "a")
        ids[end] = tokens("c")[0]
        choice = ChoiceDelta(index=0, token_ids=ids, cumulative_logprob=sums[-1], sums=sums)
        (news,) = processor.process(RequestDelta(request_id="r", choices=[choice]))
        assert news.token_ids == ids[: end + 1]
        assert processor.outputs[0].cumulative_logprob == news.cumulative_logprob == sums[end]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=15),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 6),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
def test_stop_strings_end_to_end(ids: list[int], stops: list[str], size: int, min_tokens: int, include: bool) -> None:
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include)
    processor, news = run(ids, params, size)
    text = "".join(PIECES[token] for token in ids)
    shield = len("".join(PIECES[token] for token in ids[:min_tokens]))
    where = expected_stop(text, stops, shield)
    output = processor.outputs[0]
    assert "".join(item.text for item in news) == output.text
    assert processor.finished
    if where is None:
        assert (output.text, output.token_ids, output.finish_reason) == (text, ids, "length")
        return
    end, stop = where
    count = next(n for n in range(1, len(ids) + 1) if len("".join(PIECES[t] for t in ids[:n])) >= end)
    assert output.text == (text[:end] if include else text[: end - len(stop)])
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (ids[:count], "stop", stop)


def test_the_ending_id_is_kept_in_token_ids_and_out_of_the_text() -> None:
    ids = tokens("a", "c", "\n")

    def text(params: SamplingParams, ids: list[int] = ids, stop_reason: int | None = None) -> str:
        processor, _ = run(ids, params, finish="stop", stop_reason=stop_reason)
        assert processor.outputs[0].token_ids == ids
        return processor.outputs[0].text

    newline, eos = ids[-1], tokens("a", "</s>")
    assert text(SamplingParams(stop_token_ids=[newline]), stop_reason=newline) == "ac"
    shown = SamplingParams(stop_token_ids=[newline], include_stop_str_in_output=True)
    assert text(shown, stop_reason=newline) == "ac\n"
    assert text(SamplingParams(), eos) == "a"
    assert text(SamplingParams(stop=["x"]), eos) == "a"
    assert text(SamplingParams(skip_special_tokens=False), eos) == "a</s>"
    assert run(ids, SamplingParams())[0].outputs[0].text == "ac\n"  # ended by length: an ordinary token


def test_choices_are_independent_and_a_stopped_one_ignores_what_follows() -> None:
    processor = OutputProcessor(pieces_tokenizer(), [], SamplingParams(n=2, stop=["b"], logprobs=1))

    def step(*choices: ChoiceDelta, finished: bool = False) -> list[ChoiceText]:
        return processor.process(RequestDelta(request_id="r", choices=choices, finished=finished))

    entry = {1: Logprob(-0.5, 1), 5: Logprob(-1.5, 2)}
    news = step(
        ChoiceDelta(index=1, token_ids=tokens("a"), logprobs=[entry]),
        ChoiceDelta(index=0, token_ids=tokens("c"), logprobs=[{5: Logprob(-0.25, 1)}]),
    )
    assert [(item.index, item.text) for item in news] == [(1, "a"), (0, "c")]
    assert news[0].logprobs == [{1: Logprob(-0.5, 1, "a"), 5: Logprob(-1.5, 2, "c")}]
    (news_1,) = step(ChoiceDelta(index=1, token_ids=tokens("b"), logprobs=[{2: Logprob(-0.5, 1)}]))
    assert news_1.stopped_by_text
    assert not processor.finished
    assert news_1.cumulative_logprob == -1.0
    aborted = ChoiceDelta(index=1, token_ids=tokens("c"), finish_reason="abort")
    last = ChoiceDelta(index=0, token_ids=tokens("c"), finish_reason="length", cumulative_logprob=-3.0)
    assert [item.index for item in step(aborted, last, finished=True)] == [0]
    assert processor.finished
    first, second = processor.outputs
    assert (first.index, first.text, first.finish_reason, first.cumulative_logprob) == (0, "cc", "length", -3.0)
    assert (second.index, second.text, second.finish_reason, second.stop_reason) == (1, "a", "stop", "b")
    assert second.token_ids == tokens("a", "b")
    assert len(second.logprobs or ()) == 2


def test_a_request_that_ends_early_ends_its_choices() -> None:
    processor = OutputProcessor(pieces_tokenizer(), [], SamplingParams(n=2, stop=["ab"]))
    start = ChoiceDelta(index=0, token_ids=tokens("a"))
    assert processor.process(RequestDelta(request_id="r", choices=[start]))[0].text == ""
    news = processor.process(RequestDelta(request_id="r", choices=(), finished=True, error="out of paper"))
    assert [(item.index, item.text, item.finish_reason) for item in news] == [(0, "a", "error"), (1, "", "error")]
    assert processor.finished
    assert processor.error == "out of paper"


def test_beams_scores_prompt_logprobs_and_cached_tokens_come_through() -> None:
    processor = OutputProcessor(pieces_tokenizer(), tokens("a"), SamplingParams(num_beams=2, n=1))
    head = RequestDelta(request_id="r", choices=(), prompt_logprobs=[None, {2: Logprob(-1.0, 1)}], num_cached_tokens=16)
    assert processor.process(head) == []
    settled = ChoiceDelta(index=0, token_ids=tokens("a", "b"))
    end = ChoiceDelta(index=0, token_ids=tokens("c", "</s>"), finish_reason="stop", cumulative_logprob=-4.0, score=-1.0)
    processor.process(RequestDelta(request_id="r", choices=[settled]))
    processor.process(RequestDelta(request_id="r", choices=[end], finished=True))
    output = processor.outputs[0]
    assert (output.text, output.score, output.cumulative_logprob) == ("abc", -1.0, -4.0)
    assert output.token_ids == tokens("a", "b", "c", "</s>")
    assert processor.prompt_logprobs == [None, {2: Logprob(-1.0, 1, "b")}]
    assert processor.num_cached_tokens == 16


def test_without_a_tokenizer_the_text_is_empty() -> None:
    processor = OutputProcessor(None, [1, 2], SamplingParams())
    entry = {7: Logprob(-1.0, 1)}
    choice = ChoiceDelta(index=0, token_ids=[7, 8], logprobs=[entry, entry], finish_reason="length")
    (news,) = processor.process(RequestDelta(request_id="r", choices=[choice], finished=True))
    assert (news.text, news.token_ids, news.logprobs) == ("", [7, 8], [entry, entry])
    assert processor.finished
    assert processor.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        OutputProcessor(None, [], SamplingParams(stop="x"))
    assert caught.value.param == "stop"
