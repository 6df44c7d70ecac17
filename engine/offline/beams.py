"""Beam search under vLLM's names: `LLM.beam_search`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.outputs import RequestOutput
from engine.interface.request import SamplingParams
from engine.interface.values import fail
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search.

    Attributes:
        beam_width: number of beams and of answers.
        max_tokens: maximum tokens of an answer.
        ignore_eos: treat the model's EOS as an ordinary token.
        temperature: 0, because a search does not sample.
        length_penalty: an answer's score is its log-probability / length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    @property
    def sampling(self) -> SamplingParams:
        """The equivalent parameters for the engine.

        Raises:
            InvalidRequestError: a value is invalid.
        """
        if self.temperature != 0:
            fail("temperature", f"temperature must be 0 in a beam search, got {self.temperature}.")
        return SamplingParams(
            num_beams=self.beam_width,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=0.0,
            length_penalty=self.length_penalty,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """An answer."""

    tokens: list[int]  # the tokens of prompt and answer
    text: str | None  # the text of all tokens; None if the model has no tokenizer
    cum_logprob: float | None  # sum of the log-probabilities of the answer's tokens
    score: float | None  # the score that ranks answers
    # finish_reason, stop_reason: as in `CompletionOutput`
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The answers to a prompt, best first."""

    sequences: list[BeamSearchSequence]


def sequences_of(answer: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    found = []
    for output in answer.outputs:
        tokens = [*answer.prompt_token_ids, *output.token_ids]
        found.append(
            BeamSearchSequence(
                tokens=tokens,
                text=None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False),
                cum_logprob=output.cumulative_logprob,
                score=output.score,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
        )
    return BeamSearchOutput(sequences=found)
