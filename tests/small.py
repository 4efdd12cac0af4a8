"""The small language model of the tests: the one that mechanisms are shown on."""

import dataclasses

from train import mechanism_cores

CONFIG = dataclasses.replace(
    mechanism_cores.SMALL,
    context=12,
    positions="rotary",
    block=4,
    implementation="auto",
)
