"""What the scheduler can hold, and which requests it could never run."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.scheduling.sequence import worst_case_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler (see `EngineConfig`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


def check_fits(request: Request, config: SchedulerConfig, total_pages: int) -> None:
    """Refuse a request that could never run, even alone.

    Raises:
        InvalidRequestError: it needs more rows or pages than there are.
    """
    decoding, size = request.decoding, config.block_size
    if decoding.width > config.max_num_seqs:
        name = "num_beams" if decoding.num_beams > 1 else "n"
        raise InvalidRequestError(
            f"{name} is {decoding.width}, but a step holds at most {config.max_num_seqs} sequences "
            f"(max_num_seqs). Ask for fewer, or raise --max-num-seqs.",
            param=name,
        )
    prompt = len(request.prompt_token_ids)
    pages = worst_case_pages(prompt, decoding.max_tokens, decoding.width, size)
    if pages > total_pages:
        raise InvalidRequestError(
            f"the request may need {pages} pages of {size} tokens ({prompt} prompt "
            f"tokens, max_tokens {decoding.max_tokens}, {decoding.width} sequences), but the KV cache has "
            f"{total_pages}. Lower max_tokens, n or num_beams, or raise --kv-cache-memory.",
            param="max_tokens",
        )
