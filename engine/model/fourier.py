"""The Fourier transform in place of attention (FNet, arXiv:2105.03824)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.inputs import RunningPass


class FourierMixing(nn.Module):
    """A mixing of tokens without weights."""

    def mix(self, state: RunningPass, x: Tensor) -> Tensor:
        """The real part of the transform of each input's rows x [Tp, features], over tokens and features. Each input is
        transformed separately, because its length is part of the transform."""
        inputs = state.inputs
        inputs_alone = torch.split(x[: inputs.tokens].float(), inputs.metadata.query_lens)
        parts = [torch.fft.fft2(one).real.to(x.dtype) for one in inputs_alone if len(one)]
        return torch.cat([*parts, torch.zeros_like(x[inputs.tokens :])])
