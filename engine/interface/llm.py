"""The offline face: prompts in, answers out; texts in, vectors, scores, classes and masked tokens out; sounds
in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from engine.audio.samples import mono_samples
from engine.audio.transcribing import Transcription
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError, RequestFailedError
from engine.interface.inputs import decoder_start, decoder_tokens
from engine.interface.llm_pooling import PROGRESS_FROM, PoolingMethods
from engine.interface.llm_prompts import Prompt, list_prompts, read_prompt
from engine.interface.llm_speech import Transcriber, Transcript, need_speech
from engine.interface.outputs import EngineStats, RequestOutput
from engine.interface.pooling import check_task
from engine.interface.request import AudioInput, SamplingParams, Seq2SeqInput, TokenInput
from engine.pooled import check_sides
from engine.text.chat_templates import read_template
from engine.text.processor import OutputProcessor, load_tokenizer

Sound = NDArray[np.floating[Any] | np.integer[Any]]


class LLM(PoolingMethods):
    """A model in this process: to generate with, to embed, compare or classify texts, or to fill in masked tokens.

    Args:
        model: local folder, GGUF file or hub id.
        **settings: the other fields of `EngineConfig`. Steps may take as long as they like unless max_step_time is
            given: no client waits for the end of one here, and a prompt is computed fastest in one piece.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: with what to do about it.
    """

    def __init__(self, model: str, **settings: Any):
        config = EngineConfig(model=str(model), **({"max_step_time": 0.0} | settings))
        if config.chat_template is not None:
            read_template(config.chat_template)  # so that a wrong name is known before the model loads
        engine, tokenizer = Engine(config), None
        if not config.skip_tokenizer_init:
            tokenizer = load_tokenizer(
                config.tokenizer or engine.info.model_path,
                revision=config.revision if config.tokenizer else None,
                hf_token=config.hf_token,
                lower_case=engine.info.lower_case,
                chat_template=config.chat_template,
            )
        check_sides(engine.info, tokenizer)
        super().__init__(engine, tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; all run together.

        Args:
            prompts: a text, token ids, a dictionary as vLLM takes it (`prompt` or `prompt_token_ids`; `encoder_prompt`
                and `decoder_prompt`), or a list of these. An encoder-decoder model's encoder reads them; a
                `Seq2SeqInput`, or for a speech model an `AudioInput`, also holds the beginning of the answer.
            params: for all prompts, or one per prompt; None takes the model's defaults.
            use_tqdm: progress bar; None shows one for long lists.

        Raises:
            InvalidRequestError: a prompt or its parameters are impossible; nothing was generated.
            RequestFailedError: the engine failed on a request.
        """
        check_task(self.engine.info, "generate")
        inputs = [read_prompt(prompt, self.tokenizer, self.engine.info) for prompt in list_prompts(prompts)]
        each = self._params(params, len(inputs))
        ids = [f"offline-{next(self._numbers)}" for _ in inputs]
        processors: dict[str, OutputProcessor] = {}
        results: dict[str, RequestOutput] = {}
        try:
            for request_id, input, chosen in zip(ids, inputs, each, strict=True):
                self.engine.add_request(request_id, input, chosen)
                result = results[request_id] = self._unanswered(request_id, input, chosen)
                processors[request_id] = OutputProcessor(self.tokenizer, result.prompt_token_ids, chosen)
            show = len(inputs) >= PROGRESS_FROM if use_tqdm is None else use_tqdm
            with tqdm(total=len(inputs), desc="generating", unit="prompt", disable=not show) as bar:
                self._run(processors, results, bar)
        finally:
            for request_id in processors:
                self.engine.abort_request(request_id)
        return [results[request_id] for request_id in ids]

    def transcribe(
        self, sounds: Sound | Sequence[Sound], wanted: Transcription | None = None, *, use_tqdm: bool | None = None
    ) -> list[Transcript]:
        """The texts of sounds, in their order; the windows of all of them run together.

        Args:
            sounds: one sound or several, of any length, at the rate of the model's preprocessor (16,000 a second):
                arrays [samples] or [samples, channels], which are averaged, of floats from -1 to 1 or of integers
                (uint8, int8, int16, int32), whose whole range is taken for that.
            wanted: language, task, timestamps and so on; None: the text in its own language, with timestamps.
            use_tqdm: progress bars; None shows them for long lists.

        Raises:
            InvalidRequestError: the model is no speech model, or cannot do what is wanted; or a sound is none.
            ModelLoadError: its preprocessor's config cannot be used.
            RequestFailedError: the engine failed on a window.
        """
        tokenizer = need_speech(self.engine.info, self.tokenizer)
        several = isinstance(sounds, list | tuple) and not (sounds and isinstance(sounds[0], int | float))
        named = {f"sounds[{place}]": sound for place, sound in enumerate(sounds)} if several else {"sounds": sounds}
        listed = [mono_samples(sound, name) for name, sound in named.items()]
        answers = partial(self.generate, use_tqdm=use_tqdm)
        places = partial(self._pool_inputs, what="aligning", use_tqdm=use_tqdm)
        return Transcriber(self.engine.info, tokenizer, answers, places).transcribe(listed, wanted or Transcription())

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    def close(self) -> None:
        """Free the model and its pages."""
        self.engine.close()

    def _run(self, processors: dict[str, OutputProcessor], results: dict[str, RequestOutput], bar: Any) -> None:
        unfinished = set(processors)
        while unfinished:
            for delta in self.engine.step_deltas():
                if delta.request_id not in unfinished:
                    continue  # of a request that was added to the engine directly
                if delta.error is not None:
                    raise RequestFailedError(delta.error)
                processor, result = processors[delta.request_id], results[delta.request_id]
                for news in processor.process(delta):
                    if news.stopped_by_text:
                        self.engine.abort_request(delta.request_id, choice=news.index)
                if processor.finished:
                    self.engine.abort_request(delta.request_id)
                    result.outputs, result.finished = processor.outputs, True
                    result.prompt_logprobs = processor.prompt_logprobs
                    result.num_cached_tokens = processor.num_cached_tokens
                    unfinished.remove(delta.request_id)
                    bar.update()

    def _unanswered(
        self, request_id: str, input: TokenInput | Seq2SeqInput | AudioInput, params: SamplingParams
    ) -> RequestOutput:
        info = self.engine.info
        if isinstance(input, AudioInput):
            begun = decoder_tokens(input.decoder_token_ids or (), decoder_start(params, info))
            return RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=list(begun), outputs=[], finished=False
            )
        whole = input if isinstance(input, TokenInput) else TokenInput(input.encoder_token_ids)
        prompt, encoded = whole.token_ids, None
        if info.max_encoder_len is not None:
            begin = input.decoder_token_ids if isinstance(input, Seq2SeqInput) else None
            prompt, encoded = decoder_tokens(begin or (), decoder_start(params, info)), list(whole.token_ids)
        return RequestOutput(
            request_id=request_id,
            prompt=whole.text,
            prompt_token_ids=list(prompt),
            outputs=[],
            finished=False,
            encoder_token_ids=encoded,
        )

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [SamplingParams()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(f"{count} prompts came with {len(params)} SamplingParams.", param="params")
        return list(params)
