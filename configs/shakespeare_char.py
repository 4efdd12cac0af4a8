r"""The default model on the public 1.1 MB Shakespeare corpus, by characters.

    python -m train.main --config=configs/shakespeare_char.py \
        --config.data.path=tinyshakespeare.txt --workdir=runs/shakespeare_char

The corpus is not in this repository: name a copy. Without a path the run takes the
default corpus.

Cost: 115 s on two cores. Expected: 1.68 nats per character over the whole validation
split in consecutive windows of 64; a well-known PyTorch recipe of this size reports
1.88.
"""

from ml_collections import config_dict

from configs import tiny_lm


def get_config() -> config_dict.ConfigDict:
    """Changes what differs from the default."""
    config = tiny_lm.get_config()
    config.data.tokenizer = "chars"
    config.train.steps = 2000
    return config
