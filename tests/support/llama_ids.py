"""Token ids that llama.cpp gives to texts, in `llama_ids.json`: the oracle for tokenizers of GGUF files.

The file holds texts, two small vocabularies, and the ids of these texts for each kind of tokenizer that a vocabulary
serves, and for two published models. A kind with a `base` lists the texts alone whose ids differ from the base's. With
llama-cpp-python and gguf installed, this writes them anew:

    python tests/support/llama_ids.py SmolLM2-135M-Instruct=FILE.gguf gemma-3-270m=FILE.gguf
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_suffix(".json")
SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
         "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip


class Kind(NamedTuple):
    """A kind of tokenizer.

    Attributes:
        vocabulary: its name.
        metadata: more of a file.
        base: the kind that it differs from in some texts.
        defined: the vocabulary's user-defined tokens are such; otherwise they are ordinary ones.
    """

    vocabulary: str
    metadata: Mapping[str, Any]
    base: str | None = None
    defined: bool = True


def _splits(name: str, base: str | None = "gpt-2") -> Kind:
    return Kind("bytes", {"tokenizer.ggml.pre": name}, base)


KINDS = {
    "gpt-2": _splits("gpt-2", None),
    **{name: _splits(name) for name in ("smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o")},
    "llama": Kind("scores", {}),
    "unspaced": Kind("scores", {"tokenizer.ggml.add_space_prefix": False}, "llama"),
    "phi-3": Kind("scores", {"general.name": "Phi-3 tiny"}, "llama", defined=False),
}
SAME = {
    "phi-2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe",
    "falcon-h1": "llama-bpe", "lfm2": "llama-bpe", "pixtral": "llama-bpe", "smaug-bpe": "dbrx", "megrez": "qwen2",
    "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "llama4": "gpt-4o",
}  # fmt: skip
"""Other names of kinds, for which llama.cpp gives the same ids."""


class LlamaIds:
    """What the file holds."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
        self.published: list[str] = self.content["texts"]

    def metadata(self, kind: Kind) -> dict[str, Any]:
        """Of a GGUF file with that tokenizer."""
        held = {**self.content["vocabularies"][kind.vocabulary], **kind.metadata}
        if not kind.defined:
            held["tokenizer.ggml.token_type"] = [1 if kind == 4 else kind for kind in held["tokenizer.ggml.token_type"]]
        return held

    def texts(self, kind: Kind) -> list[str]:
        """All texts, and each token that is never cut alone and between others."""
        whole = self.whole(kind)
        return [*self.published, *(made for text in whole for made in (text, f"a{text}  b", f" {text}{text}\n"))]

    def whole(self, kind: Kind, *types: int) -> list[str]:
        """Tokens of the vocabulary of these types; without types all that are never cut."""
        held = self.content["vocabularies"][kind.vocabulary]
        typed = zip(held["tokenizer.ggml.tokens"], held["tokenizer.ggml.token_type"], strict=True)
        return [text for text, number in typed if number in (types or (2, 3, 4))]

    def ids(self, name: str) -> list[list[int]]:
        """Of each text, without the tokens that frame it."""
        stored = self.content["ids"][name]
        if (base := KINDS[name].base if name in KINDS else None) is not None:
            whole = dict(enumerate(self.content["ids"][base]))
            stored = (whole | {int(place): ids for place, ids in stored.items()}).values()
        return [[int(part) for part in ids.split()] for ids in stored]

    def frame(self, name: str) -> list[int]:
        """Ids of the text "a" and of what frames it."""
        return [int(part) for part in self.content["frames"][name].split()]


def write_vocabulary(
    path: Path, metadata: Mapping[str, Any], architecture: str = "llama", rows: int | None = None
) -> Path:
    """A GGUF file with a tokenizer and hardly a model, whose table has as many rows as there are tokens, or `rows`."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), architecture)
    held = {f"{architecture}.{name}": value for name, value in SIZES.items()} | dict(metadata)
    if architecture == "gemma3":
        held["gemma3.attention.sliding_window"] = 16
    put: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        list: writer.add_array,
    }  # fmt: skip
    for name, value in held.items():
        put[type(value)](name, value)
    rows = rows or len(held["tokenizer.ggml.tokens"])
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _asker(path: Path) -> Callable[[str, bool], str]:
    """llama.cpp's answer for a text, with the tokens that frame it or without."""
    import llama_cpp

    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    vocabulary = llama_cpp.llama_model_get_vocab(model)

    def ask(text: str, framed: bool) -> str:
        raw = text.encode()
        room = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), room, len(room), framed, True)
        if count < 0:
            raise RuntimeError(f"{text!r} has more than {len(room)} tokens")
        return " ".join(map(str, room[:count]))

    return ask


def main(arguments: Sequence[str]) -> None:
    """Write the file's ids and frames anew."""
    held = LlamaIds()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: (write_vocabulary(Path(folder) / f"{name}.gguf", held.metadata(kind)), held.texts(kind))
            for name, kind in KINDS.items()
        }
        files |= {name: (Path(path), held.published) for name, _, path in (each.partition("=") for each in arguments)}
        found: dict[str, list[str]] = {}
        for name, (path, texts) in files.items():
            ask = _asker(path)
            found[name] = [ask(text, False) for text in texts]
            held.content["frames"][name] = ask("a", True)
            for other in (other for other, kind in SAME.items() if kind == name):
                path = write_vocabulary(path, held.metadata(_splits(other)))
                ask = _asker(path)
                if [ask(text, False) for text in texts] != found[name]:
                    raise RuntimeError(f"{other} does not split texts as {name} does")
    held.content["ids"] = {}
    for name, ids in found.items():
        base = KINDS[name].base if name in KINDS else None
        differ = {str(i): each for i, each in enumerate(ids) if base is not None and each != found[base][i]}
        held.content["ids"][name] = ids if base is None else differ
    lines = (f"{json.dumps(part)}: {json.dumps(value, ensure_ascii=False)}" for part, value in held.content.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
