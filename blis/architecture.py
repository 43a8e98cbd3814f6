"""What a transformer is made of: parameter counts and bytes, from its published configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources

import yaml

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.release_fields import Fields

# Matrices of a gated feed-forward network: gate, up and down.
_GATED = 3

# Larger than any published dimension; what is beyond is a slip of the keyboard.
_LARGEST = 10_000_000

# What tells latent attention, separately sized experts, quantised weights and several networks in one.
_OTHER_FORMS = (
    "kv_lora_rank",
    "n_routed_experts",
    "num_experts",
    "moe_intermediate_size",
    "quantization_config",
    "text_config",
)

_BYTES_OF_TYPE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward network.

    ``experts`` 0: dense, else ``experts_per_token`` of them serve each token and a router of
    ``hidden_size * experts`` parameters a layer chooses them.  ``bytes_per_parameter`` is that of
    weights, KV cache and activations alike.
    """

    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    bytes_per_parameter: int = 2

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output projection of a layer."""
        return 2 * self.hidden_size * self.head_size * (self.attention_heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """One feed-forward network of a layer."""
        return _GATED * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """The table of token vectors; the output projection is as large."""
        return self.vocabulary * self.hidden_size

    @property
    def always_read_parameters(self) -> int:
        """Weights that every step reads: all but the table of token vectors and the experts, if there are any."""
        norms_and_router = 2 * self.hidden_size + self.hidden_size * self.experts
        feed_forward = 0 if self.experts else self.expert_parameters
        per_layer = self.attention_parameters + norms_and_router + feed_forward
        return self.layers * per_layer + self.hidden_size + self.embedding_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        table = 0 if self.tied_embeddings else self.embedding_parameters
        return self.always_read_parameters + table + self.layers * self.experts * self.expert_parameters

    @property
    def layer_flops_per_token(self) -> int:
        """Multiplications and additions of all layers for one token, but for attention over the context."""
        networks = self.experts_per_token if self.experts else 1
        return 2 * self.layers * (self.attention_parameters + networks * self.expert_parameters)

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted sum of one token over one token of its context, all layers."""
        return 4 * self.layers * self.attention_heads * self.head_size

    def kv_bytes_per_token(self, tensor_parallelism: int = 1) -> float:
        """KV cache of one token on each GPU; with fewer KV heads than GPUs the heads are replicated."""
        heads = max(self.kv_heads / tensor_parallelism, 1.0)
        return 2 * self.layers * heads * self.head_size * self.bytes_per_parameter


def bundled_architectures() -> dict[str, Architecture]:
    """The models of the bundled experiments, by name."""
    text = (resources.files("blis_replay.blis") / "architectures.yaml").read_text("utf-8")
    top = Fields(yaml.safe_load(text), "architectures.yaml", "")
    return {name: parse_architecture(top.mapping(name)) for name in top.values}


def parse_architecture(values: Fields) -> Architecture:
    """An architecture from a mapping of its fields.  Raises ``ReleaseError`` naming the field."""
    numbers = {}
    for field in fields(Architecture):
        if field.name != "tied_embeddings":
            smallest = 0 if field.name.startswith("experts") else 1
            numbers[field.name] = values.count(field.name, smallest, _LARGEST, optional=smallest == 0)
    tied = values.flag("tied_embeddings")
    values.text("source", optional=True)
    values.refuse_unknown()
    if (numbers["experts"] == 0) != (numbers["experts_per_token"] == 0) or (
        numbers["experts_per_token"] > numbers["experts"]
    ):
        values.refuse("experts_per_token", "does not go with experts", "give both, the first at most the second")
    return Architecture(tied_embeddings=tied, **numbers)


def format_architecture(architecture: Architecture) -> dict[str, object]:
    """The fields that ``parse_architecture`` reads."""
    return dict(vars(architecture))


def architecture_of_config(document: object, origin: str) -> Architecture:
    """The architecture of a model's own ``config.json`` (Llama, Mistral, Mixtral, Qwen2 and their like).

    ``document``: the parsed file.  Raises ``ReleaseError`` naming the field that is missing.
    """
    if not isinstance(document, Mapping):
        raise ReleaseError(f"{origin}: is no model configuration; name the config.json of a model")
    config = Fields(dict(document), origin, "")
    for name in _OTHER_FORMS:
        if config.values.get(name) is not None:
            config.refuse(name, "is of a kind of model that is not counted here", "describe the model in a release")
    heads = config.count("num_attention_heads", 1, _LARGEST)
    hidden = config.count("hidden_size", 1, _LARGEST)
    experts = config.count("num_local_experts", 0, _LARGEST, optional=True)
    return Architecture(
        layers=config.count("num_hidden_layers", 1, _LARGEST),
        hidden_size=hidden,
        attention_heads=heads,
        kv_heads=config.count("num_key_value_heads", 0, _LARGEST, optional=True) or heads,
        head_size=config.count("head_dim", 0, _LARGEST, optional=True) or max(hidden // heads, 1),
        intermediate_size=config.count("intermediate_size", 1, _LARGEST),
        vocabulary=config.count("vocab_size", 1, _LARGEST),
        experts=experts,
        experts_per_token=config.count("num_experts_per_tok", 1, max(experts, 1)) if experts else 0,
        tied_embeddings=config.flag("tie_word_embeddings"),
        bytes_per_parameter=_bytes_per_parameter(config),
    )


def _bytes_per_parameter(config: Fields) -> int:
    name = "torch_dtype" if "torch_dtype" in config.values else "dtype"
    known = config.text(name)
    if known not in _BYTES_OF_TYPE:
        config.refuse(name, f"is {known!r}", f"use one of {', '.join(_BYTES_OF_TYPE)}")
    return _BYTES_OF_TYPE[known]
