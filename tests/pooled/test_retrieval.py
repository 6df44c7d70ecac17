"""Sparse vectors and vectors of tokens: SPLADE, bge-m3 and ColBERT, in the layouts in which they are published. The
oracle is transformers' model with the formula of each written out here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.driving import finish, make_engine
from support.late_interaction import IDENTITY, stanford
from support.sentence import HIDDEN, NORMALIZE, VOCAB, Module, dense, pipeline_folder, pooling, save_bert
from support.text_encoders import TEXTS, make_text_encoder

from engine import LLM, Engine, InvalidRequestError, Pooled, PoolingParams, Task
from engine.errors import ModelLoadError, UnsupportedModelError

LENGTHS = (1, 2, 7, 200, 19)
SPLADE = "sentence_transformers.sparse_encoder.models."


def splade(**config: Any) -> Module:
    return Module(f"{SPLADE}SpladePooling", {"pooling_strategy": "max", "activation_function": "relu"} | config)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("bert")
    return path, save_bert(path)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("masked")
    return path, save_bert(path, "BertForMaskedLM")


def inputs(vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def ask(engine: Engine, task: Task, **params: Any) -> list[Pooled]:
    """The answers to all inputs, asked for at once."""
    given = inputs(engine.info.vocab_size)
    for i, tokens in enumerate(given):
        engine.add_request(str(i), tokens, PoolingParams(task=task, **params))
    outputs = finish(engine)
    found = [outputs[str(i)].pooled for i in range(len(given))]
    return [pooled for pooled in found if pooled is not None]


@torch.no_grad()
def states(model: Any, tokens: list[int]) -> torch.Tensor:
    trunk = getattr(model, model.base_model_prefix, model)
    found: torch.Tensor = trunk(torch.tensor([tokens])).last_hidden_state[0]
    return found


@torch.no_grad()
def expanded(model: Any, tokens: list[int], pooling: str = "max", logarithms: int = 1) -> torch.Tensor:
    """SPLADE's vector over the vocabulary."""
    weights = model(torch.tensor([tokens])).logits[0].relu()
    for _ in range(logarithms):
        weights = torch.log(1 + weights)
    return weights.max(0).values if pooling == "max" else weights.sum(0)


def written_out(pooled: Pooled, size: int) -> np.ndarray:
    """A sparse vector with its zeros."""
    found = np.zeros(size, dtype=np.float32)
    ids = pooled.token_ids()[0]
    assert (np.diff(ids) > 0).all()
    assert (pooled.values() > 0).all()
    found[ids] = pooled.values()[0]
    return found


def assert_close(found: np.ndarray, wanted: torch.Tensor) -> None:
    assert found.shape == tuple(wanted.shape)
    assert np.abs(found - wanted.numpy()).max() <= 1e-4 * max(float(wanted.abs().max()), 1e-6)


# ---------------------------------------------------------------- SPLADE


@pytest.mark.parametrize(
    ("config", "pooled", "logarithms"),
    [({}, "max", 1), ({"pooling_strategy": "sum", "activation_function": "log1p_relu"}, "sum", 2)],
)
def test_splade(config: dict[str, Any], pooled: str, logarithms: int, masked: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pipeline_folder(
        tmp_path / "m",
        masked[0],
        [splade(**config)],
        kind=f"{SPLADE}MLMTransformer",
        settings={"model_type": "SparseEncoder"},
    )
    engine = make_engine(folder)
    assert (engine.info.tasks, engine.info.sparse) == (("fill_mask", "token_embed", "sparse_embed"), "vocabulary")
    for tokens, answer in zip(inputs(), ask(engine, "sparse_embed"), strict=True):
        assert_close(written_out(answer, VOCAB), expanded(masked[1], tokens, pooled, logarithms))


def test_any_masked_language_model_is_asked_by_the_task(tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=HIDDEN, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=320
    )
    torch.manual_seed(3)
    model = transformers.DistilBertForMaskedLM(config).eval()
    torch.nn.init.normal_(model.distilbert.embeddings.word_embeddings.weight)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.info.tasks == ("fill_mask", "embed", "token_embed", "sparse_embed")
    for tokens, answer in zip(inputs(), ask(engine, "sparse_embed"), strict=True):
        assert_close(written_out(answer, VOCAB), expanded(model, tokens))
    for tokens, answer in zip(inputs(), ask(engine, "token_embed"), strict=True):
        assert_close(answer.values(), states(model, tokens))
    for tokens, answer in zip(inputs(), ask(engine, "token_embed", normalize=True), strict=True):
        assert_close(answer.values(), F.normalize(states(model, tokens), dim=-1))


REFUSED: dict[str, tuple[list[Module], dict[str, Any], str]] = {
    "no-head": ([splade()], {}, "SpladePooling of modules.json needs .* and the model has none"),
    "strategy": ([splade(pooling_strategy="mean")], {}, "pooling_strategy is 'mean'"),
    "function": ([splade(activation_function="gelu")], {}, "activation_function is 'gelu'"),
    "after": ([splade(), NORMALIZE], {}, "nothing is implemented after SpladePooling"),
    "mean": ([pooling("mean")], {"settings": {"model_type": "SparseEncoder"}}, "the only supported sparse encoder"),
    "pooled": ([pooling("mean")], {"settings": {"model_type": "ColBERT"}}, "Pooling is not implemented for vectors of"),
    "skiplist": ([], {"settings": {"model_type": "ColBERT", "skiplist_words": "."}}, "must be a list of texts"),
    "prefix": ([], {"settings": {"model_type": "ColBERT", "query_prefix": 1}}, "query_prefix and document_prefix"),
    "length": ([], {"settings": {"model_type": "ColBERT", "document_length": True}}, "document_length must be a whole"),
    "size": (
        [Module("pylate.models.Dense.Dense", dense(9, 4, IDENTITY, bias=False).config)],
        {},
        "made for vectors of 9 features.*returns 32",
    ),
    "code": ([Module("pylate.models.Own", {})], {}, "custom code"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, bert: tuple[Path, Any], tmp_path: Path) -> None:
    modules, more, message = REFUSED[name]
    folder = pipeline_folder(tmp_path / "m", bert[0], modules, **more)
    with pytest.raises(ModelLoadError, match=message):
        make_engine(folder)


# ---------------------------------------------------------------- bge-m3


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.nn.Linear]]:
    """XLM-R with the two layers of torch files beside it, and a pipeline that takes the first token."""
    own, folder = tmp_path_factory.mktemp("xlmr"), tmp_path_factory.mktemp("bge") / "m"
    config = transformers.XLMRobertaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=322, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.XLMRobertaModel(config).eval()
    torch.nn.init.normal_(model.embeddings.word_embeddings.weight)
    model.save_pretrained(own)
    layers = {"sparse_linear.pt": torch.nn.Linear(HIDDEN, 1), "colbert_linear.pt": torch.nn.Linear(HIDDEN, 24)}
    for name, layer in layers.items():
        torch.nn.init.normal_(layer.weight, std=0.5)
        torch.save(layer.state_dict(), own / name)
    return pipeline_folder(folder, own, [pooling("cls"), NORMALIZE]), model, layers


@torch.no_grad()
def test_bge_m3(bge: tuple[Path, Any, dict[str, torch.nn.Linear]]) -> None:
    folder, model, layers = bge
    engine = make_engine(folder)
    assert (engine.info.tasks, engine.info.sparse) == (("embed", "token_embed", "sparse_embed"), "input")
    for tokens, answer in zip(inputs(), ask(engine, "embed"), strict=True):
        assert_close(answer.values()[0], F.normalize(states(model, tokens)[0], dim=0))
    for tokens, answer in zip(inputs(), ask(engine, "sparse_embed"), strict=True):
        weights = layers["sparse_linear.pt"](states(model, tokens)).relu()[:, 0]
        wanted = torch.zeros(VOCAB)
        for token, weight in zip(tokens, weights, strict=True):
            wanted[token] = max(wanted[token], weight)
        assert_close(written_out(answer, VOCAB), wanted)
    for tokens, answer in zip(inputs(), ask(engine, "token_embed"), strict=True):
        rows = states(model, tokens)[min(1, len(tokens) - 1) :]  # of a single token, that one
        assert_close(answer.values(), F.normalize(layers["colbert_linear.pt"](rows), dim=-1))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a checkpoint",)


def damage(file: Path, kind: str) -> None:
    match kind:
        case "code":
            torch.save({"weight": Bomb()}, file)
        case "text":
            file.write_text("weights")
        case "inflated":
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("m/data.pkl", bytes(80 << 20))
        case "view":
            torch.save({"weight": torch.zeros(1, 1).expand(1 << 20, 1 << 20)}, file)
        case "names":
            torch.save({"weight": torch.zeros(1, HIDDEN), "more": torch.zeros(1)}, file)
        case "width":
            torch.save({"weight": torch.zeros(1, HIDDEN + 1)}, file)
        case "outputs":
            torch.save({"weight": torch.zeros(2, HIDDEN)}, file)
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("code", "cannot be read as tensors"),
        ("text", "was not written by torch 1.6 or newer"),
        ("inflated", r"has 83\d+ bytes; a linear layer may have at most 67108864"),
        ("view", "must hold the state of a linear layer"),
        ("names", "must hold the state of a linear layer"),
        ("width", "sparse_linear.pt is made for vectors of 33 features"),
        ("outputs", "computes 2 numbers per token"),
    ],
)
def test_files_of_torch_are_read_as_tensors_alone(
    kind: str, message: str, bert: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pipeline_folder(tmp_path / "m", bert[0], [pooling("cls")])
    damage(folder / "sparse_linear.pt", kind)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        make_engine(folder)
    assert "code of" not in capsys.readouterr().out


# ---------------------------------------------------------------- ColBERT


def test_colbert(tmp_path: Path) -> None:
    """One that does not say how queries and documents are read; test_late_interaction.py has the others."""
    late = stanford(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", show_progress=False)
    info = llm.engine.info
    assert info.tasks == ("token_embed",)
    assert info.token_vectors is not None
    assert info.token_vectors.size == 12
    ids = [late.encoder.tokenizer(text).input_ids for text in TEXTS]
    vectors = [late.plain(tokens) for tokens in ids]
    wanted = [float((vectors[0] @ other.T).max(1).values.sum()) for other in vectors]
    found = llm.score(TEXTS[0], TEXTS)
    assert [output.score for output in found] == pytest.approx(wanted, rel=1e-5)
    assert found[1].prompt_token_ids == ids[0] + ids[1]
    with pytest.raises(InvalidRequestError, match="cannot serve embed"):
        llm.embed(TEXTS)


def test_a_colbert_without_its_matrix(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(bert[0] / "model.safetensors")
    config = json.loads((bert[0] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    with pytest.raises(ModelLoadError, match=r"lacks the matrix linear\.weight"):
        make_engine(folder)


def test_splade_scores_by_products(tmp_path: Path) -> None:
    checkpoint = make_text_encoder("masked", tmp_path / "plain")
    pipeline_folder(tmp_path / "m", tmp_path / "plain", [splade()], kind=f"{SPLADE}MLMTransformer")
    llm = LLM(str(tmp_path / "m"), dtype="float32", device="cpu", show_progress=False)
    vectors = [expanded(checkpoint.model, checkpoint.tokenizer(text).input_ids) for text in TEXTS]
    wanted = [float(vectors[0] @ other) for other in vectors]
    assert [output.score for output in llm.score(TEXTS[0], TEXTS)] == pytest.approx(wanted, rel=1e-5)
