"""The kernels for mixtures of experts as Mixtral-8x7B, Qwen3-30B-A3B and gpt-oss-20b launch them, in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import triton

from engine.backends.triton import experts, routing
from support.gpu import Variant
from support.variants_few_bits import SCALES, VALUES

# Name, experts, active ones, hidden size, width, activation; "clamped" ones have biases.
MODELS = [
    ("Mixtral-8x7B", 8, 2, 4096, 14336, "silu"),
    ("Qwen3-30B-A3B", 128, 8, 2048, 768, "silu"),
    ("gpt-oss-20b", 32, 4, 2880, 2880, "clamped"),
]


def products(capability: int, bits: int = 0, steps: tuple[int, ...] = (1, 64, 128, 512, 8192)) -> list[Variant]:
    """Both products of each model, for steps of one token to a long prompt.

    Args:
        bits: of the weights; 0: they are bfloat16.
    """
    made: dict[tuple[Any, ...], Variant] = {}
    weights = {"weights": VALUES[bits], "scales": SCALES[bits]} if bits else {"weights": "*bf16"}
    for name, count, active, hidden, width, activation in MODELS:
        for tokens in steps:
            launch = experts.choose_launch(tokens, active, count, torch.bfloat16, capability, bool(bits))
            for gated, shared, features in ((True, active, hidden), (False, 1, width)):
                constants = {
                    "SHARED": shared,
                    "GATED": gated,
                    "ACTIVATION": activation if gated else "",
                    "BIASED": activation == "clamped",
                    "WEIGHTED": not gated,
                    "EVEN": features % launch.inputs == 0,
                    "SIZE": features if bits else 0,
                    "BITS": bits,
                    "TOKENS": launch.tokens,
                    "OUTPUTS": launch.outputs,
                    "INPUTS": launch.inputs,
                    "NEIGHBOURS": 8,
                }
                shares = "*bf16" if gated else "*fp32"
                pointers = {"x": "*bf16", **weights, "biases": "*bf16", "shares": shares, "out": "*bf16"}
                numbers = {"features": "i32", "width": "i32", "bound": "i32", "limit": "fp32", "slope": "fp32"}
                made[(*constants.values(), launch)] = Variant(
                    name=f"{name}, {tokens} tokens, {'up' if gated else 'down'}, {bits or 16} bits",
                    kernel=experts._multiply,
                    signature={**pointers, "order": "*i32", "tiles": "*i32", **numbers},
                    constants=constants if bits else {"scales": None, **constants},
                    multiples=("features", "width"),
                    num_warps=launch.warps,
                    num_stages=launch.stages,
                    capabilities=(capability,),
                )
    return list(made.values())


def others() -> list[Variant]:
    """What surrounds the products; the second model's experts are the most."""
    _, count, active, *_ = MODELS[1]
    sizes = {"CHUNK": 4096, "BLOCK": 1024, "BINS": triton.next_power_of_2(count)}
    integers = {"pairs": "i32", "chunks": "i32"}
    placed = {"chosen": "*i32", "counts": "*i32", "order": "*i32", "tiles": "*i32", **integers}
    variants = [
        Variant(
            name="route",
            kernel=routing._route,
            signature={"logits": "*bf16", "chosen": "*i32", "shares": "*fp32", "count": "i32"},
            constants={"ACTIVE": active, "NORMALIZE": True, "BINS": sizes["BINS"]},
            multiples=("count",),
            num_warps=1,
        ),
        Variant(
            name="count",
            kernel=routing._count,
            signature={"chosen": "*i32", "counts": "*i32", "pairs": "i32"},
            constants=sizes,
        ),
        Variant(
            name="add",
            kernel=experts._add,
            signature={"answers": "*bf16", "out": "*bf16", "tokens": "i32", "width": "i32"},
            constants={"ACTIVE": active, "BLOCK": 1024},
            multiples=("width",),
        ),
    ]
    return variants + [
        Variant(
            name=f"place, counted {'before' if counted else 'there'}",
            kernel=routing._place,
            signature=placed,
            constants={"COUNTED": counted, "SIZE": 16, **sizes},
        )
        for counted in (False, True)
    ]


# Each step for the oldest; the smallest and the largest tiles for the others, and the steps between them by turns.
VARIANTS = [*products(80), *products(90, steps=(1, 128, 8192)), *products(100, steps=(1, 64, 512, 8192)), *others()]
# Where shared memory is least: the largest tiles.
VARIANTS += [variant for variant in products(120) if variant.constants["TOKENS"] == 128]
# Of few bits: the smallest tiles, and the largest.
VARIANTS += [*products(80, 8, (64,)), *products(90, 4, (1, 8192)), *products(100, 4, (1,)), *products(120, 8, (8192,))]
