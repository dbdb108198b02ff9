"""What a checkpoint of a calibration knows of what it was counted with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import FileFormatError, UsageError
from spark.pipeline import checkpoints
from spark.pipeline.sample import Sample
from spark.pipeline.tokens import Origin, TokensFile


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"file_id": "g"}, "model file"),
        ({"kv_type": "q8_0"}, r"kv_type \(found f16, expected q8_0\)"),
        ({"ctx_tokens": 2048}, r"ctx_tokens \(found 1024, expected 2048\)"),
        ({"tokens": b"others"}, "token file"),
        ({"count": "all"}, r"count \(found generated, expected all\)"),
        ({"generate_tokens": 8}, r"generate \(found 0, expected 8\)"),
        ({"trace_url": "s3://b/t", "staged": "s3://b/t/.parts-1"}, r"trace \(found None, expected s3://b/t\)"),
        ({"trace_dir": Path("elsewhere")}, r"trace \(found None, expected .*elsewhere\)"),
        ({"hidden": True}, r"hidden \(found False, expected True\)"),
        ({"n_used": 9}, r"sample \(found .*, expected .*\)"),
    ],
    ids=str,
)
def test_a_checkpoint_knows_all_that_the_counts_depend_on(tmp_path: Path, changed: dict, named: str | None) -> None:
    """And of a model all of whose files have one id, the file."""

    def fingerprint(
        file_id: str = "f", kv_type: str = "f16", ctx_tokens: int = 1024, tokens: bytes = b"tokens", n_used: int = 8,
        **options: object,
    ) -> tuple[dict, dict]:  # fmt: skip
        (tmp_path / "tokens").write_bytes(tokens)
        model = {"file_id": file_id, "model_id": "1" * 64, "n_expert_used": n_used}
        ready = {"model": model, "kv_type": kv_type, "ctx_tokens": ctx_tokens}
        file = TokensFile(tmp_path / "tokens", Origin("1" * 64, "2" * 64, "3" * 64), 16, 1, 1)
        made = checkpoints.CalibrateOptions(file.path, tmp_path / "p.csv", **options)
        return checkpoints.fingerprint_of(made, file, ready, Sample(48, n_used)), ready

    first, ready = fingerprint()
    tally = checkpoints.Tally(np.arange(48).reshape(3, 16), 2, 700, 300, 1)
    options = checkpoints.CalibrateOptions(tmp_path / "tokens", tmp_path / "p.csv")
    checkpoints.save(options, tally, first, ready)
    if named is None:
        loaded = checkpoints.load(options, fingerprint()[0], 99)
        assert np.array_equal(loaded.counts, tally.counts)
        assert replace(loaded, counts=None) == replace(tally, counts=None)
        return
    with pytest.raises(UsageError, match=f"counted with another {named}$"):
        checkpoints.load(options, fingerprint(**changed)[0], 99)


@pytest.mark.parametrize("changed", [{"windows": -3}, {"windows": 4}, {"trace_parts": -1}, {"windows": "x"}], ids=str)
def test_a_checkpoint_of_numbers_that_cannot_be_is_refused(tmp_path: Path, changed: dict) -> None:
    options = checkpoints.CalibrateOptions(tmp_path / "tokens", tmp_path / "p.csv")
    model = {"file_id": "f", "model_id": "1" * 64, "n_expert_used": 8}
    tally = checkpoints.Tally(np.arange(48).reshape(3, 16), 2, 700, 300, 1)
    checkpoints.save(options, tally, {}, {"model": model})
    loaded = checkpoints.load(options, {}, 3)
    assert loaded is not None and loaded.windows == 2
    partial = checkpoints.partial_path(options.out)
    ((name, value),) = changed.items()
    text = partial.read_text()
    partial.write_text(text.replace(f'"{name}": {getattr(tally, name)}', f'"{name}": {json.dumps(value)}'))
    assert partial.read_text() != text
    with pytest.raises(FileFormatError, match="is not a checkpoint of this version's calibration"):
        checkpoints.load(options, {}, 3)
