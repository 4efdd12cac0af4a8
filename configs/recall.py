"""Who recalls what, with how much state: multi-query associative recall.

    python -m train.study --config=configs/recall.py --workdir=runs/recall

Another task follows a colon: induction, copy or brackets.

    python -m train.study --config=configs/recall.py:copy --workdir=DIR

One layer: of two, windows learn in so few steps which values they see, and not which of
them is asked for.

Cost: 16 min 50 s on two cores. Expected: softmax of width 64 reaches 0.99 in every run
within 150 steps; linear attention and RWKV-6 of that width are not told apart from it,
all others stand below; windows of width 64 answer all that is asked up to 17 tokens
behind, and guess beyond 20. Exit status 0.
"""

from ml_collections import config_dict


def get_config(task: str = "recall") -> config_dict.ConfigDict:
    """Every value of a `train.studies.recall.config.StudyConfig`."""
    return config_dict.ConfigDict(
        {
            "seed": 0,
            "task": task,
            "recall": {
                "num_keys": 16,
                "num_values": 16,
                "num_pairs": 8,
                "num_slots": 16,
            },
            "induction": {"num_symbols": 16, "length": 32},
            "copy": {"num_symbols": 16, "num_copied": 16},
            "brackets": {"num_kinds": 8, "max_depth": 8, "num_pairs": 16},
            "mixers": "softmax,window,longformer,bigbird,linear,performer,retention,"
            "rwkv,rwkv6,mamba,gru,zero",
            "widths": "32,64",
            "model": {
                "num_layers": 1,
                "num_heads": 2,
                "num_kv_heads": config_dict.placeholder(int),
                "mlp_factor": 2,
                "positions": "none",
                "convolution": 4,
                "window": 18,
                "global_tokens": 1,
                "block_size": 8,
                "random_blocks": 1,
                "features": 16,
                "state_size": 8,
                "scale": config_dict.placeholder(float),
                "use_bias": False,
                "tie_embeddings": True,
                "dropout_rate": 0.0,
                "dtype": "float32",
                "implementation": "auto",
            },
            "optimizer": {
                "peak_lr": 3e-3,
                "min_lr": 3e-4,
                "warmup_steps": 50,
                "b1": 0.9,
                "b2": 0.98,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "runs": {
                "factors": "0.3,1,3,10",
                "seeds": 2,
                "steps": 350,
                "every": 50,
                "goal": 0.99,
                "batch_size": 32,
                "rows": 256,
                "test_batches": 8,
            },
        }
    )
