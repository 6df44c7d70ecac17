"""llama.cpp in a process of its own, through its C API, and the conversion of a checkpoint for it.

    python llama_cpp_worker.py

Orders as in `octavo_worker.py`; settings are those of `llama_context_params`. {"op": "convert", "model": folder,
"file": where to, "weights": "bf16", "f32", "q8_0", "q4_0" or "q4_k_m", "plain": "bf16" or "f32"} writes a GGUF file,
and llama.cpp's own quantiser the smaller ones from the plain one; "convert_random" writes one of random blocks,
"convert_hybrid" one with the shape of a hybrid model.
{"op": "logits", "texts": token ids, "file": where to} writes logits [tokens of all texts but each one's last,
vocabulary] as float32, by numpy.
"""

from __future__ import annotations

import ctypes
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api
import numpy as np
from hybrid_files import write as write_hybrid
from protocol import serve

FLASH_ATTENTION = {"off": 0, "on": 1}
KINDS = {"BF16": np.uint16, "F32": np.float32}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.0.gate_proj": "ffn_gate_exps",
    "mlp.experts.0.up_proj": "ffn_up_exps",
    "mlp.experts.0.down_proj": "ffn_down_exps",
}

_loaded: dict[str, Any] = {}


# ---------------------------------------------------------------- conversion


def convert(model: str, file: str, weights: str, plain: str = "bf16") -> dict[str, Any]:
    """Write the checkpoint as it is in the plain format, or quantise the file that holds it so already."""
    source = Path(file).with_name(f"{plain}.gguf")
    if not source.exists():
        _write(Path(model), source, plain)
    if weights != plain:
        params = api.llama_model_quantize_default_params()
        params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{weights.upper()}")
        if api.llama_model_quantize(str(source).encode(), file.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not quantise {source} to {weights}")
    return {"bytes": Path(file).stat().st_size}


def convert_random(model: str, file: str, weights: str) -> dict[str, Any]:
    """Write a quantised file of random blocks, with the formats that llama.cpp's quantiser would choose. It takes
    seconds where the quantiser takes minutes. The matrices of one shape and format are the same in all layers.

    Args:
        model: folder with a config and a tokenizer; it needs no weights.
    """
    writer, config = _writer(Path(model), Path(file), "bf16")
    made: dict[tuple[int, Any], np.ndarray] = {}
    for name, shape in sorted(_shapes(config).items(), key=lambda item: -item[1][0]):  # the largest ones first
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        kind, inputs = _kind(name, weights, config["num_hidden_layers"]), shape[-1]
        rows = int(np.prod(shape[:-1]))
        if (inputs, kind) not in made or len(made[inputs, kind]) < rows:
            made[inputs, kind] = _random_rows(rows, inputs, kind)
        stored = made[inputs, kind][:rows].reshape(*shape[:-1], -1)
        writer.add_tensor(name, stored, raw_dtype=kind)
    _finish(writer)
    return {"bytes": Path(file).stat().st_size}


def convert_hybrid(shape: str, file: str) -> dict[str, Any]:
    """Write a file of random blocks with the shape of a hybrid model."""
    write_hybrid(shape, Path(file))
    return {"bytes": Path(file).stat().st_size}


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a GGUF file for a config."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size, experts = config.get("head_dim") or hidden // heads, _experts(config)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (heads * size, hidden),
        "attn_k": (kv_heads * size, hidden),
        "attn_v": (kv_heads * size, hidden),
        "attn_output": (hidden, heads * size),
        "ffn_norm": (hidden,),
    }
    if experts:
        inner = config["moe_intermediate_size"]
        layer |= {"attn_q_norm": (size,), "attn_k_norm": (size,), "ffn_gate_inp": (experts, hidden)}
        layer |= {f"ffn_{part}_exps": (experts, inner, hidden) for part in ("gate", "up")}
        layer |= {"ffn_down_exps": (experts, hidden, inner)}
    else:
        inner = config["intermediate_size"]
        layer |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    made = {
        f"blk.{number}.{part}.weight": shape
        for number in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    made |= {"token_embd.weight": (config["vocab_size"], hidden), "output_norm.weight": (hidden,)}
    return made if config["tie_word_embeddings"] else made | {"output.weight": (config["vocab_size"], hidden)}


def _kind(name: str, weights: str, layers: int) -> gguf.GGMLQuantizationType:
    """The format of a matrix in a file of llama.cpp's quantiser (llama-quant.cpp)."""
    kinds = gguf.GGMLQuantizationType
    if "ffn_gate_inp" in name:
        return kinds.F32
    if weights == "q4_k_m":
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else -1
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        if name == "output.weight" or (layer >= 0 and more and parts[2] in ("attn_v", "ffn_down", "ffn_down_exps")):
            return kinds.Q6_K
        return kinds.Q4_K
    if weights == "q4_0" and name == "output.weight":
        return kinds.Q6_K
    return kinds[weights.upper()]


def _random_rows(rows: int, inputs: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks whose numbers have about the deviation inputs**-0.5, and a mean of about 0."""
    kinds, random = gguf.GGMLQuantizationType, np.random.default_rng(0)
    if kind == kinds.F32:
        return (random.standard_normal((rows, inputs), dtype=np.float32) * inputs**-0.5).astype(np.float32)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    count = rows * inputs // numbers
    blocks = np.resize(random.integers(0, 256, (min(count, 1 << 16), size), dtype=np.uint8), (count, size))

    def halves(value: float) -> np.ndarray:
        return np.frombuffer(np.float16(value * inputs**-0.5).tobytes(), np.uint8)

    if kind == kinds.Q8_0:
        blocks[:, :2] = halves(1 / 74)
    elif kind == kinds.Q4_0:
        blocks[:, :2] = halves(1 / 4.6)
    elif kind == kinds.Q4_K:
        blocks[:, :2], blocks[:, 2:4] = halves(1 / 145), halves(7.5 / 145)
    elif kind == kinds.Q6_K:
        scales = blocks[:, 192:208]
        scales &= 31
        scales -= 16  # signed bytes from -16 to 15
        blocks[:, 208:] = halves(1 / 170)
    else:
        raise ValueError(f"no random blocks of {kind.name} are made here")
    return blocks.reshape(rows, -1)


def _writer(model: Path, file: Path, plain: str) -> tuple[gguf.GGUFWriter, dict[str, Any]]:
    """A file with the metadata of a LLaMA or Qwen3-MoE, and the config: in bfloat16 with its byte-level tokenizer, in
    float32 without any."""
    config = json.loads((model / "config.json").read_text())
    experts = _experts(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(file), "qwen3moe" if experts else "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    if experts:
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if plain == "bf16":
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        _write_tokenizer(writer, model)
    else:
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_tokenizer_model("no_vocab")
    return writer, config


def _write(model: Path, file: Path, plain: str) -> None:
    """A checkpoint of one file, as it is."""
    writer, config = _writer(model, file, plain)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts = _experts(config)
    for name, dtype, stored in _tensors(model / "model.safetensors", experts):
        if not experts and (name.endswith("q_proj.weight") or name.endswith("k_proj.weight")):
            stored = _interleaved(stored, heads if "q_proj" in name else kv_heads)
        if plain == "f32" or stored.ndim == 1 or name.endswith("mlp.gate.weight"):
            wide = stored if dtype == "F32" else (stored.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(_gguf_name(name), wide)
        elif dtype == "BF16":
            writer.add_tensor(_gguf_name(name), stored.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            raise ValueError(f"{name} is {dtype}, of which no bfloat16 is made here")
    _finish(writer)


def _experts(config: dict[str, Any]) -> int:
    """The number of experts, or 0. `transformers` has used two names for this setting."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    made = json.loads((model / "tokenizer.json").read_text())
    special = {token["content"] for token in made["added_tokens"]}
    tokens = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in made["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _tensors(file: Path, experts: int) -> Any:
    """Names, formats and numbers of a safetensors file's tensors: float32, or bits (uint16) of bfloat16, which numpy
    does not have. They are mapped: a model of 8B takes no memory. The matrices of all experts, which lie one after the
    other, are one tensor, named as the first expert's."""
    with file.open("rb") as source:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        start = source.tell()
    for name, entry in header.items():
        if name == "__metadata__" or (".experts." in name and ".experts.0." not in name):
            continue
        if entry["dtype"] not in KINDS:
            raise ValueError(f"{name} is {entry['dtype']}, and only {' and '.join(KINDS)} are converted")
        at, shape = start + entry["data_offsets"][0], tuple(entry["shape"])
        if ".experts.0." in name:
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            last = header[name.replace(".experts.0.", f".experts.{experts - 1}.")]
            assert last["data_offsets"][0] == entry["data_offsets"][0] + (experts - 1) * size, name
            shape = (experts, *shape)
        yield name, entry["dtype"], np.memmap(file, KINDS[entry["dtype"]], "r", at, shape)


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: neighbours form a pair, where `transformers` pairs the halves of a head."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def _gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, *part = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{NAMES['.'.join(part)]}.weight"


# ---------------------------------------------------------------- generation


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a GGUF file, in place of the one before."""
    unload()
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    if not loaded:
        raise RuntimeError(f"llama.cpp could not load {model}")
    params = api.llama_context_default_params()
    params.no_perf = True
    for name, value in settings.items():
        setattr(params, name, FLASH_ATTENTION[value] if name == "flash_attn_type" else value)
    context = api.llama_init_from_model(loaded, params)
    if not context:
        raise RuntimeError(f"llama.cpp could not make a context with {settings}")
    _loaded.update(model=loaded, context=context, batch=params.n_batch)
    _loaded["words"] = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
    return {"version": version("llama-cpp-python"), "system": api.llama_print_system_info().decode()}


def unload() -> dict[str, Any]:
    """Free what is loaded."""
    if _loaded:
        api.llama_free(_loaded["context"])
        api.llama_model_free(_loaded["model"])
        _loaded.clear()
    return {}


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers of exactly `new` tokens, batched continuously as llama-server does: each step takes a token of every
    sequence that decodes, and of the prompts what fits beside them."""
    if beams != 1:
        raise ValueError("llama.cpp has no beam search")
    context, room = _loaded["context"], _loaded["batch"]
    api.llama_memory_clear(api.llama_get_memory(context), False)
    read = [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    batch = api.llama_batch_init(room, 0, 1)
    started = time.perf_counter()
    try:
        while any(len(answer) < count for answer, count in zip(answers, new, strict=True)):
            outputs: list[tuple[int, int]] = []  # row of the batch, sequence
            batch.n_tokens = 0
            for sequence, answer in enumerate(answers):
                if answer and len(answer) < new[sequence]:
                    position = len(prompts[sequence]) + len(answer) - 1
                    outputs.append((_add(batch, answer[-1], position, sequence, True), sequence))
            for sequence, prompt in enumerate(prompts):
                chunk = prompt[read[sequence] : read[sequence] + room - batch.n_tokens]
                for token in chunk:
                    read[sequence] += 1
                    last = read[sequence] == len(prompt)
                    row = _add(batch, token, read[sequence] - 1, sequence, last)
                    if last:
                        outputs.append((row, sequence))
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for row, sequence in outputs:
                answers[sequence].append(_most_likely(row))
                if len(answers[sequence]) == new[sequence]:
                    api.llama_memory_seq_rm(api.llama_get_memory(context), sequence, -1, -1)
        seconds = time.perf_counter() - started
    finally:
        api.llama_batch_free(batch)
    return {"seconds": seconds, "tokens": answers}


def hold(prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt, in place of the one before. Its answer begins, and goes on with `advance`."""
    context, room = _loaded["context"], _loaded["batch"]
    api.llama_memory_clear(api.llama_get_memory(context), False)
    batch = api.llama_batch_init(room, 0, 1)
    try:
        for first in range(0, len(prompt), room):
            batch.n_tokens = 0
            for position, token in enumerate(prompt[first : first + room], first):
                row = _add(batch, token, position, 0, position + 1 == len(prompt))
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
        _loaded["held"] = _most_likely(row), len(prompt)
    finally:
        api.llama_batch_free(batch)
    return {}


def advance(new: int) -> dict[str, Any]:
    """Seconds of that many more tokens of the answer."""
    token, position = _loaded["held"]
    batch, tokens = api.llama_batch_init(1, 0, 1), []
    try:
        started = time.perf_counter()
        for _ in range(new):
            batch.n_tokens = 0
            _add(batch, token, position, 0, True)
            if api.llama_decode(_loaded["context"], batch):
                raise RuntimeError("llama_decode failed")
            token, position = _most_likely(0), position + 1
            tokens.append(token)
        seconds = time.perf_counter() - started
    finally:
        api.llama_batch_free(batch)
    _loaded["held"] = token, position
    return {"seconds": seconds, "tokens": tokens}


def _most_likely(row: int) -> int:
    logits = np.ctypeslib.as_array(api.llama_get_logits_ith(_loaded["context"], row), shape=(_loaded["words"],))
    return int(logits.argmax())


def logits(texts: list[list[int]], file: str) -> dict[str, Any]:
    """Write what follows each token of the texts but their last ones; a text is one batch, with nothing before it."""
    context, words = _loaded["context"], _loaded["words"]
    batch = api.llama_batch_init(_loaded["batch"], 0, 1)
    found = []
    try:
        for text in texts:
            if len(text) > _loaded["batch"]:
                raise ValueError(f"a text has {len(text)} tokens, and a batch {_loaded['batch']}")
            api.llama_memory_clear(api.llama_get_memory(context), False)
            batch.n_tokens = 0
            for position, token in enumerate(text):
                _add(batch, token, position, 0, True)
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            rows = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(text), words))
            found.append(rows[:-1].copy())
    finally:
        api.llama_batch_free(batch)
    np.save(file, np.concatenate(found))
    return {"positions": sum(map(len, found))}


def _add(batch: Any, token: int, position: int, sequence: int, output: bool) -> int:
    """Put a token into the batch; its row."""
    row = batch.n_tokens
    batch.token[row] = token
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence
    batch.logits[row] = output
    batch.n_tokens = row + 1
    return int(row)


if __name__ == "__main__":
    serve(
        {
            "convert": convert,
            "convert_random": convert_random,
            "convert_hybrid": convert_hybrid,
            "load": load,
            "unload": unload,
            "generate": generate,
            "hold": hold,
            "advance": advance,
            "logits": logits,
        }
    )
