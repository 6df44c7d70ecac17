"""Answers of the whole engine against a model of `transformers` in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from engine import LLM, RequestOutput, SamplingParams
from gpu_parts.check import Check, Outcome, Setting
from gpu_parts.shapes import prompt

# Nats that a log-probability may be off: in bfloat16, of a model with random weights.
_OFF = 0.15


def _answers(model_type: str) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        sizes = (1024, 2048, 4, 16, 4, 64) if setting.full else (64, 96, 2, 4, 2, 16)
        hidden, inner, layers, heads, kv_heads, head_dim = sizes
        config = transformers.AutoConfig.for_model(
            model_type,
            vocab_size=2048,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=2048,
            initializer_range=hidden**-0.5,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        dtype = torch.bfloat16 if setting.full else torch.float32
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        lengths, count = ((5, 130, 17, 700, 64), 24) if setting.full else ((5, 13), 4)
        prompts = [prompt(number, length, 2048) for number, length in enumerate(lengths)]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
        outputs = _generated(reference, setting, dtype, prompts, params)
        exact = reference.to(setting.device, torch.float64)
        for asked, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            ids = torch.tensor([asked + answer.token_ids], device=setting.device)
            with torch.inference_mode():
                logits = exact(ids).logits[0, len(asked) - 1 : -1].log_softmax(-1)
            given = answer.logprobs or []
            if len(given) != count or not bool(logits.isfinite().all()):
                yield float("inf")
            for place, token in enumerate(answer.token_ids):
                want = float(logits[place, token])
                yield abs(given[place][token].logprob - want) / _OFF
                yield float(logits[place].max() - want) / _OFF  # it was the likeliest token, but for rounding

    return checks


def _beams(setting: Setting) -> Iterator[Outcome]:
    """The scores of all four beams of an encoder-decoder model: attention to the encoder's pages, biases by distance,
    rows that fork and end."""
    sizes = (512, 64, 1024, 3, 8) if setting.full else (32, 8, 48, 2, 4)
    config = transformers.T5Config(
        vocab_size=2048, d_model=sizes[0], d_kv=sizes[1], d_ff=sizes[2], num_layers=sizes[3], num_heads=sizes[4],
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, n_positions=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.full else torch.float32
    reference = transformers.T5ForConditionalGeneration(config).to(dtype).eval()
    lengths, count = ((5, 300, 33), 16) if setting.full else ((5, 9), 4)
    inputs = [prompt(number, length, 2048) for number, length in enumerate(lengths)]
    params = SamplingParams(temperature=0.0, num_beams=4, n=4, max_tokens=count, ignore_eos=True)
    outputs = _generated(reference, setting, dtype, inputs, params)
    exact = reference.to(setting.device, torch.float64)
    for asked, output in zip(inputs, outputs, strict=True):
        if len({tuple(answer.token_ids) for answer in output.outputs}) != 4:
            yield float("inf")
        for answer in output.outputs:
            ids = torch.tensor([asked], device=setting.device)
            given = torch.tensor([[0, *answer.token_ids]], device=setting.device)
            with torch.inference_mode():
                logits = exact(input_ids=ids, decoder_input_ids=given[:, :-1]).logits[0].log_softmax(-1)
            want = float(logits.gather(1, given[0, 1:, None]).sum())
            yield abs((answer.cumulative_logprob or 0.0) - want) / _OFF / count


def _generated(
    reference: Any, setting: Setting, dtype: torch.dtype, inputs: list[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Answers of the engine with the weights of a model of `transformers`."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        llm = LLM(
            folder, device=str(setting.device), dtype=str(dtype).removeprefix("torch."), skip_tokenizer_init=True,
            max_model_len=1024, max_num_seqs=12, kv_cache_memory="256MiB", show_progress=False,
            generation_config="none",
        )  # fmt: skip
    try:
        return llm.generate(inputs, params, use_tqdm=False)
    finally:
        llm.close()


CHECKS = (
    Check("engine: answers of a small LLaMA", _answers("llama"), bound=1.0, served=True),
    Check("engine: answers of a small Qwen3", _answers("qwen3"), bound=1.0, served=True),
    Check("engine: beams of a small T5", _beams, bound=1.0, served=True),
)
