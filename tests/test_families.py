"""The registry of families: README's table of it, and what is said of architectures that it lacks."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from support.encoders import ENCODER_SHAPES
from support.families import FAMILY_SHAPES
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES

from engine.errors import UnsupportedModelError
from engine.model import families
from engine.model.normalisation import Norm
from engine.model.spec import MaskedLm, ModelSpec, Pool

ROOT = Path(__file__).resolve().parent.parent


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_tools_families_table", ROOT / "tools" / "families_table.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVED = [family for family in families.FAMILIES if family.weights is not None]


# ---------------------------------------------------------------- what is left unread

# What no answer depends on, though it is there: a pooler that no head reads, DeBERTa's vectors of distances where a
# config has no terms that read them, and Longformer's projections for global tokens where a head has none.
LOCAL = {
    f"encoder.layer.{layer}.attention.self.{name}_global.{kind}"
    for layer in range(3)
    for name in ("query", "key", "value")
    for kind in ("weight", "bias")
}
UNREAD = {
    "pooler": {"pooler.dense.weight", "pooler.dense.bias"},
    "deberta-no-terms": {"encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.LayerNorm.bias"},
    "deberta-1-no-terms": {"encoder.rel_embeddings.weight"},
    "longformer": LOCAL | {"pooler.dense.weight", "pooler.dense.bias"},
    "longformer-windows": LOCAL | {"pooler.dense.weight", "pooler.dense.bias"},
    **dict.fromkeys(
        ("longformer-masked", "longformer-masked-untied", "longformer-tokens", "longformer-tokens-wide"), LOCAL
    ),
    "deberta-not-relative-scaled": {"encoder.LayerNorm.weight", "encoder.LayerNorm.bias"},
}


@pytest.mark.parametrize("name", [*FAMILY_SHAPES, *ENCODER_SHAPES, *SEQ2SEQ_SHAPES])
def test_no_tensor_that_the_reference_reads_is_ignored(name: str) -> None:
    """Patterns of `WeightTable.ignored` are for what transformers does not load either: what it loads has a place, or
    is another name of what has one."""
    shape: Any = {**FAMILY_SHAPES, **ENCODER_SHAPES, **SEQ2SEQ_SHAPES}[name]
    model_class = getattr(transformers, shape.architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(vocab_size=shape.vocab, **({"pad_token_id": 0} | shape.settings)))
    config = model.config
    config.architectures = [shape.architecture]
    table = families.weight_table(config, families.build_spec(config))
    read = {source for entry in table.entries for source in entry.sources} | {table.head, *table.copies}
    names = [n if n.startswith(table.prefix) else f"{table.prefix}{n}" for n in model.state_dict()]
    ignored = {n.removeprefix(table.prefix) for n in names if n not in read and table.ignores(n)}
    headless = isinstance(families.build_spec(config).head, Pool)
    unread = UNREAD.get(name, UNREAD["pooler"] if headless or name == "bert-pretraining" else set())
    assert ignored <= unread


# ---------------------------------------------------------------- README's table


def test_the_readme_has_the_current_table() -> None:
    assert tool.replaced(README, tool.table()) == README, f"README's table of families is not current: {tool.COMMAND}"


def test_the_list_of_octavo_models_is_current() -> None:
    assert tool.LISTED.read_text(encoding="utf-8") == tool.listed(), (
        f"{tool.LISTED.name} is not current: {tool.COMMAND}"
    )


DECODING = "greedy, top-k, top-p, min-p, beams"


def test_the_table_has_one_line_for_each_family_that_is_served() -> None:
    lines = tool.table().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {family.name}" for family in SERVED]
    for family, line in zip(SERVED, lines, strict=True):
        served = line.removesuffix(" |").split(" | ")[-1]
        hidden = set(family.headless) if DECODING in served else set()
        assert all((f"`{name}`" in line) == (name not in hidden) for name in family.architectures)
        assert line.count(" | ") == 3


def test_the_table_says_what_each_kind_of_model_serves() -> None:
    ends = {line.split(" | ")[0][2:]: line.removesuffix(" |").split(" | ")[-1] for line in tool.table().splitlines()}
    assert ends["LLaMA"] == f"{DECODING}, embeddings"
    assert ends["BART"] == DECODING
    assert ends["BERT"] == "embeddings, classes, classes of tokens, answers to questions, masked tokens"


def test_what_a_family_can_do_follows_from_its_parts() -> None:
    (llama,) = (family for family in SERVED if "LlamaForCausalLM" in family.architectures)
    assert tool.tasks_of(llama, "LlamaForCausalLM") == ("generate", "embed")
    assert tool.decoding() == tuple(tool.MODES)

    def unfinished(config: object) -> ModelSpec:
        return replace(llama.spec(config), head=MaskedLm(tied=True, activation="gelu", norm=Norm("layer", 1e-5)))

    with pytest.raises(UnsupportedModelError, match="parts that are not implemented"):
        tool.line(replace(llama, spec=unfinished))


def test_models_of_a_family_that_generates_serve_the_same() -> None:
    (llama,) = (family for family in SERVED if "LlamaForCausalLM" in family.architectures)

    def changing(config: transformers.PretrainedConfig) -> ModelSpec:
        model = llama.spec(config)
        return model if config.architectures == ["LlamaForCausalLM"] else replace(model, head=Pool())

    with pytest.raises(AssertionError, match=r"LLaMA differ in what they can do: \{'LlamaModel': "):
        tool.line(replace(llama, spec=changing, headless=()))


def test_a_name_of_older_checkpoints_stands_beside_the_newer_one() -> None:
    family = next(family for family in SERVED if family.name == "GPT-2")
    line = tool.line(replace(family, architectures=("GPT2LMHeadModel", "OldGPT2"), name="a|b"))
    assert line.startswith("| a&#124;b | learned positions")
    assert "| `GPT2LMHeadModel`, `OldGPT2` |" in line
    with pytest.raises(UnsupportedModelError, match="transformers has none of OldGPT2"):
        tool.line(replace(family, architectures=("OldGPT2",)))


def test_only_what_is_between_the_markers_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, listed = tmp_path / "README.md", tmp_path / "families.json"
    monkeypatch.setattr(tool, "README", readme)
    monkeypatch.setattr(tool, "LISTED", listed)
    readme.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert tool.main() == 0
        assert readme.read_text(encoding="utf-8") == f"before\n{tool.BEGIN}\n{tool.table()}{tool.END}\nafter\n"
        assert listed.read_text(encoding="utf-8") == tool.listed()
    for damaged in (tool.BEGIN, f"{tool.BEGIN}{tool.END}{tool.END}"):
        with pytest.raises(ValueError, match="each of these lines once"):
            tool.replaced(damaged, "")


# ---------------------------------------------------------------- the nearest architecture

NEAREST = {
    "BloomForCausalLM": "BloomModel BloomForSequenceClassification",
    "FalconForCausalLM": "FalconH1ForCausalLM FalconMambaForCausalLM FalconForTokenClassification",
    "GPT2LMHeadModel": "GPT2DoubleHeadsModel GPT2Model OpenAIGPTLMHeadModel BioGptForCausalLM",
    "GPTNeoXForCausalLM": "GPTNeoForCausalLM GPTNeoXJapaneseForCausalLM GPTNeoXModel",
    "Gemma2ForCausalLM": "GemmaForCausalLM T5Gemma2ForConditionalGeneration RecurrentGemmaForCausalLM",
    "Gemma3ForCausalLM": "Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM",
    "LlamaForCausalLM": """LlamaModel LlamaForSequenceClassification LlamaForCausalLMEagle3
        Llama4ForConditionalGeneration MllamaForConditionalGeneration LlavaForConditionalGeneration
        DiffLlamaForCausalLM llama""",
    "MistralForCausalLM": "Mistral3ForConditionalGeneration MinistralForCausalLM",
    "MixtralForCausalLM": "PixtralForConditionalGeneration MixtralModel",
    "MptForCausalLM": "MptModel MPTForCausalLM",
    "OPTForCausalLM": "OPTModel OPTForSequenceClassification",
    "Olmo2ForCausalLM": "OlmoForCausalLM Olmo3ForCausalLM OlmoeForCausalLM FlexOlmoForCausalLM",
    "PhiForCausalLM": "PhimoeForCausalLM PhiMoEForCausalLM PhiModel",
    "Phi3ForCausalLM": "Phi3VForCausalLM Phi3SmallForCausalLM Phi4MultimodalForCausalLM",
    "Qwen2ForCausalLM": """Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
        QWenLMHeadModel""",
    "Qwen3ForCausalLM": "Qwen3NextForCausalLM Qwen3VLForConditionalGeneration Qwen3ForRewardModel",
    "Qwen3MoeForCausalLM": "Qwen3VLMoeForConditionalGeneration Qwen3_5MoeForCausalLM",
    None: """ArceeForCausalLM BaichuanForCausalLM BambaForCausalLM BartForConditionalGeneration BertLMHeadModel
        ChatGLMModel CodeGenForCausalLM CohereForCausalLM Cohere2ForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM
        DeepseekV3ForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM Glm4MoeForCausalLM GraniteForCausalLM
        InternLM2ForCausalLM JambaForCausalLM Lfm2ForCausalLM Mamba2ForCausalLM MambaForCausalLM MarianMTModel
        MiniCPMForCausalLM NemotronForCausalLM PersimmonForCausalLM ProphetNetForCausalLM RWForCausalLM RwkvForCausalLM
        SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM T5ForConditionalGeneration WhisperForCausalLM
        XGLMForCausalLM XLNetLMHeadModel ZambaForCausalLM Model ForCausalLM x 7 ÅÄÖ""",
}
KNOWN = sorted(["GPTBigCodeForCausalLM", "GPTJForCausalLM", *filter(None, NEAREST)])


@pytest.mark.parametrize(("expected", "names"), NEAREST.items(), ids=str)
def test_the_nearest_is_of_the_same_name(expected: str | None, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_with_head", lambda: KNOWN)
    assert {name: families.nearest(name) for name in names.split()} == dict.fromkeys(names.split(), expected)
    if expected is not None:
        assert families.nearest(expected) == expected


def test_any_name_is_answered() -> None:
    for name in ("9" * 5000, "For" * 2000, "Model" * 2000, "\n", "_", "LMHeadModel"):
        assert families.nearest(name) in (None, *families.supported())


# ---------------------------------------------------------------- refusals


def test_no_architecture_is_of_two_families() -> None:
    names = [name for family in families.FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert all(set(family.headless) < set(family.architectures) for family in families.FAMILIES)


def refusal(architecture: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        families.build_spec(transformers.LlamaConfig(architectures=[architecture]))
    return str(caught.value)


def test_a_refusal_names_the_nearest_and_lists_what_is_supported() -> None:
    message = refusal("Llama9ForConditionalGeneration")
    assert message.startswith("The architecture 'Llama9ForConditionalGeneration' is not supported. ")
    assert ". The nearest supported one: LlamaForCausalLM. Supported: " in message
    listed = message.partition(" Supported: ")[2].partition("; classifiers over decoders, such as ")[0].split(", ")
    headless = {name for family in families.FAMILIES for name in family.headless}
    assert listed == [name for name in families.supported() if name not in headless]
    assert set(listed) | headless == set(families.supported())


@pytest.mark.parametrize(
    ("model_type", "architecture", "expected"),
    [
        ("codegen", "CodeGenForCausalLM", "GPTJForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
        ("jamba", "JambaForCausalLM", "OlmoeForCausalLM"),
        ("persimmon", "PersimmonForCausalLM", "StableLmForCausalLM"),
    ],
)
def test_where_no_name_is_near_settings_are(model_type: str, architecture: str, expected: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, architectures=[architecture])
    with pytest.raises(UnsupportedModelError) as caught:
        families.build_spec(config)
    assert f"is not supported. The nearest supported one, by its settings: {expected}. Supported: " in str(caught.value)


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_a_refusal_says_so_where_nothing_is_near(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, architectures=["ZambaForCausalLM"])
    with pytest.raises(UnsupportedModelError) as caught:
        families.build_spec(config)
    expected = "is not supported. No supported architecture has a similar name or similar settings. Supported: "
    assert expected in str(caught.value)
