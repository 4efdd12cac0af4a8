"""The small language model of the tests: the one that mechanisms are shown on."""

import dataclasses

from train.mechanisms import cores

CONFIG = dataclasses.replace(
    cores.SMALL,
    context=12,
    positions="rotary",
    block_size=4,
    implementation="auto",
)
