"""The registry of families: the table of it in docs/families.md, and what is said of architectures that it lacks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.encoder_shape import class_of
from support.encoders import ENCODER_SHAPES
from support.everyday import everyday
from support.families import FAMILY_SHAPES
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from test_setup_script import load

from engine.errors import UnsupportedModelError
from engine.model import families
from engine.model.normalisation import Norm
from engine.model.spec import MaskedLm, ModelSpec, Pool

ROOT = Path(__file__).resolve().parents[3]


tool = load("families_table")
LONG_DOCUMENTS = (ROOT / "docs" / "long-documents.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
SERVED = [family for family in families.FAMILIES if family.weights is not None]


# ---------------------------------------------------------------- what is left unread

# What no answer depends on, though it is there, by how names of shapes begin: what a config has no terms that read, and
# sinusoids and frequencies, which are made here as there.
UNREAD: dict[str, str] = {
    # Beside each head, of which none but that of a sentence's place reads it.
    "big-bird": r"pooler\.(weight|bias)",
    "deberta-1-no-terms": r"encoder\.rel_embeddings\.weight",
    "deberta-no-terms": r"encoder\.(rel_embeddings\.weight|LayerNorm\.(weight|bias))",
    "deberta-not-relative-scaled": r"encoder\.LayerNorm\.(weight|bias)",
    "esm": r"contact_head\..*|rotary_embeddings\.inv_freq",
    "fnet": r"pooler\..*",
    "layoutlm": r"pooler\..*",
    # Projections for global tokens, where a head has none of these.
    r"longformer(-windows|-masked.*|-tokens.*)?$": r"encoder\.layer\.\d+\.attention\.self\.\w+_global\.(weight|bias)",
    # These settings follow from the number of heads.
    r"minimax(-odd-scaled)?$": r"layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",
    "mobilebert-inside": r"encoder\.layer\.\d+\.bottleneck\.attention\..*",
    "mobilebert-masked-untied": r"encoder\.layer\.\d+\.bottleneck\.attention\..*",
    "mobilebert-masked-wide": r"embeddings\.embedding_transformation\..*|cls\.predictions\.dense\.weight",
    "mobilebert-numbers": r"encoder\.layer\.\d+\.bottleneck\.attention\..*",
    "mobilebert-tokens-wide": r"embeddings\.embedding_transformation\..*",
    "mobilebert-wide": r"embeddings\.embedding_transformation\..*",
    # For images.
    "t5gemma2": r".*\.eoi_embedding|encoder\.(vision_tower|multi_modal_projector)\..*",
    "roformer": r"encoder\.embed_positions\.weight",
    # Vectors of languages, which no request names.
    "xlm": r"lang_embeddings\.weight",
}
# No head reads it, or the one that does is of pretraining.
POOLER = r"pooler\.(dense\.)?(weight|bias)"


@pytest.mark.parametrize("name", everyday([*FAMILY_SHAPES, *ENCODER_SHAPES, *SEQ2SEQ_SHAPES]))
def test_no_tensor_that_the_reference_reads_is_ignored(name: str) -> None:
    """Patterns of `WeightTable.ignored` are for what transformers does not load either: what it loads has a place, or
    is another name of what has one."""
    shape: Any = {**FAMILY_SHAPES, **ENCODER_SHAPES, **SEQ2SEQ_SHAPES}[name]
    model_class = class_of(shape.architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(vocab_size=shape.vocab, **({"pad_token_id": 0} | shape.settings)))
    config = model.config
    config.architectures = [shape.architecture]
    table = families.weight_table(config, families.build_spec(config))
    read = {source for entry in table.entries for source in entry.sources} | {table.head, *table.copies}
    names = [n if n.startswith(table.prefix) else f"{table.prefix}{n}" for n in model.state_dict()]
    ignored = {n.removeprefix(table.prefix) for n in names if n not in read and table.ignores(n)}
    headless = isinstance(families.build_spec(config).head, Pool)
    unread = [pattern for beginning, pattern in UNREAD.items() if re.match(beginning, name)]
    unread += [POOLER] if headless or "pretraining" in name else []
    assert not [n for n in ignored if not any(re.fullmatch(pattern, n) for pattern in unread)]


# ---------------------------------------------------------------- the table in docs/families.md


def test_the_page_of_families_has_the_current_table() -> None:
    assert tool.replaced(PAGE, tool.table()) == PAGE, f"{tool.PAGE.name} is not current: {tool.COMMAND}"


def test_the_list_of_octavo_models_is_current() -> None:
    assert tool.LISTED.read_text(encoding="utf-8") == tool.listed(), (
        f"{tool.LISTED.name} is not current: {tool.COMMAND}"
    )


DECODING = "greedy, top-k, top-p, min-p, beams"


def test_the_table_has_one_line_for_each_family_that_is_served() -> None:
    lines = tool.table().splitlines()[2:]
    (gliner,) = (line for line in lines if line.startswith("| GLiNER | "))
    assert gliner.endswith(" | `gliner_uni_encoder_span` | entities |")
    lines.remove(gliner)
    assert [line.split(" | ")[0] for line in lines] == [f"| {family.name}" for family in SERVED]
    for family, line in zip(SERVED, lines, strict=True):
        served = line.removesuffix(" |").split(" | ")[-1]
        hidden = set(family.headless) if DECODING in served else set()
        assert all((f"`{name}`" in line) == (name not in hidden) for name in family.architectures)
        assert line.count(" | ") == 3


def test_the_table_names_the_classifiers_of_encoder_and_decoder() -> None:
    families_of = [family for family in SERVED if family.repeats is not None]
    assert {name for family in families_of for name in tool.joint_classifiers(family)} == {
        f"{name}ForSequenceClassification" for name in ("Bart", "PLBart", "Mvp", "MBart", "T5", "MT5")
    }
    for family in families_of:
        for name in tool.joint_classifiers(family):
            assert tool.tasks_of(family, name) == ("classify",)
            assert name in tool.row(family)["architectures"]


def test_the_page_of_long_documents_names_all_that_answer_questions() -> None:
    (listed,) = re.findall(r"Octavo supports\s(`.*?)\. LayoutLM", LONG_DOCUMENTS, re.DOTALL)
    names = re.split(r",\s(?:and\s|the same class of\s)?|\sand\s", listed)
    found = {re.sub(r"[\s-]", "", name).lower() for name in names}
    for name in (name for family in SERVED for name in family.architectures if "ForQuestionAnswering" in name):
        stem = name.partition("ForQuestionAnswering")[0].replace("JinaEmbeddings", "Jina").lower()
        assert stem in found or f"`{name.lower()}`" in found, name


def test_the_table_says_what_each_kind_of_model_serves() -> None:
    ends = {line.split(" | ")[0][2:]: line.removesuffix(" |").split(" | ")[-1] for line in tool.table().splitlines()}
    assert ends["LLaMA"] == f"{DECODING}, embeddings"
    assert ends["BART, PLBART, MVP"] == ends["T5"] == f"{DECODING}, classification"
    assert ends["Marian"] == DECODING
    bert = "embeddings, classification, token classification, question answering, fill-mask"
    assert ends["BERT and ERNIE"] == f"{bert}, token embeddings, sparse embeddings"


def test_what_a_family_can_do_follows_from_its_parts() -> None:
    (llama,) = (family for family in SERVED if "LlamaForCausalLM" in family.architectures)
    assert tool.tasks_of(llama, "LlamaForCausalLM") == ("generate", "embed")
    assert tool.decoding() == tuple(tool.MODES)

    def unfinished(config: object) -> ModelSpec:
        return replace(llama.spec(config), head=MaskedLm(tied=True, activation="gelu", norm=Norm("layer", 1e-5)))

    with pytest.raises(UnsupportedModelError, match="parts that are not implemented"):
        tool.line(tool.row(replace(llama, spec=unfinished)))


def test_models_of_a_family_that_generates_serve_the_same() -> None:
    (llama,) = (family for family in SERVED if "LlamaForCausalLM" in family.architectures)

    def changing(config: transformers.PretrainedConfig) -> ModelSpec:
        model = llama.spec(config)
        return model if config.architectures == ["LlamaForCausalLM"] else replace(model, head=Pool())

    with pytest.raises(AssertionError, match=r"LLaMA differ in what they can do: \{'LlamaModel': "):
        tool.line(tool.row(replace(llama, spec=changing, headless=())))


def test_a_name_of_older_checkpoints_stands_beside_the_newer_one() -> None:
    family = next(family for family in SERVED if family.name == "GPT-2")
    line = tool.line(tool.row(replace(family, architectures=("GPT2LMHeadModel", "OldGPT2"), name="a|b")))
    assert line.startswith("| a&#124;b | learned positions")
    assert "| `GPT2LMHeadModel`, `OldGPT2` |" in line
    with pytest.raises(UnsupportedModelError, match="transformers has none of OldGPT2"):
        tool.line(tool.row(replace(family, architectures=("OldGPT2",))))


@pytest.mark.slow
def test_only_what_is_between_the_markers_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, listed = tmp_path / "families.md", tmp_path / "families.json"
    monkeypatch.setattr(tool, "PAGE", page)
    monkeypatch.setattr(tool, "LISTED", listed)
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert tool.main() == 0
        assert page.read_text(encoding="utf-8") == f"before\n{tool.BEGIN}\n{tool.table()}{tool.END}\nafter\n"
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


@pytest.mark.slow
def test_any_name_is_answered() -> None:
    for name in ("9" * 5000, "For" * 2000, "Model" * 2000, "\n", "_", "LMHeadModel"):
        assert families.nearest(name) in (None, *families.supported())


# ---------------------------------------------------------------- refusals


def test_no_architecture_is_of_two_families() -> None:
    names = [name for family in families.FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert all(set(family.headless) < set(family.architectures) for family in families.FAMILIES)


def refusal(config: Any) -> str:
    """What is said of it: short, and ending in where the whole list is."""
    with pytest.raises(UnsupportedModelError) as caught:
        families.build_spec(config)
    message = str(caught.value)
    assert message.startswith(f"The architecture '{config.architectures[0]}' is not supported")
    assert len(message) < 480
    end = " `octavo models` lists what is supported."
    assert message.endswith(end)
    return message.removesuffix(end)


def of_type(model_type: str, architecture: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, architectures=[architecture], **settings)


def test_a_refusal_names_the_nearest_and_what_would_show_that_it_does() -> None:
    message = refusal(transformers.LlamaConfig(architectures=["Llama9ForCausalLM"]))
    assert message == (
        "The architecture 'Llama9ForCausalLM' is not supported. The most similar one, LlamaForCausalLM, has the same "
        "settings; whether it computes the same, only transformers can tell."
    )


@pytest.mark.parametrize(
    ("model_type", "name", "why"),
    [
        (
            "zamba2",
            "Zamba2ForCausalLM",
            "several layers share the weights of one attention layer, which also reads the embeddings",
        ),
        ("mamba2", "Mamba2ForCausalLM", "no layer is attention"),
        ("falcon_mamba", "FalconMambaForCausalLM", "no layer is attention"),
        ("rwkv", "RwkvForCausalLM", "no layer is attention"),
        ("xlstm", "xLSTMForCausalLM", "no layer is attention"),
    ],
)
def test_a_refusal_says_what_no_part_expresses(model_type: str, name: str, why: str) -> None:
    message = refusal(of_type(model_type, name))
    assert message.startswith(f"The architecture {name!r} is not supported: {why}")


def test_the_documentation_gives_the_reasons_of_refusals() -> None:
    """NLLB-MoE's is the only one that is no missing part."""
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    rows = page.partition("### What is refused")[2].partition("\n\nExcept")[0].strip().splitlines()[2:]
    told = {row.strip("| ").split(" | ")[1] for row in rows if not row.startswith("| NLLB-MoE")}
    assert told
    assert told <= set(families._REASONS.values())


@pytest.mark.parametrize(
    ("model_type", "architecture", "nearest", "unknown"),
    [
        ("diffllama", "DiffLlamaForCausalLM", "LlamaForCausalLM", "lambda_std_dev."),
        ("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "GPTNeoXForCausalLM", "intermediate_multiple_size."),
    ],
)
def test_a_refusal_says_why_the_nearest_would_not_do(
    model_type: str, architecture: str, nearest: str, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_with_head", lambda: ["Glm4MoeForCausalLM", *KNOWN])
    message = refusal(of_type(model_type, architecture))
    assert f" The most similar one, {nearest}, cannot replace it: it does not know the setting {unknown}" in message


def test_where_the_name_is_near_and_the_settings_are_not_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_with_head", lambda: ["MixtralForCausalLM", *KNOWN])
    config = of_type("gpt_oss", "GptOss2ForCausalLM")
    assert families.nearest("GptOss2ForCausalLM") in ("GPT2LMHeadModel", "GPTNeoXForCausalLM")
    assert " The most similar one, MixtralForCausalLM, cannot replace it: " in refusal(config)


def test_another_head_of_a_family_that_is_served() -> None:
    message = refusal(transformers.BertConfig(architectures=["BertForMultipleChoice"]))
    assert re.search(r" Bert\w+, of the same family, is supported, but has another head\.$", message)


@pytest.mark.parametrize(
    "config",
    [
        of_type("bailing_hybrid", "BailingHybridForCausalLM"),
        transformers.PretrainedConfig(architectures=["NewForCausalLM"], ssm_state_size=16),
    ],
    ids=lambda config: str(config.architectures[0]),
)
def test_models_that_keep_a_state_of_another_kind(config: Any) -> None:
    message = refusal(config)
    assert " is not supported: it keeps a state (recurrent or state-space layers) of a kind that is not impl" in message
    assert message.endswith(". No supported architecture can replace it.")


def test_a_known_architecture_that_needs_a_missing_part_is_not_recommended_itself() -> None:
    config = of_type("jamba", "JambaForCausalLM", num_hidden_layers=2)
    message = "JambaForCausalLM needs parts that are not implemented yet: a decoder without attention. `octavo models`"
    with pytest.raises(UnsupportedModelError, match=f"^{message}"):
        families.build_spec(config)


def test_a_hybrid_family_without_a_layer_that_keeps_a_state_is_refused_as_any_other() -> None:
    kinds = ["full_attention"] * 2
    config = of_type("bailing_hybrid", "BailingHybridForCausalLM", layer_types=kinds, num_hidden_layers=2)
    assert " cannot replace it: " in refusal(config)


def test_a_multimodal_model_says_whether_its_language_part_would_do() -> None:
    name = "MllamaForConditionalGeneration"
    text = f"The architecture {name!r} is not supported: it reads more than text. Its language part is not "
    assert refusal(of_type("mllama", name)) == f"{text}supported either."
    config = of_type("fuyu", "FuyuForCausalLM", text_config={"model_type": "llama"})
    assert refusal(config).endswith(" A checkpoint with only its language part (LlamaForCausalLM) is supported.")


def test_a_refusal_says_so_where_nothing_is_near() -> None:
    assert refusal(of_type("blt", "ZambezeForCausalLM")).endswith(" No supported architecture is similar.")


def test_a_config_without_architectures() -> None:
    with pytest.raises(UnsupportedModelError, match=r'has no "architectures"\. Add the name .* `octavo models` lists'):
        families.build_spec(transformers.LlamaConfig())
