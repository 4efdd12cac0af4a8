"""The plan of a benchmark of attention, and the presets by name."""

import dataclasses
import types
from collections.abc import Mapping

from train.bench import workload

DTYPES = tuple(workload.TOLERANCE)
MODES = ("jit", "eager")
DIRECTIONS = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of a benchmark, and how they are measured.

    Attributes:
      implementations: keys of `peers.CONTENDERS`.
      lengths: T = S, ascending.
      dtypes: dtypes of query, key and value.
      modes: 'jit' and 'eager'; PyTorch, which has 'eager' alone, runs in any case.
      directions: 'forward' and 'forward+backward'.
      batch_size: B.
      num_heads: N.
      num_kv_heads: K.
      width: H.
      is_causal: whether query i attends to keys j <= i only.
      head_counts: N, in the sweep at fixed N * H; may be empty.
      head_length: T of that sweep.
      rounds: largest number of measurements of each implementation.
      seconds: time after which a case ends, once each was measured three times.
      patience: seconds of a call after which an implementation is skipped at greater
        lengths.
      product_size: rows and columns of the matrix product.
      claims: 0 to leave out `claims`, 1 to measure and judge them, n to measure them at
        lengths n times smaller without judging.
    """

    implementations: tuple[str, ...]
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    directions: tuple[str, ...]
    batch_size: int
    num_heads: int
    num_kv_heads: int
    width: int
    is_causal: bool
    head_counts: tuple[int, ...]
    head_length: int
    rounds: int
    seconds: float
    patience: float
    product_size: int
    claims: int

    def __post_init__(self) -> None:
        for name, known in (
            ("dtypes", DTYPES),
            ("modes", MODES),
            ("directions", DIRECTIONS),
        ):
            values = getattr(self, name)
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise ValueError(f"{name} must be of {', '.join(known)}, got {values}")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths must ascend, got {self.lengths}")
        if self.lengths[0] < 1:
            raise ValueError(f"lengths must be at least 1, got {self.lengths}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        total = self.num_heads * self.width
        for heads in self.head_counts:
            if heads < 1 or total % heads:
                raise ValueError(
                    f"head_counts must divide num_heads * width = {total}, got {heads}"
                )


_CPU = Plan(
    implementations=("flash", "reference", "jax.nn.xla", "flax.linen", "torch"),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    dtypes=("float32", "bfloat16"),
    modes=MODES,
    directions=DIRECTIONS,
    batch_size=1,
    num_heads=8,
    num_kv_heads=8,
    width=64,
    is_causal=True,
    head_counts=(1, 2, 4, 8, 16, 32),
    head_length=2048,
    rounds=10,
    seconds=10.0,
    patience=1.0,
    product_size=1024,
    claims=1,
)
_GPU = dataclasses.replace(
    _CPU,
    implementations=(
        *("flash", "cudnn", "auto", "jax.nn.xla", "jax.nn.cudnn"),
        *("flax.linen", "torch", "tokamax"),
    ),
    lengths=(2048, 4096, 8192, 16384),
    dtypes=("bfloat16",),
    modes=("jit",),
    num_heads=64,
    num_kv_heads=8,
    width=128,
    head_counts=(32, 64, 128),
    rounds=20,
    seconds=2.0,
    patience=0.3,
    product_size=8192,
    claims=0,
)
PRESETS: Mapping[str, Plan] = types.MappingProxyType(
    {
        "cpu": _CPU,
        "gpu": _GPU,
        "tpu": dataclasses.replace(
            _GPU,
            implementations=("flash", "auto", "jax.nn.xla", "flax.linen", "splash"),
        ),
        "smoke": dataclasses.replace(
            _CPU,
            implementations=("flash", "reference", "torch"),
            lengths=(8, 16, 32),
            dtypes=("float32",),
            num_heads=2,
            num_kv_heads=2,
            width=8,
            head_counts=(1, 2),
            head_length=8,
            rounds=2,
            product_size=64,
            claims=0,
        ),
    }
)
