"""What reads the hidden states: the modules of heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.torch.executor import TorchExecutor
from engine.model import spec
from engine.model.activations import activate
from engine.model.executor import Executor, fastest
from engine.model.layers import Linear
from engine.model.normalisation import Norm
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.program import Inputs, compile_head
from engine.model.tables import Tables

NO_TABLES = Tables({}, {})


class Head(nn.Module):
    """norm(activation(dense(x))) where there is a dense layer, then a matrix of outputs.

    Args:
        sizes: features of the hidden states, of the dense layer (None: there is none), and of the outputs.
        shared: the output matrix, if another module owns it.
        beyond: so many of the last features have an output matrix of their own, without a bias.
    """

    def __init__(
        self,
        sizes: tuple[int, int | None, int],
        activation: spec.Activation | None,
        norm: Norm | None,
        place: Place,
        *,
        dense_bias: bool,
        bias: bool,
        shared: nn.Parameter | None = None,
        beyond: int = 0,
    ):
        super().__init__()
        hidden, width, outputs = sizes
        self.dense = None if width is None else Linear(hidden, width, dense_bias, place)
        self.norm = build_norm(norm, width or hidden, place)
        self.output = Linear((width or hidden) - beyond, outputs, bias, place, shared=shared)
        self.beyond = Linear(beyond, outputs, False, place) if beyond else None
        self.program = compile_head(hidden, self.dense, activation, self.norm)
        self.executor: Executor = TorchExecutor(self.program, NO_TABLES)

    def make_ready(self) -> None:
        """Let the fastest executor for the device run what lies before the matrix of outputs from now on. Weights have
        been filled and laid out, and stay as they are."""
        if len(self.program.operations) > 1:
            self.executor = fastest(self.program, NO_TABLES, self.output.weight.dtype, self.output.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, outputs] of hidden states [N, hidden]."""
        if len(self.program.operations) > 1:
            x = self.executor.run(Inputs.of_rows(x))
        if self.beyond is None:
            return self.output.in_float32(x)
        near, far = x[:, : self.output.inputs].contiguous(), x[:, self.output.inputs :].contiguous()
        return self.output.in_float32(near) + self.beyond.in_float32(far)


def build_head(model: spec.ModelSpec, table: nn.Parameter, place: Place) -> nn.Module | None:
    """The module of a model's head; None where the hidden states themselves are the answer.

    Args:
        table: the token table, which a tied head shares.
    """
    hidden, part = model.trunk.output_size, model.head
    sizes: tuple[int, int | None, int]
    match part:
        case spec.Lm():
            shared, layer = table if part.tied else None, part.layer
            if layer is None:
                return Linear(hidden, model.vocab_size, part.bias, place, shared=shared)
            sizes = (hidden, hidden, model.vocab_size)
            return Head(
                sizes, layer.activation, layer.norm, place, dense_bias=layer.bias, bias=part.bias, shared=shared
            )
        case spec.MaskedLm():
            sizes = (hidden, part.width or table.shape[1], model.vocab_size)
            shared = table if part.tied else None
            return Head(
                sizes,
                part.activation,
                part.norm,
                place,
                dense_bias=part.dense_bias,
                bias=part.bias,
                shared=shared,
                beyond=part.beyond,
            )
        case spec.Classifier():
            width = None if part.activation is None else part.width or hidden
            return Head(
                (hidden, width, part.labels),
                part.activation,
                part.norm,
                place,
                dense_bias=part.dense_bias,
                bias=part.bias,
            )
        case spec.AnswerSpan():
            width = None if part.activation is None else hidden
            return Head((hidden, width, 2), part.activation, part.norm, place, dense_bias=part.dense_bias, bias=True)
        case spec.Pool():
            return None


def classes(numbers: Tensor, activation: str) -> Tensor:
    """Scores of classes [N, classes] as the model means them: softmax, sigmoid, or none."""
    match activation:
        case "softmax":
            return F.softmax(numbers, dim=-1)
        case "sigmoid":
            return activate(F.sigmoid, numbers)
        case _:
            return numbers
