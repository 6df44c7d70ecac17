"""The registry of families, and what is said of architectures that it lacks."""

from __future__ import annotations

import pytest
import transformers

from engine.errors import UnsupportedModelError
from engine.model import families

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
    listed = message.removesuffix(".").partition(" Supported: ")[2].split(", ")
    headless = {name for family in families.FAMILIES for name in family.headless}
    assert listed == [name for name in families.supported() if name not in headless]
    assert set(listed) | headless == set(families.supported())


def test_a_refusal_says_so_where_nothing_is_near() -> None:
    message = refusal("ZambaForCausalLM")
    assert "is not supported. No supported architecture has a similar name. Supported: " in message
