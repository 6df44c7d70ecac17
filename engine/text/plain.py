"""Reads a tokenizer.json and plain settings as `transformers` does, but without it: its import takes half a second and
20 MB, and it parses the whole file twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
# Settings that have no effect on what is read here.
_IDLE = frozenset(
    {
        "add_bos_token", "add_eos_token", "backend", "clean_up_tokenization_spaces", "is_local", "local_files_only",
        "made_from", "model_max_length", "padding_side", "tokenizer_class",
    }
)  # fmt: skip
# Other settings that may occur, and their types.
_TYPES: dict[str, type] = {
    **dict.fromkeys((*NAMED, "chat_template", "source_lang", "target_lang", "truncation_side"), str),
    **dict.fromkeys((*_EXTRA, "model_input_names"), list),
    "added_tokens_decoder": dict,
}
_OTHER_FILES = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")


class PlainTokenizer:
    """The part of `PreTrainedTokenizerFast` that `engine.text.tokenizer.Tokenizer` uses.

    Args:
        backend: a tokenizer of the tokenizers library; special tokens that it lacks are added.
        settings: the content of tokenizer_config.json.
        chat_template: Jinja text, or None.
        folder: the folder of these files.
    """

    is_fast = True

    def __init__(self, backend: Tokenizer, settings: Mapping[str, Any], chat_template: str | None, folder: Path):
        self._tokenizer, self._folder = backend, folder
        self.init_kwargs = dict(settings)
        self.chat_template = chat_template
        self.truncation_side = settings.get("truncation_side", "right")
        self.model_input_names = settings.get("model_input_names", ["input_ids", "attention_mask"])
        # the special tokens that have a name, by name
        self.special_tokens_map: dict[str, str] = {name: settings[name] for name in NAMED if name in settings}
        extra: list[str] = next((settings[name] for name in _EXTRA[::-1] if settings.get(name)), [])
        # these and the other special tokens, each once
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *extra]))
        self._add(settings.get("added_tokens_decoder", {}))
        if backend.post_processor is None:
            from tokenizers import processors

            backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])

    def _add(self, decoder: Mapping[str, Any]) -> None:
        """Add the tokens that the settings name and the tokenizer.json lacks, in the order of `transformers`."""
        from tokenizers import AddedToken

        present = self._tokenizer.get_added_tokens_decoder().values()
        written, named = {repr(token) for token in present}, set(self.special_tokens_map.values())
        listed = [AddedToken(**token) for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]
        missing = [token for token in listed if repr(token) not in written]
        for token in missing:
            token.special = token.special or token.content in named
        known = {token.content for token in (*present, *missing)}
        missing += [AddedToken(text, special=True) for text in self.all_special_tokens if text not in known]
        if missing:
            self._tokenizer.add_tokens(missing)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        """bos_token, bos_token_id, and so on; None for a token that does not exist."""
        text = name.removesuffix("_id")
        if text not in NAMED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        token = self.special_tokens_map.get(text)
        return token if text == name or token is None else self.convert_tokens_to_ids(token)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The token's id; that of the unknown token if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None and token != self.special_tokens_map.get("unk_token"):
            found = self.unk_token_id
        return found

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The vocabulary's spelling of tokens."""
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def whole(self) -> Any:
        """The `transformers` object that reads the same folder."""
        from transformers import PreTrainedTokenizerFast  # slow to import

        made = PreTrainedTokenizerFast.from_pretrained(str(self._folder), local_files_only=True)
        made.chat_template = self.chat_template
        return made


def read_plain(folder: Path, settings: Mapping[str, Any]) -> PlainTokenizer | None:
    """The tokenizer of a folder whose settings are plain; None if `transformers` has to read it. Raises Exception if
    the tokenizers library cannot read the file.

    Args:
        folder: has a tokenizer.json, and `transformers` has no specific class for it.
        settings: the content of tokenizer_config.json.
    """
    given = {name: value for name, value in settings.items() if value is not None and name not in _IDLE}
    plain = (
        all(isinstance(value, _TYPES.get(name, ())) for name, value in given.items())
        and all(isinstance(token, str) for name in _EXTRA for token in given.get(name, ()))
        and given.get("truncation_side", "right") in ("left", "right")
        and not any((folder / name).exists() for name in _OTHER_FILES)
    )
    if not plain:
        return None
    from engine.text.large_vocabulary import read_tokenizer  # an engine that reads no tokenizer needs no such library

    backend = read_tokenizer(folder / "tokenizer.json")
    tidies = bool(settings.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"
    if backend.truncation is not None or backend.padding is not None or tidies:
        return None
    template = folder / "chat_template.jinja"
    own = template.read_text(encoding="utf-8") if template.is_file() else given.get("chat_template")
    return PlainTokenizer(backend, given, own, folder)
