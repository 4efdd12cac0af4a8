"""Programs that are read from jax's persistent cache are those that were compiled."""

import os
import subprocess
import sys

# Attention in blocks, its gradients and a reduction: what rounds, in one program.
PROGRAM = """
import jax, numpy as np
import attention

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
query, key, value = np.random.default_rng(0).normal(size=(3, 2, 9, 4, 8)).astype("f")

def loss(*arrays):
    out = attention.dot_product_attention(
        *arrays, is_causal=True, implementation="flash"
    )
    return (out**2).sum(), out

program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
for array in jax.tree.leaves(program(query, key, value)):
    print(np.asarray(array).tobytes().hex())
print(hits.count("/jax/compilation_cache/cache_hits"))
print(hits.count("/jax/compilation_cache/cache_misses"))
"""


def test_a_cold_and_a_warm_cache_agree(tmp_path):
    """Bit for bit, from two processes; the second compiles nothing."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    cold, warm = (
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    )
    *compiled, hits, misses = cold.stdout.split()
    assert int(hits) == 0 and int(misses) > 0
    *read, hits, misses_left = warm.stdout.split()
    assert int(hits) == int(misses) and int(misses_left) == 0
    assert read == compiled and len(read) == 5
    assert warm.stderr == cold.stderr == ""
