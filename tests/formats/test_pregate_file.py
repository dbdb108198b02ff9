"""The file of pre-gates: what it says is what is read, and each way in which it is none is refused in one line."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.formats import pregate
from engine.formats.pregate import METADATA, PregateModel
from engine.ground.errors import FileFormatError, SparkError, WrongModelError

E, D, H = 7, 12, 5
MODEL = PregateModel("ab" * 32, (1, 2, 4), D, E, 3)
PAIRS = [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)]


def made():
    """Tensors, and what the metadata says."""
    rng = np.random.default_rng(7)
    shapes = {
        "linear.weight": (E, D), "linear.bias": (E,), "mlp.weight": (E, D), "mlp.bias": (E,),
        "mlp.hidden.weight": (H, D), "mlp.hidden.bias": (H,), "mlp.output.weight": (E, H),
    }  # fmt: skip
    tensors = {
        f"layers.{layer}.target.{target}.{name}": rng.normal(size=shape).astype(np.float32)
        for layer, target in PAIRS
        for name, shape in shapes.items()
    }
    tables = [
        {"predictor": kind, "layer": a, "target_layer": b, "knots": [-1.0, 0.5 + a, 9.0], "values": [0.0, 0.25, 0.75]}
        for kind in ("mlp", "router")
        for a, b in [*PAIRS, *([(1, 4)] if kind == "router" else [])]
    ]
    known = {
        "version": 1, "model_id": MODEL.model_id, "layers": [1, 2, 4], "n_embd": D, "n_expert": E, "n_expert_used": 3,
        "eps": 1e-5, "predictors": ["linear", "mlp"], "chances": tables, "rows": [], "options": {"epochs": 5},
    }  # fmt: skip
    return tensors, known


def write(path, tensors, known):
    save_file(tensors, path, {METADATA: known if isinstance(known, str) else json.dumps(known)})
    return path


def test_what_is_written_is_read(tmp_path):
    tensors, known = made()
    found = pregate.read(write(tmp_path / "p", tensors, known), MODEL)
    assert found.eps == 1e-5 and set(found.predictors) == {"linear", "mlp"} and set(found.chances) == {"mlp", "router"}
    x = np.random.default_rng(1).normal(size=(4, D)).astype(np.float32)
    for a, b in PAIRS:
        t = {
            name.split(".", 4)[4]: value.astype(float) for name, value in tensors.items() if f".{a}.target.{b}." in name
        }
        linear = x @ t["linear.weight"].T + t["linear.bias"]
        np.testing.assert_allclose(found.predictors["linear"][a, b].scores(x), linear, rtol=1e-4, atol=1e-4)
        hidden = np.maximum(x @ t["mlp.hidden.weight"].T + t["mlp.hidden.bias"], 0)
        mlp = x @ t["mlp.weight"].T + t["mlp.bias"] + hidden @ t["mlp.output.weight"].T
        np.testing.assert_allclose(found.predictors["mlp"][a, b].scores(x), mlp, rtol=1e-4, atol=1e-4)
        knots, values = found.chances["router"][a, b]
        assert knots.tolist() == [-1, 0.5 + a, 9] and values.tolist() == [0, 0.25, 0.75]


def test_an_older_file_has_no_chances(tmp_path):
    tensors, known = made()
    del known["chances"]
    assert pregate.read(write(tmp_path / "p", tensors, known), MODEL).chances == {}


def table(**changes):
    return {"predictor": "mlp", "layer": 1, "target_layer": 2, "knots": [0, 1], "values": [0, 1]} | changes


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"version": None}, "version None"),
        ({"layers": [1, 2, 3]}, r"layers is \[1, 2, 3\], expected \[1, 2, 4\]"),
        ({"n_embd": 13}, "n_embd is 13, expected 12"),
        ({"n_expert": 8}, "n_expert is 8, expected 7"),
        ({"n_expert_used": 4}, "n_expert_used is 4"),
        ({"eps": "small"}, "eps is 'small'"),
        ({"predictors": ["linear", "oracle"]}, "predictors is"),
        ({"predictors": 3}, "predictors is 3"),
        ({"chances": 3}, "chances are no list"),
        ({"chances": [3]}, "chances hold 3"),
        ({"chances": [table(knots=[1, 0])]}, "no table that rises"),
        ({"chances": [table(values=[0, 2])]}, "no table that rises"),
        ({"chances": [table(values=[0])]}, "no table that rises"),
        ({"chances": [table(knots=[0, float("nan")])]}, "no table that rises"),
        ({"chances": [table(target_layer=4)]}, "no table that rises"),
        ({"chances": [table(predictor="oracle")]}, "no table that rises"),
        ({"chances": [table()]}, "mlp for 1 pairs of layers, expected 5"),
        ("[]", "no JSON object"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit_is_refused(tmp_path, changes, match):
    tensors, known = made()
    path = write(tmp_path / "p", tensors, changes if isinstance(changes, str) else known | changes)
    with pytest.raises(FileFormatError, match=match) as error:
        pregate.read(path, MODEL)
    assert str(path) in error.value.message and "\n" not in error.value.message and error.value.hint


def test_another_models_file_is_refused(tmp_path):
    path = write(tmp_path / "p", *made())
    with pytest.raises(WrongModelError, match=f"{MODEL.model_id}.*{'cd' * 32}"):
        pregate.read(path, replace(MODEL, model_id="cd" * 32))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v: v[:-1], r"F32 \(6,\), expected F32 \(7,\)"),
        (lambda v: v.astype(np.float16), r"F16 \(7,\), expected F32"),
        (lambda v: v * np.nan, "not finite"),
        (None, "expected a tensor layers.2.target.4.mlp.bias, found none"),
    ],
    ids=["shape", "type", "nan", "missing"],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, match):
    tensors, known = made()
    name = "layers.2.target.4.mlp.bias"
    values = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(values))
    with pytest.raises(FileFormatError, match=match):
        pregate.read(write(tmp_path / "p", tensors, known), MODEL)


def test_a_type_that_numpy_does_not_have_is_refused(tmp_path):
    tensors, known = made()
    path = write(tmp_path / "p", tensors, known)
    whole = path.read_bytes()
    n = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + n])
    name = "layers.2.target.4.mlp.weight"
    header[name] |= {"dtype": "BF16", "shape": [2 * E, D]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + n :])
    with pytest.raises(FileFormatError, match=rf"mlp.weight is BF16 \({2 * E}, {D}\), expected F32 \({E}, {D}\)"):
        pregate.read(path, MODEL)


def test_what_is_no_whole_file_is_refused(tmp_path):
    whole = write(tmp_path / "p", *made()).read_bytes()
    for n in (0, 5, 8, 300, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:n])
        with pytest.raises(FileFormatError, match="no whole safetensors file"):
            pregate.read(tmp_path / "cut", MODEL)
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "other")
    with pytest.raises(FileFormatError, match="expected pre-gates"):
        pregate.read(tmp_path / "other", MODEL)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "none", tmp_path):
        with pytest.raises(SparkError, match="cannot read pre-gates"):
            pregate.read(path, MODEL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(folder, data):
    path = folder / "whole"
    whole = bytearray((path if path.exists() else write(path, *made())).read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(b'"{}[]:,0129-eBFIUx\\\x00\xff '))
    (folder / "damaged").write_bytes(whole)
    try:
        pregate.read(folder / "damaged", MODEL)
    except SparkError as error:
        assert str(folder / "damaged") in error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_metadata_of_other_kinds_is_refused(folder, data):
    tensors, known = made()
    value = data.draw(JSON)
    if data.draw(st.booleans()):
        known[data.draw(st.sampled_from(sorted({*known} - {"rows", "options"})))] = value
    else:
        known["chances"][3][data.draw(st.sampled_from(sorted(known["chances"][3])))] = value
    path = write(folder / "other", tensors, known)
    try:
        pregate.read(path, MODEL)
    except SparkError as error:
        assert str(path) in error.message and "\n" not in error.message
