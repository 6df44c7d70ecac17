"""Module configs of sentence-transformers in a checkpoint's folder: its arithmetic, spelled out in torch, is ours.

`tests/pooled/test_real_embeddings.py` compares with sentence-transformers itself, where it is installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.driving import finish, make_engine, watching
from support.sentence import (
    DROPOUT,
    HIDDEN,
    NORMALIZE,
    POOLINGS,
    POSITIONS,
    VOCAB,
    Module,
    dense,
    hidden_states,
    layer_norm,
    mapped,
    pipeline_folder,
    pooling,
    save_bert,
    save_qwen3,
    write,
)

from engine import Engine, InvalidRequestError, PoolingParams
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import checkpoint, sentence
from engine.model.abilities import find_abilities
from engine.model.families import build_spec

LENGTHS = (1, 2, 7, 40, 300, 19)
NN = "torch.nn.modules.activation."
# What old versions write, and what 6.2 does.
KINDS = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.Dropout",
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("bert")
    return path, save_bert(path)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_qwen3(path)


def texts() -> list[list[int]]:
    """Token ids of every length in LENGTHS."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def embed(engine: Engine, inputs: Sequence[Sequence[int]], **params: Any) -> list[np.ndarray]:
    """The vectors of these inputs, asked for at once."""
    for i, tokens in enumerate(inputs):
        engine.add_request(str(i), list(tokens), PoolingParams(**params))
    outputs = finish(engine)
    found = [outputs[str(i)].pooled for i in range(len(inputs))]
    return [pooled.values()[0] for pooled in found if pooled is not None]


def assert_close(ours: Sequence[np.ndarray], wanted: Sequence[torch.Tensor]) -> None:
    """Equal to 1e-5 of the largest value."""
    for vector, reference in zip(ours, wanted, strict=True):
        assert vector.shape == tuple(reference.shape)
        assert np.abs(vector - reference.numpy()).max() <= 1e-5 * reference.abs().max()


def pooled(states: torch.Tensor, modes: Sequence[str], skip: int = 0) -> torch.Tensor:
    return torch.cat([POOLINGS[mode](states, skip) for mode in modes])


SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_CONFIGS: dict[str, tuple[Module, tuple[str, ...]]] = {
    **{f"switch-{mode}": (pooling(**{switch: True}), (mode,)) for switch, mode in SWITCHES.items()},
    **{f"name-{mode}": (pooling(mode), (mode,)) for mode in POOLINGS},
    # Switches have an order of their own; a list has its own.
    "switches": (
        pooling(**dict.fromkeys(reversed(SWITCHES), True)),
        ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
    ),
    "list": (pooling(["weightedmean", "cls", "max"]), ("weightedmean", "cls", "max")),
    "list-of-one": (pooling(["cls"]), ("cls",)),
    "name-over-switch": (pooling("max", pooling_mode_cls_token=True), ("max",)),
    "no-switch-set": (pooling(pooling_mode_cls_token=False, pooling_mode_mean_tokens=False), ("mean",)),
}


@pytest.mark.parametrize("name", POOLING_CONFIGS)
def test_pooling(name: str, bert: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = bert
    module, modes = POOLING_CONFIGS[name]
    engine = make_engine(pipeline_folder(tmp_path / "m", path, [module]))
    info = engine.info
    assert (info.normalize, info.has_projection, info.embedding_size) == (False, False, len(modes) * HIDDEN)
    wanted = [pooled(hidden_states(model, tokens), modes) for tokens in texts()]
    assert_close(embed(engine, texts()), wanted)
    assert_close(embed(engine, texts(), normalize=True), [torch.nn.functional.normalize(v, dim=0) for v in wanted])


PIPELINES: dict[str, list[Module]] = {
    "normalize": [NORMALIZE],
    "dense-tanh": [dense(HIDDEN, 48)],
    "dense-dense-normalize": [dense(HIDDEN, 48, "torch.nn.modules.linear.Identity"), dense(48, 20), NORMALIZE],
    "no-bias": [dense(HIDDEN, 8, NN + "ReLU", bias=False)],
    "normalize-first": [NORMALIZE, dense(HIDDEN, 40), NORMALIZE, layer_norm(40)],
    "layer-norm": [layer_norm(HIDDEN), DROPOUT, dense(HIDDEN, 12), NORMALIZE, NORMALIZE],
    "normalize-twice": [NORMALIZE, DROPOUT, NORMALIZE],
    "residual": [dense(HIDDEN, HIDDEN, use_residual=True), dense(HIDDEN, 10, use_residual=True)],
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("today", [False, True], ids=["old", "6.2"])
def test_layers(name: str, today: bool, bert: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = bert
    modules = [pooling("mean"), *PIPELINES[name]]
    if today:
        modules = [Module(KINDS[m.type.rpartition(".")[2]], m.config, m.tensors) for m in modules]
    kind = KINDS["Transformer"] if today else "sentence_transformers.models.Transformer"
    engine = make_engine(pipeline_folder(tmp_path / "m", path, modules, kind=kind))
    wanted = [mapped(pooled(hidden_states(model, tokens), ("mean",)), modules[1:]) for tokens in texts()]
    found = embed(engine, texts())
    assert_close(found, wanted)
    last = [module for module in modules if not module.type.endswith("Dropout")][-1]
    assert engine.info.normalize == last.type.endswith("Normalize")
    assert engine.info.embedding_size == len(wanted[0])
    assert engine.info.has_projection == any(module.tensors for module in modules)
    # The first features of the last vector, normalised again where it was; never below what is there.
    fewer = [vector[:5] for vector in wanted]
    if engine.info.normalize:
        fewer = [vector / vector.norm() for vector in fewer]
    assert_close(embed(engine, texts(), dimensions=5), fewer)
    with pytest.raises(InvalidRequestError, match=f"embeddings have only {len(wanted[0])}"):
        engine.add_request("more", [1], PoolingParams(dimensions=len(wanted[0]) + 1))
    if name == "dense-dense-normalize":
        plain = [mapped(pooled(hidden_states(model, tokens), ("mean",)), modules[1:-1]) for tokens in texts()]
        assert_close(embed(engine, texts(), normalize=False), plain)
        other = [mapped(hidden_states(model, tokens)[0], modules[1:]) for tokens in texts()]
        assert_close(embed(engine, texts(), pooling="cls"), other)


def test_every_activation(bert: tuple[Path, Any], tmp_path: Path) -> None:
    """Several vectors side by side feed a dense layer, with each function in turn."""
    path, model = bert
    states = hidden_states(model, texts()[3])
    for name in sentence.ACTIVATIONS:
        package = "torch.nn.modules.linear." if name == "Identity" else NN
        modules = [pooling(["cls", "mean"]), dense(2 * HIDDEN, 16, package + name)]
        engine = make_engine(pipeline_folder(tmp_path / name, path, modules))
        assert_close(embed(engine, [texts()[3]]), [mapped(pooled(states, ("cls", "mean")), modules[1:])])
        with pytest.raises(InvalidRequestError, match="combines cls and mean pooling"):
            engine.add_request("one", [1], PoolingParams(pooling="cls"))
        engine.close()


def test_weights_in_half_precision(bert: tuple[Path, Any], tmp_path: Path) -> None:
    """What is stored in 16 bits is read, and computed with in float32."""
    path, model = bert
    layer = dense(HIDDEN, 24)
    half = Module(layer.type, layer.config, {name: tensor.bfloat16() for name, tensor in layer.tensors.items()})
    engine = make_engine(pipeline_folder(tmp_path / "m", path, [pooling("cls"), half]))
    rounded = Module(layer.type, layer.config, {name: tensor.float() for name, tensor in half.tensors.items()})
    assert_close(embed(engine, texts()), [mapped(hidden_states(model, t)[0], [rounded]) for t in texts()])


@pytest.mark.parametrize("where", ["", "0_Transformer"])
def test_where_the_transformer_lies(where: str, bert: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = bert
    folder = pipeline_folder(tmp_path / "m", path, [pooling("cls")], transformer=where, limits={"max_seq_length": 77})
    engine = make_engine(folder)
    assert engine.info.model_path == str(folder / where)
    assert engine.info.max_model_len == 77
    short = [tokens for tokens in texts() if len(tokens) <= 77]
    assert_close(embed(engine, short), [hidden_states(model, tokens)[0] for tokens in short])


def test_a_decoder(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored; it still generates. Inputs are computed in parts."""
    path, model = qwen3
    modules = [pooling(pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False, include_prompt=True), NORMALIZE]
    settings = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}, "default_prompt_name": None}
    folder = pipeline_folder(tmp_path / "m", path, modules, settings=settings)
    engine = make_engine(folder, max_num_batched_tokens=32, max_num_seqs=8)
    info = engine.info
    assert (info.tasks, info.pooling_modes, info.normalize) == (("generate", "embed"), ("last",), True)
    assert (info.prompts, info.default_prompt, info.include_prompt) == (settings["prompts"], None, True)
    with watching(engine) as plans:
        found = embed(engine, texts())
    assert max(len(plan.pooling) for plan in plans) > 1
    assert sum(1 for plan in plans for row in plan.pooling if row.before is not None) > 5
    wanted = [hidden_states(model, tokens)[-1] for tokens in texts()]
    assert_close(found, [vector / vector.norm() for vector in wanted])
    # The weighted mean, as SGPT has it (arXiv:2202.08904), from the same states.
    weighted = [POOLINGS["weightedmean"](hidden_states(model, tokens), 0) for tokens in texts()]
    assert_close(embed(engine, texts(), pooling="weighted_mean", normalize=False), weighted)


@pytest.mark.parametrize("skip", [3, 8, 21])
@pytest.mark.parametrize("mode", POOLINGS)
def test_a_prompt_that_does_not_count(mode: str, skip: int, qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    """Its tokens are read and left out of the vector, whichever part of the input they end in."""
    path, model = qwen3
    folder = pipeline_folder(tmp_path / "m", path, [pooling(mode, include_prompt=False)])
    engine = make_engine(folder, max_num_batched_tokens=8, block_size=8, max_num_seqs=4)
    assert not engine.info.include_prompt
    tokens = texts()[3]
    with watching(engine) as plans:
        found = embed(engine, [tokens], skip_tokens=skip)
    assert len(plans) > 3
    assert_close(found, [POOLINGS[mode](hidden_states(model, tokens), skip)])


def test_a_masked_language_model_embeds(tmp_path: Path) -> None:
    model = save_bert(tmp_path / "base", "BertForMaskedLM")
    engine = make_engine(pipeline_folder(tmp_path / "m", tmp_path / "base", [pooling("mean"), dense(HIDDEN, 9)]))
    assert (engine.info.tasks, engine.info.embedding_size) == (("fill_mask", "embed", "token_embed", "sparse_embed"), 9)
    wanted = [mapped(hidden_states(model, tokens).mean(0), [dense(HIDDEN, 9)]) for tokens in texts()]
    assert_close(embed(engine, texts()), wanted)


def test_without_modules(bert: tuple[Path, Any], qwen3: tuple[Path, Any]) -> None:
    """Encoders: the mean; decoders: the last token; of norm 1."""
    for (path, model), pick in ((bert, lambda s: s.mean(0)), (qwen3, lambda s: s[-1])):
        wanted = [pick(hidden_states(model, tokens)) for tokens in texts()]
        assert_close(embed(make_engine(path), texts()), [vector / vector.norm() for vector in wanted])


@pytest.mark.parametrize(
    ("limits", "tokenizer", "asked", "expected"),
    [
        ({"max_seq_length": 100, "do_lower_case": True}, None, None, 100),
        ({"max_seq_length": 100}, {"model_max_length": 50}, None, 100),
        ({"max_seq_length": None}, {"model_max_length": 50}, None, 50),
        (None, {"model_max_length": 50}, None, 50),
        (None, {"model_max_length": int(1e30)}, None, POSITIONS),
        ({"max_seq_length": 9999}, None, None, POSITIONS),
        ({"max_seq_length": 100}, None, 200, 200),
        ({"max_seq_length": 100}, None, 60, 60),
    ],
)
def test_the_longest_input(
    limits: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
    asked: int | None,
    expected: int,
    bert: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [pooling("mean")], limits=limits)
    if tokenizer is not None:
        write(folder / "tokenizer_config.json", tokenizer)
    engine = make_engine(folder, max_model_len=asked)
    assert engine.info.max_model_len == expected
    assert engine.info.lower_case == bool(limits and limits.get("do_lower_case"))
    embed(engine, [[1] * expected])
    with pytest.raises(InvalidRequestError, match=f"{expected}"):
        engine.add_request("long", [1] * (expected + 1), PoolingParams())


def test_an_old_name_of_the_limits(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [pooling("mean")])
    write(folder / "sentence_xlm-roberta_config.json", {"max_seq_length": 12, "do_lower_case": False})
    assert sentence.read_pipeline(folder).max_seq_length == 12


def test_prompts(bert: tuple[Path, Any], tmp_path: Path) -> None:
    """Names without a text stand for no prompt."""
    settings = {
        "prompts": {"query": "query: ", "passage": "passage: ", "document": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "cosine",
    }
    found = sentence.read_pipeline(pipeline_folder(tmp_path / "m", bert[0], [pooling("mean")], settings=settings))
    assert found.prompts == {"query": "query: ", "passage": "passage: ", "document": ""}
    assert found.default_prompt == "query"


IDENTITY = "torch.nn.modules.linear.Identity"
CROSS_ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "default": ({}, None, "sigmoid"),
    "several": ({"num_labels": 3}, None, "softmax"),
    "today": ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, None, "none"),
    "legacy": ({"sbert_ce_default_activation_function": IDENTITY}, None, "none"),
    "legacy-sigmoid": ({"num_labels": 3, "sbert_ce_default_activation_function": NN + "Sigmoid"}, None, "sigmoid"),
    "softmax": ({"sbert_ce_default_activation_function": NN + "Softmax"}, None, "softmax"),
    "today-first": (
        {"sentence_transformers": {"activation_fn": NN + "Sigmoid"}, "sbert_ce_default_activation_function": IDENTITY},
        None,
        "sigmoid",
    ),
    "short": ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, None, "none"),
    "foreign": ({"sbert_ce_default_activation_function": "os.system"}, None, "sigmoid"),
    "over-problem-type": (
        {"problem_type": "regression", "sentence_transformers": {"activation_fn": NN + "Sigmoid"}},
        None,
        "sigmoid",
    ),
    "6.2": (
        {"sbert_ce_default_activation_function": NN + "Sigmoid"},
        {"model_type": "CrossEncoder", "activation_fn": IDENTITY, "prompts": {}},
        "none",
    ),
}


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_cross_encoders(name: str, tmp_path: Path) -> None:
    config, settings, expected = CROSS_ENCODERS[name]
    path = tmp_path / "m"
    model = save_bert(tmp_path / "base", "BertForSequenceClassification", **({"num_labels": 1} | config))
    if settings is None:
        shutil.copytree(tmp_path / "base", path)
    else:
        limits = {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "scores",
        }
        pipeline_folder(path, tmp_path / "base", [], settings=settings, limits=limits, kind=KINDS["Transformer"])
    engine = make_engine(path)
    assert (engine.info.tasks, engine.info.activation) == (("classify",), expected)
    tokens = texts()[2]
    engine.add_request("c", tokens, PoolingParams(task="classify"))
    answer = finish(engine)["c"].pooled
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "none": lambda x: x,
    }
    assert answer is not None
    assert_close([answer.values()], [functions[expected](logits)])


def test_an_activation_that_is_not_there(tmp_path: Path) -> None:
    save_bert(tmp_path, "BertForSequenceClassification", sbert_ce_default_activation_function=NN + "Tanh")
    with pytest.raises(UnsupportedModelError, match=r"activation is torch\.nn\.modules\.activation\.Tanh.*Sigmoid"):
        make_engine(tmp_path)


def altered(module: Module, **config: Any) -> Module:
    return Module(module.type, {**(module.config or {}), **config}, module.tensors)


def of_type(name: str) -> Module:
    return Module(name, {})


MEAN = pooling("mean")
REFUSED: dict[str, tuple[list[Module], dict[str, Any], str]] = {
    **{
        name: ([MEAN, of_type(f"sentence_transformers.models.{name}")], {}, rf"modules\.json, module '2': .*{name}")
        for name in ("WordEmbeddings", "CNN", "LSTM", "WeightedLayerPooling", "Router", "Asym", "CLIPModel", "BoW")
    },
    "foreign": (
        [MEAN, of_type("modeling_own.Pooling")],
        {},
        "modeling_own.Pooling is custom code.*no code from a checkpoint",
    ),
    "lookalike": ([MEAN, of_type("sentence_transformers_own.Dense")], {}, "custom code"),
    "not-first": ([], {"kind": "sentence_transformers.models.StaticEmbedding"}, "StaticEmbedding is not implemented"),
    "no-transformer": ([MEAN], {"kind": "sentence_transformers.models.Normalize"}, "must begin with a Transformer"),
    "no-pooling": ([], {}, "has no Pooling module, and the model has no classification head"),
    "normalize-only": ([NORMALIZE], {}, "Normalize comes before any Pooling"),
    "dense-first": ([dense(HIDDEN, 4), MEAN], {}, "Dense comes before any Pooling"),
    "two": ([MEAN, pooling("cls")], {}, "more than one Pooling"),
    "two-transformers": ([MEAN, of_type(KINDS["Transformer"])], {}, "more than one Transformer"),
    "unknown-mode": ([pooling("attention")], {}, "pooling_mode 'attention' must be one of cls, max, mean"),
    "bad-mode": ([pooling(3)], {}, "pooling_mode must be a name or a list"),  # type: ignore[arg-type]
    "width": ([altered(MEAN, embedding_dimension=64)], {}, "hidden states of 32 features.*made for 64"),
    "inputs": ([MEAN, dense(64, 4)], {}, r"2_Dense/config\.json is made for vectors of 64 features.*returns 32"),
    "second-inputs": ([MEAN, dense(HIDDEN, 4), dense(5, 4)], {}, r"3_Dense/config\.json.*of 5 features.*returns 4"),
    "norm": ([MEAN, layer_norm(31)], {}, r"2_LayerNorm/config\.json.*31 features"),
    "size": ([MEAN, altered(dense(HIDDEN, 4), out_features="4")], {}, "out_features must be a whole number, got '4'"),
    "activation": ([MEAN, dense(HIDDEN, 4, "os.system")], {}, "activation_function is 'os.system'; of torch.nn"),
    "with-weights": ([MEAN, dense(HIDDEN, 4, NN + "PReLU")], {}, "PReLU'; of torch.nn, Identity, Tanh"),
    "inside-nn": ([MEAN, dense(HIDDEN, 4, "torch.nn.functional.Tanh")], {}, "activation_function is"),
    "tokens": (
        [MEAN, dense(HIDDEN, 4, module_input_name="token_embeddings")],
        {},
        "module_input_name is 'token_embeddings', but only sentence_embedding",
    ),
    "scores": ([MEAN, dense(HIDDEN, 1, module_output_name="scores")], {}, "module_output_name is 'scores'"),
    "missing": ([MEAN, Module("sentence_transformers.models.Dense", dense(HIDDEN, 4).config)], {}, "save_pretrained"),
    "lacks": (
        [MEAN, Module("sentence_transformers.models.Dense", dense(32, 4).config, dense(32, 4, bias=False).tensors)],
        {},
        r"2_Dense/model\.safetensors does not match its config\.json: it lacks linear\.bias",
    ),
    "too-many": (
        [MEAN, altered(dense(HIDDEN, 4), bias=False)],
        {},
        r"does not match.*has no place for linear\.bias",
    ),
    "shape": (
        [MEAN, altered(dense(HIDDEN, 4), out_features=5)],
        {},
        r"linear\.\w+ should have shape \[5.*stored as \[4",
    ),
    "task": ([MEAN], {"limits": {"transformer_task": "fill-mask"}}, "transformer_task is 'fill-mask'"),
    "messages": (
        [MEAN],
        {"limits": {"modality_config": {"text": {}, "message": {}}}},
        "texts rendered as chat messages",
    ),
    "output": (
        [MEAN],
        {"limits": {"modality_config": {"text": {"method_output_name": "pooler_output"}}}},
        "an output other than last_hidden_state",
    ),
    "length": ([MEAN], {"limits": {"max_seq_length": "long"}}, "max_seq_length must be a whole number, got 'long'"),
    "modalities": (
        [MEAN],
        {"limits": {"modality_config": ["text"]}},
        "modality_config must be an object whose values are objects",
    ),
    "no-object": ([MEAN], {"limits": ["text"]}, r"sentence_bert_config\.json is damaged: it contains no JSON object"),
    "other": ([MEAN], {"settings": {"model_type": "Other"}}, "model_type is 'Other'; served are"),
    "prompts": ([MEAN], {"settings": {"prompts": ["query: "]}}, "prompts must be an object that maps names to texts"),
    "default-prompt": (
        [MEAN],
        {"settings": {"prompts": {"query": "q: "}, "default_prompt_name": "passage"}},
        "default_prompt_name is 'passage', but must be one of query",
    ),
    "cross": (
        [MEAN],
        {"settings": {"model_type": "CrossEncoder"}},
        "the only supported cross-encoder is a Transformer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, bert: tuple[Path, Any], tmp_path: Path) -> None:
    """At the start, with the file and the module."""
    modules, more, message = REFUSED[name]
    folder = pipeline_folder(tmp_path / "m", bert[0], modules, **more)
    with pytest.raises(ModelLoadError, match=message):
        make_engine(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", r"modules\.json is not valid JSON"),
        ("{}", r"modules\.json is damaged: it contains no list"),
        ("[]", r"modules\.json is damaged: it contains no list"),
        ('[{"path": ""}]', "an entry has no type"),
        ('[{"path": "/etc", "type": "sentence_transformers.models.Transformer"}]', "must lie in the checkpoint's fold"),
        ('[{"path": "../x", "type": "sentence_transformers.models.Transformer"}]', "must lie in the checkpoint's fol"),
        ('[{"path": "0_T", "type": "sentence_transformers.models.Transformer"}]', r"0_T has no config\.json"),
    ],
)
def test_damaged_lists(content: str, message: str, bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [MEAN])
    (folder / "modules.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        make_engine(folder)


def test_a_pooling_without_its_config(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [Module(KINDS["Pooling"])])
    with pytest.raises(ModelLoadError, match=r"1_Pooling/config\.json is missing"):
        make_engine(folder)


def test_pickled_weights_are_not_read(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [MEAN, dense(HIDDEN, 4)])
    stored = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(stored), folder / "2_Dense" / "pytorch_model.bin")
    stored.unlink()
    with pytest.raises(
        ModelLoadError, match=r"2_Dense contains no model\.safetensors, but pytorch_model\.bin.*convert"
    ):
        make_engine(folder)
    stored.write_bytes(b"nothing of the kind")
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        make_engine(folder)
    save_file({name: tensor.to(torch.int8) for name, tensor in dense(HIDDEN, 4).tensors.items()}, stored)
    with pytest.raises(ModelLoadError, match="stored as I8"):
        make_engine(folder)


def test_a_head_that_classifies_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_bert(tmp_path / "base", "BertForSequenceClassification", num_labels=2)
    folder = pipeline_folder(tmp_path / "m", tmp_path / "base", [MEAN])
    config = checkpoint.read_config(folder)
    found = find_abilities(config, build_spec(config), sentence.read_pipeline(folder))
    assert (found.tasks, found.labels) == (("classify",), ("LABEL_0", "LABEL_1"))
    assert (
        "modules.json describes embeddings, but they are not served: the model has a head that classifies"
        in caplog.text
    )


def test_what_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    write(tmp_path / "modules.json", [])
    asked: dict[str, Any] = {}
    monkeypatch.setattr("engine.model.hub.snapshot_download", lambda model, **more: asked.update(more) or str(tmp_path))
    assert checkpoint.locate("org/name") == tmp_path
    needed = [
        "modules.json", "config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json",
        "2_Dense/model.safetensors", "sentence_bert_config.json", "config_sentence_transformers.json", "vocab.txt",
        "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "0_Transformer/config.json", "0_Transformer/vocab.txt",
        "0_Transformer/model.safetensors", "0_Transformer/sentence_bert_config.json", "0_Transformer/tokenizer.json",
        "0_Transformer/sentencepiece.bpe.model", "0_Transformer/merges.txt",
    ]  # fmt: skip
    other = [
        "pytorch_model.bin", "2_Dense/pytorch_model.bin", "onnx/model.onnx", "openvino/openvino_model.bin",
        "tf_model.h5", "rust_model.ot", "README.md", "train_script.py", "data_config.json", "0_Transformer/a.bin",
    ]  # fmt: skip
    assert list(filter_repo_objects(needed + other, allow_patterns=asked["allow_patterns"])) == needed


def test_reading_needs_no_torch_class(bert: tuple[Path, Any], tmp_path: Path) -> None:
    """Names of classes are compared, not imported: a module of that name would leave a trace."""
    trace = tmp_path / "ran"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sentence_transformers.py").write_text(f"open({str(trace)!r}, 'w')\n")
    folder = pipeline_folder(tmp_path / "m", bert[0], [MEAN, dense(HIDDEN, 4)])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "own"))
        make_engine(folder).close()
    assert not trace.exists()
