"""A tiny language model on Python's own language reference: the default.

    python -m train.main --config=configs/tiny_lm.py --workdir=runs/tiny_lm

Another mixer, or a pattern of mixers, follows a colon; the MLPs then have the width
that leaves the number of parameters about the same:

    python -m train.main --config=configs/tiny_lm.py:window,window,softmax --workdir=DIR

Cost: 75 to 82 s on two cores, the proofs of causality included. Expected: 1.32 nats per
byte over the whole validation split (0.57 of the bigram baseline; the trigram's is
1.72), and all three proofs passed.
"""

import types

from ml_collections import config_dict

# Of a model whose mixers have more parameters than attention, 4 width²; else 512.
MLP_WIDTHS = types.MappingProxyType(
    {"retention": 448, "rwkv6": 224, "mamba": 313, "gru": 320}
)
# What tells positions apart, where order alone does not; else none.
POSITIONS = types.MappingProxyType(
    {
        "softmax": "rotary",
        "window": "rotary",
        "longformer": "rotary",
        "bigbird": "rotary",
        "linear": "learned",
        "performer": "learned",
    }
)


def get_config(mixers: str = "softmax") -> config_dict.ConfigDict:
    """Every value of a `train.config.Config`."""
    names = mixers.split(",")
    found = {POSITIONS.get(name, "none") for name in names}
    positions = next(x for x in ("rotary", "learned", "none") if x in found)
    widths = [MLP_WIDTHS.get(name, 512) for name in names]
    return config_dict.ConfigDict(
        {
            "seed": 0,
            "model": {
                "num_layers": 4,
                "num_heads": 4,
                "num_kv_heads": config_dict.placeholder(int),
                "width": 128,
                "mlp_width": sum(widths) // len(widths),
                "context": 64,
                "positions": positions,
                "mixers": mixers,
                "convolution": config_dict.placeholder(int),
                "window": 16,
                "global_tokens": 1,
                "block_size": 8,
                "random_blocks": 1,
                "features": 64,
                "state_size": 16,
                "scale": config_dict.placeholder(float),
                "use_bias": False,
                "tie_embeddings": True,
                "dropout_rate": 0.0,
                "dtype": "float32",
                "implementation": "auto",
            },
            "data": {"path": config_dict.placeholder(str), "tokenizer": "bytes"},
            "optimizer": {
                "peak_lr": 3e-3,
                "min_lr": 3e-4,
                "warmup_steps": 100,
                "b1": 0.9,
                "b2": 0.99,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "train": {
                "steps": 1000,
                "batch_size": 12,
                "accumulation": 1,
                "log_every": 50,
                "checkpoint_every": 500,
            },
            "audit": {"steps": 150, "eval_sequences": 1024, "replacements": 3},
        }
    )
