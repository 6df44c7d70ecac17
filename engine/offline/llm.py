"""The offline API: prompts to answers; texts to vectors, scores, classes and masked tokens; sounds to texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from engine.audio.samples import mono_samples
from engine.audio.transcribing import Transcription
from engine.engine import Engine
from engine.errors import InvalidRequestError, RequestFailedError
from engine.images.placing import ImagePlacer
from engine.interface.argument_names import names_arguments
from engine.interface.generation import CHAT_ROOM, chat_max_tokens
from engine.interface.inputs import decoder_start, decoder_tokens
from engine.interface.outputs import EngineStats, RequestOutput
from engine.interface.pooling import check_task
from engine.interface.request import AudioInput, PixelInput, SamplingParams, Seq2SeqInput, TokenInput
from engine.offline.adapters import Lora, LoRARequest
from engine.offline.arguments import engine_config
from engine.offline.beams import BeamSearchOutput, BeamSearchParams, sequences_of
from engine.offline.chat import (
    Message,
    Tool,
    ToolPrompt,
    check_chats,
    conversation_prompt,
    image_prompt,
    read_conversations,
)
from engine.offline.pooling import PoolingMethods, hides_progress
from engine.offline.prompts import AnyInput, Prompt, PromptReader, list_prompts, with_images
from engine.offline.speech import Transcriber, Transcript, need_speech
from engine.pooled import check_sides
from engine.pooled.sources import need_tokenizer
from engine.text.chat_templates import read_template
from engine.text.pictures import Pictures
from engine.text.processor import OutputProcessor, check_vocabulary, give_template, load_tokenizer, spell_bad_words

Sound = NDArray[np.floating[Any] | np.integer[Any]]

_TEMPLATE_ARGUMENTS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tokenizer", "tools"}
)


class Metric(NamedTuple):
    """A number that the engine counts or measures."""

    name: str
    value: float


@names_arguments
class LLM(PoolingMethods):
    """A model in this process, for generation, embeddings, scores, classification, or masked tokens.

    Args:
        model: local folder, GGUF file or hub id.
        **settings: the other fields of `EngineConfig`, and vLLM's arguments with values that change nothing. Steps have
            no time limit unless max_step_time is set, because no client waits for the end of a step here, and a prompt
            is computed fastest in one piece.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: the messages suggest what to do.
    """

    def __init__(self, model: str, **settings: Any):
        config = engine_config(model, settings)
        if config.chat_template is not None:
            read_template(config.chat_template)  # finds a wrong name before the model loads
        engine, tokenizer = Engine(config), None
        if not config.skip_tokenizer_init:
            tokenizer = load_tokenizer(
                config.tokenizer or engine.info.model_path,
                revision=config.revision if config.tokenizer else None,
                hf_token=config.hf_token,
                lower_case=engine.info.lower_case,
                chat_template=config.chat_template,
            )
        check_vocabulary(engine.info, tokenizer)
        give_template(engine.info, tokenizer)
        check_sides(engine.info, tokenizer)
        super().__init__(engine, tokenizer)
        self._placer = ImagePlacer.of(engine.info)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Lora | Sequence[Lora | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        images: Sequence[Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts; returns them in order. All prompts run together.

        Args:
            prompts: a text, token ids, a dictionary in vLLM's form (`prompt` or `prompt_token_ids`, and
                `multi_modal_data` with images; `encoder_prompt` and `decoder_prompt`), or a list of these. An
                encoder-decoder model's encoder reads them. A `Seq2SeqInput`, or an `AudioInput` for a speech model,
                also has the beginning of the answer.
            sampling_params: one for all prompts, or one per prompt; None uses the model's defaults.
            params: another name of sampling_params.
            lora: one adapter for all prompts, or one per prompt: its name, its path or a `LoRARequest`; None for the
                base model. An adapter is loaded when it is first used.
            lora_request: vLLM's name of lora.
            images: for a model that reads images, those of each prompt: one image or a list. An image is a path, the
                bytes of a file, a PIL image, or an array [height, width, 3] of uint8. A prompt has an image token for
                each.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing was generated.
            AdapterError: an adapter cannot be loaded.
            RequestFailedError: the engine failed on a request.
        """
        listed = list_prompts(prompts)
        if images is not None:
            listed = with_images(listed, images)
        adapters = self._adapters.each(lora, len(listed), lora_request)
        return self._generated(listed, self._params(sampling_params, params, len(listed)), use_tqdm, adapters)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_prompt: ToolPrompt = "auto",
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Lora | Sequence[Lora | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; returns the answers in order. All conversations run together.

        If neither max_tokens nor the model sets a limit, an answer may fill the rest of the context. Tool calls stay in
        the answer's text as the model writes them.

        Args:
            messages: a conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
            sampling_params: one for all conversations, or one per conversation; None uses the model's defaults.
            chat_template: replaces the model's own template: a Jinja template, a file or a name such as chatml.
            add_generation_prompt: open the assistant's answer.
            continue_final_message: continue the last message instead; needs add_generation_prompt=False.
            tools: {"type": "function", "function": {...}} each, or Python functions with docstrings.
            documents: documents in the template's form.
            chat_template_kwargs: further variables for the template, such as enable_thinking.
            tool_prompt: auto: if the chat template does not support tools, describe them in a system message, as
                `octavo serve` does. off: refuse such requests.
            params: another name of sampling_params.
            lora, lora_request: as for `generate`.
            use_tqdm: progress bar; None shows one in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model does not support conversations, or a message or a parameter is invalid;
                nothing was generated.
            ConfigError: the chat template does not exist.
            AdapterError: an adapter cannot be loaded.
            RequestFailedError: the engine failed on a request.
        """
        info = self.engine.info
        check_task(info, "generate")
        check_chats(info)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to False.",
                param="continue_final_message",
            )
        tokenizer, named = need_tokenizer(self.tokenizer, info), chat_template_kwargs or {}
        if reserved := sorted(_TEMPLATE_ARGUMENTS & named.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs must not contain {reserved[0]}, which is an argument of chat.",
                param="chat_template_kwargs",
            )
        pictures: list[Pictures] | None = [] if info.vision is not None or info.writes_of_images else None
        conversations = read_conversations(messages, pictures)
        if info.writes_of_images:
            prompts = [image_prompt(*each) for each in zip(conversations, pictures or [], strict=True)]
            chosen, count = self._params(sampling_params, params, len(prompts)), len(prompts)
            return self._generated(prompts, chosen, use_tqdm, self._adapters.each(lora, count, lora_request))
        each_pictures: Sequence[Pictures | None] = pictures or [None] * len(conversations)
        inputs = [
            conversation_prompt(
                conversation, tokenizer, chat_template=chat_template, tools=tools or None, documents=documents or None,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                tool_prompt=tool_prompt, pictures=found, placer=self._placer, **named,
            )
            for conversation, found in zip(conversations, each_pictures, strict=True)
        ]  # fmt: skip
        each = self._params(sampling_params, params, len(inputs))
        inputs = [
            PromptReader.of(tokenizer, info, chosen, CHAT_ROOM).cut_input(input)
            for input, chosen in zip(inputs, each, strict=True)
        ]
        each = [
            replace(chosen, max_tokens=chat_max_tokens(chosen, info, len(input.token_ids)))
            if chosen.max_tokens is None
            else chosen
            for input, chosen in zip(inputs, each, strict=True)
        ]
        return self._answers(inputs, each, use_tqdm, self._adapters.each(lora, len(inputs), lora_request))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt by beam search, with the rules of `transformers`.

        `generate` with `SamplingParams(num_beams=...)` is the same search with all other parameters. `lora` and
        `lora_request` are the same as there.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid; nothing was generated.
            RequestFailedError: the engine failed on a request.
        """
        listed = list_prompts(prompts)
        adapters = self._adapters.each(lora, len(listed), lora_request)
        answers = self._generated(listed, [params.sampling] * len(listed), use_tqdm, adapters)
        return [sequences_of(answer, self.tokenizer) for answer in answers]

    def _generated(
        self,
        prompts: Sequence[Any],
        each: Sequence[SamplingParams],
        use_tqdm: bool | None,
        adapters: Sequence[str | None],
    ) -> list[RequestOutput]:
        info, tokenizer = self.engine.info, self.tokenizer
        check_task(info, "generate")
        inputs = [
            PromptReader.of(tokenizer, info, params, placer=self._placer).read(prompt)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        return self._answers(inputs, each, use_tqdm, adapters)

    def _answers(
        self,
        inputs: Sequence[AnyInput],
        each: Sequence[SamplingParams],
        use_tqdm: bool | None,
        adapters: Sequence[str | None],
    ) -> list[RequestOutput]:
        each = [replace(spell_bad_words(params, self.tokenizer), truncate_prompt_tokens=None) for params in each]
        ids = [f"offline-{next(self._numbers)}" for _ in inputs]
        begun: list[str] = []
        processors: dict[str, OutputProcessor] = {}
        results: dict[str, RequestOutput] = {}
        try:
            for request_id, input, chosen, adapter in zip(ids, inputs, each, adapters, strict=True):
                self.engine.add_request(request_id, input, chosen, adapter=adapter)
                begun.append(request_id)
                result = results[request_id] = self._unanswered(request_id, input, chosen)
                processors[request_id] = OutputProcessor(self.tokenizer, result.prompt_token_ids, chosen)
            hidden = hides_progress(use_tqdm, len(inputs))
            with tqdm(total=len(inputs), desc="generating", unit="prompt", disable=hidden) as bar:
                self._run(processors, results, bar)
        finally:
            for request_id in begun:
                if request_id not in results or not results[request_id].finished:
                    self.engine.abort_request(request_id)
        return [results[request_id] for request_id in ids]

    def transcribe(
        self, sounds: Sound | Sequence[Sound], wanted: Transcription | None = None, *, use_tqdm: bool | None = None
    ) -> list[Transcript]:
        """Transcribe sounds; returns the texts in order. The windows of all sounds run together.

        Args:
            sounds: one sound or several, of any length, at the rate of the model's preprocessor (16,000 per second):
                arrays [samples] or [samples, channels] (channels are averaged) of floats from -1 to 1 or of integers
                (uint8, int8, int16, int32), whose whole range is scaled to that.
            wanted: language, task, timestamps and so on; None: text in the spoken language, with timestamps.
            use_tqdm: progress bars; None shows them in a terminal, for long lists.

        Raises:
            InvalidRequestError: the model is not a speech model or does not support the request, or an input is not
                sound.
            ModelLoadError: the config of its preprocessor cannot be used.
            RequestFailedError: the engine failed on a window.
        """
        tokenizer = need_speech(self.engine.info, self.tokenizer)
        several = isinstance(sounds, list | tuple) and not (sounds and isinstance(sounds[0], int | float))
        named = {f"sounds[{place}]": sound for place, sound in enumerate(sounds)} if several else {"sounds": sounds}
        listed = [mono_samples(sound, name) for name, sound in named.items()]
        answers = partial(self.generate, use_tqdm=use_tqdm)
        places = partial(self._pool_inputs, what="aligning", use_tqdm=use_tqdm)
        return Transcriber(self.engine.info, tokenizer, answers, places).transcribe(listed, wanted or Transcription())

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, an object of `transformers`.

        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        return need_tokenizer(self.tokenizer, self.engine.info).hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults for parameters that a request does not set."""
        return self.engine.defaults.as_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; returns False, and forgets nothing, while requests hold some."""
        return self.engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine, those of `stats`, by name."""
        found = asdict(self.engine.stats()).items()
        return [Metric(name, value) for name, value in found if not isinstance(value, tuple)]

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
                    continue  # a request that was added to the engine directly
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

    def _unanswered(self, request_id: str, input: AnyInput, params: SamplingParams) -> RequestOutput:
        info = self.engine.info
        if isinstance(input, AudioInput | PixelInput):
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

    def _params(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
    ) -> list[SamplingParams]:
        if sampling_params is not None and params is not None:
            raise InvalidRequestError("params and sampling_params are the same; set only one of them.", param="params")
        given = params if sampling_params is None else sampling_params
        if given is None:
            return [SamplingParams()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequestError(f"there are {count} prompts but {len(given)} SamplingParams.", param="params")
        return list(given)
