"""The emulator: warp intrinsics, barriers, fragments of matrices; and that it says what a GPU would not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine.ground.digest import kernels
from engine.ground.errors import CapacityError
from engine.ops.cuda.device import Module
from tests.emulated_device import EMULATOR, EmulatedDevice, EmulatedKernel, EmulatorError

KERNELS = """
#include "ptx.cuh"

KERNEL warps(const i32* x, i32* y, i32 source, i32 delta) {
    i32 v = x[threadIdx.x];
    i32* out = y + threadIdx.x * 14;
    out[0] = __shfl_sync(FULL_WARP, v, source);
    out[1] = __shfl_up_sync(FULL_WARP, v, delta);
    out[2] = __shfl_down_sync(FULL_WARP, v, delta, 16);
    out[3] = __shfl_xor_sync(FULL_WARP, v, delta);
    out[4] = __ballot_sync(FULL_WARP, v & 1);
    out[5] = __any_sync(FULL_WARP, v == source);
    out[6] = __all_sync(FULL_WARP, v >= 0);
    out[7] = __match_any_sync(FULL_WARP, v % 5);
    out[8] = __reduce_max_sync(FULL_WARP, v);
    out[9] = __reduce_add_sync(FULL_WARP, v);
    // Halves of a warp on their own ways, the first one further ahead each time.
    if (threadIdx.x % 32 < 16) {
        i32 sum = 0;
        for (int i = 0; i < 3; i++) sum += __shfl_sync(0x0000ffffu, v + i, i);
        out[10] = sum;
    } else {
        out[10] = __shfl_sync(0xffff0000u, v, 20);
    }
    __syncwarp();
    out[11] = __syncthreads_or(v == source);
    out[12] = __syncthreads_or(v == -1);
    out[13] = (i32)(__shfl_sync(FULL_WARP, (u64)v << 40, source) >> 40);
}

KERNEL follower(const float* x, float* sums, i32 n, float scale) {
    dependency_release();
    if (threadIdx.x) return;
    dependency_wait();
    sums[0] = x[n - 1] * scale;
}

KERNEL block_sum(const float* x, float* sums, i32 n, float scale) {
    __shared__ float s[8];
    DYNAMIC_SHARED(float, all);
    int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    all[threadIdx.x] = i < n ? x[i] * scale : 0.0f;
    __syncthreads();
    float v = all[blockDim.x - 1 - threadIdx.x];
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL_WARP, v, d);
    if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x) return;
    float sum = 0.0f;
    for (int w = 0; w < blockDim.x / 32; w++) sum += s[w];
    sums[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

KERNEL poisoned(u32* out) {
    __shared__ u32 fixed[32];
    DYNAMIC_SHARED(u32, free_size);
    out[2 * blockIdx.x] = fixed[threadIdx.x];
    out[2 * blockIdx.x + 1] = free_size[threadIdx.x];
    fixed[threadIdx.x] = free_size[threadIdx.x] = 1;
}

// c [16, 8] = a [16, 16] b [16, 8], both row by row in global memory.
KERNEL product_f16(const u16* a, const u16* b, float* c, i32 committed) {
    __shared__ __align__(16) u16 sa[256];
    __shared__ __align__(16) u16 sb[256];
    copy16_async(sa + threadIdx.x * 8, a + threadIdx.x * 8);
    copies_commit();
    copy16_async_if(sb + threadIdx.x * 8, b + threadIdx.x * 8, threadIdx.x < 16);
    if (committed) copies_commit();
    copies_wait<0>();
    __syncwarp();
    int lane = threadIdx.x;
    u32 fa[4], fb[4];
    load_matrix4(fa, sa + (lane % 16) * 16 + lane / 16 * 8);
    load_matrix4_transposed(fb, sb + lane * 8);
    float d[4] = {0, 0, 0, 0};
    mma_f16(d, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

// c [16, 8] = a [16, 32] b [8, 32] transposed.
KERNEL product_s8(const u8* a, const u8* b, i32* c) {
    int lane = threadIdx.x, group = lane / 4, column = lane % 4 * 4;
    u32 f[4];
    for (int r = 0; r < 4; r++) f[r] = *(const u32*)(a + (group + r % 2 * 8) * 32 + column + r / 2 * 16);
    i32 d[4] = {1, 1, 1, 1};
    mma_s8(d, f, *(const u32*)(b + group * 32 + column), *(const u32*)(b + group * 32 + column + 16));
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

KERNEL halves(const float* x, u16* rounded, const u32* a, const u32* b, const u32* c, u32* out) {
    int i = threadIdx.x;
    rounded[i] = float_to_half(x[i]);
    out[i] = half2_fma(a[i], b[i], c[i]);
}

KERNEL integers(const i32* x, i32* out) {
    out[0] = __dp4a(x[0], x[1], x[2]);
    out[1] = __byte_perm(x[0], x[1], 0x7b52);
    out[2] = __funnelshift_r(x[0], x[1], 12);
    out[3] = __vsub4(x[0], x[1]);
    out[4] = __popc(x[0]) + 100 * __clz(x[2]) + 10000 * __ffs(x[1]);
    out[5] = __float2int_rn(2.5f) + __float2int_rn(-1e20f);
}

KERNEL __launch_bounds__(2 * (48), 1) bounded(i32* y) { y[threadIdx.x] = threadIdx.x; }

// Without the barrier that it lacks.
KERNEL racing(i32* y) {
    __shared__ i32 s[64];
    s[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = s[threadIdx.x ^ 33];
}

KERNEL types(i32 a, float b, u64 c, const void* d, u8 e, u16 f, float* out) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = d == nullptr; out[4] = e; out[5] = f;
}

__device__ __noinline__ i32 deep(i32 n) { volatile i32 x[99]; x[n % 99] = n; return n < 0 ? n : deep(n + 1) + x[5]; }

KERNEL mistake(i32* y, i32 which) {
    DYNAMIC_SHARED(i32, s);
    __shared__ i32 fixed[4];
    int i = threadIdx.x;
    if (which == 0) { if (i < 40) __syncthreads(); else __any_sync(FULL_WARP, 1); }
    if (which == 1) {
        if (i < 40) __syncthreads();
        else __syncthreads();
    }
    if (which == 2 && i != 33) __shfl_sync(FULL_WARP, i, 0);
    if (which == 3) __shfl_sync(0xffff0000u, i, 20);
    if (which == 4) __shfl_sync(i % 32 < 16 ? 0x0000ffffu : 0xffff0000u, i, 3);
    if (which == 5) s[i + 1] = 0;
    if (which == 6) fixed[i - which] = 0;
    if (which == 7) y[64] = 0;
    if (which == 8) *(uint4*)(y + 1) = make_uint4(0, 0, 0, 0);
    if (which == 9) load_once16(y + 1);
    if (which == 10) y[0] = 7 / i;
    if (which == 11) y[0] = 1 << (i + 32);
    if (which == 12) y[60] = 0;
    if (which == 14) y[0] = deep(i);
    if (which == 13) { if (i % 32) __syncwarp(); else __any_sync(FULL_WARP, 1); }
}
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedKernel:
    (tmp_path / "test.cu").write_text(KERNELS)
    monkeypatch.setattr("tests.emulated_device.kernels", lambda: tmp_path)
    device = EmulatedDevice()
    return lambda name: (device, device.kernel(Module("test.cu"), name))


def test_warp_intrinsics(kernel) -> None:
    device, warps = kernel("warps")
    x = np.random.default_rng(1).integers(0, 1000, 96).astype(np.int32)
    y = device.empty((96, 14), np.int32)
    source, delta = 7, 3
    warps(1, 96, [device.upload(x), y, source, delta])
    y = device.read(y).view(np.uint32).reshape(3, 32, 14)
    lane = np.arange(32)
    for w, v in enumerate(x.reshape(3, 32)):
        expected = [
            np.full(32, v[source]),
            v[np.where(lane >= delta, lane - delta, lane)],
            v[np.where(lane % 16 + delta < 16, lane + delta, lane)],
            v[lane ^ delta],
            np.full(32, sum(1 << i for i in range(32) if v[i] & 1)),
            np.full(32, np.any(v == source)),
            np.ones(32),
            [sum(1 << i for i in range(32) if v[i] % 5 == a % 5) for a in v],
            np.full(32, v.max()),
            np.full(32, v.sum()),
            np.where(lane < 16, v[:3].sum() + 3, v[20]),
            np.full(32, np.any(x == source)),
            np.zeros(32),
            np.full(32, v[source]),
        ]
        np.testing.assert_array_equal(y[w].T, np.array(expected).astype(np.uint32))


def test_blocks_barriers_and_shared_memory(kernel) -> None:
    device, block_sum = kernel("block_sum")
    x = np.arange(15 * 64 - 5, dtype=np.float32)
    sums = device.empty(15, np.float32)
    block_sum((5, 3), 64, [device.upload(x), sums, x.size, 2.0], 64 * 4)
    np.testing.assert_array_equal(device.read(sums), np.pad(2 * x, (0, 5)).reshape(15, 64).sum(1))


def test_memory_is_poisoned(kernel) -> None:
    device, poisoned = kernel("poisoned")
    out = device.empty(6, np.uint32)
    assert (device.read(out) == 0xFFFFFFFF).all()
    device.set_bytes(device.pointer(out), 0, out.nbytes)
    poisoned(3, 32, [out], 128)
    assert (device.read(out) == 0xFFFFFFFF).all()


def test_tensor_cores_and_asynchronous_copies(kernel) -> None:
    device, product = kernel("product_f16")
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-9, 9, s).astype(np.float16) for s in ((16, 16), (16, 8)))
    c = device.empty((16, 8), np.float32)
    product(1, 32, [device.upload(a), device.upload(b), c, 1])
    np.testing.assert_array_equal(device.read(c), a.astype(np.float32) @ b.astype(np.float32))
    product(1, 32, [device.upload(a), device.upload(b), c, 0])  # a wait does not cover what was not committed
    assert np.isnan(device.read(c)).all()

    device, product = kernel("product_s8")
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((16, 32), (8, 32)))
    c = device.empty((16, 8), np.int32)
    product(1, 32, [device.upload(a), device.upload(b), c])
    np.testing.assert_array_equal(device.read(c), a.astype(np.int32) @ b.T.astype(np.int32) + 1)


def test_halves_are_rounded_once(kernel) -> None:
    device, halves = kernel("halves")
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(256) * 10.0 ** rng.integers(-9, 6, 256)).astype(np.float32)
    x[:3] = 65520, 65519.996, 2**-25
    a, b, c = ((rng.standard_normal(512) * 2.0 ** rng.integers(-12, 5, 512)).astype(np.float16) for _ in range(3))
    rounded, out = device.empty(256, np.float16), device.empty(256, np.uint32)
    halves(1, 256, [device.upload(x), rounded, *(device.upload(v.view(np.uint32)) for v in (a, b, c)), out])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(device.read(rounded), x.astype(np.float16))
        fma = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        np.testing.assert_array_equal(device.read(out).view(np.float16), fma.astype(np.float16))


def test_integer_functions(kernel) -> None:
    device, integers = kernel("integers")
    out = device.empty(6, np.uint32)
    integers(1, 1, [device.upload(np.array([0x80FF017F, 0x01F07F02, 1000], np.int64).astype(np.int32)), out])
    a, b = ([int(v) for v in np.array([n], np.uint32).view(np.int8)] for n in (0x80FF017F, 0x01F07F02))
    expected = [
        1000 + sum(x * y for x, y in zip(a, b, strict=True)),
        0x01FF7FFF,  # bytes 7, 11 (the sign of 3), 5, 2
        0x01F07F0280FF017F >> 12 & 0xFFFFFFFF,
        sum((x - y & 0xFF) << 8 * i for i, (x, y) in enumerate(zip(a, b, strict=True))),
        (0x80FF017F).bit_count() + 100 * 22 + 10000 * 2,
        2 - 2**31 & 0xFFFFFFFF,
    ]
    assert [hex(v) for v in device.read(out)] == [hex(v & 0xFFFFFFFF) for v in expected]


def test_arguments_are_checked(kernel) -> None:
    device, types = kernel("types")
    out = device.empty(6, np.float32)
    good = [-1, 2.5, np.uint64(2**33), None, np.uint8(200), np.uint16(65535), out]
    types(1, 1, good)
    np.testing.assert_array_equal(device.read(out), [-1, 2.5, 2**33, 1, 200, 65535])
    types(1, 1, [*good[:3], np.uint64(device.pointer(out)), *good[4:]])
    assert device.read(out)[3] == 0
    for i, bad in ((0, 1.0), (0, 2**31), (0, None), (0, np.int64(1)), (1, 1), (1, np.float64(1)), (2, 1), (3, 5),
                   (3, out[:4:2]), (3, np.zeros(3, np.float32)), (4, out), (4, np.uint16(1)), (6, "x")):  # fmt: skip
        with pytest.raises(EmulatorError, match=f"argument {i}"):
            types(1, 1, [*good[:i], bad, *good[i + 1 :]])
    with pytest.raises(EmulatorError, match="6 arguments for 7 parameters"):
        types(1, 1, good[:6])
    for grid, block, shared in ((0, 1, 0), ((1, 70000), 1, 0), (1, 1025, 0), (1, (1, 1, 65), 0), (1, 1, 100 * 1024)):
        with pytest.raises(EmulatorError):
            types(grid, block, good, shared)


def test_launch_bounds_hold(kernel) -> None:
    device, bounded = kernel("bounded")
    y = device.empty(200, np.int32)
    bounded(1, 96, [y])
    with pytest.raises(EmulatorError, match="launch bound is 96"):
        bounded(1, 97, [y])


def test_a_missing_barrier_shows(kernel) -> None:
    device, racing = kernel("racing")
    y = device.empty(64, np.int32)
    for _ in range(2):  # in both orders
        racing(1, 64, [y])
        assert (device.read(y) == -1).sum() == 32


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, r"threads 0 to 39: wait in __syncthreads at test.cu:\d+.*threads 40 to 63: wait in __any_sync"),
        (1, r"at another __syncthreads than the threads that wait at test.cu:\d+"),
        (2, r"deadlock.*threads 32 to 32: wait in __shfl_sync.*for the lanes ffffffff.*threads 33 to 33: returned"),
        (3, r"the mask ffff0000 lacks the calling lane \d+"),
        (4, r"lane \d+ reads lane 3, which is not in the mask ffff0000"),
        (5, r"past its 256 bytes of dynamic shared memory, at byte 256"),
        (6, r"index -?\d+ outside of an array, test.cu:\d+"),
        (7, r"no memory may be accessed at 0x"),
        (8, r"misaligned access at address 0x"),
        (9, r"load_once16: address 0x\w+ is not 16-byte aligned, test.cu:\d+"),
        (10, r"division by zero"),
        (11, r"shift by \d+, test.cu"),
        (14, r"no memory may be accessed at 0x"),
        (13, r"in __(syncwarp .*__any_sync|any_sync .*__syncwarp) at test.cu"),
    ],
)
def test_mistakes_are_found(kernel, which: int, message: str) -> None:
    device, mistake = kernel("mistake")
    y = device.empty(64, np.int32)
    with pytest.raises(EmulatorError, match=r"kernel mistake, block \(0, 0, 0\)") as caught:
        mistake(1, 64, [y, which], 256)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value
    mistake(1, 64, [y, 99], 256)  # the next launch is a fresh one
    device.synchronize()


def test_writes_behind_an_array_are_found(kernel) -> None:
    device, mistake = kernel("mistake")
    mistake(1, 64, [device.empty(61, np.int32), 12], 260)
    device.synchronize()
    y = device.empty(60, np.int32)
    mistake(1, 64, [y, 12], 260)
    with pytest.raises(EmulatorError, match="behind an array of 240 bytes"):
        device.read(y)


def test_graphs_hold_their_arguments(kernel) -> None:
    device, block_sum = kernel("block_sum")
    x = device.upload(np.ones(64, np.float32))
    sums, copied = device.empty(1, np.float32), device.empty(1, np.float32)
    args = [x, sums, 64, 2.0]

    def work() -> None:
        block_sum(1, 64, args, 256)
        device.copy(device.pointer(copied), device.pointer(sums), 4)
        device.set_bytes(device.pointer(sums), 0, 4)

    graph = device.capture(work)
    args[3] = 5.0
    assert np.isnan(device.read(sums)).all()  # nothing ran
    graph.launch()
    assert (device.read(sums), device.read(copied)) == (0, 128)
    device.write(x, np.full(64, 2, np.float32))
    graph.launch()
    assert device.read(copied) == 256
    for call in (
        lambda: device.empty(1, np.int8),
        lambda: device.read(x),
        lambda: device.write(x, np.zeros(64, np.float32)),
        device.synchronize,
    ):
        with pytest.raises(EmulatorError, match="cannot be part of a graph"):
            device.capture(call)
    device.synchronize()


def test_a_launch_with_overlap_waits_for_the_kernel_ahead(kernel) -> None:
    for name, waits in (("follower", True), ("block_sum", False)):
        device, launch = kernel(name)
        args = [device.upload(np.ones(64, np.float32)), device.empty(1, np.float32), 64, 2.0]
        launch(1, 64, args, 256)
        if waits:
            launch(1, 64, args, 256, overlap=True)
            continue
        with pytest.raises(EmulatorError, match="block_sum: launched with overlap, and no thread called"):
            launch(1, 64, args, 256, overlap=True)


def test_memory_of_the_device(kernel) -> None:
    device = EmulatedDevice(n_bytes=4096)
    device.reserve(1024)
    a = device.empty((3, 5), np.float16)
    assert a.ctypes.data % 256 == 0 and a.flags.writeable and device.pointer(a[1]) == a.ctypes.data + 10
    with pytest.raises(TypeError):
        a + 1
    with pytest.raises(CapacityError):
        device.empty(1024, np.uint8)
    locked = device.page_locked(300)
    locked[:30] = np.arange(30)
    device.copy(device.pointer(a), device.pointer(locked), 30)
    assert device.read(a).tobytes() == bytes(range(30))
    for address, n in ((device.pointer(a), 31), (device.pointer(a) - 1, 2), (0, 1)):
        with pytest.raises(EmulatorError, match="not within memory of this device"):
            device.copy(address, address, n)
    with pytest.raises(ValueError):
        device.write(a, np.zeros((5, 3), np.float16))
    device.close()


def test_the_emulator_has_the_functions_of_ptx() -> None:
    def functions(path: Path) -> set[str]:
        return set(re.findall(r"^DEVICE [\w ]+?[ *](\w+)\(", path.read_text(), re.MULTILINE))

    mine = {f for f in functions(EMULATOR / "ptx.cuh") if not f.startswith("emulator_")}
    # shared_address is for the others alone, stamp is the GPU's timer, for a measurement.
    assert mine == functions(kernels() / "ptx.cuh") - {"shared_address", "stamp"}
    assert len(mine) > 20
