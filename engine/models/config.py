"""Hyper-parameters: how the metadata of a model file is read, and what all architectures have of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from engine.formats.gguf import MISSING, GGUFFile, StringArray
from engine.formats.gguf_header import describe
from engine.ground.errors import ModelFormatError, UnsupportedModelError
from engine.memory.shape import DeltaShape
from engine.models.conventions import mtp_blocks, refuse_unsupported_keys
from engine.models.scaling import Scaling, scaled_rope_table
from engine.ops import F32

MAX_LAYERS = 256  # twice what published models have; what a header asks for is laid out before any weight is seen
MAX_SIZE = (1 << 31) - 1  # of any size: kernels take them as 32 bits
_TOKENS = "tokenizer.ggml.tokens"
MAX_ITEMS = 1024  # of an array, which have one a layer or fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What every architecture has, and what is read of one in which nothing is particular (see `ModelConfig`).

    head_dim, rope_base, scaling (of positions): of full attention. n_expert, n_expert_used, n_ff_exp: 0 in a model
    without experts.
    """

    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    head_dim: int
    rope_base: float
    eps: float
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    scaling: Scaling | None = None

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Read and check the metadata; what is not implemented is refused by name, a key that nobody reads too."""
        keys = Keys(file)
        config = cls.read(keys)
        refuse_unsupported_keys(file.metadata, file.architecture, keys.asked)
        return config

    @classmethod
    def read(cls, keys: Keys) -> Self:
        """The configuration that the keys describe; a variant that is not implemented is refused by name."""
        raise NotImplementedError

    def rope_table(self, n_ctx: int, n_rot: int, factors: NDArray[np.float64] | None = None) -> F32:
        """The table of full attention for so many positions and dimensions; factors divide each frequency."""
        return scaled_rope_table(n_ctx, n_rot, self.rope_base, self.scaling, factors)

    def written(self, arch: str, own: dict[str, Any]) -> dict[str, Any]:
        """The GGUF keys of an architecture that `from_gguf` reads back, with what it has of its `own`."""
        values = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.rope_base,
        }
        if self.n_expert:
            values |= {
                "expert_count": self.n_expert,
                "expert_used_count": self.n_expert_used,
                "expert_feed_forward_length": self.n_ff_exp,
            }
        if self.scaling is not None:
            values |= self.scaling.written()
        return {f"{arch}.{key}": value for key, value in (values | own).items()}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: all, or none."""
        return tuple(range(self.n_layer)) if self.n_expert else ()

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose cache a layer reads: its own."""
        return layer

    @property
    def delta(self) -> DeltaShape | None:
        """The recurrent layers: none."""
        return None


class Keys:
    """The metadata of an architecture, each key without the architecture's name before it.

    asked: those that were read. whole: the file has tensors of every layer.
    """

    whole = True

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.architecture
        self.asked: set[str] = set()

    def _value(self, key: str, kind: type[Any], default: Any) -> Any:
        self.asked.add(key)
        return self.file.value(f"{self.arch}.{key}", kind, MISSING if default is None else default)

    def size(self, key: str, least: int = 1, default: int | None = None) -> int:
        """A whole number, at least `least`; `default` if there is no such key and it is not None."""
        value: int = self._value(key, int, default)
        if not least <= value <= MAX_SIZE:
            bound = f"at least {least}" if value < least else f"at most {MAX_SIZE}"
            raise ModelFormatError(f"{self.arch}.{key} is {value}, expected {bound}")
        return value

    def real(self, key: str, default: float | None = None, least: float = -math.inf) -> float:
        """A finite number, as `size`."""
        value = float(self._value(key, float, default))
        if not math.isfinite(value) or value < least:
            bound = "" if least == -math.inf else f" of at least {least:g}"
            raise ModelFormatError(f"{self.arch}.{key} is {value}, expected a number{bound}")
        return value

    def positive(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number, as `size`, that is above a bound."""
        value = self.real(key, default)
        if value <= above:
            raise ModelFormatError(f"{self.arch}.{key} is {value}, expected a number above {above:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so."""
        return bool(self._value(key, bool, default))

    def word(self, key: str, default: str) -> str:
        """A name."""
        return str(self._value(key, str, default))

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """An array, as a list."""
        found = self._value(key, object, default)
        if not isinstance(found, list | np.ndarray) or len(found) > MAX_ITEMS:
            raise ModelFormatError(f"{self.arch}.{key} is {describe(found)}, expected numbers, {MAX_ITEMS} at most")
        return list(found) if isinstance(found, list) else list(found.tolist())

    def is_number(self, key: str) -> bool:
        """Whether the file has one number where it may have an array."""
        return isinstance(self.file.metadata.get(f"{self.arch}.{key}"), int)

    def sizes(self, key: str, n_layer: int) -> tuple[int, ...]:
        """Whole numbers, one a layer, each at least 1; the file may hold one number for all layers."""
        if self.is_number(key):
            return (self.size(key),) * n_layer
        return tuple(self._of_layers(key, n_layer, "iu", 1, MAX_SIZE))

    def flags(self, key: str, n_layer: int) -> tuple[bool, ...]:
        """Whether something is so, one a layer; some writers have 0 and 1."""
        return tuple(map(bool, self._of_layers(key, n_layer, "biu", 0, 1)))

    def _of_layers(self, key: str, n_layer: int, kinds: str, least: int, most: int) -> list[int]:
        """The first items of an array, one a layer, of these kinds of `dtype` and within bounds."""
        found = self._value(key, object, None)
        if isinstance(found, np.ndarray) and found.dtype.kind in kinds and len(found) >= n_layer:
            values: list[int] = found[:n_layer].tolist()
            if least <= min(values) and max(values) <= most:
                return values
            said = f"{values!r:.60}"
        else:
            said = describe(found)
        raise ModelFormatError(f"{self.arch}.{key} is {said}, expected {n_layer} numbers from {least} to {most}")

    def expect(self, key: str, value: float) -> None:
        """Refuse a file that has a key with another value than what is computed here, whether it says so or not."""
        if not math.isclose(found := self.real(key, value), value, rel_tol=1e-4):
            raise self.missing(f"{key} {found:g} (it is {value:g} here)")

    def layers(self) -> int:
        """How many layers there are, without those that predict further tokens; no more than the file can hold."""
        n_layer = self.size("block_count")
        if self.whole and n_layer > len(self.file.tensors):
            raise ModelFormatError(
                f"{self.arch}.block_count is {n_layer}, the file has {len(self.file.tensors)} tensors"
            )
        if n_layer > MAX_LAYERS:
            raise ModelFormatError(f"{self.arch}.block_count is {n_layer}, more than {MAX_LAYERS}")
        if (n_mtp := self.size("nextn_predict_layers", 0, 0)) >= n_layer:
            raise ModelFormatError(f"{self.arch}.nextn_predict_layers is {n_mtp} of {n_layer} blocks")
        return mtp_blocks(self.file.metadata, self.arch).start

    def vocabulary(self) -> int:
        """Tokens of the embedding."""
        if "token_embd.weight" not in self.file.tensors:
            raise ModelFormatError("tensor token_embd.weight is missing")
        rows, tokens = int(self.file.tensors["token_embd.weight"].shape[0]), self.file.metadata.get(_TOKENS)
        if isinstance(tokens, StringArray) and rows < len(tokens):
            raise ModelFormatError(f"token_embd.weight has {rows} rows, fewer than the {len(tokens)} of {_TOKENS}")
        return rows

    def common(
        self, *, head_dim: int | None = None, rope_base: float | None = None, experts: bool = True
    ) -> dict[str, Any]:
        """The fields of `Common`, by name.

        head_dim, rope_base: where the file does not say. experts: whether there are any.
        """
        sizes: dict[str, Any] = {
            "n_layer": self.layers(),
            "n_embd": self.size("embedding_length"),
            "n_vocab": self.vocabulary(),
            "n_ctx_train": self.size("context_length"),
            "head_dim": self.head_dim(head_dim),
            "rope_base": self.positive("rope.freq_base", rope_base, above=1.0),
            "eps": self.real("attention.layer_norm_rms_epsilon", least=0.0),
            "scaling": self.scaling(),
        }
        if experts:
            sizes |= {
                "n_expert": self.size("expert_count"),
                "n_expert_used": self.size("expert_used_count"),
                "n_ff_exp": self.size("expert_feed_forward_length"),
            }
            check_experts(sizes["n_expert_used"], sizes["n_expert"])
        return sizes

    def head_dim(self, default: int | None = None, kind: str = "") -> int:
        """Dimensions of a head, those of values among them."""
        head_dim = self.size(f"attention.key_length{kind}", 2, default)
        if self.size(f"attention.value_length{kind}", 1, head_dim) != head_dim:
            raise self.missing("value heads of another size than key heads")
        return head_dim

    def scaling(self) -> Scaling | None:
        """How positions are scaled, None if they are not; another kind than those of `Scaling` is refused."""
        p = "rope.scaling."
        kind = self.word(p + "type", "linear")  # as the format has it where a file only gives a factor
        factor = self.real(p + "factor", self.real("rope.scale_linear", 0.0)) or 1.0
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if factor < 0.0:
            raise ModelFormatError(f"{self.arch}.{p}factor is {factor}, expected a number above 0")
        if kind == "linear":
            return Scaling("linear", factor)
        if kind != "yarn":
            raise self.missing(f"rope scaling {kind!r:.60}", hint="implemented are 'linear' and 'yarn'")
        # Two converters, two names.
        fast, slow = (
            self.positive(f"{p}yarn_beta_{speed}", self.positive(f"{p}beta_{speed}", default))
            for speed, default in (("fast", 32.0), ("slow", 1.0))
        )
        yarn = Scaling("yarn", factor, self.size(p + "original_context_length"), fast, slow)
        # Configurations say the whole magnitude, or nothing; files also 1, where engines make it of the factor.
        if self.real(p + "yarn_attn_factor", 1.0) != 1.0:
            self.expect(p + "yarn_attn_factor", yarn.magnitude)
        return yarn

    def missing(self, what: str, hint: str = "") -> UnsupportedModelError:
        """The error for a variant that is not implemented."""
        return UnsupportedModelError(f"{self.arch} with {what} is not implemented", hint=hint)


def check_heads(n_head: int | tuple[int, ...], n_head_kv: int | tuple[int, ...]) -> None:
    """Refuse query heads that cannot share the KV heads, in any layer."""
    heads, kv = (n if isinstance(n, tuple) else (n,) for n in (n_head, n_head_kv))
    if any(n % k for n in heads for k in kv):
        raise ModelFormatError(f"{n_head} heads cannot share {n_head_kv} KV heads evenly")


def check_experts(n_used: int, n_expert: int) -> None:
    """Refuse more active experts than there are."""
    if n_used > n_expert:
        raise ModelFormatError(f"{n_used} active experts of {n_expert}")


def check_rope(n_dims: int, head_dim: int) -> None:
    """Refuse a rotation of an odd number of dimensions, or of more than a head has."""
    if n_dims % 2 or n_dims > head_dim:
        raise ModelFormatError(f"{n_dims} rotated dimensions of {head_dim}")
