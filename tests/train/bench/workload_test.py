"""Runners: work is counted, and wrong results are detected."""

import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks
from tests.support import oracle
from train.bench import peers, workload

reference = functools.partial(
    attention.dot_product_attention, implementation="reference"
)


def error_of(kernel, work):
    arrays = work.arrays()
    runner = peers.of_kernel(kernel).runners(work, arrays)["jit"]
    return workload.expected(arrays, work.visible).error(runner)


@pytest.fixture
def few_rows(monkeypatch):
    """Makes every length a long one."""
    monkeypatch.setattr(workload, "ROWS", 4)


def work(**changes):
    fields = dict(length=12, num_heads=2, num_kv_heads=1, width=4)
    return workload.Work(**(fields | changes))


def test_flops_are_those_of_the_visible_pairs():
    visible = np.tri(12).sum()
    assert work().flops == 2 * visible * 2 * (2 * 4)
    assert work(backward=True).flops == 2 * visible * 7 * (2 * 4)
    assert work(is_causal=False, batch_size=3).flops == 3 * 2 * 12 * 12 * 2 * (2 * 4)


def test_expected_is_what_the_oracle_computes(few_rows):
    case = work(backward=True)
    query, key, value, cotangent = arrays = case.arrays()
    expected = workload.expected(arrays, case.visible)
    assert len(expected.rows) == 4 and {0, 11} <= set(expected.rows)
    rest = np.setdiff1d(np.arange(12), expected.rows)
    assert not np.asarray(expected.cotangent)[:, rest].any()
    results = oracle.attention(
        query,
        key,
        value,
        visible=np.broadcast_to(np.tri(12, dtype=bool), (1, 2, 12, 12)),
        output_gradient=expected.cotangent,
    )
    output, *gradients = expected.outputs
    np.testing.assert_allclose(output, results["out"][:, expected.rows], atol=1e-6)
    for gradient, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(gradient, results[name], atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_right_is_found_right(backward, few_rows):
    assert error_of(reference, work(backward=backward)) < 1e-5


def unscaled(query, key, value, *, is_causal):
    return reference(query, key, value, is_causal=is_causal, scale=1.0)


def not_causal(query, key, value, *, is_causal):
    return reference(query, key, value)


def one_row_of_nan(query, key, value, *, is_causal):
    return reference(query, key, value, is_causal=is_causal).at[0, 5].set(jnp.nan)


@jax.custom_vjp
def _doubled(x):
    return x


_doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))


def wrong_gradient(query, key, value, *, is_causal):
    return reference(query, _doubled(key), value, is_causal=is_causal)


@pytest.mark.parametrize(
    "kernel", [unscaled, not_causal, one_row_of_nan, wrong_gradient]
)
def test_what_is_wrong_is_found(kernel, few_rows):
    backward = kernel is wrong_gradient
    error = error_of(kernel, work(backward=backward))
    assert not error <= workload.tolerance("float32")


def test_another_shape_is_named():
    def transposed(query, key, value, *, is_causal):
        return reference(query, key, value, is_causal=is_causal).swapaxes(1, 2)

    with pytest.raises(workload.WrongShape, match="expected outputs"):
        error_of(transposed, work())


def test_rows_are_all_or_one_of_each_part(few_rows):
    rows = workload.sampled_rows((1, 3, 1, 1), 3)
    np.testing.assert_array_equal(rows, [0, 1, 2])
    rows = workload.sampled_rows((1, 100, 1, 1), 100)
    assert rows[0] == 0 and rows[-1] == 99
    assert (rows // 25).tolist() == [0, 1, 2, 3]


def test_a_mask_is_an_argument_of_the_program():
    case = work()
    arrays = case.arrays()
    ids = jnp.arange(12, dtype=jnp.int32) // 5
    mask = masks.segments(ids) & masks.causal()
    runner = workload.jax_runners(reference, arrays, mask=mask)["jit"]
    assert workload.expected(arrays, mask).error(runner) < 1e-5
    assert workload.expected(arrays, case.visible).error(runner) > 1e-2


def test_compilation_is_counted_once():
    runners = workload.jax_runners(reference, work().arrays())
    runners["jit"].run()
    runners["jit"].run()
    runners["eager"].run()
    assert runners["jit"].traces() == 1
    assert runners["jit"].compile_seconds > 0
    assert runners["jit"].temporary_bytes > 0
    assert runners["eager"].compile_seconds is None


HERE = [name for name, x in peers.CONTENDERS.items() if x.missing() is None]


@pytest.mark.parametrize("name", HERE)
def test_everyone_here_is_right(name):
    kv_heads = 2 if name == "flax.linen" else 1
    case = work(num_kv_heads=kv_heads, backward=True)
    arrays = case.arrays()
    contender = peers.CONTENDERS[name]
    runners = contender.runners(case, arrays)
    assert runners.keys() == set(contender.modes)
    expected = workload.expected(arrays, case.visible)
    for runner in runners.values():
        assert expected.error(runner) <= workload.tolerance("float32")


def test_pytorch_narrow_and_forward(torch):
    from train.bench import torch_sdpa

    for dtype in ("bfloat16", "float16"):
        case = work(dtype=dtype, is_causal=False)
        arrays = case.arrays()
        runner = torch_sdpa.runners(case, arrays)["eager"]
        runner.run()
        expected = workload.expected(arrays, None)
        assert expected.error(runner) <= workload.tolerance(dtype)


@pytest.mark.parametrize("is_causal", [True, False])
def test_splash_attention_is_called_right(is_causal):
    """Interpreted: the kernel itself needs a TPU."""
    case = work(length=128, width=128, is_causal=is_causal)
    kernel = functools.partial(peers.splash, interpret=True)
    assert error_of(kernel, case) < 1e-5


def test_tokamax_is_called_by_its_name(monkeypatch):
    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.util.spec_from_loader("tokamax", None)
    module.dot_product_attention = reference
    monkeypatch.setitem(sys.modules, "tokamax", module)
    contender = peers.CONTENDERS["tokamax"]
    assert contender.missing() is None
    arrays = work().arrays()
    runner = contender.runners(work(), arrays)["jit"]
    assert workload.expected(arrays, work().visible).error(runner) < 1e-5


def test_who_takes_part():
    chosen, left_out = peers.choose(["reference", "splash"], not_causal)
    assert list(chosen) == [peers.TARGET, "reference"]
    assert left_out == {"splash": "splash attention needs a TPU"}
    with pytest.raises(ValueError, match="no implementation 'flush', only"):
        peers.choose(["flush"], None)
    with pytest.raises(ValueError, match="needs a TPU"):
        peers.choose(["splash"], None)
