"""Answers of the whole engine against a model of `transformers` in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import torch
import transformers

from engine import LLM, SamplingParams
from gpu_parts.kernels import Check, Outcome, Setting
from gpu_parts.shapes import prompt

# Nats that a log-probability may be off: in bfloat16, of a model with random weights.
_OFF = 0.1


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
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if setting.full else torch.float32
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        lengths, count = ((5, 130, 17, 700, 64), 24) if setting.full else ((5, 13), 4)
        prompts = [prompt(number, length, 2048) for number, length in enumerate(lengths)]
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            llm = LLM(
                folder, device=str(setting.device), dtype=str(dtype).removeprefix("torch."), skip_tokenizer_init=True,
                max_model_len=1024, max_num_seqs=8, kv_cache_memory="256MiB", show_progress=False,
            )  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.close()
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


CHECKS = (
    Check("engine: answers of a small LLaMA", _answers("llama"), bound=1.0, served=True),
    Check("engine: answers of a small Qwen3", _answers("qwen3"), bound=1.0, served=True),
)
