"""What a checkpoint of a calibration knows of what it was counted with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.ground.errors import UsageError
from spark.pipeline import calibrate
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
        made = calibrate.CalibrateOptions(file.path, tmp_path / "p.csv", **options)
        return calibrate._fingerprint(made, file, ready, Sample(48, n_used)), ready

    first, ready = fingerprint()
    tally = calibrate.Tally(np.arange(48).reshape(3, 16), 2, 700, 300, 1)
    options = calibrate.CalibrateOptions(tmp_path / "tokens", tmp_path / "p.csv")
    calibrate._save_checkpoint(options, tally, first, ready)
    if named is None:
        loaded = calibrate._load_checkpoint(options, fingerprint()[0])
        assert np.array_equal(loaded.counts, tally.counts)
        assert replace(loaded, counts=None) == replace(tally, counts=None)
        return
    with pytest.raises(UsageError, match=f"counted with another {named}$"):
        calibrate._load_checkpoint(options, fingerprint(**changed)[0])
