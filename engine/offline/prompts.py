"""The prompts of `LLM.generate`: texts, token ids, and vLLM's dictionaries of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, NoReturn

from engine.errors import InvalidRequestError
from engine.images.placing import ImagePlacer, read_image
from engine.images.reader import ImageReader, is_image
from engine.interface.generation import DEFAULT_MAX_TOKENS, tokens_to_keep_free
from engine.interface.outputs import EngineInfo
from engine.interface.request import AudioInput, PixelInput, SamplingParams, Seq2SeqInput, TokenInput
from engine.interface.values import brief
from engine.text.image_tasks import encode_task
from engine.text.tokenizer import Tokenizer

AnyInput = TokenInput | Seq2SeqInput | AudioInput | PixelInput
Prompt = str | Sequence[int] | TokenInput | Seq2SeqInput | AudioInput | PixelInput | Mapping[str, Any]

_PLAIN = ("prompt", "prompt_token_ids")
_SIDES = ("encoder_prompt", "decoder_prompt")


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list. Raises InvalidRequestError: `prompts` is neither."""
    if isinstance(prompts, (str, TokenInput, Seq2SeqInput, AudioInput, PixelInput, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        _refuse(prompts)
    items = list(prompts)
    return [items] if items and _is_id(items[0]) else items


def with_images(prompts: Sequence[Any], images: Any) -> list[Any]:
    """Prompts as dictionaries, each with its images. Raises InvalidRequestError if the number of entries of `images`
    differs from the number of prompts, or a prompt is neither a text nor token ids."""
    listed = list(images) if isinstance(images, list | tuple) else [images]
    if len(prompts) == 1 and not (len(listed) == 1 and isinstance(listed[0], list | tuple)):
        listed = [listed]
    if len(listed) != len(prompts):
        _fail(f"images must have the images of each of the {len(prompts)} prompts, got {len(listed)} entries.")
    found = []
    for prompt, own in zip(prompts, listed, strict=True):
        if isinstance(prompt, Mapping):
            given = dict(prompt)
        elif isinstance(prompt, str):
            given = {"prompt": prompt}
        else:
            given = {"prompt_token_ids": prompt.token_ids if isinstance(prompt, TokenInput) else prompt}
        found.append({**given, "multi_modal_data": {"image": own}} if own is not None and own != [] else given)
    return found


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Converts prompts to the engine's form."""

    tokenizer: Tokenizer | None  # None if the model has none; prompts must then be token ids
    info: EngineInfo
    kept: int | None = None  # maximum tokens of a prompt; longer ones are cut. None: all.
    placer: ImagePlacer | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        params: SamplingParams,
        usual: int = DEFAULT_MAX_TOKENS,
        placer: ImagePlacer | None = None,
    ) -> PromptReader:
        """The reader for the prompt of a request with these parameters. `usual`: default tokens of the answer, see
        `tokens_to_keep_free`. Raises InvalidRequestError: truncate_prompt_tokens exceeds the model's limit."""
        room, kept = info.max_encoder_len or info.max_model_len, params.truncate_prompt_tokens
        if kept is not None and kept > room:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {kept}; it must be at most {room} (max_model_len), or -1 to keep as many "
                "tokens as leave room for the answer.",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        if kept == -1:
            kept = room if info.max_encoder_len else max(room - tokens_to_keep_free(params, info, usual), 1)
        return cls(tokenizer, info, kept, placer)

    def read(self, prompt: Any) -> AnyInput:
        """One prompt. Raises InvalidRequestError if it is not a prompt, or if it is a text and the model has no
        tokenizer."""
        if isinstance(prompt, (Seq2SeqInput, AudioInput, PixelInput)):
            if self.kept is not None:
                _fail(f"truncate_prompt_tokens cuts texts and token ids, not a {type(prompt).__name__}.")
            return prompt
        if isinstance(prompt, TokenInput):
            return self.cut_input(prompt)
        if isinstance(prompt, Mapping):
            return self._read_dict(prompt)
        if not isinstance(prompt, str):
            return TokenInput(self.cut(_ids(prompt)))
        tokenizer = self._need_tokenizer()
        if self.kept is None:
            return TokenInput(tokenizer.encode(prompt), prompt)
        return TokenInput(tokenizer.encode_input(prompt, max_length=self.kept, side=self._side).ids, prompt)

    def cut_input(self, input: TokenInput) -> TokenInput:
        """The input with the token ids that stay. Raises InvalidRequestError if it has images, and would be cut."""
        if self.kept is None or len(input.token_ids) <= self.kept:
            return input
        if input.images:
            _fail("truncate_prompt_tokens does not cut prompts with images. Shorten the prompt.")
        return input.keeping(self.cut(input.token_ids), self.cut)

    def cut(self, ids: Sequence[Any]) -> list[Any]:
        """The token ids that stay, or the values that belong to them."""
        if self.kept is None:
            return list(ids)
        return list(ids[-self.kept :] if self._side == "left" else ids[: self.kept])

    @property
    def _side(self) -> Literal["left", "right"]:
        """The side on which a prompt is cut: the left for a decoder's prompt, the tokenizer's side for an encoder's."""
        return "left" if self.tokenizer is None or not self.info.max_encoder_len else self.tokenizer.truncation_side

    def _read_dict(self, prompt: Mapping[str, Any]) -> AnyInput:
        given = {name: value for name, value in prompt.items() if value is not None}
        if "multi_modal_data" in given:
            return self._read_images(given)
        if given and set(given) <= set(_PLAIN):
            text, ids = (given.get(name) for name in _PLAIN)
            if text is not None and not isinstance(text, str):
                _fail(f"prompt must be a text, got {brief(text)}. Token ids go into prompt_token_ids.")
            return self.read(text) if ids is None else TokenInput(self.cut(_ids(ids)), text)
        if "encoder_prompt" in given and set(given) <= set(_SIDES):
            whole, begin = self.read(given["encoder_prompt"]), given.get("decoder_prompt")
            if not isinstance(whole, TokenInput):
                _fail(f"encoder_prompt must be a text or token ids, got {brief(given['encoder_prompt'])}.")
            if isinstance(begin, str):
                return Seq2SeqInput(whole.token_ids, self._need_tokenizer().encode_answer(begin))
            return Seq2SeqInput(whole.token_ids, None if begin is None else _ids(begin))
        unknown = sorted(str(name) for name in given if name not in (*_PLAIN, *_SIDES))
        found = f"unknown keys: {', '.join(unknown)}" if unknown else f"its keys are: {', '.join(given) or 'none'}"
        _fail(
            "a prompt given as a dictionary must hold prompt or prompt_token_ids, or encoder_prompt and optionally "
            f"decoder_prompt for an encoder-decoder model; {found}."
        )

    def _read_images(self, given: dict[str, Any]) -> AnyInput:
        data = given.pop("multi_modal_data")
        if not isinstance(data, Mapping) or set(data) != {"image"}:
            _fail(f"multi_modal_data must hold image, and nothing else is read; got {brief(data)}.")
        images = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
        if self.info.writes_of_images:
            return self._read_whole(images, given)
        if self.placer is None:
            _fail(f"{self.info.model} reads no images.")
        whole = replace(self, kept=None)._read_dict(given)
        if not isinstance(whole, TokenInput):
            _fail("images need a prompt or prompt_token_ids.")
        return self.cut_input(self.placer.input(whole.token_ids, images, whole.text, self.tokenizer, special=True))

    def _read_whole(self, images: Sequence[Any], given: dict[str, Any]) -> PixelInput:
        """The input of an encoder-decoder model that reads an image. The prompt, if there is one, is the beginning of
        the answer, or the text that the encoder reads after the image."""
        if len(images) != 1:
            _fail(f"{self.info.model} reads one image at a time, got {len(images)}.")
        if not set(given) <= {*_PLAIN, "decoder_prompt"} or len(given) > 1:
            _fail(
                f"beside an image, a prompt may have one of prompt, prompt_token_ids and decoder_prompt, got {given}."
            )
        image = images[0] if is_image(images[0]) else read_image(images[0])
        pixels, begin = ImageReader(self.info).read(image), next(iter(given.values()), None)
        if self.info.signal is not None and self.info.signal.texts and "decoder_prompt" not in given:
            text = begin or ""
            ids = encode_task(self._need_tokenizer(), text) if isinstance(text, str) else _ids(text)
            return replace(pixels, encoder_token_ids=ids)
        if isinstance(begin, str) and begin:
            begin = self._need_tokenizer().encode_answer(begin)
        return replace(pixels, decoder_token_ids=_ids(begin) if begin else None)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            _fail(
                f"{self.info.model} has no tokenizer, so prompts must be token ids. Set tokenizer to a folder that has "
                "one."
            )
        return self.tokenizer


def _ids(ids: Any) -> list[int]:
    """Token ids, also from arrays of numpy and torch."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence) or not all(map(_is_id, listed)):
        _refuse(ids)
    return [int(token) for token in listed]


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _refuse(prompt: Any) -> NoReturn:
    _fail(
        "a prompt must be a text, a list of token ids, or a dictionary with prompt or prompt_token_ids, got "
        f"{type(prompt).__name__}: {brief(prompt)}."
    )


def _fail(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="prompt", code="invalid_value")
