"""The types of the cache: words, sizes, and the sameness of what different words say."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import daemon
from engine.ground.errors import UsageError
from engine.ground.kv_types import BY_DTYPE, KINDS, KV_TYPES, pair_of
from spark.commands import options

NAMES = st.sampled_from(list(KINDS))


@given(NAMES, NAMES)
def test_two_words_and_one_are_the_same_type(k: str, v: str) -> None:
    pair = pair_of(f"{k},{v}")
    assert (pair.k.name, pair.v.name) == (k, v) and str(pair) == options.kv(f"{k},{v}") and str(pair) in KV_TYPES
    assert pair_of(str(pair)) == pair and (str(pair) == k) == (k == v)
    assert daemon.parse_arguments(["m.gguf", "--kv-type", f"{k},{v}"]).kv_type == str(pair)


@given(st.text(alphabet="fq810_4,. ", max_size=12))
def test_words_are_types_or_refused(text: str) -> None:
    names = text.split(",")
    known = all(name in KINDS for name in names) and len(names) < 3
    if known:
        assert options.kv(text) in KV_TYPES
        return
    with pytest.raises(UsageError, match="expected one of f16"):
        options.kv(text)
    with pytest.raises(SystemExit):
        daemon.parse_arguments(["m.gguf", f"--kv-type={text}"])


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_says_what_its_arrays_take(kind) -> None:  # type: ignore[no-untyped-def]
    assert BY_DTYPE[kind.dtype] is kind and np.dtype(kind.dtype).itemsize == kind.element_bytes
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name.upper()]]
    assert kind.row_bytes(96) == 96 // block * n_bytes
    assert kind.fits(96) and kind.fits(72) == (block == 1)
