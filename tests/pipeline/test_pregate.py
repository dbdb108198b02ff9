"""Pre-gates: traces with a known structure are learned, no session leaks, what cannot be trained on is refused."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engine.formats import trace as trace_module
from engine.formats.gguf import open_model
from engine.formats.pregate import TRAINED, PregateModel, Router, Trained, pairs, read_router, unit
from engine.formats.pregate import read as read_pregate
from engine.formats.trace import TraceWriter, part_paths
from engine.ground.errors import (
    FileFormatError,
    MissingExtraError,
    NumericalError,
    SparkError,
    UnsupportedModelError,
    UsageError,
    WrongModelError,
)
from engine.ground.install import requirement
from engine.ops import cpu
from engine.running.loaded import load
from engine.running.stepping import Span
from spark.pipeline import predictors, pregate
from spark.pipeline.guessed import expert_bytes
from spark.pipeline.pregate import PregateOptions
from tests.engine_runs import config
from tests.gguf_files import write_gguf
from tests.tiny_models import MODELS, tiny_path

LAYERS, N_LAYER = (1, 2, 4), 6  # the others are dense
D, E, A, F = 24, 13, 3, 5
SIZES = (150, 290, 310, 260, 330, 270, 240)  # tokens of the sessions
EPS = 1e-3
OPTIONS = PregateOptions(threads=1, hidden_units=10, epochs=3)
QUICK = replace(OPTIONS, epochs=1)
CHANCE = A / E


def session_id(number):
    return f"session-{number}"


def held_out_sessions():
    """The documented rule: the first fifth, rounded up, by SHA-256."""
    order = sorted(range(len(SIZES)), key=lambda i: hashlib.sha256(session_id(i).encode()).digest())
    return order[: -(-len(SIZES) // 5)]


def norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def top(scores):
    return np.argsort(-scores, axis=1, kind="stable")[:, :A]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of which only routers and norms matter: path, {layer: norm}, {layer: router}."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_model(path)
    rng = np.random.default_rng(5)
    return path, *weights(rng)


def weights(rng):
    norms = {layer: rng.normal(1, 0.3, D).astype(np.float32) for layer in LAYERS}
    routers = {layer: rng.normal(0, 0.3, (E, D)).astype(np.float32) for layer in LAYERS}
    return norms, routers


def write_model(path, seed=5, arch="qwen3moe"):
    norms, routers = weights(np.random.default_rng(seed))
    tensors = {f"blk.{layer}.ffn_norm.weight": norms[layer] for layer in LAYERS}
    tensors |= {f"blk.{layer}.ffn_gate_inp.weight": routers[layer] for layer in LAYERS}
    for layer in LAYERS:
        shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
        zeros = {part: np.zeros(shape, np.float32) for part, shape in shapes.items()}
        tensors |= {f"blk.{layer}.ffn_{part}_exps.weight": values for part, values in zeros.items()}
    metadata = {"general.architecture": arch, f"{arch}.block_count": N_LAYER}
    metadata |= {f"{arch}.attention.layer_norm_rms_epsilon": EPS}
    write_gguf(path, metadata, tensors)


def structured(norms, routers, seed=1):
    """Tokens whose routing has a known cause. Returns hidden, experts [T, L, .] and generated [T].

    First layer: a fixed linear map of the residual that enters it. Second: one of the residual that entered the
    first, and nothing of its own. Third: exactly its router on its own residual.
    """
    rng = np.random.default_rng(seed)
    T = sum(SIZES)
    hidden = rng.normal(size=(T, len(LAYERS), D)) * rng.lognormal(size=(T, len(LAYERS), 1)) * np.linspace(0.2, 5, D)
    hidden = hidden.astype(np.float16).astype(np.float32)
    maps = np.random.default_rng(2).normal(size=(2, E, D)) / np.linspace(0.2, 5, D)
    maps /= np.linalg.norm(maps * np.linspace(0.2, 5, D), axis=2, keepdims=True)
    last = LAYERS[2]
    scores = (
        hidden[:, 0] @ maps[0].T,
        hidden[:, 0] @ maps[1].T,
        (norm(hidden[:, 2]) * norms[last]) @ routers[last].T,
    )
    experts = np.stack([top(s) for s in scores], axis=1)
    return hidden, experts, rng.random(T) < 0.6


def write_trace(directory, model_id, hidden, experts, generated, sizes=SIZES, with_hidden=True):
    bounds = np.cumsum([0, *sizes])
    with TraceWriter(directory, model_id, A, D, with_hidden, n_layer=N_LAYER, n_expert=E) as writer:
        for number, (begin, end) in enumerate(pairwise(bounds)):
            part = slice(begin, end)
            uniform = np.full(experts[part].shape, 1 / A)
            values = hidden[part] if with_hidden else None
            writer.append(
                session_id(number), np.arange(end - begin), generated[part], LAYERS, experts[part], uniform, values
            )
            writer.flush()
    return directory


@pytest.fixture(scope="module")
def model_id(model):
    with open_model(model[0]) as file:
        return file.model_id


@pytest.fixture(scope="module")
def data(model):
    return structured(*model[1:])


@pytest.fixture(scope="module")
def good_trace(tmp_path_factory, model_id, data):
    return write_trace(tmp_path_factory.mktemp("trace"), model_id, *data)


@pytest.fixture(scope="module")
def report(tmp_path_factory, model, good_trace):
    return pregate.train(model[0], good_trace, tmp_path_factory.mktemp("out") / "p", replace(OPTIONS, epochs=12))


@pytest.fixture(scope="module")
def quick(tmp_path_factory, model, good_trace):
    """The tests that compare runs use little training."""
    return pregate.train(model[0], good_trace, tmp_path_factory.mktemp("out") / "p", QUICK)


def recalls(report):
    return {(r.predictor, r.layer, r.target_layer): (r.recall_1x, r.recall_2x, r.recall_3x) for r in report.rows}


def read_tensors(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["spark.pregate"])  # noqa: SIM118


# --- what is learned ---------------------------------------------------------------------------------


def test_every_layer_and_target_has_every_predictor(report):
    pairs = [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)]
    names = ("linear", "mlp", "router", "previous_token", "frequency")
    assert [(r.layer, r.target_layer, r.predictor) for r in report.rows] == [(*p, n) for p in pairs for n in names]
    for r in report.rows:
        assert 0 <= r.recall_1x <= r.recall_2x <= r.recall_3x <= 1


@pytest.mark.parametrize("pair", [(1, 1), (1, 2)], ids=["own layer", "next layer"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_linear_rule_is_learned(report, kind, pair):
    first, second, third = recalls(report)[kind, *pair]
    assert first > 0.85 and second > 0.98 and third > 0.99
    assert abs(recalls(report)["router", *pair][0] - CHANCE) < 0.12  # its router has nothing to do with the rule


def test_the_router_is_applied_with_its_norm(report):
    found = recalls(report)
    assert found["router", 4, 4][0] > 0.999
    assert found["linear", 4, 4][0] > 0.9


@pytest.mark.parametrize("pair", [(2, 2), (2, 4)], ids=["own layer", "next layer"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "router"])
def test_nothing_is_learned_where_there_is_nothing(report, kind, pair):
    for k, value in enumerate(recalls(report)[kind, *pair], 1):
        assert abs(value - k * CHANCE) < 0.07


def test_independent_tokens_repeat_by_chance(report):
    for pair in ((1, 1), (2, 4)):
        for k, value in enumerate(recalls(report)["previous_token", *pair], 1):
            assert abs(value - k * CHANCE) < 0.07
        assert abs(recalls(report)["frequency", *pair][0] - CHANCE) < 0.1


@pytest.mark.slow
def test_shuffled_hidden_states_are_worth_nothing(tmp_path, model, model_id, data):
    hidden, experts, generated = data
    order = np.random.default_rng(0).permutation(len(hidden))
    trace = write_trace(tmp_path / "trace", model_id, hidden[order], experts, generated)
    found = recalls(pregate.train(model[0], trace, tmp_path / "p", OPTIONS))
    for kind in ("linear", "mlp", "router"):
        assert abs(found[kind, 1, 1][0] - CHANCE) < 0.1


# --- the file ----------------------------------------------------------------------------------------


def test_the_file_alone_gives_the_recall_that_was_reported(report, data, model_id):
    hidden, experts, generated = data
    tensors, metadata = read_tensors(report.out)
    assert metadata["version"] == 1 and metadata["model_id"] == model_id
    assert metadata["layers"] == list(LAYERS) and metadata["eps"] == pytest.approx(EPS)
    assert [metadata[key] for key in ("n_embd", "n_expert", "n_expert_used")] == [D, E, A]

    session = np.repeat(np.arange(len(SIZES)), SIZES)
    rows = np.flatnonzero(np.isin(session, held_out_sessions()) & generated)
    assert report.held_out_tokens == len(rows)
    assert report.train_tokens == sum(n for i, n in enumerate(SIZES) if i not in held_out_sessions())
    recorded = [r for r in report.to_json()["rows"] if r["predictor"] in ("linear", "mlp")]
    assert metadata["rows"] == recorded
    for r in recorded:
        x = norm(hidden[rows, LAYERS.index(r["layer"])].astype(np.float64))
        t = {
            name: tensors.pop(f"layers.{r['layer']}.target.{r['target_layer']}.{r['predictor']}.{name}").astype(float)
            for name in ("weight", "bias")
            + (("hidden.weight", "hidden.bias", "output.weight") if r["predictor"] == "mlp" else ())
        }
        scores = x @ t["weight"].T + t["bias"]
        if r["predictor"] == "mlp":
            scores += np.maximum(x @ t["hidden.weight"].T + t["hidden.bias"], 0) @ t["output.weight"].T
        best = np.argsort(-scores, axis=1, kind="stable")
        for k in (1, 2, 3):
            hits = [
                len(set(guess[: k * A]) & set(true))
                for guess, true in zip(best, experts[rows, LAYERS.index(r["target_layer"])], strict=True)
            ]
            assert r[f"recall_{k}x"] == pytest.approx(np.mean(hits) / A, abs=2e-3)
    assert not tensors  # nothing that the formula does not use


def test_the_reader_in_the_documentation_reads_it(report, data, model_id):
    hidden, experts, generated = data
    page = (Path(__file__).parents[2] / "docs" / "pregate.md").read_text()
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    rows = np.flatnonzero(np.isin(np.repeat(np.arange(len(SIZES)), SIZES), held_out_sessions()) & generated)
    found = scope["guess"](report.out, model_id, 1, 2, hidden[rows, 0], 2 * A)
    assert found.shape == (len(rows), 2 * A)
    hits = (experts[rows, 1][:, :, None] == found[:, None, :]).sum() / len(rows) / A
    assert hits == pytest.approx(recalls(report)["mlp", 1, 2][1], abs=2e-3)


def test_shapes_in_the_file(report):
    tensors, _ = read_tensors(report.out)
    prefix = "layers.2.target.4."
    assert tensors[prefix + "linear.weight"].shape == (E, D)
    assert tensors[prefix + "linear.bias"].shape == (E,)
    assert tensors[prefix + "mlp.hidden.weight"].shape == (OPTIONS.hidden_units, D)
    assert tensors[prefix + "mlp.output.weight"].shape == (E, OPTIONS.hidden_units)
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}


def test_the_report_is_json(report):
    read = json.loads(json.dumps(report.to_json()))
    assert {"predictor", "layer", "target_layer", "recall_1x", "recall_2x", "recall_3x"} == set(read["rows"][0])
    assert read["train_sessions"] + read["held_out_sessions"] == len(SIZES)


@pytest.mark.slow
def test_same_seed_same_bytes_and_passes_do_not_matter(tmp_path, monkeypatch, model, good_trace, quick):
    read = []
    real = pregate.iter_parts
    monkeypatch.setattr(pregate, "iter_parts", lambda *a: read.append(a) or real(*a))
    monkeypatch.setattr(pregate, "PASS_BYTES", 1)  # one layer a pass
    again = pregate.train(model[0], good_trace, tmp_path / "p", QUICK)
    assert len(read) == len(LAYERS)
    assert again.rows == quick.rows
    assert (tmp_path / "p").read_bytes() == quick.out.read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "p"]

    other = pregate.train(model[0], good_trace, tmp_path / "q", replace(QUICK, seed=1))
    assert other.rows != quick.rows


def test_progress_counts_up_to_its_total(tmp_path, model, good_trace):
    seen = {}
    pregate.train(model[0], good_trace, tmp_path / "p", QUICK, lambda *step: seen.setdefault(step[0], []).append(step))
    assert set(seen) == {"reading hidden states", "training predictors"}
    for steps in seen.values():
        done = [d for _, d, _ in steps]
        assert done == sorted(set(done)) and done[-1] == steps[-1][2]


# --- sessions and samples ----------------------------------------------------------------------------


def test_nothing_of_a_held_out_session_reaches_the_weights(tmp_path, model, model_id, data, quick):
    hidden, experts, generated = (a.copy() for a in data)
    held_out = np.isin(np.repeat(np.arange(len(SIZES)), SIZES), held_out_sessions())
    hidden[held_out] *= -2
    experts[held_out] = (experts[held_out] + 1) % E
    trace = write_trace(tmp_path / "trace", model_id, hidden, experts, generated)
    changed = pregate.train(model[0], trace, tmp_path / "p", QUICK)
    before, after = read_tensors(quick.out)[0], read_tensors(tmp_path / "p")[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert recalls(changed)["linear", 1, 1] != recalls(quick)["linear", 1, 1]


def test_two_sessions_suffice_and_all_tokens_can_count(tmp_path, model, model_id, data):
    hidden, experts, generated = data
    trace = write_trace(tmp_path / "trace", model_id, hidden, experts, np.zeros_like(generated), sizes=(300, 400))
    with pytest.raises(FileFormatError, match="0 generated tokens in the 0 held-out sessions") as error:
        pregate.train(model[0], trace, tmp_path / "p", OPTIONS)
    assert "count all" in error.value.hint
    report = pregate.train(model[0], trace, tmp_path / "p", replace(QUICK, count="all"))
    assert sorted((report.train_tokens, report.held_out_tokens)) == [300, 400]


@pytest.mark.slow
def test_a_sample_takes_generated_tokens_first(tmp_path, model, model_id, data):
    hidden, experts, generated = data
    experts = experts.copy()
    rng = np.random.default_rng(0)
    experts[~generated] = rng.random((int((~generated).sum()), len(LAYERS), E)).argsort(axis=2)[..., :A]
    trace = write_trace(tmp_path / "trace", model_id, hidden, experts, generated)
    report = pregate.train(model[0], trace, tmp_path / "p", replace(OPTIONS, max_rows=600, epochs=8))
    assert report.train_tokens == 600 and report.held_out_tokens == 150
    assert recalls(report)["linear", 1, 1][0] > 0.75  # noise would have spoiled it


# --- what is refused ---------------------------------------------------------------------------------


def refused(error, match, model, trace, tmp_path, options=OPTIONS, out="p"):
    """`train` raises, and leaves what was at its output as it was, and nothing beside it."""
    existing = tmp_path / "p"
    existing.write_bytes(b"before")
    files = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=match) as caught:
        pregate.train(model[0], trace, tmp_path / out, options)
    assert existing.read_bytes() == b"before" and sorted(tmp_path.iterdir()) == files
    return caught.value


def test_a_trace_without_hidden_states_is_refused(tmp_path, model, model_id, data):
    trace = write_trace(tmp_path / "trace", model_id, *data, with_hidden=False)
    error = refused(FileFormatError, "expected hidden states, found none", model, trace, tmp_path)
    assert "--hidden" in error.hint


def test_a_truncated_part_is_refused(tmp_path, model, model_id, data):
    trace = write_trace(tmp_path / "trace", model_id, *data)
    part = part_paths(trace)[3]
    part.write_bytes(part.read_bytes()[:-700])
    refused(FileFormatError, part.name, model, trace, tmp_path)


def test_another_models_trace_is_refused(tmp_path, model, model_id, data):
    trace = write_trace(tmp_path / "trace", "cd" * 32, *data)
    refused(WrongModelError, f"{'cd' * 32}.*{model_id}", model, trace, tmp_path)


def test_one_session_is_refused(tmp_path, model, model_id, data):
    trace = write_trace(tmp_path / "trace", model_id, *data, sizes=(sum(SIZES),))
    refused(FileFormatError, "tokens of 1 session; expected at least 2", model, trace, tmp_path)


def test_too_few_tokens_are_refused(tmp_path, model, model_id, data):
    trace = write_trace(tmp_path / "trace", model_id, *data, sizes=(60, 60, 120, 10))
    refused(FileFormatError, r"has \d+ (generated )?tokens in the .*, expected at least", model, trace, tmp_path)


@pytest.mark.parametrize(
    ("value", "match"),
    [(np.nan, "found NaN entering layer 2"), (np.inf, "infinity entering layer 2: .* float16, 65504")],
    ids=["nan", "infinity"],
)
def test_a_hidden_state_that_is_no_number_names_the_part(tmp_path, monkeypatch, model, model_id, data, value, match):
    hidden, experts, generated = data
    session = next(i for i in range(len(SIZES)) if i not in held_out_sessions())
    hidden = hidden.copy()
    hidden[sum(SIZES[:session]) + 7, 1, 3] = value
    monkeypatch.setattr(trace_module, "_HALF_MAX", np.inf)  # a writer that does not clip
    trace = write_trace(tmp_path / "trace", model_id, hidden, experts, generated)
    error = refused(FileFormatError, match, model, trace, tmp_path)
    assert part_paths(trace)[session].name in error.message and error.hint


def test_a_trace_that_grows_meanwhile_is_refused(tmp_path, monkeypatch, model, good_trace):
    real = pregate.read_routing
    monkeypatch.setattr(pregate, "read_routing", lambda *a: (found := real(*a)).part(0, len(found.session) - 5))
    refused(FileFormatError, f"had {sum(SIZES) - 5} tokens .* has {sum(SIZES)} now", model, good_trace, tmp_path)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith("dense") and name != "qwen35"])
def test_a_router_chooses_what_the_engine_chooses(name, monkeypatch):
    """Given what the router of the engine is given, of every family."""
    entering = []
    real = cpu.router
    monkeypatch.setattr(cpu, "router", lambda ws, x, *rest: (entering.append(x.copy()), real(ws, x, *rest)))
    loaded = load(config(tiny_path(name), device="cpu"))
    tokens = np.arange(30, dtype=np.int32)
    chosen = loaded.steps.run([Span(loaded.kv.sequence(), tokens, np.ones(30, bool))]).experts.copy()
    c = loaded.source.config
    assert len(entering) == len(c.moe_layers) > 0
    for m, layer in enumerate(c.moe_layers):
        scores = read_router(loaded.source.file, layer).scores(unit(entering[m], c.eps))
        assert predictors.recall(scores, chosen[m].astype(np.uint16))[0] == 1
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "laguna", "gemma4"])
def test_every_family_from_its_own_trace_to_its_file_and_back(name, tmp_path):
    loaded = load(config(tiny_path(name), device="cpu"))
    c, model_id = loaded.source.config, loaded.source.file.model_id
    loaded.forward.capture_hidden(True)
    hidden, experts = [], []
    for n in (110, 120, 105, 90):
        sequence, tokens = loaded.kv.sequence(), (np.arange(n) ** 2 % c.n_vocab).astype(np.int32)
        for part in np.split(tokens, range(40, n, 40)):
            result = loaded.steps.run([Span(sequence, part, np.ones(len(part), bool))])
            hidden.append(result.hidden[list(c.moe_layers)].transpose(1, 0, 2).copy())
            experts.append(result.experts.transpose(1, 0, 2).copy())
        sequence.release()
    bytes_of = [sum(e.part_bytes) for e in loaded.residency.experts]
    loaded.close()
    with TraceWriter(
        tmp_path / "t", model_id, c.n_expert_used, c.n_embd, True, n_layer=c.n_layer, n_expert=c.n_expert
    ) as writer:
        hidden, experts = np.concatenate(hidden), np.concatenate(experts)
        for i, part in enumerate(np.split(np.arange(425), np.cumsum((110, 120, 105)))):
            weights = np.full(experts[part].shape, 1 / c.n_expert_used)
            writer.append(f"s{i}", part, np.arange(len(part)) >= 20, c.moe_layers, experts[part], weights, hidden[part])
    with open_model(tiny_path(name)) as file:
        assert [expert_bytes(file, layer) for layer in c.moe_layers] == bytes_of
    report = pregate.train(tiny_path(name), tmp_path / "t", tmp_path / "p", replace(QUICK, hidden_units=4))
    early = [row for row in report.guesses if (row.predictor, row.budget) == ("router", 2)]
    assert [(row.ahead, row.residency_pct) for row in early] == [(k, p) for k in (0, 1, 2) for p in (10, 30, 60)]
    for row in early:
        assert 0 < row.recall <= 1 and 0 < row.guesses_per_token <= 2 * (len(c.moe_layers) - row.ahead)
    read = read_pregate(tmp_path / "p", PregateModel(model_id, c.moe_layers, c.n_embd, c.n_expert, c.n_expert_used))
    assert set(read.chances) == {"linear", "mlp", "router"}
    assert all(set(t) == set(pairs(c.moe_layers, 1 + (kind == "router"))) for kind, t in read.chances.items())


def test_shares_and_a_bias_choose_together():
    rng = np.random.default_rng(4)
    weight, bias, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((E, D), E, (9, D)))
    logits = x.astype(np.float64) @ weight.T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(Router(weight, bias, softmax=True).scores(x), shares + bias, rtol=1e-4)
    sigmoids = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(Router(weight, bias).scores(x), sigmoids + bias, rtol=1e-4, atol=1e-6)


def test_an_unknown_router_is_refused(tmp_path, data):
    write_model(tmp_path / "other.gguf", arch="other")
    with open_model(tmp_path / "other.gguf") as file:
        trace = write_trace(tmp_path / "trace", file.model_id, *data)
    known = "'other', only of qwen3moe, qwen35moe, laguna, gemma4"
    refused(UnsupportedModelError, known, (tmp_path / "other.gguf",), trace, tmp_path)


def test_without_torch_the_line_that_installs_it(tmp_path, monkeypatch, model, good_trace):
    monkeypatch.setitem(sys.modules, "torch", None)
    error = refused(MissingExtraError, "needs PyTorch", model, good_trace, tmp_path)
    assert error.hint == f"{sys.executable} -m pip install {requirement('train')} {pregate.TORCH}"


def test_importing_loads_no_torch():
    code = "import sys, spark.pipeline.pregate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epochs": 0}, "epochs is 0, expected at least 1"),
        ({"max_rows": 255}, "max_rows is 255, expected at least 256"),
        ({"hidden_units": 0}, "hidden_units"),
        ({"seed": -1}, "seed"),
        ({"threads": 0}, "threads"),
        ({"device": "abacus"}, "no device 'abacus'"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_options_that_mean_nothing_are_refused(tmp_path, model, good_trace, change, match):
    refused(UsageError, match, model, good_trace, tmp_path, replace(OPTIONS, **change))


def test_an_output_that_cannot_be_is_refused_first(tmp_path, model):
    refused(UsageError, "existing folder", model, tmp_path / "no-trace", tmp_path, out="missing/p")


def test_weights_that_diverge_are_an_error(tmp_path, monkeypatch, model, good_trace):
    monkeypatch.setattr(predictors, "_loss", lambda scores, chosen: scores.sum() * float("nan"))
    refused(NumericalError, "diverged", model, good_trace, tmp_path)


def test_torch_keeps_its_threads(tmp_path, model, good_trace):
    before = torch.get_num_threads()
    with pytest.raises(SparkError):
        pregate.train(model[0], good_trace, tmp_path / "p", replace(OPTIONS, threads=before + 3, max_rows=0))
    pregate.train(model[0], good_trace, tmp_path / "p", replace(OPTIONS, epochs=1))
    assert torch.get_num_threads() == before


# --- predictors, beside loops ------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ranks_follow_the_sorted_order(data):
    T, n = data.draw(st.integers(0, 5)), data.draw(st.integers(4, 9))
    values = st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 2.0])
    scores = np.array(data.draw(st.lists(st.lists(values, min_size=n, max_size=n), min_size=T, max_size=T)))
    scores = scores.reshape(T, n)
    experts = np.array([data.draw(st.permutations(range(n)))[:3] for _ in range(T)], np.uint16).reshape(T, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictors, "_BLOCK_TOKENS", 2)
        found = predictors.ranks(scores, experts)
    for t in range(T):
        order = sorted(range(n), key=lambda e: (-scores[t, e], e))
        for a, e in enumerate(experts[t]):
            if scores[t, e] == -np.inf:
                assert found[t, a] > 3 * n
            else:
                assert found[t, a] == order.index(e)


@settings(deadline=None, max_examples=60)
@given(session=st.lists(st.integers(0, 2), min_size=1, max_size=30), block=st.integers(1, 7), seed=st.integers(0, 99))
def test_reuse_ranks_by_the_last_use(session, block, seed):
    rng = np.random.default_rng(seed)
    experts = np.array([rng.permutation(7)[:2] for _ in session], np.uint16)
    wanted = np.flatnonzero(rng.random(len(session)) < 0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictors, "_BLOCK_TOKENS", block)
        scores = predictors.reuse_scores(experts, np.array(session), wanted, 7)
    recent = {s: [] for s in session}  # of each session, the last used first
    for t, s in enumerate(session):
        row = np.flatnonzero(wanted == t)
        if len(row):
            found = scores[row[0]]
            known = [e for e in np.argsort(-found, kind="stable") if found[e] > -np.inf]
            assert known == recent[s]
        now = experts[t].tolist()
        recent[s] = now + [e for e in recent[s] if e not in now]


def test_training_sets_out_from_the_router_and_takes_the_residual_itself(monkeypatch):
    monkeypatch.setattr(predictors, "_MAX_STEP", 1e-12)
    rng = np.random.default_rng(4)
    T, G = 90, 2
    x = (rng.normal(size=(T, D)) * np.linspace(0.1, 7, D) + np.linspace(-5, 9, D)).astype(np.float32)
    x[:, 2] = 1.5  # a dimension that never varies
    routers = rng.normal(size=(G, E, D)).astype(np.float32)
    experts = rng.random((T, G, E)).argsort(axis=2)[..., :A].astype(np.uint16)
    inputs = predictors.standardize(x.copy(), "cpu")
    fitted = predictors.fit(inputs, experts, routers, hidden_units=5, epochs=1, rng=rng)
    for router, kinds in zip(routers, fitted, strict=True):
        assert tuple(kinds) == TRAINED
        for tensors in kinds.values():
            np.testing.assert_allclose(Trained.of(tensors).scores(x), x @ router.T, atol=1e-3)


def test_frequency_counts_uses():
    experts = np.array([[4, 1], [4, 2], [1, 4]], np.uint16)
    assert predictors.frequency_scores(experts, 6, 2).tolist() == [[0, 2, 1, 0, 3, 0]] * 2


def test_the_loss_is_cross_entropy_at_the_best_threshold():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(5, E)) * [[0.5], [1], [3], [8], [2]] + [[0], [40], [-9], [3], [0]]
    chosen = np.array([rng.permutation(E)[:A] for _ in scores])
    thresholds = np.linspace(-40, 70, 110_001)[:, None]
    best = 0.0
    for s, c in zip(scores, chosen, strict=True):
        sign = np.where(np.isin(np.arange(E), c), -1.0, 1.0)
        best += np.logaddexp(0, sign * (s - thresholds)).sum(1).min() / len(scores)
    tensor = torch.tensor(scores, requires_grad=True)
    loss = predictors._loss(tensor, torch.from_numpy(chosen))
    assert loss.item() == pytest.approx(best, rel=1e-3)
    loss.backward()
    assert tensor.grad.sum(1).abs().max() < 0.02  # the chances of a token sum to A
