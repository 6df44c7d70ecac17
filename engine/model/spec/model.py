"""A whole model, and the properties that follow from its parts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.attention.base import Chunks
from engine.interface.outputs import RepeatedInput, SignalInfo
from engine.model.positions import Rotary
from engine.model.spec.embedding import Tokens
from engine.model.spec.heads import Head
from engine.model.spec.stack import Stack
from engine.model.spec.vision import Vision


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model: decoder-only, encoder-only or encoder-decoder."""

    encoder: Stack | None
    decoder: Stack | None
    head: Head
    context_length: int | None = None  # context length that the model was made for; None if its config does not say
    shared_tokens: bool = True  # whether encoder and decoder share one token table
    # how the decoder reads the encoder's input, if both read it in order to classify it
    repeats: RepeatedInput | None = None
    # an encoder of signals whose vectors are in the same space as this model's, which reads token ids
    # (arXiv:2103.00020)
    twin: ModelSpec | None = None
    # the token that pads texts to the maximum length: the model was trained only on texts of that length, and treats
    # these tokens like others. None: texts are not padded.
    filler: int | None = None
    vision: Vision | None = None  # computes vectors of images, which replace some of the decoder's tokens

    @property
    def trunk(self) -> Stack:
        """The stack whose hidden states the head reads."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @property
    def vocab_size(self) -> int:
        """Rows of the token table, 0 if there is none."""
        stack = self.decoder or self.encoder
        return stack.embedding.vocab_size if stack and isinstance(stack.embedding, Tokens) else 0

    @property
    def attention_span(self) -> int | None:
        """Maximum number of keys that a query sees in any layer of the decoder, including its own; None if one sees
        all."""
        parts = self.decoder.attentions if self.decoder else ()
        windows = [part.window for part in parts if part.causal and part.window is not None]
        reaches = [window.size if isinstance(window, Chunks) else window.left + 1 for window in windows]
        return max(reaches, default=None) if len(windows) == len(parts) else None

    @property
    def state_sizes(self) -> list[int]:
        """Numbers in the state of each of the decoder's layers that carry one."""
        return [part.state_size for part in self.decoder.states] if self.decoder else []

    @property
    def signal(self) -> SignalInfo | None:
        """The signal that its encoder, or its twin's, reads instead of token ids; None: it reads only token ids."""
        encoder = self.encoder if self.twin is None else self.twin.encoder
        return None if encoder is None else encoder.embedding.signal

    @property
    def encoder_vocab_size(self) -> int:
        """Rows of the encoder's token table, 0 if there is none."""
        return self.encoder.embedding.vocab_size if self.encoder and isinstance(self.encoder.embedding, Tokens) else 0

    @property
    def rotary_limits(self) -> tuple[int, ...]:
        """Lengths, ascending, up to which sequences are rotated differently than beyond (`Rotary.limit`)."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        parts = [attention.position for stack in stacks for attention in stack.attentions]
        return tuple(sorted({part.limit for part in parts if isinstance(part, Rotary) and part.limit is not None}))

    @property
    def max_positions(self) -> int | None:
        """Maximum tokens of a sequence, because a position table ends there or attention would leave out some keys;
        None without a limit."""
        sizes = [
            _positions(stack)
            for stack in (self.encoder, self.decoder)
            # The length of a signal does not depend on a decoder's tokens.
            if stack is not None and (isinstance(stack.embedding, Tokens) or stack is self.trunk)
        ]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def max_encoder_positions(self) -> int | None:
        """Maximum tokens of an encoder's input beside a decoder, if its position table is longer than the decoder's;
        None for other models."""
        if self.encoder is None or self.decoder is None or self.signal is not None:
            return None
        own, other = _positions(self.encoder), _positions(self.decoder)
        return own if own is not None and other is not None and own > other else None


def _positions(stack: Stack | None) -> int | None:
    """The number of positions in a stack's table, or of tokens that its attention sees; None without a limit."""
    if stack is None:
        return None
    table = stack.embedding.positions
    if table is None:
        parts = (part.value_scores for part in stack.attentions)
        return min((part.longest for part in parts if part is not None), default=None)
    return table.size - table.offset - (stack.predicting is not None)  # the token after the last needs one
