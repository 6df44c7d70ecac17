"""The tokenizer of a GGUF file, as the `tokenizer.json` and `tokenizer_config.json` of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.gguf.container import Gguf
from engine.model.gguf.splitting import BEGINS, MERGES_LAST, normalizer, splitter

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens
_BLANK = "▁"
_LONGEST = 1024  # maximum characters of a token whose merges are sought
# Vocabularies of models have about two pairs per token: Gemma's, with 262,144 tokens, has 514,906 pairs of 3.1 million
# characters. A damaged file of 7 MB can have 4 million. The maximum takes 0.4 GB.
_MOST_PAIRS = 1 << 21
_MOST_CHARACTERS = 1 << 25
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>", "<|eot|>",
        "<｜end▁of▁sentence｜>", "<|return|>",
    }
)  # fmt: skip
"""Tokens that end an answer in any vocabulary and are never split, whatever type the file gives them (llama.cpp),
because most files name only one end."""
_TAKES_BLANKS = ("phi-3", "phi3")
"""Parts of the names of models whose tokens include the blanks after them; files do not say so (llama.cpp)."""
_KEEPS_BLANKS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Tokens that do not include them."""
_TEXT_ROLES = ("bos", "eos", "unk", "pad")
_SPLIT = "tokenizer.ggml.pre"
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def special_ids(file: Gguf) -> dict[str, int]:
    """The ids of the tokens with a role (bos, eos, unk, pad) that the file names."""
    size = len(_texts(file, "tokens"))
    found = {role: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _KEYS.items()}
    return {role: value for role, value in found.items() if isinstance(value, int) and 0 <= value < size}


def end_ids(file: Gguf) -> list[int]:
    """All tokens that end an answer, the file's own eos first."""
    tokens = _texts(file, "tokens")
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [number for number, text in enumerate(tokens) if text in _ENDS]
    return list(
        dict.fromkeys(value for value in (*named, *known) if isinstance(value, int) and 0 <= value < len(tokens))
    )


def tokenizer_files(file: Gguf) -> dict[str, Any]:
    """The contents of the files, by name. Raises UnsupportedModelError if the kind of tokenizer, or its way of
    splitting texts, is not known exactly."""
    tokens = _texts(file, "tokens")
    if not tokens:
        raise _unsupported(file, "it contains no vocabulary")
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(tokens) > table.shape[0]:
        raise _unsupported(file, f"its vocabulary has {len(tokens)} tokens, but {table.name} has {table.shape[0]} rows")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(text for number, text in enumerate(tokens) if vocabulary[text] != number)
        raise _unsupported(file, f"its vocabulary contains {ascii(twice)[:80]} twice")
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level(file, vocabulary)
    elif kind == "llama":
        made = _by_scores(file, tokens)
    else:
        raise _unsupported(file, f"its tokenizer.ggml.model is {ascii(kind)[:80]}; gpt2 and llama are supported")
    ids = special_ids(file)
    words = {f"{role}_token": tokens[ids[role]] for role in _TEXT_ROLES if role in ids}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "made_from": "gguf",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length"),
        **words,
    }
    if (template := _chat_template(file)) is not None:
        settings["chat_template"] = template
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(file, tokens, ids),
        "post_processor": _frame(file, kind, tokens, ids),
        **made,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def _byte_level(file: Gguf, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Merges of bytes, which are written as printable characters."""
    name = _split_name(file)
    split = splitter(name)
    if split is None:
        said = file.metadata.get(_SPLIT)
        raise _unsupported(
            file,
            f"it does not say how texts are split ({_SPLIT} is absent)"
            if said is None
            else f"it splits texts by {ascii(said)[:80]} ({_SPLIT}), which is not known exactly",
        )
    merges = [merge.split(" ") for merge in _texts(file, "merges")]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise _unsupported(file, "its tokenizer.ggml.merges are absent, or are not pairs")
    return {
        "normalizer": normalizer(name),
        "pre_tokenizer": split,
        "decoder": _BYTES,
        "model": _bpe(vocabulary, merges, ignore_merges=name in MERGES_LAST),
    }


def _by_scores(file: Gguf, tokens: list[str]) -> dict[str, Any]:
    """SentencePiece's merges: the merge whose token has the best score comes first."""
    scores = _numbers(file, "scores")
    if len(scores) != len(tokens):
        raise _unsupported(file, f"it has {len(scores)} scores for {len(tokens)} tokens")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    joined: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    normal: dict[str, Any] = replace
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True:
        # Before each stretch of text between tokens that are never split, as in llama.cpp.
        normal = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _BLANK}, replace]}
        joined.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = {text: number for number, text in enumerate(tokens)}
    unknown = special_ids(file).get("unk")
    return {
        "normalizer": normal,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": joined},
        "model": _bpe(
            vocabulary,
            _merges(file, tokens, scores, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges(file: Gguf, tokens: list[str], scores: list[float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, those with the best score first. Raises UnsupportedModelError if a token
    is too long, or there are too many pairs."""
    found: list[tuple[float, int, int, int, int, int]] = []
    characters = 0
    for place, (text, score) in enumerate(zip(tokens, scores, strict=True)):
        if len(text) > _LONGEST:
            raise _unsupported(
                file, f"token {place} is {len(text)} characters long, but at most {_LONGEST} are allowed"
            )
        earlier = -place
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                found.append((score, cut, len(text) - cut, earlier, left, right))
                characters += len(text)
        if len(found) > _MOST_PAIRS or characters > _MOST_CHARACTERS:
            raise _unsupported(
                file,
                f"the first {place + 1} of its {len(tokens)} tokens are formed by {len(found)} pairs of tokens with "
                f"{characters} characters, but at most {_MOST_PAIRS} pairs with {_MOST_CHARACTERS} characters are "
                "allowed",
            )
    found.sort(reverse=True)
    return [(tokens[left], tokens[right]) for _, _, _, _, left, right in found]


def _bpe(vocabulary: Mapping[str, int], merges: Any, **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **settings,
        "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _added(file: Gguf, tokens: list[str], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tokens that are never split, as the file writes them: control tokens are special."""
    kinds = dict(enumerate(_numbers(file, "token_type")))
    control = {number for number, text in enumerate(tokens) if kinds.get(number) in (_CONTROL, _UNKNOWN)}
    control |= {number for number, text in enumerate(tokens) if text in _ENDS} | set(ids.values())
    whole = {number for number in range(len(tokens)) if kinds.get(number) == _USER_DEFINED}
    name = str(file.metadata.get("general.name", "")).lower()
    takes_blanks = any(known in name for known in _TAKES_BLANKS)
    return [
        {
            "id": number, "content": tokens[number], "single_word": False, "lstrip": False,
            "rstrip": takes_blanks and tokens[number] not in _KEEPS_BLANKS,
            "normalized": False, "special": number in control,
        }
        for number in sorted(control | whole)
        if tokens[number]
    ]  # fmt: skip


def _frame(file: Gguf, kind: object, tokens: list[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The tokens before and after a text."""
    begins = kind == "llama" or _split_name(file) in BEGINS
    first = file.metadata.get("tokenizer.ggml.add_bos_token", begins) is True and "bos" in ids
    last = file.metadata.get("tokenizer.ggml.add_eos_token", False) is True and "eos" in ids
    if not first and not last:
        return _BYTES | {"trim_offsets": False} if kind == "gpt2" else None

    def part(letter: str, segment: int) -> list[dict[str, Any]]:
        before = [{"SpecialToken": {"id": tokens[ids["bos"]], "type_id": segment}}] if first else []
        after = [{"SpecialToken": {"id": tokens[ids["eos"]], "type_id": segment}}] if last else []
        return [*before, {"Sequence": {"id": letter, "type_id": segment}}, *after]

    used = [tokens[ids[role]] for role, wanted in (("bos", first), ("eos", last)) if wanted]
    known = {text: number for number, text in enumerate(tokens) if text in used}
    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": {text: {"id": text, "ids": [known[text]], "tokens": [text]} for text in used},
    }


def _split_name(file: Gguf) -> str | None:
    name = file.metadata.get(_SPLIT)
    return name if isinstance(name, str) else None


def _chat_template(file: Gguf) -> str | list[dict[str, str]] | None:
    main = file.metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    others = {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix) and isinstance(value, str)
    }
    if not others:
        return main if isinstance(main, str) else None
    if isinstance(main, str):
        others = {"default": main} | others
    return [{"name": name, "template": value} for name, value in others.items()]


def _texts(file: Gguf, name: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    return found if isinstance(found, list) and all(isinstance(value, str) for value in found) else []


def _numbers(file: Gguf, name: str) -> list[float]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    return found if isinstance(found, list) and all(isinstance(value, int | float) for value in found) else []


def _unsupported(file: Gguf, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"No tokenizer can be made from {file.path}: {why}. Set --tokenizer (tokenizer of LLM) to the original "
        "model, a folder or hub id; or set --skip-tokenizer-init to work with token ids alone."
    )
