"""Convolutions over the tokens of each input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionMetadata
from engine.model import spec
from engine.model.layers import Linear
from engine.model.place import Place


class TokenConvolution(nn.Module):
    """The weights of activation(convolution(x)) for inputs end to end, as one matrix product.

    The window of each token (its neighbours' features, one after the other) is multiplied with the kernel [out, taps *
    in].
    """

    def __init__(self, part: spec.Convolution, hidden_size: int, place: Place):
        super().__init__()
        self.taps = part.kernel
        self.kernel = Linear(part.kernel * hidden_size, hidden_size, True, place)
        self.activation = part.activation


def gather_neighbours(x: Tensor, metadata: AttentionMetadata, taps: int, tokens: int) -> Tensor:
    """[Tp, taps * features] of x [Tp, features]: the windows of tokens; rows past `tokens` are padding.

    Positions before the first and after the last token of an input are zeros, so no input sees its neighbour in the
    batch.
    """
    nothing = len(x)
    places = neighbours(metadata, taps, nothing).to(x.device)
    places = F.pad(places, (0, 0, 0, len(x) - tokens), value=nothing)
    return F.pad(x, (0, 0, 0, 1)).index_select(0, places.view(-1)).view(len(x), -1)


def neighbours(metadata: AttentionMetadata, taps: int, nothing: int) -> Tensor:
    """[T, taps] int64 on the host: the tokens around each token, `nothing` beyond the ends of its row."""
    lens = torch.tensor(metadata.query_lens, device="cpu")
    end = lens.cumsum(0).repeat_interleave(lens)
    begin = end - lens.repeat_interleave(lens)
    places = torch.arange(len(end), device="cpu")[:, None] + torch.arange(taps, device="cpu") - taps // 2
    inside = (places >= begin[:, None]) & (places < end[:, None])
    return places.where(inside, nothing)
