"""Reads sentence-transformers' module configs: a checkpoint's settings for embeddings.

`modules.json` lists the parts of a pipeline in order: the transformer, the pooling, and the layers that map the pooled
vector. Each has a config in its own folder. Types are Python classes; only their names are read, and nothing is
imported. (https://sbert.net/docs/sentence_transformer/usage/custom_models.html)
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.outputs import PoolingMode, SideInfo

logger = logging.getLogger("octavo.model")

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# The transformer's own settings; the others are names from old versions.
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
# Old configs have a switch for each kind of pooling; the order is that of the concatenated vectors.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES: dict[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Classes of torch.nn that a dense layer may name: elementwise, without weights or settings.
ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "LeakyReLU", "ELU", "SELU", "CELU", "ReLU6", "Mish",
    "Softplus", "Softsign", "Tanhshrink", "Hardtanh", "Hardswish", "Hardsigmoid", "LogSigmoid",
)  # fmt: skip
_TORCH_MODULES = ("torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn")
_VECTOR, _TOKENS = "sentence_embedding", "token_embeddings"
# Supported settings of a Transformer: its task, the part of its output that is used, and the name of that part.
_ENCODER = ("feature-extraction", "last_hidden_state", _TOKENS)
_CROSS_ENCODER = ("sequence-classification", "logits", "scores")
_SPLADE = ("fill-mask", "logits", _TOKENS)
_UNLIMITED = 10**9  # transformers writes 1e30 if a tokenizer has no limit
# PyLate's defaults.
_PYLATE_MARKS = {"query": "[Q] ", "document": "[D] "}
_PYLATE_LENGTHS = {"query": 32, "document": 180}


@dataclass(frozen=True, slots=True)
class OwnFile:
    """Weights in a separate safetensors file."""


@dataclass(frozen=True, slots=True)
class AmongModel:
    """Weights among those of the transformer."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """Weights in a torch file: a layer's state."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """activation(x @ weight.T + bias), plus x itself or a matrix of it if the layer is residual.

    `activation` is the name of a torch.nn class; `folder` contains the weights, and `source` says in which form.
    """

    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool
    folder: Path
    source: OwnFile | AmongModel | TorchFile = OwnFile()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayer:
    """A layer norm of the vector; `folder` contains the weights."""

    size: int
    folder: Path


@dataclass(frozen=True, slots=True)
class UnitLayer:
    """The vector divided by its Euclidean norm, between other layers."""


Layer = DenseLayer | NormLayer | UnitLayer


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """A weight for each token of the vocabulary, from a masked-language-model head's logits over all tokens of an
    input: the largest, or the sum, of log(1 + relu(x)) (SPLADE, arXiv:2107.05720, arXiv:2109.10086). `logarithms`: how
    often log(1 + x) is applied."""

    pooling: Literal["max", "sum"] = "max"
    logarithms: int = 1


@dataclass(frozen=True, slots=True)
class InputWeights:
    """A weight for each distinct token of an input: the largest relu(layer(x)) over its occurrences (arXiv:2402.03216,
    3.2). Special tokens have none."""

    layer: DenseLayer


SparseVectors = VocabularyWeights | InputWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVectors:
    """A vector of norm 1 for each token (ColBERT, arXiv:2004.12832; arXiv:2402.03216, 3.2)."""

    layers: tuple[Layer, ...]  # the layers that make vectors from hidden states
    first: int = 0  # tokens at the beginning of an input without a vector
    # the rules for a "query" and a "document"; {} if they are read like any text
    sides: dict[str, SideInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The settings of the folder; for a folder without modules.json, the defaults."""

    transformer: Path  # the folder with the transformer's config.json, weights and tokenizer
    # kinds of pooling whose vectors are concatenated; empty if the pipeline has no pooling, None if the folder does not
    # say
    modes: tuple[PoolingMode, ...] | None = None
    width: int | None = None  # features of the pooled hidden states, if the folder says so
    layers: tuple[Layer, ...] = ()  # the layers that map the pooled vector, in order
    normalize: bool = True  # whether the last step divides by the norm
    include_prompt: bool = True  # whether the tokens of a prompt count in the pooling
    max_seq_length: int | None = None  # maximum tokens of an input, if the folder says so
    lower_case: bool = False  # whether texts are lower-cased before they are tokenised
    prompts: dict[str, str] = field(default_factory=dict)  # texts to put before inputs, by name
    default_prompt: str | None = None
    # for a cross-encoder, the dotted path of the class that turns its outputs into scores
    activation: str | None = None
    sparse: SparseVectors | None = None  # the rule for sparse vectors, if the folder has one
    tokens: TokenVectors | None = None  # the rule for token vectors, if the folder has one

    def embedding_size(self, hidden_size: int) -> int:
        """Features of the pipeline's vectors for hidden states of this size. Raises ModelLoadError if it is made for
        another size, or the sizes of two layers do not match."""
        if self.width not in (None, hidden_size):
            raise ModelLoadError(
                f"{self.transformer} has hidden states of {hidden_size} features, but the Pooling of its {MODULES} is "
                f"made for {self.width}."
            )
        return size_after(self.layers, len(self.modes or ()) * hidden_size)


def size_after(layers: Sequence[Layer], size: int) -> int:
    """Features of the vectors after these layers, from vectors with `size` features. Raises ModelLoadError if a layer
    is made for another size than it gets."""
    for layer in layers:
        if isinstance(layer, UnitLayer):
            continue
        wanted = layer.inputs if isinstance(layer, DenseLayer) else layer.size
        if wanted != size:
            source = layer.source if isinstance(layer, DenseLayer) else OwnFile()
            file = source.name if isinstance(source, TorchFile) else "config.json"
            raise ModelLoadError(
                f"{layer.folder / file} is made for vectors of {wanted} features, but the module before it returns "
                f"{size}."
            )
        size = layer.outputs if isinstance(layer, DenseLayer) else size
    return size


def read_pipeline(root: Path) -> Pipeline:
    """Read sentence-transformers' configs in a checkpoint's folder. Raises ModelLoadError if a file is missing or
    damaged, or has invalid values; UnsupportedModelError if a module, or a setting of one, is not implemented."""
    if not (root / MODULES).is_file():
        return Pipeline(transformer=root)
    modules = [_Module.of(root, entry) for entry in _modules(root / MODULES)]
    first = modules[0]
    if first.kind not in ("Transformer", "MLMTransformer"):
        raise first.refusal(f"a pipeline must begin with a Transformer, but this one begins with {first.kind}")
    settings = _settings(root / SETTINGS)
    kind = settings.get("model_type")
    splade = len(modules) > 1 and modules[1].kind == "SpladePooling"
    limits = _transformer(first, _CROSS_ENCODER if kind == "CrossEncoder" else _SPLADE if splade else _ENCODER)
    if splade:
        if len(modules) > 2:
            raise modules[2].refusal("nothing is implemented after SpladePooling")
        sparse, prompts = _splade(modules[1]), _prompts(root / SETTINGS, settings)
        return Pipeline(transformer=first.folder, modes=(), sparse=sparse, **limits, **prompts)
    if kind == "SparseEncoder" or first.kind == "MLMTransformer":
        raise first.refusal("the only supported sparse encoder is a masked language model with SpladePooling")
    if kind == "ColBERT" or any(module.is_pylate for module in modules):
        tokens = TokenVectors(layers=_token_layers(modules[1:]), sides=_sides(root / SETTINGS, settings))
        prompts = _prompts(root / SETTINGS, settings)
        prompts["prompts"] = dict.fromkeys(tokens.sides, "") | prompts["prompts"]
        # PyLate leaves the length of its last tokenisation there, and reads each side at the side's own length.
        limits["max_seq_length"] = None
        return Pipeline(transformer=first.folder, modes=(), tokens=tokens, **limits, **prompts)
    if kind == "CrossEncoder":
        if len(modules) > 1:
            raise modules[1].refusal("the only supported cross-encoder is a Transformer with a classification head")
        name = settings.get("activation_fn")
        named = name if isinstance(name, str) else None
        return Pipeline(transformer=first.folder, modes=(), activation=named, **limits)
    return Pipeline(transformer=first.folder, **limits, **_prompts(root / SETTINGS, settings), **_vector(modules[1:]))


@dataclass(frozen=True, slots=True)
class _Module:
    """An entry of modules.json: the class's name, and the folder with its files."""

    file: Path
    name: str
    kind: str
    folder: Path
    is_pylate: bool = False

    @classmethod
    def of(cls, root: Path, entry: Any) -> _Module:
        file = root / MODULES
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ModelLoadError(f"{file} is damaged: an entry has no type.")
        path = entry.get("path", "")
        if not isinstance(path, str) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ModelLoadError(f"{file} names the folder {path!r}; a module must lie in the checkpoint's folder.")
        package, _, kind = entry["type"].rpartition(".")
        is_pylate = package.partition(".")[0] == "pylate" and kind == "Dense"
        module = cls(file, str(entry.get("name", path)), kind, root / path, is_pylate)
        if package.partition(".")[0] != "sentence_transformers" and not is_pylate:
            raise module.refusal(f"{entry['type']} is custom code, and Octavo runs no code from a checkpoint")
        if kind not in _READERS:
            raise module.refusal(f"{entry['type']} is not implemented")
        return module

    def refusal(self, why: str) -> UnsupportedModelError:
        known = ", ".join(_READERS)
        return UnsupportedModelError(f"{self.file}, module {self.name!r}: {why}. Implemented are {known}.")

    def config(self, *, needed: bool = True) -> dict[str, Any]:
        return _object(self.folder / "config.json", needed=needed)

    def number(self, config: dict[str, Any], *names: str) -> int:
        """A size in its config, which may have one of several names."""
        value = next((config[name] for name in names if name in config), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{self.folder / 'config.json'}: {names[0]} must be a whole number, got {value!r}.")
        return value

    def on_vector(self, config: dict[str, Any]) -> None:
        """Refuse a module that reads or writes anything other than the pooled vector or, for PyLate's, token
        vectors."""
        works_on = _TOKENS if self.is_pylate else _VECTOR
        for name in ("module_input_name", "module_output_name"):
            if config.get(name) not in (None, works_on):
                raise self.refusal(f"{name} is {config[name]!r}, but only {works_on} is implemented")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file} is missing. Download the checkpoint again.") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON ({error}).") from error


def _object(file: Path, *, needed: bool = False) -> dict[str, Any]:
    """A JSON object; an empty one if an optional file is missing."""
    found = _read(file) if needed or file.is_file() else {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} is damaged: it contains no JSON object.")
    return found


def _modules(file: Path) -> list[Any]:
    found = _read(file)
    if not isinstance(found, list) or not found:
        raise ModelLoadError(f"{file} is damaged: it contains no list of modules.")
    return found


def _settings(file: Path) -> dict[str, Any]:
    """config_sentence_transformers.json; empty if there is none."""
    found = _object(file)
    kind = found.get("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "ColBERT"):
        raise UnsupportedModelError(
            f"{file}: model_type is {kind!r}; served are SentenceTransformer (one vector per text), CrossEncoder, "
            "SparseEncoder and ColBERT."
        )
    return found


def _prompts(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts must be an object that maps names to texts.")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name is {default!r}, but must be one of {', '.join(prompts)}.")
    return {"prompts": {name: text or "" for name, text in prompts.items()}, "default_prompt": default}


def _transformer(module: _Module, wanted: tuple[str, str, str]) -> dict[str, Any]:
    """The transformer's settings for its inputs. `wanted`: its task, the part of its output that is used, and the name
    of that part. Raises UnsupportedModelError if it reads texts, or answers, in a way other than by its hidden
    states."""
    if not (module.folder / "config.json").is_file():
        raise ModelLoadError(f"{module.file}: {module.folder} has no config.json, so it is not a transformer.")
    files = (module.folder / name for name in _TRANSFORMER_CONFIGS)
    file = next((file for file in files if file.is_file()), module.folder / _TRANSFORMER_CONFIGS[0])
    config = _object(file)
    task, states, output = wanted
    if config.get("transformer_task", task) != task:
        raise module.refusal(f"transformer_task is {config['transformer_task']!r} in {file.name}, not {task!r}")
    ways = config.get("modality_config") or {"text": {"method_output_name": states}}
    if not isinstance(ways, dict) or not isinstance(ways.get("text", {}), dict):
        raise ModelLoadError(f"{file}: modality_config must be an object whose values are objects.")
    if "message" in ways:
        raise module.refusal(f"{file.name} has texts rendered as chat messages, which is not implemented")
    if ways.get("text", {}).get("method_output_name") != states or config.get("module_output_name", output) != output:
        raise module.refusal(f"{file.name} asks for an output other than {states}, which is not implemented")
    for name in ("model_args", "model_kwargs", "config_args", "config_kwargs", "processing_kwargs", "query_expansion"):
        if config.get(name):
            logger.warning("%s: %s is ignored: %s", file, name, config[name])
    length = config.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelLoadError(f"{file}: max_seq_length must be a whole number, got {length!r}.")
    if length is None:  # current versions then leave it to the tokenizer
        most = _object(module.folder / "tokenizer_config.json").get("model_max_length")
        length = int(most) if isinstance(most, int | float) and 1 <= most < _UNLIMITED else None
    return {"max_seq_length": length, "lower_case": config.get("do_lower_case") is True}


def _splade(module: _Module) -> VocabularyWeights:
    """The rule by which a SpladePooling makes a sparse vector."""
    config = module.config()
    pooling, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise module.refusal(f"pooling_strategy is {pooling!r}, which is neither max nor sum")
    logarithms = {"relu": 1, "log1p_relu": 2}.get(activation) if isinstance(activation, str) else None
    if logarithms is None:
        raise module.refusal(f"activation_function is {activation!r}, which is neither relu nor log1p_relu")
    return VocabularyWeights(pooling, logarithms)


def _sides(file: Path, settings: dict[str, Any]) -> dict[str, SideInfo]:
    """PyLate's rules for reading queries and documents (`ColBERT.preprocess` and `encode` of its models/colbert.py)."""
    known = {name: value for name, value in settings.items() if value is not None}
    fills = known.get("do_query_expansion", True) is not False
    words = known.get("skiplist_words", list(string.punctuation))
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ModelLoadError(f"{file}: skiplist_words must be a list of texts.")
    marks = {name: known.get(f"{name}_prefix", text) for name, text in _PYLATE_MARKS.items()}
    if not all(isinstance(text, str) for text in marks.values()):
        raise ModelLoadError(f"{file}: query_prefix and document_prefix must be texts.")
    lengths = {name: token_length(file, known, f"{name}_length", most) for name, most in _PYLATE_LENGTHS.items()}
    query = SideInfo(
        marker=marks["query"] or None,
        length=lengths["query"],
        filled=fills,
        attended=fills and known.get("attend_to_expansion_tokens") is True,
    )
    document = SideInfo(marker=marks["document"] or None, length=lengths["document"], ignored=tuple(words))
    return {"query": query, "document": document}


def token_length(file: Path, settings: Mapping[str, Any], name: str, default: int) -> int:
    """A number of tokens in a file's settings. Raises ModelLoadError if it is not a number of tokens."""
    value = settings.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{file}: {name} must be a whole number of tokens, got {value!r}.")
    return value


def _token_layers(modules: list[_Module]) -> tuple[Layer, ...]:
    """The layers with which PyLate makes token vectors."""
    layers = []
    for module in modules:
        if module.kind not in ("Dense", "Normalize", "Dropout"):
            raise module.refusal(f"{module.kind} is not implemented for vectors of tokens")
        layer = _READERS[module.kind](module)
        if layer is not None:
            layers.append(layer)
    return tuple(layers)


def _vector(modules: list[_Module]) -> dict[str, Any]:
    """The pooling of the hidden states, and the layers after it."""
    if not modules or modules[0].kind != "Pooling":
        # Without pooling there are no vectors, but the model may have a head that needs none.
        if modules:
            raise modules[0].refusal(f"{modules[0].kind} comes before any Pooling")
        return {"modes": ()}
    pooling = modules[0].config()
    modes = _pooling_modes(modules[0], pooling)
    layers: list[Layer] = []
    for module in modules[1:]:
        layer = _READERS[module.kind](module)
        # Once normalised, a vector stays so.
        if layer is not None and not (isinstance(layer, UnitLayer) and layers and layer == layers[-1]):
            layers.append(layer)
    normalize = bool(layers) and isinstance(layers[-1], UnitLayer)
    names = ("embedding_dimension", "word_embedding_dimension")
    return {
        "modes": modes,
        "width": modules[0].number(pooling, *names) if any(name in pooling for name in names) else None,
        "layers": tuple(layers[:-1] if normalize else layers),
        "normalize": normalize,
        "include_prompt": pooling.get("include_prompt", True) is not False,
    }


def _pooling_modes(module: _Module, config: dict[str, Any]) -> tuple[PoolingMode, ...]:
    asked = config.get("pooling_mode")
    if asked is None:
        asked = [mode for switch, mode in _SWITCHES.items() if config.get(switch)] or "mean"
    names = [asked] if isinstance(asked, str) else asked
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{module.folder / 'config.json'}: pooling_mode must be a name or a list of names.")
    for name in names:
        if name not in _MODES:
            raise module.refusal(f"pooling_mode {name!r} must be one of {', '.join(_MODES)}")
    return tuple(_MODES[name] for name in names)


def _dense(module: _Module) -> DenseLayer:
    config = module.config()
    module.on_vector(config)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = torch_class(name) if isinstance(name, str) else "Identity" if name is None else None
    if activation not in ACTIVATIONS:
        raise module.refusal(f"activation_function is {name!r}; of torch.nn, {', '.join(ACTIVATIONS)} are implemented")
    return DenseLayer(
        inputs=module.number(config, "in_features"),
        outputs=module.number(config, "out_features"),
        bias=config.get("bias", True) is not False,
        activation=activation,
        residual=config.get("use_residual") is True,
        folder=module.folder,
    )


def _normalize(module: _Module) -> UnitLayer:
    module.on_vector(module.config(needed=False))
    return UnitLayer()


def _layer_norm(module: _Module) -> NormLayer:
    return NormLayer(size=module.number(module.config(), "dimension"), folder=module.folder)


def _dropout(module: _Module) -> None:
    """Dropout belongs to training."""


def _second(module: _Module) -> Layer:
    raise module.refusal(f"there is more than one {module.kind}")


# The layers after the pooling. The transformer and the pooling themselves are read with the pipeline.
_READERS: dict[str, Callable[[_Module], Layer | None]] = {
    "Transformer": _second,
    "MLMTransformer": _second,
    "Pooling": _second,
    "SpladePooling": _second,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": _dropout,
}


def torch_class(path: str) -> str | None:
    """The torch.nn class that a dotted path names; None for anything else."""
    package, _, name = path.rpartition(".")
    return name if package in _TORCH_MODULES else None
