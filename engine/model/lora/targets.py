"""The products of a model that adapters change, by the checkpoint's names of their matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import AdapterError
from engine.model import spec
from engine.model.adapter_targets import adaptable
from engine.model.adapters import LowRank
from engine.model.divided import Divided, cut_of
from engine.model.layers import Linear
from engine.model.sharding import Cut
from engine.model.state_layers import DeltaRuleAttention
from engine.model.table import Affine, Entry, Joined, ScaledRows, Transform, Transposed, keeps_rows
from engine.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Target:
    """The rows of a product that come from one matrix of a checkpoint."""

    path: str  # path of the `Linear` in `model.named_modules()`
    size: tuple[int, int]  # features in and out of the `Linear`
    transform: Transform
    places: tuple[int, ...]  # the matrix is each of these sources of the transform
    rule: spec.DeltaRule | None = None  # of the layer that the product belongs to

    @property
    def stored(self) -> tuple[int, int]:
        """Features in and out of the checkpoint's matrix."""
        cut = self._columns
        inputs = self.size[0] if cut is None else sum(cut.sizes)
        return inputs, _rows(self.transform, self.places[0], self.size[1])

    @property
    def _columns(self) -> Cut | None:
        """The inputs that a rank has, if ranks divide them."""
        cut = cut_of(self.transform)
        return cut if cut is not None and cut.inputs else None

    def in_order(self, down: Tensor, up: Tensor, alternate: bool) -> tuple[Tensor, Tensor]:
        """The matrices with the value heads of a delta rule in the model's order. `alternate`: the order in which they
        are stored, see `DeltaRule`."""
        rule, kind = self.rule, self.path.rpartition(".")[2]
        if rule is None or rule.alternate == alternate:
            return down, up
        each = rule.value_heads // rule.key_heads

        def order(count: int, first: int = 0, size: int = rule.value_dim) -> Tensor:
            values = torch.arange(first, count)
            apart = values.view(-1, each, size) if rule.alternate else values.view(each, -1, size)
            return torch.cat([torch.arange(first), apart.transpose(0, 1).flatten()])

        if kind == "out":
            return down[:, order(down.shape[1])], up
        if kind == "rates":
            return down, up[order(len(up), size=1)]
        keys = len(up) // (2 * rule.key_dim + each * rule.value_dim)
        return down, up[order(len(up), 2 * keys * rule.key_dim if kind == "enter" else 0)]

    def own(self, down: Tensor) -> Tensor:
        """[rank, in of the Linear] of the checkpoint's [rank, in]."""
        cut = self._columns
        return down if cut is None else down[:, slice(*cut.ranges[0])].contiguous()

    def lift(self, up: Tensor) -> Tensor:
        """[out of the Linear, rank] of the checkpoint's [out, rank], with each row at its index in the product."""
        lifted = up.new_zeros(self.size[1], up.shape[1])
        for place in self.places:
            _fill(self.transform, lifted, place, up)
        return lifted


class Targets:
    """All matrices of a loaded model's checkpoint, by name, and how an adapter can change each."""

    def __init__(self, model: Transformer):
        assert model.table is not None
        self._table = model.table
        self._model = model
        self._has_own_head = isinstance(model.spec.head, spec.Classifier | spec.AnswerSpan)
        changed = adaptable(model.encoder, model.decoder)
        self._paths = {id(module): path for path, module in model.named_modules() if module in changed}
        self._entries: dict[str, list[tuple[Entry, int]]] = {}
        for entry in self._table.entries:
            for place, source in enumerate(entry.sources):
                self._entries.setdefault(source, []).append((entry, place))

    def find(self, module: str) -> list[Target]:
        """The targets of a checkpoint's matrix; none if no answer of this model depends on it. `module`: the name of
        its module in transformers. Raises AdapterError if the matrix does not exist, or adapters of it are not
        supported; gives the reason."""
        name = self._current(f"{module}.weight")
        if name == self._table.head:
            raise AdapterError(f"{module} is the output matrix: adapters of it are not supported")
        if name not in self._entries:
            if self._table.ignores(name):
                return []
            raise AdapterError(f"the model has no matrix {module}")
        entries = {id(entry): entry for entry, _ in self._entries[name]}
        found: dict[str, Target] = {}
        for number, entry in entries.items():
            places = tuple(place for one, place in self._entries[name] if id(one) == number)
            target = self._target(entry, places, module)
            found.setdefault(target.path, target)  # several entries are forms of the same parameter
        return list(found.values())

    def head_parameter(self, name: str) -> tuple[Entry, torch.Size] | None:
        """The parameter of a head with this stored name, and its shape; None if it does not belong to a head, or to one
        that adapters cannot replace. They can replace heads of classifiers and of models that find answers."""
        if not self._has_own_head:
            return None
        parameters = dict(self._model.named_parameters())
        for entry, _ in self._entries.get(self._current(name), ()):
            module, _, kind = entry.target.rpartition(".")
            if not entry.target.startswith("head.") or len(entry.sources) != 1:
                continue
            linear = self._model.get_submodule(module)
            if isinstance(linear, Linear) and kind == "weight":  # its own parameter may have been released
                return entry, torch.Size((linear.outputs, linear.inputs))
            return entry, parameters[entry.target].shape
        return None

    def _target(self, entry: Entry, places: tuple[int, ...], module: str) -> Target:
        path = entry.target.removesuffix(".weight")
        if ".embedding." in f".{entry.target}":
            raise AdapterError(f"{module} belongs to the embedding: adapters of embeddings are not supported")
        if entry.target.startswith("head."):
            raise AdapterError(f"{module} belongs to the head: adapters of heads are not supported")
        try:
            linear = self._model.get_submodule(path)
        except AttributeError:
            linear = None
        if not isinstance(linear, Linear) or id(linear) not in self._paths:
            if ".routed." in path or "expert" in module or "router" in path:
                raise AdapterError(f"{module} belongs to experts: adapters of experts are not supported")
            raise AdapterError(f"{module} is not a plain product here: adapters of it are not supported")
        if not _is_rowwise(entry.transform):
            raise AdapterError(f"{module} is stored with its columns rearranged: adapters of it are not supported")
        layer = self._model.get_submodule(path.rpartition(".")[0])
        rule = layer.part if isinstance(layer, DeltaRuleAttention) else None
        return Target(self._paths[id(linear)], (linear.inputs, linear.outputs), entry.transform, places, rule)

    def _current(self, stored: str) -> str:
        """The table's name for a checkpoint tensor with this name (`Checkpoint.rename`)."""
        name = self._table.current(stored)
        longer = self._table.prefix + name
        return longer if name not in self._entries and longer in self._entries else name


def joined(parts: list[tuple[Target, Tensor, Tensor]]) -> LowRank:
    """The addition to one product from adapters of the matrices that it consists of. `parts`: for each its target, down
    [rank, in], and up [out, rank] with the rows of the checkpoint's matrix."""
    parts = sorted(parts, key=lambda part: part[0].places)
    return LowRank(
        torch.cat([down for _, down, _ in parts]).contiguous(),
        torch.cat([target.lift(up) for target, _, up in parts], dim=1).contiguous(),
    )


def _is_rowwise(transform: Transform) -> bool:
    """Whether the rows of the result are stored rows times a factor."""
    match transform:
        case Transposed() | ScaledRows():
            return True
        case Affine(offset=offset, inner=inner):
            return not offset and _is_rowwise(inner)
        case Joined(inner=several):
            return all(map(_is_rowwise, several))
        case Divided(inner):
            return _is_rowwise(inner)
    return keeps_rows(transform)


def _rows(transform: Transform, place: int, outputs: int) -> int:
    """The outputs of source matrix `place` of a parameter with this many outputs."""
    match transform:
        case Transposed():
            return outputs
        case Affine(inner=inner):
            return _rows(inner, place, outputs)
        case Joined(lengths=lengths):
            return _rows(transform.of(place), 0, lengths[place])
        case Divided(inner, cut):
            return _rows(inner, place, outputs if cut.inputs else sum(cut.sizes))
    return int(transform.shapes(torch.Size((outputs, 1)))[place][0])


def _fill(transform: Transform, target: Tensor, place: int, up: Tensor) -> None:
    """Put the rows of `up` [out, rank] where a transform puts the rows of its matrix."""
    match transform:
        case Transposed():
            target.copy_(up)
        case Affine(factor=factor, inner=inner):
            _fill(inner, target, place, up * factor)
        case Joined(lengths=lengths):
            _fill(transform.of(place), torch.split(target, list(lengths))[place], 0, up)
        case Divided(inner, cut) if cut.inputs:
            _fill(inner, target, place, up)
        case Divided(inner, cut):
            whole = up.new_zeros(sum(cut.sizes), up.shape[1])
            _fill(inner, whole, place, up)
            transform.take(target, whole)
        case _:
            transform.fill(target, place, up)
