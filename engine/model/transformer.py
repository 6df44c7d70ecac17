"""The one transformer: modules composed from a `ModelSpec`.

Nothing here depends on a family. `engine.model.missing` names parts without a module; the loader asks it before it
reads any weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.backends.attention.formats import PageShape
from engine.backends.native.gemm import Packed, Weight
from engine.backends.native.ranks import Ranks
from engine.errors import ConfigError, UnsupportedModelError
from engine.interface.token_sides import SIDES, TokenSide
from engine.model import quantisation, spec
from engine.model.adapter_slots import AdapterSlots
from engine.model.adapter_targets import adaptable
from engine.model.embedding import TokenEmbedding, count_placed
from engine.model.executors.choice import choose_kernels
from engine.model.experts import ExpertMatrices, ExpertsFeedForward
from engine.model.heads import Head, Panel, build_head
from engine.model.inputs import Inputs
from engine.model.latent import LatentAttention
from engine.model.layers import EncodedKeys, Linear, OpenedFeedForward
from engine.model.missing import unsupported
from engine.model.packing import LookUp, keeps_once, on_gpu
from engine.model.place import Place
from engine.model.quantisation import Held, Wanted
from engine.model.recurrences import FeatureDeltaLayer, GatedRecurrenceLayer
from engine.model.routed_attention import RoutedAttention
from engine.model.row_form import LIBRARY, RowForm
from engine.model.sharding import Share, splits_vocabulary
from engine.model.stack import TransformerStack
from engine.model.state_layers import DeltaRuleAttention
from engine.model.table import WeightTable
from engine.model.value_scores import ValueScoringAttention
from engine.model.vision import ImageEmbedding


class Transformer(nn.Module):
    """A model built from a spec. Raises UnsupportedModelError if a part is not implemented; ConfigError: max_model_len
    exceeds a table of positions.

    Args:
        backend: computes attention.
        max_encoder_len: positions of an encoder beside a decoder are below this; None: the same as for others.
        device, dtype: device and format of the parameters; the CPU and float32 by default. Parameters are
            uninitialised.
        filled_on: device of matrices until they are packed; None for the final device.
        ranks: those that divide the model, if `model` is the part of one of them.
    """

    def __init__(
        self,
        model: spec.ModelSpec,
        backend: AttentionBackend,
        max_model_len: int,
        *,
        max_encoder_len: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        filled_on: torch.device | None = None,
        ranks: Ranks | None = None,
    ):
        super().__init__()
        if missing := unsupported(model):
            raise UnsupportedModelError(f"This model needs parts that are not implemented: {', '.join(missing)}.")
        if model.max_positions is not None and max_model_len > model.max_positions:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the checkpoint has positions for "
                f"{model.max_positions} tokens only. Lower --max-model-len."
            )
        place = Place(torch.device(device), dtype, filled_on, ranks)
        self.ranks = ranks
        self.spec = model
        # the names of the weights in the model's checkpoint; None until it is loaded
        self.table: WeightTable | None = None
        self.max_model_len = max_model_len
        limits = [limit for limit in model.rotary_limits if limit < max_model_len]
        starts = accumulate(limits, initial=max_model_len)
        # (limit, shift) pairs, limits ascending: a sequence up to a limit reads rotary tables this many rows further
        # on; a sequence that exceeds all limits reads them at its positions
        self.rotary_shifts = tuple(zip(limits, starts, strict=False))
        moves = bool(self.rotary_shifts) or (model.vision is not None and model.vision.axes)
        self._sides = {*model.trunk.sides, *(["rotary_offsets"] if moves else [])}
        self.encoder_length = max_encoder_len or max_model_len
        memory_size = 0 if model.encoder is None else model.encoder.output_size
        self.decoder = None
        if model.decoder is not None:
            self.decoder = TransformerStack(
                model.decoder,
                backend,
                max_model_len,
                place,
                limits=limits,
                memory_size=memory_size,
                paged=True,
                image_layers=0 if model.vision is None or model.vision.joined else len(model.vision.tower.kept),
            )
        self.encoder = None
        if model.encoder is not None:
            shared = self.decoder.tokens if self.decoder is not None and model.shared_tokens else None
            blocks = () if self.decoder is None else self.decoder.blocks
            found = ((m for m in block.modules() if isinstance(m, EncodedKeys)) for block in blocks)
            readers = [next(each, None) for each in found]  # one per layer, None for self-attention only
            signal = None if isinstance(model.encoder.embedding, spec.Tokens) else model.encoder.embedding.signal
            if signal is not None:
                self.encoder_length = signal.positions
            self.encoder = TransformerStack(
                model.encoder, backend, self.encoder_length, place, limits=limits, readers=readers, tokens=shared
            )
        self.head = build_head(model, self.trunk.tokens, place)
        self.twin = None
        if model.twin is not None and model.twin.signal is not None:
            length = model.twin.signal.positions
            self.twin = Transformer(model.twin, backend, length, device=device, dtype=dtype, filled_on=filled_on)
        self.tower = self.vision = None
        if model.vision is not None:
            seen = spec.ModelSpec(encoder=model.vision.tower, decoder=None, head=spec.Pool())
            length = 0 if seen.signal is None else seen.signal.positions
            self.tower = Transformer(seen, backend, length, device=device, dtype=dtype, filled_on=filled_on)
            self.vision = ImageEmbedding(model.vision, model.trunk.hidden_size, place)

    @property
    def trunk(self) -> TransformerStack:
        """The stack whose hidden states the head reads."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    def pack(self, quantization: Wanted | None = None) -> None:
        """Prepare the loaded parameters: all matrices are laid out for their kernels, one after the other, and stacks
        get their executors."""
        if quantization is not None:
            quantisation.warn_if_slow(self.device)
        for module, kind in self.matrices(quantization):
            if not module.is_packed:  # otherwise it was done while loading
                self.pack_matrix(module, kind)
        self._make_ready()

    def pack_matrix(
        self,
        module: Linear | ExpertMatrices,
        kind: Held | None,
        quantised: Callable[[int], Weight | Packed] | None = None,
        parts: Iterator[Tensor | Weight] | None = None,
    ) -> None:
        """Lay one matrix out, see `Linear.pack`. A head's matrix that is also the token table is kept once: tokens are
        then looked up in its packed form."""
        if not isinstance(module, Linear):
            module.pack(kind, quantised)
            return
        table = module.weight
        module.pack(kind, quantised, amx=self.reads_many(module), parts=parts)
        if module.shared and module.packed is not None and module.packed.look_up is not None:
            module.give_up_weight()
            self.look_up_elsewhere(table, module.packed.look_up)

    def reads_many(self, module: Linear) -> bool:
        """Whether a matrix mostly multiplies many rows. Decoders and heads have few rows, for which vectors are as good
        as matrix tiles."""
        encoder = self.encoder if self.decoder is None else None
        if self.tower is not None:
            encoder = self.tower.encoder
        return encoder is not None and module in set(encoder.modules())

    def look_up_elsewhere(self, table: nn.Parameter, look_up: LookUp) -> None:
        """Read a token table's rows from elsewhere."""
        for embedding in self.modules():
            if isinstance(embedding, TokenEmbedding) and embedding.tokens is table:
                embedding.give_up_table(look_up)

    def make_room(self, tokens: int, patches: int) -> None:
        """Make room in rotary tables for positions with several axes, before executors are made.

        Args:
            tokens: maximum tokens of a step.
            patches: maximum patches of an image.
        """
        assert self.tower is not None
        for stack, count in ((self.decoder, tokens), (self.tower.encoder, patches)):
            for table in [] if stack is None else stack.placed_tables:
                table.make_room(count)

    def take_adapters(self, slots: int, max_rank: int) -> None:
        """Give the products of all stacks slots for adapters, before executors are made. `max_rank`: maximum rank of an
        adapter to one matrix of a checkpoint; a product may consist of several."""
        self._sides.add("adapter_slots")
        for linear, matrices in adaptable(self.encoder, self.decoder).items():
            linear.adapters = AdapterSlots(
                linear.inputs, linear.outputs, slots, matrices * max_rank, self.dtype, self.device
            )
        if self.twin is not None:
            self.twin.take_adapters(slots, max_rank)

    def warm(self, rows: int) -> None:
        """Compile a GPU's kernels for experts, adapters and quantised weights. `rows`: most rows of a step."""
        modules = list(self.modules())
        for module in {each.shape: each for each in modules if isinstance(each, ExpertsFeedForward)}.values():
            module.warm(rows)
        for linear in modules:
            if isinstance(linear, Linear):
                linear.warm(self.dtype)
                if linear.adapters is not None:
                    linear.adapters.warm()

    def _make_ready(self) -> None:
        choose_kernels(self, self.device)
        for part in (self.encoder, self.decoder, self.head):
            if isinstance(part, TransformerStack | Head | Panel):
                part.make_ready()
        if self.twin is not None:
            self.twin._make_ready()
        if self.tower is not None:
            self.tower._make_ready()

    def weight_bytes(self, quantization: Wanted | None = None, device: torch.device | None = None) -> int:
        """Size of the parameters. Quantised ones are included if they are on a GPU or not made yet.

        Args:
            quantization: the future format of matrices that are not packed yet.
            device: their future device; None for the model's.
        """
        size = sum(tensor.nbytes for tensor in self.parameters())
        matrices = (module for module in self.modules() if isinstance(module, Linear | ExpertMatrices))
        few_bits = [module.few_bits for module in matrices if module.few_bits is not None]
        size += sum(one.values.nbytes + one.scales.nbytes for one in few_bits)
        for module, kind in self.matrices(quantization):
            apart = (
                isinstance(module, Linear) and module.shared and not keeps_once(device or self.device, self.dtype, kind)
            )
            if kind is not None:
                count = module.count if isinstance(module, ExpertMatrices) else 1
                size += count * quantisation.size_of(module.outputs, module.inputs, kind)
                size -= 0 if apart else module.weight.nbytes
            elif apart and not module.is_packed and not on_gpu(device or self.device):
                size += module.weight.nbytes
        if quantization == "stored":
            tables = [module for module in self.modules() if isinstance(module, TokenEmbedding) and module.stored_bytes]
            size -= sum(
                {module.tokens: module.tokens.nbytes - (module.stored_bytes or 0) for module in tables}.values()
            )
        return size

    @property
    def buffer_bytes(self) -> int:
        """Size of the position tables on a CPU."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def loading_bytes(self, quantization: Wanted | None) -> int:
        """Maximum memory that a matrix takes on a CPU in addition to its packed form while that is made. Most matrices
        are assembled first. `quantization`: as in `weight_bytes`."""
        sizes = [0]
        for module, kind in self.matrices(quantization):
            count = module.count if isinstance(module, ExpertMatrices) else 1
            small = 0 if kind is None else count * quantisation.size_of(module.outputs, module.inputs, kind)
            taken = quantization == "stored" and module.taken
            if isinstance(module, Linear) and module.shared and (kind is None or taken):
                continue  # rows of the file are packed
            sizes.append(small if taken else small + module.weight.nbytes)
        return max(sizes)

    def matrices(self, quantization: Wanted | None) -> Iterator[tuple[Linear | ExpertMatrices, Held | None]]:
        """All matrices, each with its future format. The few numbers that choose an expert, open a network or choose a
        class keep their format; a vocabulary's, on which every choice of a token depends, have at least 8 bits."""
        kept: list[nn.Module] = [module.router for module in self.modules() if isinstance(module, ExpertsFeedForward)]
        kept += [
            module.rates for module in self.modules() if isinstance(module, DeltaRuleAttention | FeatureDeltaLayer)
        ]
        kept += [module.router for module in self.modules() if isinstance(module, RoutedAttention)]
        kept += [module.steps for module in self.modules() if isinstance(module, ValueScoringAttention)]
        kept += [module.opening for module in self.modules() if isinstance(module, OpenedFeedForward)]
        if on_gpu(self.device):  # one product for all heads there, with plain matrices, which are small
            latents = [module for module in self.modules() if isinstance(module, LatentAttention)]
            kept += [each for module in latents for each in (module.keys, module.values)]
            recurrences = [module for module in self.modules() if isinstance(module, GatedRecurrenceLayer)]
            kept += [each for module in recurrences for each in (module.inputs, module.decays)]
        heads = [model.head for model in (self, self.twin) if model is not None and model.head is not None]
        head = [module for part in heads for module in part.modules()]
        own = isinstance(self.spec.head, spec.Classifier | spec.AnswerSpan)
        plain = {id(module) for module in (*kept, *(head if own else ()))}
        careful = {id(module) for module in head}
        for module in self.modules():
            if isinstance(module, Linear | ExpertMatrices):
                kind: Held | None
                if quantization == "stored":
                    kind = module.stored
                else:
                    kind = "int8" if quantization == "int4" and id(module) in careful else quantization
                yield module, None if id(module) in plain else kind

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def sides(self) -> tuple[TokenSide, ...]:
        """The token sides that it reads; in a recorded step they are present even if they are the default."""
        return tuple(side for name, side in SIDES.items() if name in self._sides)

    @property
    def dtype(self) -> torch.dtype:
        """Format of weights and activations; the cache may have another."""
        return self.trunk.first_parameter.dtype

    @property
    def device(self) -> torch.device:
        return self.trunk.first_parameter.device

    @property
    def max_encoder_len(self) -> int | None:
        """Maximum tokens of an encoder's input that a decoder attends to; None for other models."""
        return None if self.encoder is None or self.decoder is None else self.encoder_length

    def kv_shapes(self) -> list[PageShape]:
        """The shapes of the values that each decoder layer stores per token, for the layers that store some; empty for
        a model without a decoder."""
        if self.spec.decoder is None:
            return []
        parts = [part for part in self.spec.decoder.attentions if part.reads is None]
        return [PageShape(part.kv_heads, part.head_dim, 2 if part.latent is None else 1) for part in parts]

    def encode(self, inputs: Inputs) -> Tensor:
        """The encoder's hidden states [Tp, features] of whole inputs. If a decoder attends to them, the keys and values
        of its layers are written to the pages of `inputs`."""
        assert self.encoder is not None
        embedding = self.encoder.embedding
        unplaced = embedding.unplaced if isinstance(embedding, TokenEmbedding) else None
        if unplaced is not None:  # some tokens have no position
            inputs = replace(inputs, positions=count_placed(inputs.token_ids, inputs.positions, unplaced))
        return self.encoder(inputs)  # type: ignore[no-any-return]

    def forward(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features] of the stack that the head reads, after its final norm.

        Rows of `inputs` without slots that are padding, with a table of zeros and position 0, may write to block 0.
        """
        return self.encode(inputs) if self.decoder is None else self.decoder(inputs)

    @property
    def divides_logits(self) -> bool:
        """Whether ranks compute parts of the logits."""
        return self.ranks is not None and splits_vocabulary(self.spec)

    def logits(
        self, hidden: Tensor, form: RowForm = LIBRARY, head: nn.Module | None = None, *, own: bool = False
    ) -> Tensor:
        """The head's result for hidden states [N, hidden]: float32 [N, vocabulary], or [N, classes].

        Args:
            form: how a GPU computes one row.
            head: replaces the model's head by an adapter's.
            own: the result is the columns that this rank computes; otherwise rank 0 gets all, and other ranks zeros.
        """
        head = head or self.head
        assert head is not None
        part = self.spec.head
        if not isinstance(part, spec.Lm):
            scores: Tensor = head(hidden)
            return scores
        if part.input_scale != 1.0:
            hidden = hidden * part.input_scale
        logits = head.in_float32(hidden, form) if isinstance(head, Linear) else head(hidden)
        if part.logit_scale != 1.0:
            logits = logits * part.logit_scale
        if part.softcap is not None:
            logits = torch.tanh(logits / part.softcap) * part.softcap
        if self.divides_logits and not own:
            assert self.ranks is not None
            shares = (Share(rank, self.ranks.count).of(self.vocab_size) for rank in range(self.ranks.count))
            logits = self.ranks.gather(logits, [end - begin for begin, end in shares])
        return logits
