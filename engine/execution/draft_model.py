"""A small model that drafts tokens for a large one (speculative decoding, arXiv:2211.17192).

The small model goes on from each sequence as the large one would: with the request's own penalties, masks and filters,
and with the random numbers that belong to the places of the answer. So it mostly draws what the large one draws, at any
temperature (coupled sampling), and the large one's answers do not depend on it at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.executor import LocalExecutor
from engine.execution.kv_cache import KVCache, choose_cache_dtype, page_bytes
from engine.execution.starting import start
from engine.interface.outputs import EngineInfo
from engine.interface.request import Request
from engine.interface.speculation import SpeculativeConfig
from engine.model.checkpoint import ConfigReader
from engine.scheduling.batch import build_plan
from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.draft_costs import DraftGain
from engine.scheduling.drafting import TextDrafter, Wanted
from engine.scheduling.needs import sequence_root
from engine.scheduling.plan import StepResult
from engine.scheduling.row import Row
from engine.scheduling.sequence import Sequence, SequenceGroup, pages_needed

logger = logging.getLogger("octavo.execution")

# Tokens that the small model reads at most before a step. It catches up with a long prompt in several steps.
CHUNK = 256
# The share of right drafts that is assumed at first, the number of observations that it counts for, and the weight of
# past ones after each new one. A share that is too low to draft comes back to the assumed one by so much in each step.
_PRIOR, _COUNT, _MEMORY, _RETURN = 0.7, 4.0, 0.95, 0.002


@dataclass(slots=True)
class Shadow:
    """The small model's view of a sequence."""

    group: SequenceGroup  # of the request without an adapter and without log-probabilities
    sequence: Sequence  # the tokens, drafts included, with their pages of the small model
    num_releases: int  # the sequence's, when the shadow was made
    num_known: int  # tokens of the sequence that were no drafts, when it was last looked at
    proposal: list[int] = field(default_factory=list)
    rate: float = _PRIOR  # the share of drafts that were right
    seen: float = _COUNT

    def follow(self, real: Sequence) -> None:
        """Have the tokens of the real sequence. What is computed of drafts that came stays computed."""
        own = self.sequence
        came = real.tokens.view(self.num_known).tolist()
        pairs = zip(self.proposal, came, strict=False)
        right = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if right is None:
            right = min(len(self.proposal), len(came))
        if self.proposal and came:
            total = _MEMORY * self.seen + min(right + 1, len(came), len(self.proposal))
            self.rate = (_MEMORY * self.seen * self.rate + right) / total
            self.seen = total
        computed = min(own.num_computed, self.num_known + right, real.num_tokens - 1)
        hashes, published = own.hashes, own.num_published
        own.follow(real)
        own.hashes, own.num_published, own.num_computed = hashes, published, computed
        own.uniforms = real.uniforms
        self.num_known, self.proposal = real.num_tokens, []


class DraftModel:
    """Drafts from a small model with pages of its own, as many as the large one has. Raises ModelLoadError,
    UnsupportedModelError, ConfigError if the small model cannot be loaded, or is of the wrong kind. `read`: reads the
    config of a checkpoint folder."""

    def __init__(self, config: EngineConfig, settings: SpeculativeConfig, read: ConfigReader):
        assert settings.model is not None
        if config.distributed_executor_backend != "uni":
            raise ConfigError(
                "speculative_config: draft_model needs distributed_executor_backend uni, got "
                f"{config.distributed_executor_backend!r}."
            )
        self._config = replace(
            config, model=settings.model, mmproj=None, revision=None, speculative_config="off",
            skip_tokenizer_init=True, max_model_len=None, lora_modules=(), max_loras=None, catalogue=(),
            kv_events_config=None, kv_disk=None, num_gpu_blocks_override=1, kv_cache_memory=None, max_step_time=0,
            enforce_eager=True,
        )  # fmt: skip
        self._executor: LocalExecutor = start(self._config, read)
        facts = self._executor.facts
        has_state = bool(self._executor.runner.model.spec.state_sizes)
        decodes = "generate" in facts.info.tasks and facts.info.max_encoder_len is None and facts.needs.paged
        if has_state or not decodes:
            self._executor.close()
            raise ConfigError(
                f"speculative_config: {settings.model} cannot draft. A draft model must be decoder-only, and no layer "
                f"may carry a state."
            )
        self._begin(settings.num_speculative_tokens)

    def _begin(self, most: int) -> None:
        self._most = most
        self._texts = TextDrafter(most, own=False)
        self._hasher = PageHasher()
        self._shadows: dict[Sequence, Shadow] = {}
        self._pool = BlockPool(1)
        self._sees_alike = False  # it reads the large model's images
        self._failed = False

    @property
    def page_bytes(self) -> int:
        runner = self._executor.runner
        dtype = choose_cache_dtype(self._config.kv_cache_dtype, runner.model.dtype)
        return page_bytes(runner.model.kv_shapes(), self._config.block_size, dtype)

    def join(self, info: EngineInfo) -> None:
        """Serve this large model from now on, with as many pages as it has. Raises ConfigError if the vocabularies
        differ, or the large model is of the wrong kind."""
        own = self._executor.facts.info
        if info.vocab_size != own.vocab_size:
            raise ConfigError(
                f"speculative_config: the vocabularies must match, but {info.model} has {info.vocab_size} tokens and "
                f"the draft model {own.model} has {own.vocab_size}. Choose a draft model of the same family."
            )
        if info.max_encoder_len is not None or "generate" not in info.tasks:
            raise ConfigError(
                f"speculative_config: draft_model is for decoder-only models, but {info.model} is not one."
            )
        runner = self._executor.runner
        old, model = runner.cache, runner.model
        dtype = choose_cache_dtype(self._config.kv_cache_dtype, model.dtype)
        runner.cache = KVCache(
            model.kv_shapes(), info.num_blocks, self._config.block_size, dtype, model.device, old.key_centres
        )
        self._pool = BlockPool(info.num_blocks)
        # Its prompts are cut anywhere, so an image whose tokens see each other has none of its vectors here.
        self._sees_alike = info.vision is not None and info.vision == own.vision and not info.vision.two_way
        logger.info("Draft model: %s, with %d pages of its own", own.model, info.num_blocks)

    def check_tokens(self, info: EngineInfo, text: Callable[[int], str], own_text: Callable[[int], str]) -> None:
        """Compare the texts of all tokens in the large model and in the small one. Raises ConfigError if they
        differ."""
        for token in range(info.vocab_size):
            one, other = text(token), own_text(token)
            if one != other:
                raise ConfigError(
                    f"speculative_config: the vocabularies must match, but token {token} is {one!r} in {info.model} "
                    f"and {other!r} in the draft model {self.info.model}. Choose a draft model of the same family."
                )

    @property
    def info(self) -> EngineInfo:
        """The facts about the small model."""
        return self._executor.facts.info

    # ---------------------------------------------------------------- as a drafter

    def serves(self, request: Request) -> bool:
        """All requests whose answers are drawn."""
        return not self._failed and request.decoding.num_beams == 1 and request.pooling is None

    def prepare(self, wanted: Seq[Wanted], gain: DraftGain) -> bool:
        """Draft for all these sequences at once; whether the small model also read more than the last tokens.

        An error of the small model fails no request: it ends all drafts.
        """
        for sequence in [one for one, shadow in self._shadows.items() if shadow.num_releases != one.num_releases]:
            self._drop(sequence)  # it has ended, or was preempted
        try:
            return self._prepare(wanted, gain)
        except Exception:
            self._give_up()
            return True

    def _give_up(self) -> None:
        """End all drafts after an error, which is being handled."""
        logger.exception("the draft model failed; requests go on without drafts")
        self._failed = True
        for sequence in list(self._shadows):
            self._drop(sequence)

    def propose(self, request: Request, sequence: Sequence, most: int) -> tuple[Seq[int], float]:
        """The drafts that were prepared. If a request has a prediction, its drafts come from the prediction first."""
        if request.decoding.prediction:
            drafts, rate = self._texts.propose(request, sequence, most)
            if drafts:
                return drafts, rate
        shadow = self._shadows.get(sequence)
        if shadow is None or shadow.num_known != sequence.num_tokens:
            return (), 0.0
        return shadow.proposal, shadow.rate

    def ended(self, request: Request, sequence: Sequence) -> None:
        """Release the small model's pages for an answer."""
        if sequence in self._shadows:
            self._drop(sequence)

    def close(self) -> None:
        """Free the small model and its pages."""
        self._shadows.clear()
        self._executor.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if a page leaked or is counted wrongly."""
        self._pool.check_integrity([shadow.sequence.table.tolist() for shadow in self._shadows.values()])

    # ---------------------------------------------------------------- its work

    def _prepare(self, wanted: Seq[Wanted], gain: DraftGain) -> bool:
        left, reads = min(CHUNK, self._config.max_num_batched_tokens), False
        rows: list[tuple[Shadow, Row]] = []
        drafting: list[tuple[Shadow, int]] = []  # with the number of drafts
        for group, sequence, most in wanted:
            shadow = self._shadow(group, sequence)
            shadow.follow(sequence)
            own, start = shadow.sequence, shadow.sequence.num_computed
            self._publish(shadow)
            most = self._worth(shadow, min(most, self._most, self.info.max_model_len - own.num_tokens), gain)
            missing = own.num_tokens - start
            if most <= 0 or left <= 0 or not missing:
                continue
            count = min(missing, left)
            if not self._reserve(own, own.num_tokens + most - 1 if count == missing else start + count):
                continue
            left -= count
            reads |= missing > self._most + 1
            rows.append((shadow, Row(shadow.group, own, start, count, int(count == missing))))
            if count == missing:
                drafting.append((shadow, most))
        while rows:
            result = self._launch(rows)
            drafting = self._take(result, drafting) if drafting else []
            rows = [(s, Row(s.group, s.sequence, s.sequence.num_computed, 1, 1)) for s, _ in drafting]
        return reads

    def _launch(self, rows: Seq[tuple[Shadow, Row]]) -> StepResult:
        """Compute these rows of shadows."""
        result = self._executor.launch(build_plan([row for _, row in rows], (), self._config.block_size)).result()
        for _, row in rows:
            row.sequence.num_computed += row.count
        return result

    def _worth(self, shadow: Shadow, most: int, gain: DraftGain) -> int:
        """The number of drafts that are worth their time. `gain` counts them."""
        right = 1.0
        for count in range(most):
            right *= shadow.rate
            if not gain.is_worth(right):
                if not count:
                    shadow.rate += _RETURN * (_PRIOR - shadow.rate)
                return count
            gain.count(right)
        return most

    def _take(self, result: StepResult, drafting: list[tuple[Shadow, int]]) -> list[tuple[Shadow, int]]:
        """Append the drawn tokens. Returns the shadows that draw another token."""
        going = []
        tokens, scores = result.tokens[:, 0].tolist(), result.logprobs[:, 0].tolist()
        for (shadow, most), token, score in zip(drafting, tokens, scores, strict=True):
            decoding = shadow.group.request.decoding
            if math.isnan(score) or token in decoding.stop_ids:
                continue
            shadow.proposal.append(token)
            if len(shadow.proposal) < most:
                shadow.sequence.append(decoding, token)
                going.append((shadow, most))
        return going

    def _shadow(self, group: SequenceGroup, sequence: Sequence) -> Shadow:
        found = self._shadows.get(sequence)
        if found is not None:
            return found
        own_group = self._group_of(group.request)
        own = own_group.sequences[0]
        own.index = sequence.index
        own.follow(sequence)
        own.num_computed, own.num_published = 0, 0
        own.hashes = []
        shadow = Shadow(own_group, own, sequence.num_releases, num_known=sequence.num_tokens)
        self._adopt(shadow, own.num_tokens - 1)
        self._shadows[sequence] = shadow
        return shadow

    def _group_of(self, request: Request) -> SequenceGroup:
        """The small model's view of a request."""
        plain = replace(request.decoding, logprobs=None, prompt_logprobs=None, logprob_token_ids=())
        images = request.images if self._sees_alike else ()
        request = replace(request, adapter=None, sides={}, decoding=plain, images=images)
        sides = self._executor.facts.needs.sides_of(request)
        group = SequenceGroup(request, 0, sequence_root(request, self._hasher, None, sides), sides=sides)
        group.started = True
        return group

    def _adopt(self, shadow: Shadow, most: int) -> None:
        """Adopt cached pages for at most `most` tokens."""
        own, size = shadow.sequence, self._config.block_size
        if self._config.enable_prefix_caching:
            count = most // size
            hashes = own.extend_hashes(self._hasher, shadow.group.root, size, count, shadow.group.sides)
            pages = self._pool.adopt(self._pool.match(hashes))
            own.table.extend(pages)
            own.num_published, own.num_computed = len(pages), len(pages) * size

    def _publish(self, shadow: Shadow) -> None:
        """Let later sequences find the full pages."""
        own, size = shadow.sequence, self._config.block_size
        full = own.num_computed // size
        if not self._config.enable_prefix_caching or full <= own.num_published:
            return
        hashes = own.extend_hashes(self._hasher, shadow.group.root, size, full, shadow.group.sides)
        for page in range(own.num_published, full):
            self._pool.publish(own.table[page], hashes[page])
        own.num_published = full

    def _reserve(self, own: Sequence, end: int) -> bool:
        """Reserve pages for the tokens up to `end`. Returns False if there are too few."""
        pages = self._pool.reserve(max(pages_needed(end, self._config.block_size) - own.table.size, 0))
        if pages is None:
            return False
        own.table.extend(pages)
        return True

    def _drop(self, sequence: Sequence) -> None:
        self._pool.free(self._shadows.pop(sequence).sequence.table.tolist())
