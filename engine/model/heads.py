"""The modules of heads, which read the hidden states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.activations import activate, activate_by_name
from engine.model.blocks import Sublayer, build_feed_forward
from engine.model.executors.choice import Executor, fastest
from engine.model.executors.reference import TorchExecutor
from engine.model.inputs import Inputs
from engine.model.labelled_spans import LabelledSpans
from engine.model.layers import Linear
from engine.model.normalisation import Norm
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.program import compile_head
from engine.model.row_kernels import RowModule
from engine.model.tables import Tables

NO_TABLES = Tables({}, {})


class Head(nn.Module):
    """norm(activation(dense(x))) if there is a dense layer, then an output matrix; before both a network, if there is
    one.

    Args:
        sizes: features of the hidden states, of the dense layer (None: there is none), and of the outputs.
        shared: the output matrix, if another module owns it.
        beyond: this many of the last features have a separate output matrix, without a bias.
        network: the part that processes the hidden states first.
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
        network: spec.ResidualNetwork | None = None,
    ):
        super().__init__()
        hidden, width, outputs = sizes
        self.network = None
        if network is not None:
            inner = build_feed_forward(network.ffn, hidden, place)
            self.network = Sublayer(inner, outer=build_norm(network.norm, hidden, place))
        self.dense = None if width is None else Linear(hidden, width, dense_bias, place)
        self.norm = build_norm(norm, width or hidden, place)
        self.output = Linear((width or hidden) - beyond, outputs, bias, place, shared=shared)
        self.beyond = Linear(beyond, outputs, False, place) if beyond else None
        self._hidden, self._activation = hidden, activation
        self.program = compile_head(hidden, self.network, self.dense, activation, self.norm)
        self.executor: Executor = TorchExecutor(self.program, NO_TABLES)

    def make_ready(self) -> None:
        """Let the fastest executor of the device run the layers before the output matrix from now on. The weights are
        loaded, laid out, and do not change."""
        if len(self.program.operations) > 1:
            self.executor = fastest(self.program, NO_TABLES, self.output.weight.dtype, self.output.weight.device)

    def with_own(self, parameters: Mapping[str, Tensor]) -> Head:
        """A head with other parameters, by their paths here ("output.weight"); it shares all others with this one.
        Raises KeyError: names a parameter that cannot be replaced, or one that a separate matrix lacks; ValueError:
        names a parameter with another shape."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        given = dict(parameters)
        for name in ("dense", "output"):
            linear = self._modules[name]
            if not isinstance(linear, Linear) or not any(path.startswith(f"{name}.") for path in given):
                continue
            place = Place(linear.device, self.output.weight.dtype)
            own = Linear(linear.inputs, linear.outputs, linear.bias is not None, place)
            for path, parameter in own.named_parameters():
                _fill(f"{name}.{path}", parameter, given.pop(f"{name}.{path}"))
            own.pack(None)
            made._modules[name] = own
        if self.norm is not None and any(path.startswith("norm.") for path in given):
            made._modules["norm"] = norm = copy.deepcopy(self.norm)
            for path, parameter in norm.named_parameters():
                if f"norm.{path}" in given:
                    _fill(f"norm.{path}", parameter, given.pop(f"norm.{path}"))
        if given:
            raise KeyError(next(iter(given)))
        made.program = compile_head(self._hidden, made.network, made.dense, self._activation, made.norm)
        made.executor = TorchExecutor(made.program, NO_TABLES)
        made.make_ready()
        return made

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, outputs] of hidden states [N, hidden]."""
        if len(self.program.operations) > 1:
            x = self.executor.run(Inputs.of_rows(x))
        if self.beyond is None:
            return self.output.in_float32(x)
        near, far = x[:, : self.output.inputs].contiguous(), x[:, self.output.inputs :].contiguous()
        return self.output.in_float32(near) + self.beyond.in_float32(far)


class ChoosingHead(Head):
    """A head that chooses among some tokens of a vocabulary; the logits of all others are -inf."""

    tokens: Tensor | None = None  # the id of each output's token
    vocabulary = 0

    def choose(self, tokens: Tensor, vocabulary: int) -> None:
        """Set the id of each output's token, and the number of ids."""
        self.tokens, self.vocabulary = tokens, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        chosen = super().forward(x)
        if self.tokens is None:
            return chosen
        logits = chosen.new_full((len(chosen), self.vocabulary), -torch.inf)
        logits[:, self.tokens] = chosen
        return logits


def _fill(path: str, parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.shape != values.shape:
        raise ValueError(f"{path} has the shape {list(values.shape)}, but the model's has {list(parameter.shape)}")
    parameter.data.copy_(values)


class Panel(nn.Module):
    """Several heads. Each member reads its own hidden state, and the members' outputs are averaged."""

    def __init__(self, members: Sequence[Head]):
        super().__init__()
        self.members = nn.ModuleList(members)

    def make_ready(self) -> None:
        """Prepare for rows, as in `Head.make_ready`."""
        for member in self.members:
            assert isinstance(member, Head)
            member.make_ready()

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, outputs] of hidden states [N, members * hidden], the first member's first."""
        states = x.chunk(len(self.members), dim=1)
        numbers = [member(part.contiguous()) for member, part in zip(self.members, states, strict=True)]
        return torch.stack(numbers).mean(0)


class Probe(RowModule):
    """The summary of an input's hidden states by a learned query."""

    def __init__(self, part: spec.Probe, hidden: int, place: Place):
        super().__init__()
        self.heads = part.heads
        self.query = place.parameter(hidden)
        self.qkv = Linear(hidden, 3 * hidden, True, place)
        self.out = Linear(hidden, hidden, True, place)
        self.norm = build_norm(part.norm, hidden, place)
        self.up = Linear(hidden, part.ffn.width, part.ffn.bias, place)
        self.down = Linear(part.ffn.width, hidden, part.ffn.bias, place)
        self.activation = part.ffn.activation

    def forward(self, states: Tensor, spans: Sequence[tuple[int, int]], min_rows: int = 1) -> Tensor:
        """[N, hidden] of hidden states [T, hidden] of N inputs.

        Args:
            spans: where each input's states begin and end.
            min_rows: minimum rows of a matrix product.
        """
        heads = padded(self.qkv, torch.cat((self.query[None], states)), min_rows)
        queries, keys_of_all, values_of_all = heads.view(len(heads), 3, self.heads, -1).permute(1, 2, 0, 3)
        query, found = queries[:, :1] * queries.shape[-1] ** -0.5, []
        for begin, end in spans:  # separately, so that none depends on the others
            keys, values = (rows[:, 1 + begin : 1 + end] for rows in (keys_of_all, values_of_all))
            scores = query @ keys.transpose(1, 2)
            found.append((scores.softmax(-1) @ values).reshape(-1))
        x = padded(self.out, torch.stack(found), min_rows)
        assert self.norm is not None
        up = padded(self.up, self.norm(x), min_rows)
        return x + padded(self.down, activate_by_name(self.activation, up, self.kernels), min_rows)


class Embedder(nn.Module):
    """Makes vectors of inputs: an optional probe, and the matrix that maps its result."""

    def __init__(self, part: spec.Embedder, hidden: int, place: Place):
        super().__init__()
        self.probe = Probe(part.pooling, hidden, place) if isinstance(part.pooling, spec.Probe) else None
        self.output = None if part.features is None else Linear(hidden, part.features, part.bias, place)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, features] of vectors [N, hidden]."""
        return x.float() if self.output is None else self.output.in_float32(x)


def padded(linear: Linear, x: Tensor, min_rows: int) -> Tensor:
    """A product with at least this many rows; the padding is removed from the result."""
    result: Tensor = linear(F.pad(x, (0, 0, 0, max(min_rows - len(x), 0))))[: len(x)]
    return result


def build_head(model: spec.ModelSpec, table: nn.Parameter | None, place: Place) -> nn.Module | None:
    """The module of a model's head; None if the hidden states themselves are the result. `table`: the token table,
    which a tied head shares; None if the model reads no tokens."""
    hidden, part, outputs = model.trunk.output_size, model.head, model.vocab_size
    if isinstance(model.trunk.embedding, spec.Tokens) and model.trunk.embedding.rows is not None:
        outputs = model.trunk.embedding.rows[1] - model.trunk.embedding.rows[0]
    sizes: tuple[int, int | None, int]
    match part:
        case spec.Lm():
            shared, layer = table if part.tied else None, part.layer
            if part.norm is not None:
                sizes = (hidden, None, part.choices or outputs)
                kind = Head if part.choices is None else ChoosingHead
                return kind(sizes, None, part.norm, place, dense_bias=False, bias=part.bias, shared=shared)
            if layer is None:
                return Linear(hidden, outputs, part.bias, place, shared=shared)
            sizes = (hidden, hidden, outputs)
            return Head(
                sizes, layer.activation, layer.norm, place, dense_bias=layer.bias, bias=part.bias, shared=shared
            )
        case spec.MaskedLm():
            assert table is not None
            sizes = (hidden, None if part.activation is None else part.width or table.shape[1], model.vocab_size)
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
            sizes = (hidden, None if part.activation is None else part.width or hidden, part.labels)
            count = part.pooling.count if isinstance(part.pooling, spec.FirstStates) else 1
            heads = [
                Head(sizes, part.activation, part.norm, place, dense_bias=part.dense_bias, bias=part.bias)
                for _ in range(count)
            ]
            return Panel(heads) if isinstance(part.pooling, spec.FirstStates) else heads[0]
        case spec.AnswerSpan():
            width = None if part.activation is None else hidden
            return Head(
                (hidden, width, 2),
                part.activation,
                part.norm,
                place,
                dense_bias=part.dense_bias,
                bias=True,
                network=part.network,
            )
        case spec.Embedder():
            return Embedder(part, hidden, place)
        case spec.LabelledSpans():
            return LabelledSpans(part, hidden, place.device)
        case spec.Pool():
            return None


def classes(numbers: Tensor, activation: str) -> Tensor:
    """Scores of classes [N, classes] after the model's activation: softmax, sigmoid, or none."""
    match activation:
        case "softmax":
            return F.softmax(numbers, dim=-1)
        case "sigmoid":
            return activate(F.sigmoid, numbers)
        case _:
            return numbers
