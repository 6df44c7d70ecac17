"""The methods of `LLM` that do not generate text: vectors, scores, classes, answers, entities, masked tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from engine.engine import Engine
from engine.errors import InvalidRequestError, RequestFailedError
from engine.interface.argument_names import names_arguments
from engine.interface.outputs import Pooled, PoolingMode, Task
from engine.interface.pooling import DEFAULT_TOP_K, check_task
from engine.interface.request import EngineInput, PoolingParams, TokenInput
from engine.offline.adapters import AdapterUse, Lora, LoRARequest
from engine.pooled import (
    PLAIN,
    SIDES,
    Aggregation,
    AnswerOutput,
    AnswerTerms,
    ClassificationOutput,
    Comparer,
    EmbeddingOutput,
    EntitiesOutput,
    EntityTerms,
    FillMaskOutput,
    PoolingOutput,
    ScoreOutput,
    SideReading,
    TokenClassificationOutput,
    answers_of,
    check_aggregation,
    check_scores,
    compared_side,
    entities_of,
    find_prompt,
    is_cross_encoder,
    labels_of,
    longest,
    mask_positions,
    masks_of,
    prompt_tokens,
    read_entities,
    read_question,
    side_prompt,
    spans_of,
    token_input,
    vector_of,
    windows_of,
)
from engine.pooled.sources import Input, Reader, Reading, Source, need_tokenizer, read_sources
from engine.text.processor import Tokenizer

ENCODED: tuple[Task, ...] = ("embed", "classify", "token_classify", "token_embed")
"""The tasks of `encode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOutput(PoolingOutput):
    """A head's output for an input: a tensor of its numbers, or of each token's numbers."""

    data: torch.Tensor


# Shorter lists finish before a bar would be useful.
_PROGRESS_FROM = 32


def hides_progress(use_tqdm: bool | None, count: int) -> bool | None:
    """Whether a call shows no progress bar, in tqdm's form; None: show one if stderr is a terminal."""
    if use_tqdm is not None:
        return not use_tqdm
    return None if count >= _PROGRESS_FROM else True


@names_arguments
class PoolingMethods:
    """The pooling methods of `LLM`; `EngineInfo.tasks` says which of them a model supports."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._numbers = itertools.count()
        self._adapters = AdapterUse(engine)

    def embed(
        self,
        inputs: Input | Sequence[Input],
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: Lora | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Compute a vector for each input; returns them in order.

        vLLM's method of this name takes `pooling`, `normalize` and `dimensions` as `pooling_params`.

        Args:
            inputs: text, token ids, a `TokenInput`, for models that take images also an image (a PIL image, an array
                [height, width, 3] of uint8, or a `PixelInput`), or a list of these.
            pooling, normalize, dimensions: see `PoolingParams`; None for the model's own settings.
            prompt_name: put this prompt of the model's sentence-transformers config before the texts (token ids are
                unchanged); None: its default prompt, if it has one; "": none.
            truncate_prompt_tokens: cut inputs to this many tokens; -1: to the model's limit; None: refuse longer ones.
            lora, lora_request: the adapter, as for `LLM.generate`.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model makes no vectors, or an input or a parameter is invalid; nothing was
                computed.
            RequestFailedError: the engine failed on an input.
        """
        info = self.engine.info
        check_task(info, "embed")
        terms: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        sources, limit = read_sources(inputs, images=True), longest(truncate_prompt_tokens, info)
        prompt = find_prompt(info, prompt_name)
        asked = [(prompt, PLAIN, source) for source in sources]
        (adapter,) = self._adapters.each(lora, 1, lora_request)
        ids, pooled = self._embedded(asked, limit, terms, use_tqdm, adapter)
        return [
            EmbeddingOutput(prompt_token_ids=tokens, embedding=vector_of(answer))
            for tokens, answer in zip(ids, pooled, strict=True)
        ]

    def encode(
        self,
        prompts: Input | Sequence[Input],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: Task | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: Lora | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | None = None,
    ) -> list[MatrixOutput]:
        """Return the output of the model's head for each input, with vLLM's names.

        Args:
            prompts: as in `embed`.
            pooling_params: parameters with a task of `ENCODED`.
            pooling_task: the task, if there are no pooling_params; None: the first of `ENCODED` that the model
                supports.
            truncate_prompt_tokens: cut inputs to this many tokens; -1: to the model's limit; None: refuse longer ones.
            lora, lora_request: the adapter, as for `LLM.generate`.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model does not support the task, or an input is invalid; nothing was computed.
            RequestFailedError: the engine failed on an input.
        """
        info = self.engine.info
        task = pooling_task or next((known for known in ENCODED if known in info.tasks), ENCODED[0])
        if pooling_params is not None:
            if pooling_task not in (None, pooling_params.task):
                raise InvalidRequestError(
                    f"pooling_task is {pooling_task}, but pooling_params has the task {pooling_params.task}. Set "
                    f"only one of them.",
                    param="pooling_task",
                )
            task = pooling_params.task
        if task not in ENCODED:
            raise InvalidRequestError(f"encode serves {', '.join(ENCODED)}, not {task}.", param="pooling_task")
        check_task(info, task)
        reader = Reader(self.tokenizer, info, longest(truncate_prompt_tokens, info))
        readings = [reader.read(source) for source in read_sources(prompts, images=True)]
        params = pooling_params or PoolingParams(task=task)
        (adapter,) = self._adapters.each(lora, 1, lora_request)
        answers = self._pool(readings, [params] * len(readings), "encoding", use_tqdm, adapter)
        found = []
        for reading, answer in zip(readings, answers, strict=True):
            data = torch.tensor(answer.values())
            whole = data if task in ("token_classify", "token_embed") else data[0]
            found.append(MatrixOutput(prompt_token_ids=reading.encoding.ids, data=whole))
        return found

    def reward(
        self,
        prompts: Input | Sequence[Input],
        *,
        use_activation: bool = False,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[MatrixOutput]:
        """Return the numbers of a reward model: for each token if its head scores tokens, otherwise for each input.

        Args:
            use_activation: apply the activation that the model's config names.
            prompts, truncate_prompt_tokens, use_tqdm: as in `encode`.

        Raises:
            InvalidRequestError: the model has no scores, or an input is invalid; nothing was computed.
            RequestFailedError: the engine failed on an input.
        """
        task: Task = "token_classify" if "token_classify" in self.engine.info.tasks else "classify"
        check_task(self.engine.info, task, "reward")
        params = PoolingParams(task=task, use_activation=use_activation)
        return self.encode(prompts, params, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)

    def score(
        self,
        text_1: Input | Sequence[Input],
        text_2: Input | Sequence[Input],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ScoreOutput]:
        """Score how well texts match: one text with each of several, or each of several with its counterpart.

        A model with one class reads both texts together (a cross-encoder); the score is its output after the activation
        of its config. For an embedding model, the score is the cosine of the two vectors. For a model with a vector for
        each token (ColBERT), it is MaxSim. For a model with only sparse vectors (SPLADE), it is their product. Each
        distinct text is embedded once, with the model's default prompt or its markers of queries and documents, if it
        has them.

        Args:
            text_1, text_2: a text or a list of texts, 1 and n or n and n; token ids only for embeddings.
            truncate_prompt_tokens: cut inputs (a pair is one input) to this many tokens, the longer text first; -1: to
                the model's limit; None: refuse longer ones.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model cannot compare texts, the lists do not match, or a text is invalid; nothing
                was computed.
            RequestFailedError: the engine failed on an input.
        """
        info = self.engine.info
        check_scores(info)
        pairs = _paired(read_sources(text_1), read_sources(text_2))
        limit = longest(truncate_prompt_tokens, info)
        if is_cross_encoder(info):
            reader = Reader(self.tokenizer, info, limit)
            readings = [reader.read(_joint(first, second)) for first, second in pairs]
            answers = self._pool(readings, [PoolingParams(task="classify")] * len(readings), "scoring", use_tqdm)
            return [
                ScoreOutput(score=vector_of(answer)[0], prompt_token_ids=reading.encoding.ids)
                for reading, answer in zip(readings, answers, strict=True)
            ]
        comparer = Comparer(info)
        one, other = ((side_prompt(info, side), compared_side(info, self.tokenizer, side)) for side in SIDES)
        asked = [((*one, first), (*other, second)) for first, second in pairs]
        distinct = list(dict.fromkeys(text for pair in asked for text in pair))
        inputs, answers = self._embedded(distinct, limit, {"task": comparer.task}, use_tqdm)
        read = dict(zip(distinct, zip(inputs, answers, strict=True), strict=True))
        found = []
        for query, document in asked:
            (ids, first), (tokens, second) = read[query], read[document]
            found.append(ScoreOutput(score=comparer.score(first, second), prompt_token_ids=ids + tokens))
        return found

    def classify(
        self,
        inputs: Input | Sequence[Input],
        *,
        use_activation: bool | None = None,
        aggregation: Aggregation = "simple",
        truncate_prompt_tokens: int | None = None,
        lora: Lora | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ClassificationOutput | TokenClassificationOutput]:
        """Classify each input, or its tokens, depending on the model.

        Args:
            inputs: text, token ids, a `TokenInput`, or a list of these; for classifiers of whole inputs also pairs of
                texts, as tuples or {"text": ..., "text_pair": ...}; for models that take images, images as in `embed`.
                A tuple of two texts is a pair.
            use_activation: False returns the head's raw numbers. None or True applies the activation of the model's
                config, which usually gives probabilities. The scores of spans are computed from the result.
            aggregation: how tokens are joined to spans (see `spans_of`).
            truncate_prompt_tokens: cut inputs to this many tokens; -1: to the model's limit; None: refuse longer ones.
            lora, lora_request: the adapter, as for `LLM.generate`.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model is not a classifier, or an input is invalid; nothing was computed.
            RequestFailedError: the engine failed on an input.
        """
        info = self.engine.info
        by_token = "token_classify" in info.tasks
        if not by_token:
            check_task(info, "classify")
        check_aggregation(aggregation)
        sources = read_sources(inputs, pairs=not by_token, images=not by_token)
        reader = Reader(self.tokenizer, info, longest(truncate_prompt_tokens, info))
        readings = [reader.read(source) for source in sources]
        params = PoolingParams(task="token_classify" if by_token else "classify", use_activation=use_activation)
        results: list[ClassificationOutput | TokenClassificationOutput] = []
        (adapter,) = self._adapters.each(lora, 1, lora_request)
        answers = self._pool(readings, [params] * len(readings), "classifying", use_tqdm, adapter)
        for reading, answer in zip(readings, answers, strict=True):
            ids = reading.encoding.ids
            rows: list[list[float]] = answer.values().tolist()
            if by_token:
                spans = spans_of(answer, reading.encoding, reading.text, self.tokenizer, info, aggregation)
                results.append(TokenClassificationOutput(spans=spans, probs=rows, prompt_token_ids=ids))
            else:
                results.append(
                    ClassificationOutput(probs=rows[0], labels=labels_of(answer, info), prompt_token_ids=ids)
                )
        return results

    def answer(
        self,
        question: str | Sequence[str],
        context: str | Sequence[str],
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[AnswerOutput]:
        """Find the parts of each context that answer a question: one with several, several with one, or each with its
        counterpart.

        A context that is too long is read in overlapping windows.

        Args:
            question, context: a text or a list of texts, 1 and n, n and 1, or n and n.
            top_k, max_answer_len, max_seq_len, doc_stride, handle_impossible_answer, align_to_words: see `AnswerTerms`;
                the names and defaults are those of transformers' pipeline.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model does not find answers, or a text or a parameter is invalid; nothing was
                computed.
            RequestFailedError: the engine failed on a window.
        """
        info = self.engine.info
        check_task(info, "answer")
        tokenizer = need_tokenizer(self.tokenizer, info)
        terms = AnswerTerms(
            top_k=top_k,
            max_answer_len=max_answer_len,
            max_seq_len=max_seq_len,
            doc_stride=doc_stride,
            handle_impossible_answer=handle_impossible_answer,
            align_to_words=align_to_words,
        )
        size, overlap = terms.window(info)
        pairs = _asked(question, context)
        cut = [windows_of(read_question(tokenizer, *pair), size, overlap, tokenizer.truncation_side) for pair in pairs]
        readings = [Reading(window, None, token_input(window, info)) for windows in cut for window in windows]
        pooled = iter(self._pool(readings, [PoolingParams(task="answer")] * len(readings), "answering", use_tqdm))
        return [
            AnswerOutput(
                answers=answers_of([next(pooled) for _ in windows], windows, text, terms, tokenizer.cls_token_id),
                num_windows=len(windows),
            )
            for windows, (_, text) in zip(cut, pairs, strict=True)
        ]

    def entities(
        self,
        texts: str | Sequence[str],
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat_ner: bool = True,
        multi_label: bool = False,
        stride: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EntitiesOutput]:
        """Find the parts of each text that match one of the labels (GLiNER).

        A text that is too long is read in overlapping windows.

        Args:
            texts: a text or a list of texts.
            labels: the kinds of entities, in words: "person", "date of birth".
            threshold, flat_ner, multi_label, stride: see `EntityTerms`; all but the last have the names and defaults of
                GLiNER's library.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model does not find entities, or a text or a parameter is invalid; nothing was
                computed.
            RequestFailedError: the engine failed on a window.
        """
        info = self.engine.info
        check_task(info, "entities")
        assert info.entities is not None
        tokenizer = need_tokenizer(self.tokenizer, info)
        for name, given in (("texts", texts), ("labels", labels)):
            single = name == "texts" and isinstance(given, str)
            listed = isinstance(given, Sequence) and given and all(isinstance(item, str) for item in given)
            if not single and (not listed or isinstance(given, str)):
                raise InvalidRequestError(f"{name} must be a non-empty list of texts.", param=name)
        terms = EntityTerms(
            labels=tuple(labels), threshold=threshold, flat_ner=flat_ner, multi_label=multi_label, stride=stride
        )
        given = [texts] if isinstance(texts, str) else texts
        found = [read_entities(tokenizer, text, terms, info) for text in given]
        windows = [window for reading in found for window in reading.windows]
        readings = [Reading(window.encoding, None, token_input(window.encoding, info)) for window in windows]
        asked = [window.params(threshold) for window in windows]
        pooled = iter(self._pool(readings, asked, "finding entities", use_tqdm))
        return [
            EntitiesOutput(
                entities=entities_of([next(pooled) for _ in reading.windows], reading, terms, info.entities),
                num_windows=len(reading.windows),
            )
            for reading in found
        ]

    def fill_mask(
        self,
        inputs: Input | Sequence[Input],
        *,
        top_k: int = DEFAULT_TOP_K,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[FillMaskOutput]:
        """Predict the most probable tokens for each mask of each input.

        Several masks of an input are predicted independently of each other.

        Args:
            inputs: text, token ids, a `TokenInput`, or a list of these, containing the tokenizer's mask token.
            top_k: number of tokens for each mask.
            truncate_prompt_tokens: cut inputs to this many tokens; -1: to the model's limit; None: refuse longer ones.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model does not predict masked tokens, or an input is invalid or has no mask;
                nothing was computed.
            RequestFailedError: the engine failed on an input.
        """
        info = self.engine.info
        check_task(info, "fill_mask")
        tokenizer = need_tokenizer(self.tokenizer, info)
        reader = Reader(tokenizer, info, longest(truncate_prompt_tokens, info))
        readings = [reader.read(source) for source in read_sources(inputs)]
        params = [
            PoolingParams(task="fill_mask", positions=mask_positions(reading.encoding, tokenizer), top_k=top_k)
            for reading in readings
        ]
        answers = self._pool(readings, params, "filling masks", use_tqdm)
        return [
            FillMaskOutput(prompt_token_ids=reading.encoding.ids, masks=masks_of(answer, reading.encoding, tokenizer))
            for reading, answer in zip(readings, answers, strict=True)
        ]

    def _embedded(
        self,
        asked: Sequence[tuple[str, SideReading, Source]],
        limit: int | None,
        terms: dict[str, Any],
        use_tqdm: bool | None,
        adapter: str | None = None,
    ) -> tuple[list[list[int]], list[Pooled]]:
        """The tokens of inputs (each after its prompt, and according to its side), and their vectors."""
        info, tokenizer = self.engine.info, self.tokenizer
        readers = dict[tuple[str, SideReading], tuple[Reader, PoolingParams]]()
        for prompt, side in dict.fromkeys((prompt, side) for prompt, side, _ in asked):
            skipped = 0 if tokenizer is None else prompt_tokens(tokenizer, info, prompt)
            reader = Reader(tokenizer, info, side.limit(limit), prompt, side.marker)
            readers[prompt, side] = reader, PoolingParams(skip_tokens=skipped, **terms)
        plain = Reader(tokenizer, info, limit)
        ids, inputs, params = list[list[int]](), list[EngineInput](), list[PoolingParams]()
        given: EngineInput
        for prompt, side, source in asked:
            if source.text is None:  # token ids are unchanged, and images have no prompts
                reading = plain.read(source)
                given, wanted = reading.input, side.without_ignored(reading.encoding.ids, PoolingParams(**terms))
                ids.append(reading.encoding.ids)
            else:
                reader, wanted = readers[prompt, side]
                reading = reader.read(source)
                assert isinstance(reading.input, TokenInput)
                given, wanted = side.complete(reading.input, wanted, limit)
                ids.append([*reading.encoding.ids, *given.token_ids[len(reading.input.token_ids) :]])
            inputs.append(given)
            params.append(wanted)
        return ids, self._pool_inputs(inputs, params, "embedding", use_tqdm, adapter)

    def _pool(
        self,
        readings: Sequence[Reading],
        params: Sequence[PoolingParams],
        what: str,
        use_tqdm: bool | None,
        adapter: str | None = None,
    ) -> list[Pooled]:
        return self._pool_inputs([reading.input for reading in readings], params, what, use_tqdm, adapter)

    def _pool_inputs(
        self,
        inputs: Sequence[EngineInput],
        params: Sequence[PoolingParams],
        what: str,
        use_tqdm: bool | None,
        adapter: str | None = None,
    ) -> list[Pooled]:
        """The engine's answers, in the order of the inputs; after any error, none of the inputs stays in the engine."""
        ids = [f"offline-{next(self._numbers)}" for _ in inputs]
        unfinished: set[str] = set()
        answers: dict[str, Pooled] = {}
        try:
            for request_id, given, chosen in zip(ids, inputs, params, strict=True):
                self.engine.add_request(request_id, given, chosen, adapter=adapter)
                unfinished.add(request_id)
            hidden = hides_progress(use_tqdm, len(ids))
            with tqdm(total=len(ids), desc=what, unit="input", disable=hidden) as bar:
                while unfinished:
                    for delta in self.engine.step_deltas():
                        if delta.request_id not in unfinished:
                            continue  # a request that was added to the engine directly
                        if delta.error is not None:
                            raise RequestFailedError(delta.error)
                        if delta.pooled is not None:
                            answers[delta.request_id] = delta.pooled
                            unfinished.remove(delta.request_id)
                            bar.update()
        finally:
            for request_id in unfinished:
                self.engine.abort_request(request_id)
        return [answers[request_id] for request_id in ids]


def _paired(first: list[Source], second: list[Source]) -> list[tuple[Source, Source]]:
    """Pairs of 1 and n, or n and n.

    Raises:
        InvalidRequestError: the numbers differ otherwise.
    """
    if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(
            "text_1 and text_2 must be one text and one or several texts, or two lists of the same length; got "
            f"{len(first)} and {len(second)}.",
            param="text_2" if first else "text_1",
            code="invalid_value",
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _asked(question: str | Sequence[str], context: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of 1 and n, n and 1, or n and n.

    Raises:
        InvalidRequestError: the numbers differ otherwise, or a value is not text.
    """
    for name, given in (("question", question), ("context", context)):
        listed = isinstance(given, Sequence) and given and all(isinstance(text, str) for text in given)
        if not listed and not isinstance(given, str):
            raise InvalidRequestError(f"{name} must be a text or a non-empty list of texts.", param=name)
    questions, contexts = ([texts] if isinstance(texts, str) else list(texts) for texts in (question, context))
    count = max(len(questions), len(contexts))
    if {len(questions), len(contexts)} - {1, count}:
        raise InvalidRequestError(
            f"question and context must be one text and one or several texts, or two lists of the same length; got "
            f"{len(questions)} and {len(contexts)}.",
            param="context",
            code="invalid_value",
        )
    questions, contexts = (texts * count if len(texts) == 1 else texts for texts in (questions, contexts))
    return list(zip(questions, contexts, strict=True))


def _joint(first: Source, second: Source) -> Source:
    if first.text is None or second.text is None:
        raise InvalidRequestError(
            "a cross-encoder's texts must be texts, not token ids: its tokenizer joins them. Classify a TokenInput of "
            "the joined ids instead.",
            param="text_1" if first.text is None else "text_2",
        )
    return Source(text=first.text, pair=second.text)
