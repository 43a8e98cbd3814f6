"""What is published of models and GPUs.

Of a transformer its parameter counts and bytes, from its configuration.  Of a GPU what it can do at best, from its
datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from blis_replay.base.document import Bytes, BytesPerS, FieldError, FlopsPerS, Text, read_values, read_yaml
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.gpu_names import same_gpu

# Matrices of a gated feed-forward network: gate, up and down.
_GATED = 3

# Larger than any published dimension; what is beyond is a slip of the keyboard.
Size = Annotated[int, Meta(ge=1, le=10_000_000)]
Count = Annotated[int, Meta(ge=0, le=10_000_000)]

# What tells latent attention, separately sized experts, quantised weights and several networks in one.
_OTHER_FORMS = (
    "kv_lora_rank",
    "n_routed_experts",
    "num_experts",
    "moe_intermediate_size",
    "quantization_config",
    "text_config",
)

DataType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
_BYTES_OF_TYPE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward network.

    ``experts`` 0: dense, else ``experts_per_token`` of them serve each token and a router of
    ``hidden_size * experts`` parameters a layer chooses them.  ``bytes_per_parameter`` is that of
    weights, KV cache and activations alike.  ``source``: where all this is from, in words.
    """

    layers: Size
    hidden_size: Size
    attention_heads: Size
    kv_heads: Size
    head_size: Size
    intermediate_size: Size
    vocabulary: Size
    experts: Count = 0
    experts_per_token: Count = 0
    tied_embeddings: bool = False
    bytes_per_parameter: Size = 2
    source: Text | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.experts == 0) != (self.experts_per_token == 0) or self.experts_per_token > self.experts:
            problem = "does not go with experts"
            raise FieldError("experts_per_token", problem, "give both, the first at most the second")

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
    text = (resources.files("blis_replay.blis.latency") / "architectures.yaml").read_text("utf-8")
    return read_yaml(text, dict[str, Architecture], "architectures.yaml", "an architecture", ReleaseError)


def architecture_named(model: str, among: Mapping[str, Architecture] | None = None) -> Architecture | None:
    """The architecture of a model, in upper or lower case, of those that ship if None; None if it is not known."""
    architectures = bundled_architectures() if among is None else among
    return next((known for name, known in architectures.items() if name.lower() == model.lower()), None)


class _Config(Struct, frozen=True):
    """What is read of a model's ``config.json``; one of the two data types is given."""

    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    num_key_value_heads: Count = 0
    head_dim: Count = 0
    num_local_experts: Count = 0
    num_experts_per_tok: Count = 0
    tie_word_embeddings: bool = False
    torch_dtype: DataType | None = None
    dtype: DataType | None = None

    def __post_init__(self) -> None:
        if (self.torch_dtype or self.dtype) is None:
            raise FieldError("dtype", "is missing", f"add one of {', '.join(_BYTES_OF_TYPE)}")
        if self.num_local_experts and not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            problem = f"is missing, or not a whole number from 1 to {self.num_local_experts}"
            raise FieldError("num_experts_per_tok", problem, "correct it")


def config_of(architecture: Architecture) -> dict[str, object]:
    """The ``config.json`` that says this of a model: of Llama's kind, or of Mixtral's if it has experts."""
    mixture = architecture.experts > 0
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if mixture else "LlamaForCausalLM"],
        "model_type": "mixtral" if mixture else "llama",
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.attention_heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_size,
        "intermediate_size": architecture.intermediate_size,
        "vocab_size": architecture.vocabulary,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": architecture.tied_embeddings,
        "torch_dtype": {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}[architecture.bytes_per_parameter],
    }
    experts = {"num_local_experts": architecture.experts, "num_experts_per_tok": architecture.experts_per_token}
    return config | (experts if mixture else {})


def architecture_of_config(document: object, origin: str) -> Architecture:
    """The architecture of a model's own ``config.json`` (Llama, Mistral, Mixtral, Qwen2 and their like).

    ``document``: the parsed file.  Raises ``ReleaseError`` naming the field that is missing.
    """
    for name in _OTHER_FORMS:
        if isinstance(document, dict) and document.get(name) is not None:
            problem = "is of a kind of model that is not counted here; describe the model in a release"
            raise ReleaseError(f"{origin}, field {name}: {problem}")
    config = read_values(document, _Config, origin, "", ReleaseError)
    heads, experts = config.num_attention_heads, config.num_local_experts
    return Architecture(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        attention_heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_size=config.head_dim or max(config.hidden_size // heads, 1),
        intermediate_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        tied_embeddings=config.tie_word_embeddings,
        bytes_per_parameter=_BYTES_OF_TYPE[config.torch_dtype or config.dtype or ""],
    )


_NAMES = {
    "memory_bytes_per_s": "memory_bandwidth",
    "flops_per_s": "compute",
    "link_bytes_per_s": "link_bandwidth",
    "flops_8_bit_per_s": "compute_8_bit",
    "flops_32_bit_per_s": "compute_32_bit",
    "memory_bytes": "memory",
}


class Gpu(Struct, frozen=True, rename=_NAMES):
    """Datasheet peaks: memory and link bandwidth in bytes/s (the link in one direction), dense 16-bit FLOP/s.

    ``flops_8_bit_per_s``, ``flops_32_bit_per_s``: of numbers of these widths, where they are not those of 16 bits.
    ``memory_bytes``: how much there is, None if nobody says.
    """

    name: Text
    memory_bytes_per_s: BytesPerS
    flops_per_s: FlopsPerS
    link_bytes_per_s: BytesPerS
    source: Text | None = None
    flops_8_bit_per_s: FlopsPerS | None = None
    flops_32_bit_per_s: FlopsPerS | None = None
    memory_bytes: Bytes | None = None

    def flops_at(self, bytes_per_parameter: int) -> float:
        """FLOP/s at ``bytes_per_parameter``; at 16 bits where the datasheet does not say."""
        own = {1: self.flops_8_bit_per_s, 4: self.flops_32_bit_per_s}.get(bytes_per_parameter)
        return own or self.flops_per_s


Gpus = Mapping[str, Gpu]


class _Datasheet(Struct, frozen=True, rename=_NAMES):
    source: Text
    memory_bytes_per_s: BytesPerS
    flops_per_s: FlopsPerS
    link_bytes_per_s: BytesPerS
    also: tuple[Text, ...] = ()
    flops_8_bit_per_s: FlopsPerS | None = None
    flops_32_bit_per_s: FlopsPerS | None = None
    memory_bytes: Bytes | None = None


@cache
def bundled_gpus() -> Gpus:
    """The GPUs that are known, by name and by the other names that recordings give them."""
    found = gpus_of((resources.files("blis_replay.blis.latency") / "gpus.yaml").read_text("utf-8"), "gpus.yaml")
    # Their sources stay in that file; of others a release has to say where the numbers are from.
    return {name: structs.replace(gpu, source=None) for name, gpu in found.items()}


def gpus_of(text: str, origin: str) -> Gpus:
    """The GPUs of a file of datasheets (YAML), by all of their names; ``origin`` names it in errors.

    Raises ``ReleaseError`` naming the field and what is wrong with it.
    """
    sheets = read_yaml(text, dict[str, _Datasheet], origin, "a datasheet", ReleaseError)
    if not sheets:
        raise ReleaseError(f"{origin}: has no GPU; name one, with its datasheet below it")
    gpus: dict[str, Gpu] = {}
    for name, sheet in sheets.items():
        facts = structs.asdict(sheet)
        del facts["also"]
        gpus |= dict.fromkeys([name, *sheet.also], Gpu(name, **facts))
    return gpus


def gpu_named(name: str | None, gpus: Gpus | None = None) -> Gpu:
    """A GPU by name, in any spelling that means one of ``gpus``, those that ship if None.

    Raises ``ReleaseError`` for one whose datasheet is not known, and for a name that fits several (``H100``).
    """
    gpus = bundled_gpus() if gpus is None else gpus
    if name is not None and name in gpus:
        return gpus[name]
    matching = {gpu.name: gpu for known, gpu in gpus.items() if name is not None and same_gpu(name, known)}
    if len(matching) != 1:
        raise ReleaseError(
            f"no datasheet of the hardware {name or '(not recorded)'}; known are {', '.join(gpus)}; "
            "give its datasheet with --gpu-file"
        )
    return next(iter(matching.values()))
