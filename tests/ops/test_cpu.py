"""The CPU backend around its kernels: threads, forks, instruction sets, empty steps, refusals."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from engine.ground.errors import SparkError
from engine.ops import AttentionInput, Experts, Fetches, Gating, arithmetic, cpu, reference
from engine.placing import policy
from tests.op_cases import LIMITS, bank_of, empty_cache, floats, gain, product, slot_state, weights
from tests.ops.test_ops import CASES, same_bits, twin, workspace

K4 = QType.Q4_K


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_threads_change_no_bit(threads: int) -> None:
    ws = cpu.workspace(LIMITS, threads)
    for case in CASES:
        if case.op in ("attention", "attention_input", "attention_output", "expert_ffn", "head"):
            outputs = case.run(cpu, ws)
            assert all(same_bits(outputs[name], expected) for name, expected in twin(case).items()), case.name
    ws.close()
    ws.close()


def test_no_rows_is_no_work() -> None:
    ws = workspace(cpu.supported_isas()[-1])
    none, ints = np.zeros((0, 256), np.float32), np.zeros(0, np.int32)
    w, norm = weights(K4, 256, 256, 44), gain(45, 256)
    kv, rope = empty_cache("f16", 1, 2, 64), arithmetic.rope_table(4, 64, 1e4)
    cpu.product(ws, w, none, none.copy())
    cpu.embed(ws, w, ints, none.copy())
    small = weights(K4, 128, 256, 46)
    q = np.zeros((0, 4, 64), np.float32)
    cpu.attention_input(ws, none, AttentionInput(norm, w, small, small), 1e-5, rope, ints, kv, ints, q)
    cpu.attention(ws, q, kv, np.zeros((0, 0), np.int32), ints, ints, 0.1, none.copy())
    cpu.attention_output(ws, none, w, none.copy())
    cpu.head(ws, none, ints, norm, 1e-5, w, none.copy())
    cpu.router(ws, none, norm, 1e-5, weights(QType.F32, 7, 256, 47), none.copy(), np.zeros((0, 7), np.float32))
    state = slot_state((3,), 7, 48)
    chosen, fetches = np.zeros((0, 2), np.int32), Fetches(np.zeros((7, 3), np.int32), np.ones(1, np.int32))
    gate = np.zeros((0, 2), np.float32)
    no_logits, counted, bank = np.zeros((0, 7), np.float32), np.zeros(0, np.uint8), bank_of(state, 0)
    cpu.route(ws, no_logits, Gating(), state, bank, counted, policy.LRU, chosen, gate, fetches)
    assert fetches.count[0] == 0
    pointers = np.zeros((7, 3), np.uint64)
    bank = Experts(K4, K4, K4, 256, 512, (w.nbytes * 2,) * 3, pointers, pointers, pointers, layer=0)
    cpu.expert_ffn(ws, none, chosen, gate, bank, fetches, none.copy())
    cpu.dense_ffn(ws, none, w, w, w, none.copy(), shared_gate=weights(QType.F32, 1, 256, 49))
    cpu.norm(ws, none, norm, 1e-5, none.copy())
    cpu.add_norm(ws, none, norm, 1e-5, none.copy(), 2.0)


def test_workspaces_run_side_by_side() -> None:
    w, x = weights(K4, 640, 512, 55), floats(56, 9, 512)
    expected = product(cpu, workspace(cpu.supported_isas()[-1]), w, x)

    def work(threads: int) -> bool:
        ws = cpu.workspace(LIMITS, threads)
        same = all(same_bits(product(cpu, ws, w, x), expected) for _ in range(50))
        ws.close()
        return same

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, (2, 1, 3)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_threads_but_works_and_ends() -> None:
    w, x = weights(K4, 640, 512, 57), floats(58, 9, 512)
    ws = cpu.workspace(LIMITS, 4)
    expected = product(cpu, ws, w, x)
    time.sleep(0.01)  # let the workers fall asleep
    child = os.fork()
    if child == 0:
        same = same_bits(product(cpu, ws, w, x), expected)
        ws.close()
        os._exit(0 if same else 1)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0
    assert same_bits(product(cpu, ws, w, x), expected)
    ws.close()


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_row_that_sees_no_block_is_nan_and_nothing_is_stored_without_a_slot(isa: str, kv_type: str) -> None:
    ws, q = workspace(isa), floats(55, 2, 2, 64)
    kv = empty_cache(kv_type, 2, 1, 64)
    kv.v[:] = 7
    table, rows = np.array([[-1, -1], [1, -1]], np.int32), np.array([0, 1], np.int32)
    found = []
    for ops, of in ((reference, None), (cpu, ws)):
        out = np.zeros((2, 128), np.float32)
        ops.attention(of, q, kv, table, rows, np.array([70, 70], np.int32), 0.5, out)
        found.append(out)
    assert np.isnan(found[0][0]).all() and np.isfinite(found[0][1]).all()
    np.testing.assert_array_equal(found[1], found[0])
    before, rope = kv.k.copy(), arithmetic.rope_table(4, 64, 1e4)
    w, x = weights(QType.F32, 64, 77, 56), floats(57, 2, 77)
    for ops, of in ((reference, None), (cpu, ws)):
        for slot in (-1, 5):
            ops.attention_input(
                of, x, AttentionInput(np.ones(77, np.float32), w, w, w), 1e-5, rope, rows, kv,
                np.array([-1, slot], np.int32), np.zeros((2, 1, 64), np.float32),
            )  # fmt: skip
            changed = {int(i) for i in np.nonzero((kv.k != before).any(axis=(1, 2)))[0]}
            assert changed == ({5} if slot == 5 else set())
        kv.k[:] = before


def test_what_does_not_fit_is_refused_by_name() -> None:
    ws = workspace(cpu.supported_isas()[-1])
    w, x, y = weights(K4, 3, 256, 49), floats(50, 2, 256), np.zeros((2, 3), np.float32)
    for bad in (x.astype(np.float64), floats(51, 2, 512)[:, ::2], floats(52, 3, 256)[:, :255]):
        with pytest.raises(ValueError, match="x: "):
            cpu.product(ws, w, bad, y)
    frozen = y.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cpu.product(ws, w, x, frozen)
    with pytest.raises(ValueError, match="80"):
        cpu.product(ws, w, floats(53, 81, 256), np.zeros((81, 3), np.float32))
    for bad_token in (-1, 3):
        with pytest.raises(IndexError, match="tokens"):
            cpu.embed(ws, w, np.array([0, bad_token], np.int32), x.copy())
    kv, q = empty_cache("f16", 2, 1, 64), floats(54, 1, 2, 64)
    one = np.zeros(1, np.int32)
    for table, position in ((np.array([[2, 0]]), 3), (np.array([[1, -2]]), 64), (np.array([[1, 0]]), 128)):
        with pytest.raises(IndexError):
            cpu.attention(
                ws,
                q,
                kv,
                table.astype(np.int32),
                one,
                np.array([position], np.int32),
                1.0,
                np.zeros((1, 128), np.float32),
            )
    with pytest.raises(SparkError, match="avx9"):
        cpu.workspace(LIMITS, 1, "avx9")
