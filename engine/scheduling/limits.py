"""The scheduler's limits, and requests that could never run."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.errors import InvalidRequestError
from engine.interface.request import Request
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.sequence import pages_needed, worst_case_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler (see `EngineConfig`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool = True  # whether later requests may find the pages of earlier ones
    needs: SequenceNeeds = field(default_factory=SequenceNeeds)  # the needs of the model's sequences

    @classmethod
    def of(cls, config: EngineConfig, needs: SequenceNeeds) -> SchedulerConfig:
        """The limits that follow from an engine's settings for a model."""
        return cls(
            max_num_seqs=config.most_seqs
            if needs.paged or config.max_num_seqs is not None
            else config.max_num_batched_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            needs=needs,
        )

    @property
    def window(self) -> int | None:
        """The maximum number of keys that any layer sees, including the query's own; None if some layer sees all."""
        return self.needs.window

    @property
    def seen_pages(self) -> int | None:
        """The number of a sequence's last full pages that its next query sees. None: all of them."""
        return None if self.window is None else pages_needed(self.window - 1, self.block_size)

    def first_page(self, position: int) -> int:
        """The first page of a sequence that a query at `position`, or a later one, can see."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.block_size

    def most_pages(self, width: int) -> int:
        """The maximum pages that `width` sequences of any length hold at once: those in their windows, and those of a
        step's tokens; 2**31 if that grows with their length."""
        if self.window is None:
            return 2**31
        return (width * self._kept_slots(self.window) + self.max_num_batched_tokens) // self.block_size

    def fitting(self, length: int, total_pages: int, encoder_length: int = 0) -> float:
        """The number of requests of `length` tokens, with an encoder's input of `encoder_length`, that this many pages
        hold at a time."""
        encoded = pages_needed(encoder_length, self.block_size)
        whole = total_pages / (pages_needed(length, self.block_size) + encoded)
        if self.window is None:
            return whole
        room = total_pages * self.block_size - self.max_num_batched_tokens
        return max(whole, room / max(self._kept_slots(self.window) + encoded * self.block_size, 1))

    def _kept_slots(self, window: int) -> int:
        """The maximum slots in a sequence's pages besides those of a step's tokens: the slots of the keys that the
        first of these tokens sees before it, and the unused slots of the first and the last page."""
        return window - 1 + 2 * (self.block_size - 1)


def check_fits(request: Request, config: SchedulerConfig, total_pages: int, total_states: int | None = None) -> None:
    """Refuse a request that could never run, even alone. `total_states`: number of state slots, of which a sequence has
    two in a step; None: sequences need none. Raises InvalidRequestError if it needs more rows or pages than there
    are."""
    decoding, size = request.decoding, config.block_size
    if decoding.width > config.max_num_seqs:
        name = "num_beams" if decoding.num_beams > 1 else "n"
        raise InvalidRequestError(
            f"{name} is {decoding.width}, but a step has at most {config.max_num_seqs} sequences (max_num_seqs). "
            f"Lower it, or raise --max-num-seqs.",
            param=name,
        )
    if total_states is not None and 2 * decoding.width > total_states:
        name = "num_beams" if decoding.num_beams > 1 else "n"
        raise InvalidRequestError(
            f"{name} is {decoding.width}, but the {total_states} state slots of the KV cache suffice for "
            f"{total_states // 2} sequences. Lower it, or raise --kv-cache-memory.",
            param=name,
        )
    if len(request.encoder_token_ids) > config.max_num_batched_tokens:
        raise InvalidRequestError(
            f"the encoder's input has {len(request.encoder_token_ids)} tokens, but a step has at most "
            f"{config.max_num_batched_tokens} tokens (max_num_batched_tokens), and inputs are encoded in one "
            f"step. Shorten it, or "
            "raise --max-num-batched-tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    seen_whole = any(image.of_prompt for image in request.images)
    most = config.max_num_batched_tokens - config.max_num_seqs
    if seen_whole and len(request.prompt_token_ids) > most:
        raise InvalidRequestError(
            f"the prompt has {len(request.prompt_token_ids)} tokens with its images, but one step has to compute all "
            f"of them and has room for {most} (max_num_batched_tokens minus max_num_seqs). Shorten it, send fewer "
            "images, or raise --max-num-batched-tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    if not config.needs.paged:
        return  # the first input of a step may be of any length
    prompt = len(request.prompt_token_ids)
    if request.pooling is not None:
        encoded = pages_needed(len(request.encoder_token_ids), size)
        pages = encoded + min(pages_needed(prompt, size), config.most_pages(1))
        if pages > total_pages:
            raise InvalidRequestError(
                f"the input of {prompt} tokens needs {pages} pages of {size} tokens, but the KV cache has "
                f"{total_pages}. Shorten it, or raise --kv-cache-memory.",
                param="input",
                code="context_length_exceeded",
            )
        return
    whole = worst_case_pages(prompt, decoding.max_tokens, decoding.width, size)
    encoded = pages_needed(len(request.encoder_token_ids), size)
    pages = encoded + min(whole, config.most_pages(decoding.width))
    if pages > total_pages:
        figures = f"{prompt} prompt tokens, max_tokens {decoding.max_tokens}, {decoding.width} sequences"
        setting = "or raise --kv-cache-memory"
        if encoded:
            figures = f"{len(request.encoder_token_ids)} encoder tokens, {figures}"
        if pages < whole:
            figures += f"; windows of {config.window} and steps of up to {config.max_num_batched_tokens} tokens"
            setting = "raise --kv-cache-memory, or lower --max-num-batched-tokens"
        raise InvalidRequestError(
            f"the request may need {pages} pages of {size} tokens ({figures}), but the KV cache has "
            f"{total_pages}. Lower max_tokens, n or num_beams, {setting}.",
            param="max_tokens",
        )
