"""Hyper-parameters: how the metadata of a model file is read, and what all architectures have of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from engine.formats.gguf import GGUFFile
from engine.ground.errors import ModelFormatError, UnsupportedModelError
from engine.memory.kv import DeltaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What every architecture has, and what is read of one in which nothing is particular (see `ModelConfig`).

    head_dim, rope_base: of full attention. n_expert, n_expert_used, n_ff_exp: 0 in a model without experts.
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
    """The metadata of an architecture, each key without the architecture's name before it."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.architecture

    def size(self, key: str, least: int = 1, default: int | None = None) -> int:
        """A whole number, at least `least`; `default` if there is no such key and it is not None."""
        key = f"{self.arch}.{key}"
        value = self.file.value(key, int) if default is None else self.file.value(key, int, default)
        if value < least:
            raise ModelFormatError(f"{key} is {value}, expected at least {least}")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A number, as `size`."""
        key = f"{self.arch}.{key}"
        return float(self.file.value(key, float) if default is None else self.file.value(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so."""
        return bool(self.file.value(f"{self.arch}.{key}", bool, default))

    def word(self, key: str, default: str) -> str:
        """A name."""
        return str(self.file.value(f"{self.arch}.{key}", str, default))

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """An array."""
        key = f"{self.arch}.{key}"
        return list(self.file.value(key, list) if default is None else self.file.value(key, list, default))

    def sizes(self, key: str, n_layer: int) -> tuple[int, ...]:
        """Whole numbers, one a layer, each at least 1; the file may hold one number for all layers."""
        if isinstance(self.file.metadata.get(f"{self.arch}.{key}"), int):
            return (self.size(key),) * n_layer
        values = [int(value) for value in self.items(key)]
        if len(values) < n_layer or min(values) < 1:
            raise ModelFormatError(f"{self.arch}.{key} is {values}, expected {n_layer} numbers of at least 1")
        return tuple(values[:n_layer])

    def flags(self, key: str, n_layer: int) -> tuple[bool, ...]:
        """Whether something is so, one a layer."""
        values = [bool(value) for value in self.items(key)]
        if len(values) < n_layer:
            raise ModelFormatError(f"{self.arch}.{key} has {len(values)} values, expected {n_layer}")
        return tuple(values[:n_layer])

    def layers(self, skipped: int = 0) -> int:
        """How many layers there are, without those at the end that are skipped; no more than the file can hold."""
        n_layer = self.size("block_count")
        if n_layer > len(self.file.tensors):
            raise ModelFormatError(
                f"{self.arch}.block_count is {n_layer}, the file has {len(self.file.tensors)} tensors"
            )
        return n_layer - skipped

    def vocabulary(self) -> int:
        """Tokens of the embedding."""
        if "token_embd.weight" not in self.file.tensors:
            raise ModelFormatError("tensor token_embd.weight is missing")
        return int(self.file.tensors["token_embd.weight"].shape[0])

    def common(
        self, *, skipped: int = 0, head_dim: int | None = None, rope_base: float | None = None, experts: bool = True
    ) -> dict[str, Any]:
        """The fields of `Common`, by name.

        skipped: layers at the end. head_dim, rope_base: where the file does not say. experts: whether there are any.
        """
        sizes: dict[str, Any] = {
            "n_layer": self.layers(skipped),
            "n_embd": self.size("embedding_length"),
            "n_vocab": self.vocabulary(),
            "n_ctx_train": self.size("context_length"),
            "head_dim": self.head_dim(head_dim),
            "rope_base": self.real("rope.freq_base", rope_base),
            "eps": self.real("attention.layer_norm_rms_epsilon"),
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

    def plain(self) -> Self:
        """These, unless they ask for what most architectures do not have: scaled RoPE, a scale of experts' weights."""
        if (kind := self.word("rope.scaling.type", "none")) != "none":
            raise self.missing(f"rope scaling {kind!r}")
        if self.real("expert_weights_scale", 1.0) not in (0.0, 1.0):
            raise self.missing("an expert_weights_scale")
        return self

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
