"""A head that was trained to predict later tokens from a model's hidden states, as a draft model.

At position p the head reads the token p + 1 and the hidden state that the model computed at p, and predicts the token
p + 2. Its pages follow the model's steps: after each step it has the hidden states of all accepted positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError, UnsupportedModelError
from engine.execution.draft_model import DraftModel, Shadow
from engine.execution.model_kinds import Following
from engine.execution.pending import LateStep
from engine.execution.runner import ModelRunner
from engine.execution.starting import Resolved, load, prepare
from engine.interface.speculation import SpeculativeConfig
from engine.model.checkpoint import ConfigReader, find, read_config
from engine.model.embedding import TokenEmbedding
from engine.model.heads import ChoosingHead
from engine.model.spec import Lm
from engine.model.trained_heads import chosen_tokens, eagle3, kept_layers, mtp
from engine.scheduling.batch import build_plan
from engine.scheduling.in_flight import Step
from engine.scheduling.plan import StepResult
from engine.scheduling.row import Row
from engine.scheduling.sequence import IntBuffer, Sequence, SequenceGroup

# Positions that the head reads at once although nothing is drafted.
_MANY = 32


@dataclass(slots=True)
class _HeadShadow(Shadow):
    """The head's view of a sequence. Its tokens begin with the second one."""

    # Positions whose keys come from the model's hidden states, or from zeros where these are unknown.
    settled: int = 0
    hidden: list[Tensor] = field(default_factory=list)  # the model's hidden states from there on, in parts
    is_whole: bool = True  # whether no hidden state was unknown
    # [1, features] the head's own at the last position, which the next draft reads; zeros at first.
    state: Tensor = field(default_factory=lambda: torch.zeros(1, 0))

    @property
    def reached(self) -> int:
        """Positions whose hidden states are known."""
        return self.settled + sum(map(len, self.hidden))

    def take(self, start: int, hidden: Tensor) -> None:
        """Have the hidden states [N, features] of the positions from `start` on."""
        self.cut(start)
        self._fill(start)
        if len(known := hidden[max(self.reached - start, 0) :]):
            self.hidden.append(known.clone())  # the rest of the step's are not needed

    def next(self, count: int) -> Tensor:
        """The hidden states [count, features] that the head reads next."""
        if self.proposal:
            return self.state
        self._fill(self.settled + count)
        known = torch.cat(self.hidden)
        self.hidden = [known[count:]] if len(known) > count else []
        self.settled += count
        return known[:count]

    def _fill(self, end: int) -> None:
        """Take zeros for hidden states that are unknown, up to a position."""
        if (missing := end - self.reached) > 0:
            self.hidden.append(self.state.new_zeros(missing, self.state.shape[1]))
            self.is_whole = False

    def cut(self, end: int) -> None:
        """Forget the hidden states from a position on: its token was rejected."""
        if self.reached > end:
            kept = torch.cat(self.hidden)[: max(end - self.settled, 0)] if self.hidden else None
            self.hidden = [] if kept is None or not len(kept) else [kept]

    def follow(self, real: Sequence) -> None:
        self.mirror(real)
        self.cut(real.num_tokens - 1)

    def mirror(self, real: Sequence) -> None:
        """Take over the tokens of the real sequence. A step in flight may have computed all of them."""
        Shadow.follow(self, real)
        own = self.sequence
        own.tokens, own.num_prompt, own.num_computed = IntBuffer(real.tokens.view(1)), real.num_prompt - 1, self.settled


class TrainedHead(DraftModel):
    """Drafts from the head of a model that is loaded next (`adapt`, `load`), with as many pages as the model has.

    Args:
        config: of the model.
        settings: say which head.
        read: reads the config of a checkpoint folder.

    Raises:
        ConfigError: the model runs in another process.
    """

    def __init__(self, config: EngineConfig, settings: SpeculativeConfig, read: ConfigReader = read_config):
        if config.distributed_executor_backend != "uni":
            raise ConfigError(
                f"speculative_config: {settings.method} needs distributed_executor_backend uni, got "
                f"{config.distributed_executor_backend!r}."
            )
        self._settings, self._read = settings, read
        self._config = replace(
            config, speculative_config="off", skip_tokenizer_init=True, lora_modules=(), max_loras=None, catalogue=(),
            kv_events_config=None, kv_disk=None, num_gpu_blocks_override=1, kv_cache_memory=None, max_step_time=0,
            enforce_eager=True,
        )  # fmt: skip
        self._begin(settings.num_speculative_tokens)

    def adapt(self, resolved: Resolved) -> Resolved:
        """The model with all that the head reads of it.

        Raises:
            ConfigError, UnsupportedModelError: the model has no such head, or its device or file cannot serve one.
        """
        method = self._settings.method
        if resolved.spec.decoder is None or resolved.spec.encoder is not None:
            raise ConfigError(
                f"speculative_config: {method} is for decoder-only models, but {self._config.model} is not one."
            )
        if resolved.device.type != "cpu":
            raise UnsupportedModelError(
                f"speculative_config: {method} runs on the CPU only, but the device is {resolved.device}. Use "
                "--device cpu, or remove speculative_config."
            )
        if resolved.file is not None:
            raise UnsupportedModelError(
                f"speculative_config: {method} needs a checkpoint folder, but {resolved.file} is a GGUF file."
            )
        if method == "mtp":
            spec, table = mtp(resolved.hf_config)
            self._resolved = replace(resolved, config=self._config, spec=spec, table=table, vision=None)
            return resolved
        assert self._settings.model is not None
        path = find(self._settings.model, hf_token=self._config.hf_token)
        if not path.is_dir():
            raise UnsupportedModelError(f"speculative_config: {method} needs a head in a folder, but {path} is a file.")
        config = self._read(path)
        spec, table = eagle3(config, resolved.spec, self._fill_table)
        kept = tuple(layer - 1 for layer in kept_layers(config, resolved.spec.decoder))  # which end where those begin
        self._resolved = replace(
            resolved, config=self._config, path=path, hf_config=config, spec=spec, vision=None,
            quantization=None if resolved.quantization == "stored" else resolved.quantization,
            table=table,
        )  # fmt: skip
        return replace(resolved, spec=replace(resolved.spec, decoder=replace(resolved.spec.decoder, kept=kept)))

    def load(self, runner: ModelRunner) -> int:
        """Load the head beside its model. Returns the bytes of a page."""
        runner.keeps_hidden = True
        self._model = runner.model
        own = load(self._resolved)
        own.keeps_hidden = True
        if isinstance(own.model.head, ChoosingHead):
            assert isinstance(self._resolved.spec.head, Lm)
            vocabulary, count = own.model.vocab_size, self._resolved.spec.head.choices or 0
            own.model.head.choose(chosen_tokens(self._resolved.path, count, vocabulary), vocabulary)
        del self._model
        self._zeros = torch.zeros(1, own.model.spec.trunk.hidden_size, dtype=own.model.dtype)
        self._executor = prepare(self._resolved, own)
        return self.page_bytes

    def _fill_table(self, table: Tensor) -> None:
        """Copy the model's token table."""
        assert self._model.decoder is not None
        embedding = self._model.decoder.embedding
        assert isinstance(embedding, TokenEmbedding)
        with torch.inference_mode():
            table.copy_(embedding.vectors(torch.arange(len(table))))

    # ---------------------------------------------------------------- what it reads

    def observe(self, step: Step) -> None:
        """Take the hidden states of a step whose answer is known and not applied yet."""
        if self._failed or not isinstance(step.answer, LateStep) or step.answer.hidden is None:
            return
        try:
            with torch.inference_mode():
                runner = self._executor.runner
                assert runner.model.decoder is not None
                embedding = runner.model.decoder.embedding
                assert isinstance(embedding, TokenEmbedding)
                assert embedding.joining is not None
                self._observe(step.rows, embedding.joining.enter(step.answer.hidden, runner.min_rows))
        except Exception:
            self._give_up()

    def _observe(self, rows: Seq[Row], hidden: Tensor) -> None:
        place, left = 0, self._config.max_num_batched_tokens
        many: list[tuple[Shadow, Row]] = []
        for row in rows:
            first, place = place, place + row.count
            if row.is_void or not self.serves(row.group.request):
                continue
            shadow = self._shadow(row.group, row.sequence)
            shadow.take(row.start, hidden[first:place])
            count = min(shadow.reached, row.sequence.num_tokens - 1) - shadow.settled
            if (count := min(count, left)) < _MANY:
                continue
            shadow.mirror(row.sequence)
            if self._reserve(shadow.sequence, shadow.settled + count):
                left -= count
                many.append((shadow, Row(shadow.group, shadow.sequence, shadow.settled, count, 0)))
        if many:
            self._launch(many)
            for read, _ in many:
                self._publish(read)

    def _launch(self, rows: Seq[tuple[Shadow, Row]]) -> StepResult:
        shadows = [shadow for shadow, _ in rows if isinstance(shadow, _HeadShadow)]
        kind = self._executor.runner.kind
        assert isinstance(kind, Following)
        kind.given = torch.cat([shadow.next(row.count) for shadow, (_, row) in zip(shadows, rows, strict=True)])
        try:
            step = self._executor.launch(build_plan([row for _, row in rows], (), self._config.block_size))
        finally:
            kind.given = None
        assert step.hidden is not None
        place = 0
        for own, (_, row) in zip(shadows, rows, strict=True):
            place += row.count
            row.sequence.num_computed += row.count
            own.state = step.hidden[place - 1 : place].clone()
        return step.result()

    # ---------------------------------------------------------------- sequences

    def _shadow(self, group: SequenceGroup, sequence: Sequence) -> _HeadShadow:
        found = self._shadows.get(sequence)
        if found is not None and found.num_releases == sequence.num_releases:
            assert isinstance(found, _HeadShadow)
            return found
        if found is not None:
            self._drop(sequence)
        own_group = self._group_of(group.request)
        own_group.root = self._hasher.extend(own_group.root, sequence.tokens.view(0, 1))
        own = own_group.sequences[0]
        own.index = sequence.index
        shadow = _HeadShadow(own_group, own, sequence.num_releases, num_known=sequence.num_tokens, state=self._zeros)
        shadow.mirror(sequence)
        own.hashes, own.num_published = [], 0
        first = self._shadows.get(group.sequences[0])
        if not (isinstance(first, _HeadShadow) and self._fork(first, shadow)):
            self._adopt(shadow, own.num_tokens)
            shadow.settled = own.num_computed
        self._shadows[sequence] = shadow
        return shadow

    def _fork(self, parent: _HeadShadow, shadow: _HeadShadow) -> bool:
        """Go on from the head's keys of another answer to the same request, if both begin alike."""
        one, own, count = parent.sequence.tokens.view(), shadow.sequence.tokens.view(), parent.settled
        least = min(len(one), len(own))
        alike = one[:least] != own[:least]
        common = int(alike.argmax()) if alike.any() else least
        if common < count:
            return False
        full, rest = divmod(count, self._config.block_size)
        pages = self._pool.reserve(1) if rest else []
        if pages is None:
            return False
        table = parent.sequence.table.tolist()
        if pages:
            self._executor.runner.cache.copy_pages(np.array([[table[full], pages[0]]], dtype=np.int32))
        shadow.sequence.table.extend([*self._pool.fork(table[:full]), *pages])
        shadow.settled = shadow.sequence.num_computed = count
        shadow.sequence.num_published = min(parent.sequence.num_published, full)
        shadow.sequence.hashes = parent.sequence.hashes[: shadow.sequence.num_published]
        shadow.hidden, shadow.is_whole = list(parent.hidden), parent.is_whole
        shadow.cut(common + 1)  # a hidden state depends on its own token, too
        return True

    def _publish(self, shadow: Shadow) -> None:
        assert isinstance(shadow, _HeadShadow)
        if shadow.is_whole:
            super()._publish(shadow)
