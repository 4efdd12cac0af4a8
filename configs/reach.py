"""How far back a gradient reaches: a GRU beside attention.

    python -m train.reach --config=configs/reach.py --workdir=runs/reach

Cost: 140 s on two cores. Expected: the gradient through the GRU falls by exp(-0.25) a
token before training and by exp(-0.20) after it, halved every 2.8 and 3.5 tokens; that
through attention does not fall before training, and after it from 1 at k = 1 to between
0.001 and 0.1 from k = 16 on. Exit status 0.
"""

from ml_collections import config_dict

from configs import tiny_lm


def get_config() -> config_dict.ConfigDict:
    """Every value of a `train.studies.reach.settings.Config`."""
    base = tiny_lm.get_config("softmax")
    base.model.update(num_layers=2, width=64, mlp_width=256, context=128)
    return config_dict.ConfigDict(
        {
            "seed": 0,
            "runs": 6,
            "model": base.model,
            "gru_mlp_width": 160,
            "data": base.data,
            "optimizer": base.optimizer,
            "steps": 500,
            "batch_size": 8,
            "rows": 16,
            "nearest": 1,
            "timing": {
                "shortest": 64,
                "longest": 4096,
                "width": 256,
                "rounds": 10,
                "seconds": 5.0,
            },
        }
    )
