"""What benchmarks ask of llama.cpp, one thing a process, so that an abort of its ends nothing else.

    python llama_worker.py convert SOURCE HF_DIR OUT.gguf ARCHITECTURE N_VOCAB [OPTION ...]
    python llama_worker.py quantize IN.gguf OUT.gguf FTYPE [ones]
    python llama_worker.py types IN.gguf OUT.json FTYPE [any]
    python llama_worker.py logits MODEL.gguf TOKENS.npy OUT.npy

convert: by the converter in its source tree, without a tokenizer (models of random weights have none), so it needs
`torch` and `transformers`; the others need `llama-cpp-python`. ones: an importance matrix in which all weights matter
alike, since types of fewer than 3 bits are not made without one. types: those that `quantize` would give the tensors,
by name, from the header alone; any: as with an importance matrix. logits: float32 [T, V] of all tokens, in one batch.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any


def convert(source: str, folder: str, out: str, architecture: str, n_vocab: str, *options: str) -> None:
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    import conversion  # type: ignore[import-not-found]
    import convert_hf_to_gguf  # type: ignore[import-not-found]

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(int(n_vocab))

    conversion.get_model_class(architecture).set_vocab = set_vocab
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, *options]
    convert_hf_to_gguf.main()


def quantize(source: str, out: str, ftype: str, importance: str = "") -> None:
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(ftype), 1
    kept: list[Any] = []
    if importance:
        params.imatrix = _ones(llama_cpp, source, kept)
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit("llama_model_quantize failed")


def types(source: str, out: str, ftype: str, importance: str = "") -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.dry_run = int(ftype), True
    value = (ctypes.c_float * 1)(1.0)
    matrix = (llama_cpp.llama_model_imatrix_data * 2)(llama_cpp.llama_model_imatrix_data(b"any", value, 1))
    if importance:
        params.imatrix = ctypes.cast(matrix, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    said: list[str] = []
    heard = llama_cpp.llama_log_callback(lambda level, text, data: said.append(text.decode()))
    llama_cpp.llama_log_set(heard, None)
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit("".join(said[-3:]).strip() or "llama_model_quantize failed")
    # "[1/9] NAME - [SHAPE], type = OLD, size = ..." and "-> ... (NEW)" where it is another.
    line = re.compile(r"\] (\S+) +- \[.*?\], type = +(\w+), size = [^\n]*?(?:-> .* MiB \((\w+)\))?\n")
    found = {name: (new or old).upper() for name, old, new in line.findall("".join(said))}
    Path(out).write_text(json.dumps(found))


def _ones(llama_cpp: Any, path: str, kept: list[Any]) -> Any:
    """An importance matrix of ones for every matrix of a file; `kept` holds its memory."""
    import numpy as np
    from gguf import GGUFReader

    entries = []
    for tensor in GGUFReader(path).tensors:
        columns, rows, *experts = (*tensor.shape.tolist(), 1)
        if rows > 1 or experts:
            values = np.ones(columns * (tensor.shape.tolist()[2] if len(tensor.shape) == 3 else 1), np.float32)
            kept += [values, tensor.name.encode()]
            data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entries.append(llama_cpp.llama_model_imatrix_data(kept[-1], data, values.size))
    array = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    kept.append(array)
    return ctypes.cast(array, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))


def logits(path: str, tokens_path: str, out: str) -> None:
    import llama_cpp
    import numpy as np

    tokens = np.load(tokens_path).astype(np.int32)
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        raise SystemExit(f"llama.cpp does not load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(256, len(tokens))
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    made = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(tokens), n_vocab))
    np.save(out, made)


if __name__ == "__main__":
    {"convert": convert, "quantize": quantize, "types": types, "logits": logits}[sys.argv[1]](*sys.argv[2:])
