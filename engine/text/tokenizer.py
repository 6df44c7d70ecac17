"""A model's tokenizer: converts ids to text and back, and chat messages to a prompt."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import InvalidRequestError
from engine.interface.outputs import Logprob, TokenLogprobs
from engine.text.detokenizer import CHARACTER, MAX_CONTEXT, REPLACEMENT, Detokenizer, WordDetokenizer
from engine.text.encoding import Encoding, Side, encode_fast, encode_slow, encode_words
from engine.text.languages import Languages
from engine.text.plain import PlainTokenizer
from engine.text.segments import Segmenter, cutting_tokens


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others start at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
_DECODED = 8192  # tokens decoded at a time


def _pair(hf: Any) -> tuple[str, str] | None:
    """The source and target languages, if a tokenizer's config names them and its texts need not."""
    named = getattr(hf, "init_kwargs", {})
    source, target = named.get("source_lang"), named.get("target_lang")
    if isinstance(langs := named.get("langs"), list | tuple) and len(langs) == 2:  # FSMT's name for them
        source, target = langs
    if not (isinstance(source, str) and isinstance(target, str) and source and target):
        return None
    several = getattr(hf, "supported_language_codes", ())  # texts begin with one of these tokens
    return None if several else (source, target)


def _writes_words(hf: Any) -> bool:
    """Whether it is FSMT's tokenizer: Moses writes the texts of the target side, and has no mode to encode them."""
    return hasattr(hf, "tgt_vocab_size")


def _switch_to_target(hf: Any) -> None:
    """Let a slow tokenizer encode texts of the target language from now on."""
    if hasattr(hf, "_switch_to_target_mode"):
        hf._switch_to_target_mode()
    elif _writes_words(hf):
        hf.encoder, hf.src_lang = {text: token for token, text in hf.decoder.items()}, hf.tgt_lang


class Tokenizer:
    """A `transformers` tokenizer, reduced to what serving needs; may be used from several threads. `marked_side`: which
    language an input's language token names, if it has one (`Languages`)."""

    def __init__(
        self, hf: Any, *, lower_case: bool = False, marked_side: Literal["source", "target"] = "source"
    ) -> None:
        self._hf = hf  # the tokenizer object, fast (Rust) or slow (Python)
        # texts of more than the given number of characters are encoded by this function, which is given the text and
        # whether to add special tokens; None: all are encoded here. It is only for tokenizers that can be saved.
        self.encode_long: tuple[int, Callable[[str, bool], list[int]]] | None = None
        self._lower_case = lower_case  # whether texts are lower-cased first
        self._fast: Any = getattr(hf, "_tokenizer", None) if getattr(hf, "is_fast", False) else None
        if self._fast is not None:
            # A tokenizer.json may contain truncation and padding from training. They are switched off once:
            # `transformers` sets them again for every call, which is not safe between threads.
            self._fast.no_truncation()
            self._fast.no_padding()
            if lower_case:  # within the tokenizer, so that positions in the text stay known
                from tokenizers import normalizers

                before = [] if self._fast.normalizer is None else [self._fast.normalizer]
                self._fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
            added = self._fast.get_added_tokens_decoder()
            self._special = frozenset(token for token, what in added.items() if what.special)
        else:
            # A folder need not list the tokens that stand for languages.
            self._special = frozenset(hf.all_special_ids) | frozenset(getattr(hf, "lang_token_to_id", {}).values())
        self.eos_token_id: int | None = hf.eos_token_id  # the tokenizer's own end-of-sequence id, or None
        self.bos_token_id: int | None = hf.bos_token_id  # the tokenizer's own beginning-of-sequence id, or None
        # the token for text that the vocabulary does not cover, or None
        self.unk_token_id: int | None = getattr(hf, "unk_token_id", None)
        mask = getattr(hf, "mask_token_id", None)
        if mask == self.unk_token_id:  # one that is named, but is not in the vocabulary
            mask = None
        # mask_token_id, mask_token: the token that marks a position to predict, and its text, or None
        self.mask_token_id: int | None = mask
        self.mask_token: str | None = None if mask is None else hf.mask_token
        # the token with which other programs pad short inputs, or None
        self.pad_token_id: int | None = getattr(hf, "pad_token_id", None)
        # the token that stands for a whole input, or None
        self.cls_token_id: int | None = getattr(hf, "cls_token_id", None)
        frame = (getattr(hf, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep", "pad"))
        # the tokens that begin, separate, end or pad inputs
        self.frame_ids: frozenset[int] = frozenset(token for token in frame if token is not None)
        # the side from which inputs that are too long are cut
        self.truncation_side: Side = "left" if getattr(hf, "truncation_side", "right") == "left" else "right"
        model = None if self._fast is None else self._fast.model
        # how the vocabulary marks a token that continues a word (WordPiece's "##"), if it does
        self.subword_prefix: str | None = getattr(model, "continuing_subword_prefix", None) or None
        self._segments = "token_type_ids" in getattr(hf, "model_input_names", ())
        # The two sides of Marian and FSMT may have separate vocabularies.
        other = (len(getattr(hf, "target_encoder", ())), getattr(hf, "tgt_vocab_size", 0))
        self.vocab_size: int = max(len(hf), *other)  # number of ids, added tokens included
        # number of ids without added tokens; 0 for a slow tokenizer, which does not distinguish them
        self.plain_size: int = 0 if self._fast is None else self._fast.get_vocab_size(with_added_tokens=False)
        special = {text: hf.convert_tokens_to_ids(text) for text in hf.all_special_tokens}
        special |= getattr(hf, "lang_token_to_id", {})
        # the languages that it knows
        self.languages = replace(Languages.among(special, self.encode("")), marked_side=marked_side, pair=_pair(hf))
        self._answers: Any = None  # encodes the beginning of an answer, if another tokenizer does that
        self._known: dict[int, bool] = {}
        self._texts: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None

    @property
    def class_name(self) -> str:
        """The class name of the `transformers` tokenizer."""
        return type(self._hf).__name__

    @property
    def hf(self) -> Any:
        """The `transformers` tokenizer. Do not change its settings."""
        return self._hf.whole() if isinstance(self._hf, PlainTokenizer) else self._hf

    @property
    def is_fast(self) -> bool:
        """Whether it belongs to the tokenizers library, and can be saved."""
        return self._fast is not None

    def added_beyond(self, size: int) -> dict[int, str]:
        """Added tokens with ids of at least `size`, as texts write them."""
        added = {} if self._fast is None else self._fast.get_added_tokens_decoder()
        return {token: added[token].content for token in sorted(added) if token >= size}

    def segmenter(self) -> Segmenter:
        """The object that cuts texts into segments whose joined ids are those of the whole text. It cuts before the
        special tokens of chat templates."""
        if self._fast is None or self._fast.encode_special_tokens:
            return Segmenter(())
        named = "\n".join(map(str, self.template_variables.values()))
        wanted = f"{self.all_chat_templates}\n{named}"
        return Segmenter(cutting_tokens(self._fast.get_added_tokens_decoder().values(), wanted))

    def save(self, path: Path) -> None:
        """Write a tokenizer.json that does what `encode` does, except for languages."""
        self._fast.save(str(path))

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), or None."""
        return self._template("default")

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self._hf.chat_template = template

    @property
    def template_variables(self) -> dict[str, str | list[str]]:
        """The special tokens under the names that chat templates use, such as bos_token."""
        given: Mapping[str, Any] = self._hf.special_tokens_map
        return {
            name: [str(item) for item in value] if isinstance(value, list | tuple) else str(value)
            for name, value in given.items()
        }

    def need_chat_template(self, *, tools: bool = False) -> str:
        """The model's own chat template (Jinja). `tools`: whether the conversation has tools; some models have a
        separate template for these. Raises InvalidRequestError if the model has no such template."""
        template = (self._template("tool_use") if tools else None) or self.chat_template
        if template is None:
            raise InvalidRequestError(
                "The model's tokenizer has no chat template, so it cannot read chat messages. Use /v1/completions, "
                "or set --chat-template (chat_template of LLM) to a file or a name such as chatml.",
                param="messages",
                code="no_chat_template",
            )
        return template

    @property
    def all_chat_templates(self) -> str:
        """All chat templates of the model, joined; "" if there is none."""
        template = getattr(self._hf, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The template for parsing the model's answers (`transformers`' response template), or None."""
        template = getattr(self._hf, "response_template", None)
        return template if isinstance(template, Mapping) else None

    def _template(self, name: str) -> str | None:
        """The chat template with this name. If the model has only one template, it is used for every name."""
        template = getattr(self._hf, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get(name)
        return template if isinstance(template, str) else None

    def encode(self, text: str, add_special_tokens: bool = True, src_lang: str | None = None) -> list[int]:
        """Text to ids. `src_lang`: the text's language, for tokenizers that mark it with a special token; None means
        their default. Raises InvalidRequestError if the text is not valid Unicode (unpaired surrogates), or the
        language has no token."""
        source = None if src_lang is None or not add_special_tokens else self.languages.id(src_lang, "src_lang")
        text = self._given(text)
        if self.encode_long is not None and len(text) > self.encode_long[0]:
            ids = self.encode_long[1](text, add_special_tokens)
        elif self._fast is not None:
            # Not `encode`: that holds Python's lock, and so blocks the rest of the process.
            ids = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        return ids if source is None else self.languages.marked(ids, source)

    def encode_input(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        side: Side | None = None,
        words: bool = False,
        marker: int | None = None,
    ) -> Encoding:
        """Convert a text, or a pair of texts, to an encoder's input. Raises InvalidRequestError if a text is not valid
        Unicode, there is no room for the special tokens, or the tokenizer takes no pairs.

        Args:
            max_length: the maximum number of tokens; the rest is left out, of a pair from the longer text first
                (transformers' `truncation=True`). Special tokens are kept.
            side: the side that is cut; None means the tokenizer's default.
            words: whether to return each token's word, too.
            marker: a token that is inserted after the first one, or at the start if there are no special tokens; it
                counts as a special token.
        """
        texts = tuple(self._given(part, "input") for part in (text, pair) if part is not None)
        encode, by = (encode_slow, self._hf) if self._fast is None else (encode_fast, self._fast)
        side = side or self.truncation_side
        return encode(
            by,
            texts,
            special=add_special_tokens,
            segments=self._segments,
            max_length=max_length,
            side=side,
            words=words,
            marker=marker,
        )

    def encode_words(self, words: Sequence[str]) -> Encoding:
        """Convert words that are already separated to an encoder's input; `Encoding.words` counts them. Raises
        InvalidRequestError if a word is not valid Unicode, or the tokenizer does not say which word a token is of."""
        if self._fast is None:
            raise InvalidRequestError(
                "the model's tokenizer is a Python tokenizer and does not report the words of tokens, which this "
                "task needs. Add a tokenizer.json to its folder.",
                param="input",
                code="no_offsets",
            )
        return encode_words(self._fast, [self._given(word, "input") for word in words], segments=self._segments)

    def encode_answer(self, text: str) -> list[int]:
        """Convert the beginning of an encoder-decoder model's answer to ids, without special tokens. Raises
        InvalidRequestError if the text is not valid Unicode."""
        if self._fast is not None:
            return self.encode(text, add_special_tokens=False)
        text = self._given(text)
        if self._answers is None:
            # A copy stays in that mode: a switch would affect other threads.
            answers = copy.copy(self._hf)
            if getattr(answers, "tgt_lang", "") is None:  # some require one, for the special tokens that are not added
                answers.tgt_lang = answers.src_lang
            _switch_to_target(answers)
            self._answers = answers
        return list(self._answers.encode(text, add_special_tokens=False, verbose=False))

    def encode_answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert whole answers to ids, without special tokens."""
        if self._fast is None:
            return [self.encode_answer(text) for text in texts]
        given = [self._given(text) for text in texts]
        return [encoding.ids for encoding in self._fast.encode_batch_fast(given, add_special_tokens=False)]

    def token_id(self, text: str) -> int | None:
        """The id of the token with this spelling in the vocabulary; None if there is none."""
        if self._fast is not None:
            found: int | None = self._fast.token_to_id(text)
            return found
        token: int = self._hf.convert_tokens_to_ids(text)
        return token if self._hf.convert_ids_to_tokens(token) == text else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert ids to text, all at once; ids that the tokenizer does not know have no text."""
        return self._decode(self.visible(ids, skip_special_tokens))

    def decode_tidy(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """`decode` with spaces tidied up as the model's own tokenizer does: for text that is read, not streamed."""
        return str(self._hf.decode(self.visible(ids, skip_special_tokens), skip_special_tokens=False))

    def written(self, token: int) -> str:
        """The vocabulary's spelling of a token, including its marks."""
        return str(self._hf.convert_ids_to_tokens(token))

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids that have text: known to the tokenizer and, if asked, not special."""
        return self.without(ids, self._special if skip_special_tokens else frozenset())

    def without(self, ids: Sequence[int], hidden: frozenset[int]) -> list[int]:
        return [token for token in ids if token not in hidden and self._is_known(token)]

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    def special_texts(self) -> dict[int, str]:
        """The spelling of the special tokens in texts, by id."""
        return {token: self.written(token) for token in sorted(self._special)}

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer | WordDetokenizer:
        """A detokenizer for one answer to that prompt. Pass it only visible ids."""
        if _writes_words(self._hf):
            return WordDetokenizer(self._decode, self.visible(prompt_token_ids, skip_special_tokens=True))
        tail: list[int] = []
        for token in reversed(prompt_token_ids):
            if token not in self._special and self._is_known(token):
                tail.append(token)
                if len(tail) == MAX_CONTEXT + CHARACTER:
                    break
        return Detokenizer(self._decode, tail[::-1])

    def token_text(self, token: int) -> str:
        """The text of one token within a text, including a leading space; U+FFFD for a token that is only part of a
        character; "" for an id that the tokenizer does not know."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._text_within(token)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes of one token's text, even if it is only part of a character; None if they cannot be known."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        raw = None if self._fast is None else self._fast.id_to_token(token)
        if raw is None:
            return None
        if re.fullmatch(r"<0x[0-9A-F]{2}>", raw):  # SentencePiece's byte fallback
            return bytes([int(raw[3:5], 16)])
        if all(char in _BYTE_OF for char in raw):  # byte-level BPE; no other kind decodes to the same text
            found = bytes(_BYTE_OF[char] for char in raw)
            return found if found.decode(errors="replace") == text else None
        return None

    def all_token_bytes(self, size: int) -> list[bytes | None]:
        """`token_bytes` of the ids below `size`, faster than one by one; b"" for unknown ids."""
        if self._anchor is None:
            self._anchor = self._find_anchor()
        before, before_text = self._anchor
        if self._fast is None or not before_text:
            return [self.token_bytes(token) for token in range(size)]
        found: list[bytes | None] = [b""] * size
        for first in range(0, size, _DECODED):
            known = [i for i in range(first, min(first + _DECODED, size)) if self._fast.id_to_token(i) is not None]
            texts = self._fast.decode_batch([[before, token] for token in known], skip_special_tokens=False)
            for token, text in zip(known, texts, strict=True):
                plain = text.startswith(before_text) and REPLACEMENT not in text and token not in self._special
                found[token] = text[len(before_text) :].encode() if plain else self.token_bytes(token)
        self._texts.clear()  # few of them are requested again
        return found

    def describe(self, entry: TokenLogprobs) -> TokenLogprobs:
        """The same log-probabilities with every `decoded_token` filled in."""
        return {token: Logprob(item.logprob, item.rank, self.token_text(token)) for token, item in entry.items()}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Convert messages to a prompt, by the model's chat template in `transformers`' sandbox.

        The template writes the special tokens itself: encode the result with `add_special_tokens=False`. Raises
        InvalidRequestError if the model has no template, or it refuses these messages.

        Args:
            messages: {"role": ..., "content": ...} each, with text contents.
            chat_template: a template to use instead of the model's own.
            tools: {"type": "function", "function": {...}} each.
            add_generation_prompt: whether to end with the text that opens the assistant's answer.
            variables: continue_final_message, documents, image_mark, image_text, and variables that the template may
                use (enable_thinking ...).
        """
        from engine.text.conversations import fit_messages, render_conversation  # slow to import

        template = chat_template or self.need_chat_template(tools=tools is not None)
        try:
            return render_conversation(
                template,
                fit_messages(messages, template, tools),
                **{
                    **self.template_variables, "tools": tools, "add_generation_prompt": add_generation_prompt,
                    **variables,
                },
            )  # fmt: skip
        except ValueError as error:
            raise InvalidRequestError(
                f"The model's chat template does not accept these messages: {error}",
                param="messages",
                code="invalid_messages",
            ) from error

    def _given(self, text: str, param: str = "prompt") -> str:
        """A caller's text in the form that the tokenizer accepts."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text is not valid Unicode: character {error.start} is the unpaired surrogate "
                f"{text[error.start]!a}. Send it as UTF-8.",
                param=param,
                code="invalid_value",
            ) from error
        return text.lower() if self._lower_case and self._fast is None else text

    def _decode(self, ids: list[int]) -> str:
        """The text of ids, including special tokens. This calls the Rust tokenizer directly, which takes microseconds
        and skips `transformers`' clean-up of spaces, which could not be undone once streamed."""
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=False)
            return text
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _is_known(self, token: int) -> bool:
        known = self._known.get(token)
        if known is None:
            if token < 0:
                known = False
            elif self._fast is not None:
                known = self._fast.id_to_token(token) is not None
            else:
                known = token < self.vocab_size
            self._known[token] = known
        return known

    def _text_within(self, token: int) -> str:
        if not self._is_known(token):
            return ""
        alone = self._decode([token])
        if token in self._special:
            return alone
        if self._anchor is None:
            self._anchor = self._find_anchor()
        before, before_text = self._anchor
        text = self._decode([before, token])
        return text[len(before_text) :] if before_text and text.startswith(before_text) else alone

    def _find_anchor(self) -> tuple[int, str]:
        """An ordinary token that stands for "some text before": printable and unchanged by what follows. (It is "" if
        there is none among the first thousand.)"""
        for token in range(min(self.vocab_size, 1000)):
            if token in self._special or not self._is_known(token):
                continue
            # A token such as <0x41> would join the bytes of the next token.
            if self._fast is not None and self._fast.id_to_token(token).startswith("<"):
                continue
            text = self._decode([token])
            if text.strip() == text != "" and REPLACEMENT not in text:
                return token, text
        return 0, ""
