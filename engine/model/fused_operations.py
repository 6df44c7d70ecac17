"""The operations of a decoder's layers on a GPU (`engine.model.fused`): joins, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from engine.attention.base import Bias, Paged
from engine.gpu import norms
from engine.gpu.norms import Norm
from engine.gpu.rotary import Angles, HeadNorms, turn_and_store
from engine.model.layers import CrossAttention, SelfAttention, Step


@dataclass(slots=True)
class Run:
    """One forward pass.

    Attributes:
        stream: [Tp, hidden] the residual stream, which lacks what is pending.
        turns: [Tp] the rows of rotary tables; positions, too, where slots are None.
        step: what the layers share; its slots are None where each row has one token, whose slot is worked out with it.
        input: of the next inner operation.
        pending: results of inner operations that are not in the stream yet, two at most.
    """

    stream: Tensor
    turns: Tensor
    caches: Sequence[Paged]
    step: Step
    input: Tensor
    pending: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Join:
    """The stream receives what is pending; its norm is the next input.

    Attributes:
        after: the norm of what is pending.
        norm: None: the stream itself is the next input.
        in_place: the norm takes the place of the sum in the stream.
    """

    after: Norm | None
    norm: Norm | None
    in_place: bool = False

    def __call__(self, run: Run) -> None:
        if run.pending:
            first, *others = run.pending
            run.input = norms.add_norm(
                run.stream,
                first,
                self.norm,
                after=self.after,
                also=others[0] if others else None,
                in_place=self.in_place,
            )
            run.pending.clear()
        elif self.norm is None:
            run.input = run.stream
        else:
            run.input = norms.norm(run.stream, self.norm, run.stream if self.in_place else None)


@dataclass(frozen=True, slots=True)
class NormAgain:
    """Another norm of the stream is the next input."""

    norm: Norm

    def __call__(self, run: Run) -> None:
        run.input = norms.norm(run.stream, self.norm)


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention of the new tokens to their rows' pages, which first receive them.

    Attributes:
        layer: whose pages.
        angles: None where nothing turns.
        norms: of each head.
        whole: of all queries at once, and of all keys.
        bias: what is added to the scores.
    """

    module: SelfAttention
    layer: int
    angles: Angles | None
    norms: HeadNorms | None
    whole: HeadNorms | None
    bias: Bias | None

    def __call__(self, run: Run) -> None:
        run.pending.append(self.module.out(self.attend(run, self.module.qkv(run.input))))

    def attend(self, run: Run, heads: Tensor) -> Tensor:
        """Attention's results [Tp, heads * head_dim] of queries, keys and values [Tp, all heads * head_dim], which are
        overwritten."""
        part, cache, total, clip = self.module.part, run.caches[self.layer], heads.shape[0], self.module.part.clip
        if self.whole is not None:
            if clip is not None:
                heads, clip = heads.clamp_(-clip, clip), None
            sizes = (part.heads * part.head_dim, part.kv_heads * part.head_dim)
            queries, keys = heads[:, : sizes[0]], heads[:, sizes[0] : sum(sizes)]
            norms.norm(queries, self.whole.queries, queries)
            norms.norm(keys, self.whole.keys, keys)
        heads = heads.view(total, part.heads + 2 * part.kv_heads, part.head_dim)
        turning, values = heads.tensor_split((part.heads + part.kv_heads,), dim=1)
        turn_and_store(
            turning,
            values,
            cache,
            angles=self.angles,
            positions=run.turns,
            slots=run.step.slots,
            norms=self.norms,
            clip=clip,
        )
        attended = self.module.backend.attend(
            turning[:, : part.heads],
            cache,
            run.step.metadata,
            causal=part.causal,
            window=part.window,
            scale=part.scale,
            bias=self.bias,
            softcap=part.softcap,
        )
        return attended.reshape(total, part.heads * part.head_dim)


@dataclass(frozen=True, slots=True)
class AttendAcross:
    """Attention to the encoder's pages, by its module: nothing lies between its products and attention."""

    module: CrossAttention
    layer: int

    def __call__(self, run: Run) -> None:
        run.pending.append(self.module(run.input, run.caches[self.layer], run.step))


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed-forward network by its module, whose activation or gate is one kernel."""

    module: nn.Module

    def __call__(self, run: Run) -> None:
        run.pending.append(self.module(run.input, run.step))


Operation = Callable[[Run], None]
