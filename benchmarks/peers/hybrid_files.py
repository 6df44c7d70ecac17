"""GGUF files with the published shapes of hybrid models, and random blocks of Q8_0.

    python hybrid_files.py SHAPE FILE

It runs in llama.cpp's environment, as `llama_cpp_worker.py` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Shape = tuple[int, ...]
_ROWS = 4096
_CONTEXT = 32768


def _network(hidden: int, inner: int) -> dict[str, Shape]:
    return {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}


def _lfm2(writer: gguf.GGUFWriter) -> dict[str, Shape]:
    """LFM2-1.2B."""
    hidden, layers, heads, kv_heads = 2048, 16, 32, 8
    attends = (2, 5, 8, 10, 12, 14)
    _common(writer, hidden, layers, 8192, heads, [kv_heads if layer in attends else 0 for layer in range(layers)], 1e-5)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_shortconv_l_cache(3)
    size = hidden // heads
    found: dict[str, Shape] = {"token_embd": (65536, hidden), "token_embd_norm": (hidden,)}
    for layer in range(layers):
        own = {"attn_norm": (hidden,), "ffn_norm": (hidden,)} | _network(hidden, 8192)
        if layer in attends:
            own |= {
                "attn_q": (hidden, hidden),
                "attn_k": (kv_heads * size, hidden),
                "attn_v": (kv_heads * size, hidden),
            }
            own |= {"attn_output": (hidden, hidden), "attn_q_norm": (size,), "attn_k_norm": (size,)}
        else:
            own |= {"shortconv.conv": (hidden, 3), "shortconv.in_proj": (3 * hidden, hidden)}
            own |= {"shortconv.out_proj": (hidden, hidden)}
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return found


def _granite(writer: gguf.GGUFWriter) -> dict[str, Shape]:
    """Granite-4.0-h-1b."""
    hidden, layers, heads, kv_heads, inner, groups, state, scans = 1536, 40, 12, 4, 4096, 1, 128, 48
    attends, wide = (5, 15, 25, 35), 2 * hidden
    _common(
        writer, hidden, layers, inner, heads, [kv_heads if layer in attends else 0 for layer in range(layers)], 1e-5
    )
    _scan(writer, scans, wide, groups, state)
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_attention_scale(0.0078125)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(6.0)
    writer.add_expert_shared_feed_forward_length(inner)
    size, convolved = hidden // heads, wide + 2 * groups * state
    found: dict[str, Shape] = {"token_embd": (100352, hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        own = {"attn_norm": (hidden,), "ffn_norm": (hidden,)} | _network(hidden, inner)
        if layer in attends:
            own |= {
                "attn_q": (hidden, hidden),
                "attn_k": (kv_heads * size, hidden),
                "attn_v": (kv_heads * size, hidden),
            }
            own |= {"attn_output": (hidden, hidden)}
        else:
            own |= {
                "ssm_in": (wide + convolved + scans, hidden),
                "ssm_conv1d": (convolved, 4),
                "ssm_out": (hidden, wide),
            }
            own |= {
                "ssm_conv1d.bias": (convolved,),
                "ssm_dt.bias": (scans,),
                "ssm_a.": (scans, 1),
                "ssm_d.": (scans, 1),
            }
            own |= {"ssm_norm": (groups, wide // groups)}
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return found


def _qwen3_5(writer: gguf.GGUFWriter) -> dict[str, Shape]:
    """Qwen3.5-2B, with a fifth of its vocabulary."""
    hidden, layers, heads, kv_heads, size, inner, scans, state = 2048, 24, 8, 2, 256, 6144, 16, 128
    _common(writer, hidden, layers, inner, heads, kv_heads, 1e-6)
    _scan(writer, scans, scans * state, scans, state)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_rope_dimension_count(size // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(4)
    wide = scans * state
    found: dict[str, Shape] = {"token_embd": (49664, hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        own = {"attn_norm": (hidden,), "post_attention_norm": (hidden,)} | _network(hidden, inner)
        if layer % 4 == 3:
            own |= {"attn_q": (2 * heads * size, hidden), "attn_output": (hidden, heads * size)}
            own |= {f"attn_{name}": (kv_heads * size, hidden) for name in "kv"}
            own |= {"attn_q_norm": (size,), "attn_k_norm": (size,)}
        else:
            own |= {"attn_qkv": (3 * wide, hidden), "attn_gate": (wide, hidden), "ssm_conv1d": (3 * wide, 4)}
            own |= {
                "ssm_dt.bias": (scans,),
                "ssm_a.": (scans,),
                "ssm_beta": (scans, hidden),
                "ssm_alpha": (scans, hidden),
            }
            own |= {"ssm_norm": (state,), "ssm_out": (hidden, wide)}
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return found


SHAPES = {
    "lfm2-1.2B": ("lfm2", _lfm2),
    "granite-h-1B": ("granitehybrid", _granite),
    "qwen3.5-2B": ("qwen35", _qwen3_5),
}


def write(shape: str, file: Path) -> None:
    """Write a file. Matrices of a width are the same rows again."""
    name, describe = SHAPES[shape]
    writer = gguf.GGUFWriter(str(file), name)
    tensors = describe(writer)
    writer.add_vocab_size(tensors["token_embd"][0])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    random, rows = np.random.default_rng(0), dict[int, np.ndarray]()
    for tensor, size in tensors.items():
        part = tensor.rpartition(".")[2] if not tensor.endswith(".") else ""
        full = tensor if part == "bias" else tensor.removesuffix(".") if tensor.endswith(".") else f"{tensor}.weight"
        if "ssm_a" in full and "alpha" not in full:
            writer.add_tensor(full, -random.uniform(1.0, 16.0, size).astype(np.float32))
        elif len(size) == 1 or size[-1] < 32 or "norm" in full:
            small = size[-1] < 32 or part == "bias"
            plain = random.standard_normal(size) * 0.3 if small else np.ones(size)
            writer.add_tensor(full, plain.astype(np.float32))
        else:
            if size[1] not in rows:
                rows[size[1]] = _blocks(random, size[1])
            writer.add_tensor(full, np.resize(rows[size[1]], (size[0], rows[size[1]].shape[1])), raw_dtype=_Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_Q8 = gguf.GGMLQuantizationType.Q8_0


def _blocks(random: np.random.Generator, inputs: int) -> np.ndarray:
    """Rows whose numbers have about the deviation inputs**-0.5."""
    blocks = random.integers(0, 256, (_ROWS * inputs // 32, 34), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(inputs**-0.5 / 74).tobytes(), np.uint8)
    return blocks.reshape(_ROWS, -1)


def _common(
    writer: gguf.GGUFWriter, hidden: int, layers: int, inner: int, heads: int, kv_heads: int | list[int], eps: float
) -> None:
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(eps)


def _scan(writer: gguf.GGUFWriter, heads: int, inner: int, groups: int, state: int) -> None:
    settings: dict[Any, int] = {
        writer.add_ssm_time_step_rank: heads,
        writer.add_ssm_inner_size: inner,
        writer.add_ssm_group_count: groups,
        writer.add_ssm_state_size: state,
        writer.add_ssm_conv_kernel: 4,
    }
    for add, value in settings.items():
        add(value)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
