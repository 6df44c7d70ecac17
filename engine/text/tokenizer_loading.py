"""Loading tokenizers from folders and the hub, without running any code that comes with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from engine.configs.alone import take_configs_alone
from engine.configs.listing import list_models_once
from engine.errors import ModelLoadError
from engine.host.resident import give_back
from engine.interface.outputs import EngineInfo
from engine.text.chat_templates import read_template
from engine.text.plain import read_plain
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.tokenizer")

# A folder that has a tokenizer contains at least one of these.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "vocab.json",
    "vocab-*.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "*.spm",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
)
# Classes that transformers lacks, with classes that read the same files. Their inputs begin with the token of the
# language to translate into (arXiv:2210.11621).
TARGET_MARKED = {"SMALL100Tokenizer": "M2M100Tokenizer"}
# Classes that consist of a tokenizer.json and nothing more.
GENERIC = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
# Kinds of models for which `AutoTokenizer` may still choose another class.
ELSEWISE = frozenset(
    {
        "hyperclovax_vision_v2", "ministral", "ministral3", "mistral", "mistral3", "mistral_large4", "mixtral",
        "pixtral", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2", "voxtral",
        "voxtral_realtime",
    }
)  # fmt: skip
_SHOWN = 5  # tokens that a message lists
# What a GGUF file's folder says if no tokenizer can be made from the file (`engine.model.gguf.folder`).
NO_TOKENIZER = "no_tokenizer.txt"
# Files that say which tokenizer class to use, and complete it.
COMPANION_FILES = ("config.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja")


def load_tokenizer(
    path_or_id: str | Path,
    revision: str | None = None,
    hf_token: str | None = None,
    *,
    lower_case: bool = False,
    chat_template: str | None = None,
    alone: bool = False,
) -> Tokenizer | None:
    """Load a model's tokenizer, without running any code that comes with it. Raises ModelLoadError if the tokenizer
    cannot be fetched, or its files cannot be read; ConfigError if the chat template does not exist.

    Args:
        path_or_id: a folder, or a model's id on the hub (offline mode is respected).
        revision: branch, tag or commit on the hub.
        hf_token: access token for the hub.
        lower_case: texts are lower-cased before they are tokenised (`EngineInfo.lower_case`).
        chat_template: replaces the tokenizer's own template (see `read_template`).
        alone: if `transformers` has to read the tokenizer, it does so without torch, in this whole process from then on
            (`engine.configs.alone`).

    Returns: The tokenizer, or None if there are no tokenizer files at all.
    """
    template = None if chat_template is None else read_template(chat_template)
    folder = Path(path_or_id)
    if not folder.is_dir():
        folder = _download(str(path_or_id), revision, hf_token)
    if (why := folder / NO_TOKENIZER).is_file():
        raise ModelLoadError(why.read_text(encoding="utf-8"))
    if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
        return None
    try:
        marked: Literal["source", "target"] = "target" if _class_name(folder) in TARGET_MARKED else "source"
        hf = _load(folder, alone)
        if template is not None:
            hf.chat_template = template
        loaded = Tokenizer(hf, lower_case=lower_case, marked_side=marked)
    except Exception as error:  # tokenizers raise bare exceptions of many kinds
        raise ModelLoadError(
            f"The tokenizer in {folder} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())}). A "
            "complete tokenizer.json is enough; SentencePiece's files (*.model, *.spm) need the package sentencepiece "
            "(pip install sentencepiece), or tiktoken. To use the model with token ids only, set "
            "--skip-tokenizer-init (skip_tokenizer_init of LLM)."
        ) from error
    give_back()
    return loaded


def give_template(info: EngineInfo, tokenizer: Tokenizer | None) -> None:
    """Give the tokenizer the chat template `plain` if it has none and the model has no roles: it reads images, then a
    text."""
    if tokenizer is not None and tokenizer.chat_template is None and info.vision is not None and info.vision.leading:
        tokenizer.chat_template = read_template("plain")


def check_vocabulary(info: EngineInfo, tokenizer: Tokenizer | None) -> None:
    """Refuse a tokenizer that was made for a larger vocabulary than the model's, and warn of single tokens beyond it.
    Raises ModelLoadError if the tokenizer has more tokens than the model, not counting added ones."""
    size = max(info.vocab_size, info.encoder_vocab_size or 0)
    if tokenizer is None or not size:  # a model without a vocabulary reads no tokens
        return
    if tokenizer.plain_size > size:
        raise ModelLoadError(
            f"The tokenizer of {info.model} has {tokenizer.plain_size} tokens, but the model's vocabulary has "
            f"{size}: it belongs to another model. Set --tokenizer (tokenizer of LLM) to the model's own "
            f"tokenizer, or set --skip-tokenizer-init (skip_tokenizer_init of LLM) to use token ids only."
        )
    if beyond := tokenizer.added_beyond(size):
        shown = ", ".join(f"{text!a} ({token})" for token, text in list(beyond.items())[:_SHOWN])
        logger.warning(
            "The tokenizer of %s has %d added tokens outside the model's vocabulary (ids 0 to %d): %s%s. Texts that "
            "contain one are refused.",
            info.model, len(beyond), size - 1, shown, ", ..." * (len(beyond) > _SHOWN),
        )  # fmt: skip


def _read(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if the file is missing."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _class_name(folder: Path) -> str:
    """The class that a tokenizer_config.json names, "" if it names none."""
    return str(_read(folder / "tokenizer_config.json").get("tokenizer_class", ""))


def is_generic(folder: Path) -> bool:
    """Whether `AutoTokenizer` would read only the folder's tokenizer.json. It would also import torch and the model's
    code, which takes seconds."""
    settings = _read(folder / "tokenizer_config.json")
    if settings.get("made_from") == "gguf":  # whatever class the model's kind would have
        return True
    return (
        (folder / "tokenizer.json").is_file()
        and settings.get("tokenizer_class") in GENERIC
        and "auto_map" not in settings
        and _read(folder / "config.json").get("model_type") not in ELSEWISE
    )


def _load(folder: Path, alone: bool) -> Any:
    generic = is_generic(folder)
    if generic and (plain := read_plain(folder, _read(folder / "tokenizer_config.json"))) is not None:
        return plain
    list_models_once()
    if alone:
        take_configs_alone()
    import transformers
    from transformers import PreTrainedTokenizerFast  # slow to import

    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if generic:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **settings)
    from transformers import AutoTokenizer  # slower still

    if (name := TARGET_MARKED.get(_class_name(folder))) is not None:
        return getattr(transformers, name).from_pretrained(str(folder), **settings)
    try:
        return AutoTokenizer.from_pretrained(str(folder), **settings)
    except Exception:
        # Marian's class reads no tokenizer.json, and others need packages or files that a tokenizer.json makes
        # unnecessary.
        if not (folder / "tokenizer.json").is_file():
            raise
        try:
            return PreTrainedTokenizerFast.from_pretrained(str(folder), **settings)
        except Exception as second:
            logger.debug("tokenizer.json alone does not make a tokenizer either: %s", second)
        raise


def _download(model: str, revision: str | None, hf_token: str | None) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    patterns = [*TOKENIZER_FILES, *COMPANION_FILES]
    try:
        return Path(snapshot_download(model, revision=revision, token=hf_token, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{model!r} is not a local folder, and its tokenizer cannot be downloaded from the hub"
            f"{'' if revision is None else f' at revision {revision!r}'} ({type(error).__name__}: {error}). Check the "
            "name and the revision, set HF_TOKEN for a gated model, or give a folder."
        ) from error
