"""The models of the benchmark: their shapes, what a step has to read and multiply, and engines with random weights.

Nothing is downloaded and no weights touch the disk: the folder of a model holds its config alone, and parameters are
drawn where they are used.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig
from engine.execution import starting
from engine.model.row_form import OVERLAPPING
from engine.model.transformer import Transformer

# Of the free memory that weights and pages may take: steps need some, too.
_SHARE = 0.8
# Of a weight, with its part of the scale that 32 have.
_BYTES = {"int8": 34 / 32, "int4": 18 / 32}
# The field of `Sizes` with the numbers that a part goes through; the peer has its rows at once.
_NUMBERS = {
    "decode": "batches",
    "gap": "gap_batches",
    "mixed": "mixed_rows",
    "prefill": "prompts",
    "beams": "beam_rows",
}
# The parts that need an engine.
PARTS = (*_NUMBERS, "peer")
# As published in the models' own config.json.
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 128009,
}
_TINY: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
}
MODELS = {"Qwen3-0.6B": QWEN3_06B, "Llama-3.1-8B": LLAMA31_8B}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches: rows of decode steps.
        context: tokens that each row has in the middle of the steps that are timed.
        steps, warm: timed steps, and those before them.
        chunk: most tokens of a step.
        prompts: lengths of the prompts that are timed alone.
        rounds: of each prompt.
        mixed_rows, mixed_chunk: rows that decode beside so many tokens of a prompt.
        beam_rows: rows of the step that searches, and of the greedy one that it is compared with.
        gap_batches, gap_steps: of the steps that are profiled.
        peer_rows, peer_prompt, peer_answer, peer_rounds: the work that the peer shares.
        sampler: rows and vocabulary.
        copied: bytes that a copy reads to measure the bandwidth.
        product: rows, columns and inner size of the product that measures the matrix rate.
        parts: those that are run, of `PARTS`. An engine has pages for these alone; all else of it is the same for all
            parts, so that they measure the same engine.
    """

    batches: tuple[int, ...] = (1, 8, 32, 48, 128, 256)
    context: int = 1024
    steps: int = 48
    warm: int = 8
    chunk: int = 8192
    prompts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    rounds: int = 3
    mixed_rows: tuple[int, ...] = (32,)
    mixed_chunk: int = 512
    beam_rows: tuple[int, ...] = (32, 256)
    gap_batches: tuple[int, ...] = (1, 32, 256)
    gap_steps: int = 24
    peer_rows: int = 32
    peer_prompt: int = 960
    peer_answer: int = 128
    peer_rounds: int = 2
    sampler: tuple[int, int] = (256, 131072)
    copied: int = 2 * 2**30
    product: int = 8192
    parts: tuple[str, ...] = PARTS

    def numbers(self, part: str) -> tuple[int, ...]:
        """The sizes that a part measures: numbers of rows, or tokens of a prompt."""
        return getattr(self, _NUMBERS[part]) if part in _NUMBERS else (self.peer_rows,)

    def tokens(self, part: str, number: int) -> int:
        """The tokens of the pages that a part needs for one of its sizes, with those of the step before."""
        if part == "prefill":
            held = number
        elif part == "peer":
            held = number * (self.peer_prompt + self.peer_answer)
        else:
            held = self._rows(part, number) * (self.context + 2 * self.steps + 256)
        return held + self.chunk

    @staticmethod
    def _rows(part: str, number: int) -> int:
        """The rows of a step. One step ahead, the prompt of the step before is still there."""
        return {"prefill": 1, "mixed": number + 2}.get(part, number)

    @property
    def pages(self) -> int:
        """Tokens of the pages that an engine has: what the one of its parts that needs most takes."""
        return max((self.tokens(part, number) for part in self.parts for number in self.numbers(part)), default=0)

    @property
    def rows(self) -> int:
        """Most rows of a step, of all parts."""
        return max(self._rows(part, number) for part in PARTS for number in self.numbers(part))

    def within(self, work: Work, memory: int) -> Sizes:
        """Without the numbers whose pages do not fit beside the weights, and the parts that have none left.

        Args:
            memory: bytes that are free.

        Raises:
            RuntimeError: of no part the least fits.
        """
        most = memory * _SHARE - work.weight_bytes

        def fitting(part: str) -> tuple[int, ...]:
            return tuple(number for number in self.numbers(part) if work.kv_bytes * self.tokens(part, number) <= most)

        parts = tuple(part for part in self.parts if fitting(part))
        if not parts:
            least = min(self.tokens(part, min(self.numbers(part))) for part in self.parts)
            raise RuntimeError(
                f"{memory / 1e9:.0f} GB are free; weights of {work.weight_bytes / 1e9:.0f} GB, pages of "
                f"{work.kv_bytes * least / 1e9:.1f} GB and what steps need do not fit"
            )
        fewer: dict[str, Any] = {field: fitting(part) for part, field in _NUMBERS.items()}
        return replace(self, parts=parts, **fewer)

    def lacking(self, less: Sizes) -> dict[str, list[int]]:
        """The numbers of each part that others, which are `within` a memory, have not."""
        left = {part: less.numbers(part) if part in less.parts else () for part in self.parts}
        without = {part: sorted(set(self.numbers(part)) - set(left[part])) for part in self.parts}
        return {part: numbers for part, numbers in without.items() if numbers}

    @property
    def max_model_len(self) -> int:
        """The longest prompt with its answer."""
        rows = self.context + 3 * (self.steps + self.warm)
        return max((*self.prompts, self.mixed_chunk, rows, self.peer_prompt + self.peer_answer)) + 64


TINY = Sizes(
    batches=(1, 3, 8),
    context=40,
    steps=4,
    warm=1,
    chunk=64,
    prompts=(48, 96),
    rounds=2,
    mixed_rows=(3,),
    mixed_chunk=16,
    beam_rows=(8,),
    gap_batches=(2,),
    gap_steps=8,
    peer_rows=3,
    peer_prompt=20,
    peer_answer=6,
    sampler=(4, 1024),
    copied=2**22,
    product=128,
)


def config_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """A model's config; with tiny, of the same family and as small as a dry run wants it."""
    return MODELS[name] | (_TINY if tiny else {})


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a model's steps.

    Attributes:
        weight_bytes: read by each step: all parameters, but of an embedding that is no output matrix a row for each
            token only.
        products: parameters that the hidden state of a token is multiplied with, the output matrix included.
        layer_products: without it: a prompt needs logits of its last token alone.
        kv_bytes: that a token of the context takes in the pages.
        pair_flops: floating-point operations of attention for a token and one before it.
    """

    weight_bytes: int
    products: int
    layer_products: int
    kv_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, config: Mapping[str, Any], quantization: str = "none") -> Work:
        """From a config of the LLaMA family; of weights of few bits the output matrix has 8 bits."""
        size = {"bfloat16": 2, "float16": 2, "float32": 4}[config["dtype"]]
        hidden, head_dim, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layer = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        head = config["vocab_size"] * hidden
        return cls(
            weight_bytes=round(
                layers * layer * _BYTES.get(quantization, size)
                + head * (size if quantization == "none" else _BYTES["int8"])
            ),
            products=layers * layer + head,
            layer_products=layers * layer,
            kv_bytes=2 * size * layers * kv_heads * head_dim,
            pair_flops=4 * layers * heads * head_dim,
        )

    def prefill_flops(self, tokens: int) -> tuple[float, float]:
        """Operations of a prompt: in the layers' matrices (2PT), and in attention, of which a causal one does half."""
        return 2.0 * self.layer_products * tokens, self.pair_flops * tokens * (tokens + 1) / 2.0


def fill(model: Transformer, seed: int = 0) -> None:
    """Random weights, where the parameters are: norms are 1, biases 0, matrices normal with a deviation that keeps
    hidden states of order 1."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Token ids, the same for the same arguments; a shorter prompt is the beginning of a longer one."""
    draw = random.Random(number)
    return [draw.randrange(3, vocab_size) for _ in range(length)]


@contextmanager
def random_engine(config: Mapping[str, Any], device: str, sizes: Sizes, **settings: Any) -> Iterator[Engine]:
    """An engine around a model of a config, with random weights; it is closed in the end.

    Args:
        settings: of `EngineConfig`, instead of the benchmark's own.
    """
    chosen: dict[str, Any] = {
        "dtype": config["dtype"],
        "device": device,
        "skip_tokenizer_init": True,
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.rows,
        "max_num_batched_tokens": max(sizes.chunk, sizes.rows),
        "max_step_time": 0.0,
        "async_scheduling": True,  # a dry run on a CPU goes the way of a GPU
        "kv_cache_memory": sizes.pages * Work.of(config).kv_bytes,
        "generation_config": "none",
        "quantization": "none",  # there are no files to look into
        "show_progress": False,
        "seed": 0,
    } | settings

    def made(_path: Path, _config: Any, spec: Any, *, dtype: Any, device: Any, backend: Any, max_model_len: int,
             **_of_files: Any) -> Transformer:  # fmt: skip
        model = Transformer(spec, backend, max_model_len, device=device, dtype=dtype)
        fill(model)
        return model.eval()

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        # The engine's own way to its weights leads through files; here nothing stands behind the config.
        names = ("load_model", "check_weights_fit", "check_parameters")
        before = {name: getattr(starting, name) for name in names}
        vars(starting).update(dict.fromkeys(names, lambda *_: None) | {"load_model": made})
        try:
            engine = Engine(EngineConfig(model=folder, **chosen))
        finally:
            vars(starting).update(before)
    try:
        yield engine
    finally:
        engine.close()


def facts(engine: Engine) -> dict[str, Any]:
    """How an engine computes."""
    return {
        "attention": _backend(engine).name,
        "graphs": engine.runner.graphs is not None,
        "prompt_graphs": engine.runner.prompt_graphs is not None,
        "one_row": ways_of_one_row(engine),
        **{name: getattr(engine.info, name) for name in ("dtype", "kv_cache_dtype", "block_size", "num_blocks")},
        **{name: getattr(engine.config, name) for name in ("async_scheduling", "enforce_eager", "flash_prefill")},
    }


def _backend(engine: Engine) -> Any:
    """The backend that computes attention."""
    return next(module.backend for module in engine.runner.model.modules() if hasattr(module, "backend"))


def fallen_back(engine: Engine) -> list[str]:
    """The parts that an engine on a GPU computes by a slower path than intended."""
    device, found = engine.runner.model.device, facts(engine)
    if device.type != "cuda":
        return []
    from engine.backends.triton import overlap

    problems = []
    if found["attention"] != "triton":
        problems.append(f"attention is {found['attention']}, not triton")
    if found["flash_prefill"] and _backend(engine).flash is None:
        problems.append("torch's flash attention was asked for, and is not used")
    if not found["prompt_graphs"]:
        problems.append("steps with prompts were not recorded as CUDA graphs")
    if not found["graphs"]:
        problems.append("decoding steps were not recorded as CUDA graphs")
    elif overlap.can_overlap(device):
        for name, way in found["one_row"].items():
            if OVERLAPPING.name not in way["ms"]:
                problems.append(f"{name} of one row cannot be computed by {OVERLAPPING.name}")
    return problems


def ran_eagerly(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which timed steps were no CUDA graphs, though they count those that were; "" if all were."""
    wrong = [row for row in rows if row.get("steps_as_graphs", row.get("steps", 0)) < row.get("steps", 0)]
    told = (f"{row['steps_as_graphs']} of {row['steps']} steps of {row['rows']} rows" for row in wrong)
    return f"only {', '.join(told)} ran as CUDA graphs" if wrong else ""


def ways_of_one_row(engine: Engine) -> dict[str, dict[str, Any]]:
    """What the engine found when it recorded steps of one row in several ways, of layers and of logits: milliseconds,
    and which way it kept."""
    graphs = engine.runner.graphs
    if graphs is None:
        return {}
    return {
        name: {"ms": {way: 1e3 * seconds for way, seconds in times.items()}, "kept": graphs.one_row.kept[name]}
        for name, times in graphs.one_row.timed.items()
    }
