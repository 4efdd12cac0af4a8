"""train.report.figures: pictures and the arrays behind them."""

from typing import Any

import numpy as np
import pytest
from matplotlib import figure, image

from tests.support import files
from train.report import dependency_figure, figures

STEPS = np.arange(10, 210, 10)
LOSSES = 5.5 * np.exp(-STEPS / 100.0)
BASELINES = {"uniform": 5.545, "bigram": 2.42, "trigram": 2.40}


def loss_curve(folder, **options):
    arguments: dict[str, Any] = {
        "validation_steps": np.array([100, 200]),
        "validation_losses": np.array([2.2, 1.0]),
        "baselines": BASELINES,
        "yscale": "linear",
    } | options
    return figures.loss_curve(folder, STEPS, LOSSES, **arguments)


def softmax(scores):
    weights = np.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def check(path):
    """A picture of sensible size, nothing temporary left, and the arrays."""
    assert path.suffix == ".png" and path.stat().st_size < 300_000
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 200 and pixels.std() > 0.01
    assert {file.name for file in path.parent.iterdir()} == {
        path.name,
        path.with_suffix(".npz").name,
    }
    return files.arrays(path.with_suffix(".npz"))


@pytest.mark.parametrize("yscale", ["linear", "log"])
def test_loss_curve(tmp_path, yscale):
    arrays = check(loss_curve(tmp_path / "figures", yscale=yscale))
    np.testing.assert_array_equal(arrays["training_steps"], STEPS)
    np.testing.assert_array_equal(arrays["training_losses"], LOSSES)
    np.testing.assert_array_equal(arrays["validation_losses"], [2.2, 1.0])
    assert arrays["baseline_bigram"] == 2.42


def test_loss_curve_without_validation_or_baselines_and_with_nan(tmp_path):
    nothing = np.array([])
    options = {"validation_steps": nothing, "validation_losses": nothing}
    check(loss_curve(tmp_path / "a", baselines={}, **options))
    path = loss_curve(tmp_path / "b", validation_losses=np.array([2.2, np.nan]))
    assert np.isnan(check(path)["validation_losses"][1])


def test_loss_curve_refuses_losses_that_do_not_fit_the_steps(tmp_path):
    with pytest.raises(ValueError, match="validation losses as steps"):
        loss_curve(tmp_path, validation_losses=np.array([1.0]))
    assert not list(tmp_path.iterdir())


def test_a_second_picture_replaces_the_first(tmp_path):
    before = loss_curve(tmp_path).read_bytes()
    path = loss_curve(tmp_path, baselines={})
    assert path.read_bytes() != before
    assert "baseline_bigram" not in check(path)


def test_a_failed_write_leaves_the_old_files(tmp_path, monkeypatch):
    path = loss_curve(tmp_path)
    before = path.read_bytes()

    def fail(self, file, **options):
        file.write(b"half a picture")
        raise OSError("disk full")

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        loss_curve(tmp_path, baselines={})
    assert path.read_bytes() == before
    check(path)


def test_labels_at_line_ends_keep_their_order_and_distance():
    plot = figure.Figure().add_subplot()
    plot.set_ylim(0, 10)
    values = [5.0, 5.01, 1.0, 4.99]
    figures.label_ends(plot, [(value, str(value), "black") for value in values])
    places = {float(text.get_text()): text.get_position()[1] for text in plot.texts}
    ordered = np.array([places[value] for value in sorted(values)])
    assert places[1.0] == pytest.approx(0.1)
    assert np.diff(ordered).min() >= 0.06 - 1e-9
    assert ordered[1:].mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("layers, heads, length", [(2, 3, 5), (1, 1, 48)])
def test_attention_heads(tmp_path, layers, heads, length):
    # Not mathematics, though matplotlib would read it so.
    tokens = [" ", "\n", "$\\no$", "\x80", "中", *"x" * length][:length]
    visible = np.tri(length, dtype=bool)
    scores = np.random.default_rng(0).normal(size=(layers, heads, length, length))
    weights = softmax(np.where(visible, scores, -np.inf))
    arrays = check(figures.attention_heads(tmp_path, weights, tokens))
    np.testing.assert_array_equal(arrays["weights"], weights)
    assert arrays["tokens"].tolist() == tokens


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 1, 4, 6), (1, 4, 4), (1, 1, 6, 4)])
def test_attention_heads_refuse_tokens_that_do_not_fit(tmp_path, shape):
    """One label per query and per key (case B137)."""
    with pytest.raises(ValueError, match=r"expected weights \[L, N, 4, 4\] for 4 tok"):
        figures.attention_heads(tmp_path, np.ones(shape), [*"abcd"])
    assert not list(tmp_path.iterdir())


def test_printable():
    shown = [figures.printable(token) for token in ["a", " ", "\n", "\t", "é", " the"]]
    assert shown == ["a", "␣", "↵", "⇥", "é", "␣the"]
    # No glyph, control characters and lone surrogates: the code point.
    shown = [figures.printable(token) for token in ["中", "\0", "\xad", "\udc80"]]
    assert shown == ["4E2D", "00", "AD", "DC80"]


def test_dependency_matrix(tmp_path):
    declared = np.tri(9, dtype=bool)
    dependency = declared.copy()
    dependency[2, 5], dependency[7, 1] = True, False
    path = dependency_figure.draw(
        tmp_path, dependency, declared, verdict="output 2 depends on input 5"
    )
    arrays = check(path)
    np.testing.assert_array_equal(arrays["dependency"], dependency)
    np.testing.assert_array_equal(arrays["declared"], declared)
    # The leak and the missing dependence are drawn in their own colours: a cell of
    # the picture has about 3000 pixels, a patch of its legend about 200.
    pixels = np.round(255 * image.imread(path)[..., :3])
    for colour in ((0xD5, 0x5E, 0x00), (0xE6, 0x9F, 0x00)):
        assert 2000 < (pixels == colour).all(axis=-1).sum() < 5000


def test_dependency_without_a_declared_mask(tmp_path):
    """What an output does not depend on is no fault then."""
    dependency = np.eye(9, dtype=bool)
    dependency[2, 5] = True
    path = dependency_figure.draw(tmp_path, dependency, None, verdict="LEAK")
    np.testing.assert_array_equal(check(path)["declared"], np.tri(9, dtype=bool))
    pixels = np.round(255 * image.imread(path)[..., :3])
    assert 2000 < (pixels == (0xD5, 0x5E, 0x00)).all(axis=-1).sum() < 5000
    assert not (pixels == (0xE6, 0x9F, 0x00)).all(axis=-1).any()


def test_dependency_matrix_refuses_other_shapes(tmp_path):
    square = np.tri(4, dtype=bool)
    for dependency, declared in ((square, square[:3]), (square[:3], square[:3])):
        with pytest.raises(ValueError, match="expected two square matrices"):
            dependency_figure.draw(tmp_path, dependency, declared, verdict="")


def test_outline_encloses_exactly_the_cells():
    cells = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    segments = {
        tuple(map(tuple, segment)) for segment in dependency_figure.outline(cells)
    }
    assert segments == {
        ((-0.5, -0.5), (0.5, -0.5)),
        ((0.5, 0.5), (1.5, 0.5)),
        ((-0.5, 1.5), (0.5, 1.5)),
        ((0.5, 1.5), (1.5, 1.5)),
        ((-0.5, -0.5), (-0.5, 0.5)),
        ((-0.5, 0.5), (-0.5, 1.5)),
        ((0.5, -0.5), (0.5, 0.5)),
        ((1.5, 0.5), (1.5, 1.5)),
    }
