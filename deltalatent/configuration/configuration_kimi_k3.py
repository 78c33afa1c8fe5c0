# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of hybrid delta-attention / latent-attention / latent-MoE models.

Field names are those of the released `config.json` (Kimi K3, arXiv 2607.24653), so that a released file loads verbatim
and is written back in the same form. Names that Transformers uses elsewhere are aliases (`attribute_map`) or read-only
properties (`layer_types`, `mlp_layer_types`, `linear_head_dim`, ...). Keys that no release knows survive a round trip.
"""

# No `from __future__ import annotations` here: `@strict` cannot check types that are strings, and says nothing.

import copy
import math
from typing import Any, cast

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.configuration_utils import PreTrainedConfig, SubConfigSpec

MIN_GATE_LOWER_BOUND = -5.0
"""Lowest log decay per token of the bounded gate: sixteen such steps still fit the exponent range of bf16."""

HIDDEN_ACTS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid",)
TOPK_METHODS = ("noaux_tc",)
KDA_IMPLEMENTATIONS = ("auto", "triton", "torch", "fla")

VISION_KINDS = {
    "pos_emb_type": ("divided_fixed",),
    "pos_emb_interpolation_mode": ("bilinear", "bicubic"),
    "merge_type": ("sd2_tpool",),
    "norm_type": ("rmsnorm", "layernorm"),
    "mlp_type": ("mlp2",),
    "mm_projector_type": ("patchmergerv2", "patchmerger"),
}

# What a `kimi_linear` file means when it does not name a field: the predecessor did not have these mechanisms.
PREDECESSOR_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
}

# Keys of `linear_attn_config` under the names that Transformers writes for the predecessor.
PREDECESSOR_HEADS = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}

# Any of these in a `kimi_linear` file says that the file is not the predecessor's but this architecture's.
FIELDS_OF_THIS_ARCHITECTURE = (
    "attn_res_block_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "activation_situ_beta",
    "linear_attn_config.gate_lower_bound",
    "linear_attn_config.use_full_rank_gate",
)


def has_fields_of_this_architecture(config_dict: dict[str, Any]) -> bool:
    """Whether a parsed `config.json` sets a field that the predecessor does not have (null is "not set")."""
    linear = config_dict.get("linear_attn_config") or {}
    flat = config_dict | {f"linear_attn_config.{key}": value for key, value in linear.items()}
    return any(flat.get(field) is not None for field in FIELDS_OF_THIS_ARCHITECTURE)


def read_kimi_linear(config_dict: dict[str, Any]) -> dict[str, Any]:
    """A parsed file of `model_type: kimi_linear` in the words of `KimiK3TextConfig`.

    Such a file is either a released text model of this architecture, or the predecessor's: as released, or as
    Transformers writes it, with the layers in `layer_types` and `mlp_layer_types` and the KDA heads in `linear_*`.
    Mechanisms that the file does not name are off.

    Raises:
        ValueError: The file says of no layer whether it is a KDA layer.
    """
    config_dict = PREDECESSOR_DEFAULTS | config_dict
    config_dict["model_type"] = KimiK3TextConfig.model_type
    layers = config_dict.pop("layer_types", None)
    heads = {key: config_dict.pop(name) for name, key in PREDECESSOR_HEADS.items() if name in config_dict}
    if config_dict.get("linear_attn_config") is None:
        if layers is None:
            raise ValueError(
                "a `kimi_linear` file must have `linear_attn_config` (or `layer_types`), got neither: add the layer "
                "lists and the KDA heads of the model that the weights belong to."
            )
        config_dict["linear_attn_config"] = layer_lists(layers) | heads
    mlp_layers = config_dict.get("mlp_layer_types")
    if mlp_layers is not None and "first_k_dense_replace" not in config_dict:
        config_dict["first_k_dense_replace"] = [*mlp_layers, "sparse"].index("sparse")
    return config_dict


def layer_lists(layer_types: list[str]) -> dict[str, list[int]]:
    """`layer_types` as the two 1-based lists of `linear_attn_config`."""
    numbered = list(enumerate(layer_types, start=1))
    return {
        "kda_layers": [i for i, kind in numbered if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in numbered if kind == "full_attention"],
    }


def default_linear_attn_config(num_hidden_layers: int, num_heads: int = 96, head_dim: int = 128) -> dict[str, Any]:
    """Three KDA layers, then one latent-attention layer, and latent attention again at the very end.

    Layer numbers in the two lists are 1-based, as in the release.
    """
    full = [i for i in range(1, num_hidden_layers + 1) if i % 4 == 0 or i == num_hidden_layers]
    return {
        "kda_layers": [i for i in range(1, num_hidden_layers + 1) if i not in full],
        "full_attn_layers": full,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": MIN_GATE_LOWER_BOUND,
        "use_full_rank_gate": True,
    }


@strict
class KimiK3TextConfig(PreTrainedConfig):
    r"""Configuration of the text model; the defaults are the released size (2.8 T parameters, 104 B active).

    Args:
        vocab_size (`int`): Number of token ids.
        hidden_size (`int`): Width of the residual stream.
        intermediate_size (`int`): Width of the dense channel mixers (the first `first_k_dense_replace` layers).
        num_hidden_layers (`int`): Number of decoder layers.
        num_attention_heads (`int`): Heads of the latent-attention (MLA) layers.
        num_key_value_heads (`int`, *optional*): Equal to `num_attention_heads`; the latent is shared by all heads.
        head_dim (`int`, *optional*): Kept for readers of the release; no layer uses it.
        q_lora_rank (`int`, *optional*): Rank of the query projection of MLA, `None` for a full-rank one.
        kv_lora_rank (`int`): Width of the key/value latent of MLA, which is what the cache holds.
        qk_nope_head_dim, qk_rope_head_dim (`int`): Width of the per-head and of the shared part of an MLA key. No
            position is encoded in either ("NoPE"); the name of the second is historical.
        v_head_dim (`int`): Width of an MLA value head.
        mla_use_nope (`bool`): Must be `True`.
        mla_use_output_gate (`bool`): Multiply the attention output by `sigmoid(g_proj(x))`.
        linear_attn_config (`dict`, *optional*): The KDA layers: `kda_layers` and `full_attn_layers` (1-based, together
            every layer exactly once), `num_heads`, `head_dim`, `short_conv_kernel_size`, `gate_lower_bound` (log decay
            per token, in [-5, 0), or `None` for the unbounded softplus gate) and `use_full_rank_gate`.
        attn_res_block_size (`int`, *optional*): Layers per block of the attention residuals, `None` for plain
            residuals.
        hidden_act (`str`): `"situ"` (soft-capped gated unit) or `"silu"`.
        activation_situ_beta, activation_situ_linear_beta (`float`): Soft caps of the two branches of SiTU.
        num_experts (`int`, *optional*): Routed experts per sparse layer; `None` or 0 makes every layer dense.
        num_experts_per_token (`int`): Routed experts that a token visits.
        num_shared_experts (`int`): Experts that every token visits, as one MLP of that many times the width.
        moe_intermediate_size (`int`): Width of one expert.
        routed_expert_hidden_size (`int`, *optional*): Latent width in which the routed experts work, `None` for
            `hidden_size` (no latent projections).
        latent_moe_use_norm (`bool`): RMSNorm between the experts' weighted sum and the projection back; without effect
            if there is no projection.
        moe_renormalize (`bool`): Divide the routing weights by their sum.
        moe_router_activation_func (`str`): `"sigmoid"`.
        routed_scaling_factor (`float`): Factor on the routing weights.
        use_grouped_topk (`bool`), num_expert_group, topk_group (`int`): Group-limited routing: only experts of the
            best `topk_group` groups are eligible. One group is no limit.
        topk_method (`str`): `"noaux_tc"`, selection by score plus balancing bias.
        first_k_dense_replace, moe_layer_freq (`int`): Layer `i` (0-based) is sparse if `i >= first_k_dense_replace`
            and `i % moe_layer_freq == 0`.
        rms_norm_eps (`float`): Epsilon of the norms, the depth mixing and the gated norm of KDA. The low-rank norms of
            MLA use 1e-6 whatever this says, as released.
        initializer_range (`float`): Standard deviation of the initial projections.
        embedding_initializer_range (`float`, *optional*): Standard deviation of the initial embeddings, `None` for
            `initializer_range`; without effect if they are tied to the output head. Narrow models want 1.
        kda_a_log_length (`int`, *optional*): Length at which `A_log` is written to disk (zero-padded; the release uses
            128); `None` writes one entry per head. Any length from the number of heads up is read.
        kda_implementation (`str`): `"auto"`, `"triton"`, `"torch"` or `"fla"`; not saved. What computes the KDA
            layers.

    Raises:
        StrictDataclassFieldValidationError: A value has the wrong type.
        StrictDataclassClassValidationError: A value is out of range or contradicts another; its cause, a ValueError
            or TypeError, names field, value and fix. Checked at construction, after `from_pretrained` and `from_dict`
            have applied their overrides, and before saving.
    """

    model_type = "kimi_k3_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 - the Trainer adds a list to it
    attribute_map = {  # noqa: RUF012 - read by the base class
        "model_max_length": "max_position_embeddings",
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "scoring_func": "moe_router_activation_func",
    }
    number_of_conv_states = 3  # convolution windows per KDA layer in the cache: q, k and v

    # How `DistributedConfig` spreads a model; the FSDP plan of the base class fits. KDA and MLA layers are whole on
    # each rank of a tensor-parallel group. No pipeline plan: stages would have to hand on the sums of closed blocks.
    base_model_tp_plan = {  # noqa: RUF012 - read by the base class
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.shared_experts.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
    base_model_ep_plan = cast(  # the base class declares another type than it uses
        Any,
        {
            "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
            "layers.*.mlp.experts.down_proj": "grouped_gemm",
            "layers.*.mlp.experts": "ep_dispatch_experts",
        },
    )

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    attention_dropout: float | int = 0.0

    linear_attn_config: dict[str, Any] | None = None
    kda_a_log_length: int | None = None

    attn_res_block_size: int | None = 12

    hidden_act: str = "situ"
    activation_situ_beta: float | int = 4.0
    activation_situ_linear_beta: float | int = 25.0

    num_experts: int | None = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float | int = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1

    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    max_position_embeddings: int = 1048576
    use_cache: bool = True
    output_router_logits: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    # In released files, but without effect: no position enters the text model, and no extra prediction layers exist.
    num_nextn_predict_layers: int = 0
    rope_theta: float | int | None = None
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self, **kwargs):
        # `kimi_linear` in released files; the class says what this is.
        kwargs.pop("model_type", None)
        # Derived here; written files of other tools may carry them.
        derived = {name: kwargs.pop(name, None) for name in ("layer_types", "mlp_layer_types", "qk_head_dim")}
        self._kda_implementation = kwargs.pop("kda_implementation", "auto")

        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.linear_attn_config is None:
            self.linear_attn_config = default_linear_attn_config(self.num_hidden_layers)
            if derived["layer_types"] is not None:
                self.linear_attn_config |= layer_lists(derived["layer_types"])
        self.linear_attn_config = copy.deepcopy(self.linear_attn_config)
        # The base class reads the derived properties, which rely on these.
        for validator in (self.validate_sizes, self.validate_linear_attention):
            try:
                validator()
            except (TypeError, ValueError) as error:
                raise StrictDataclassClassValidationError(validator=validator.__name__, cause=error) from error
        super().__post_init__(**kwargs)

        for name, given in derived.items():
            if given is not None and given != getattr(self, name):
                raise ValueError(
                    f"`{name}` follows from other fields and must be {getattr(self, name)}, got {given}: leave it out "
                    "and set `linear_attn_config` (token mixers), `first_k_dense_replace`, `moe_layer_freq` and "
                    "`num_experts` (channel mixers), or `qk_nope_head_dim` and `qk_rope_head_dim`."
                )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parsed `config.json` in the words of this class; arguments as in `PreTrainedConfig.get_config_dict`.

        Of a composite file, the text part. A `kimi_linear` file is translated here, not only in `from_dict`, because
        `from_pretrained` warns of any `model_type` but ours.

        Raises:
            OSError: There is no `config.json`.
        """
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict:
            raise OSError(
                f"`{pretrained_model_name_or_path}` must hold a config.json, found none: the folder is incomplete; "
                "copy the file of the model that the weights belong to."
            )
        if isinstance(text_config := config_dict.get("text_config"), dict):
            config_dict = text_config | {"model_type": cls.model_type}
        elif config_dict.get("model_type") == "kimi_linear":
            config_dict = read_kimi_linear(config_dict)
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build from a parsed `config.json` and overrides; a `kimi_linear` file gets the predecessor's defaults.

        Raises:
            ValueError: The file gives two values under two names of one field.
            StrictDataclassClassValidationError: The file, or the file with the overrides, is no valid configuration.
        """
        if config_dict.get("model_type") == "kimi_linear":
            config_dict = read_kimi_linear(config_dict)
        for alias, name in cls.attribute_map.items():
            if alias in config_dict and name in config_dict and config_dict[alias] != config_dict[name]:
                raise ValueError(
                    f"`{alias}` is another name of `{name}`={config_dict[name]!r} and must be equal, got "
                    f"{config_dict[alias]!r}: keep one of the two."
                )
        result = super().from_dict(config_dict, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config.validate()  # overrides were assigned one by one
        return result

    # ---- names that Transformers' caches, masks and parallel plans look for; derived, never saved -------------------

    @property
    def _kda(self) -> dict[str, Any]:
        assert self.linear_attn_config is not None  # filled in by `__post_init__`
        return self.linear_attn_config

    @property
    def layer_types(self) -> list[str]:
        """`"linear_attention"` (KDA) or `"full_attention"` (MLA) per 0-based layer."""
        full = set(self._kda["full_attn_layers"])
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(self.num_hidden_layers)]

    @property
    def mlp_layer_types(self) -> list[str]:
        """`"sparse"` (mixture of experts) or `"dense"` per 0-based layer."""
        return [
            "sparse"
            if self.num_experts and i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0
            else "dense"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA key; tells `generate` that head sizes do not give the shape of a static cache."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def linear_num_heads(self) -> int:
        """Heads of a KDA layer."""
        return self._kda["num_heads"]

    @property
    def linear_head_dim(self) -> int:
        """Width of a KDA head, keys and values alike."""
        return self._kda["head_dim"]

    @property
    def linear_conv_kernel_dim(self) -> int:
        """Taps of the short convolutions of a KDA layer."""
        return self._kda["short_conv_kernel_size"]

    @property
    def gate_lower_bound(self) -> float | None:
        """Log decay per token at which the gate of KDA saturates, `None` for the unbounded softplus gate."""
        return self._kda.get("gate_lower_bound")

    @property
    def use_full_rank_gate(self) -> bool:
        """Whether the output gate of KDA is one projection (`g_proj`) or two (`g_a_proj`, `g_b_proj`)."""
        return bool(self._kda.get("use_full_rank_gate"))

    @property
    def kda_implementation(self) -> str:
        """What computes the KDA layers: `"auto"`, `"triton"`, `"torch"` or `"fla"`."""
        return self._kda_implementation

    @kda_implementation.setter
    def kda_implementation(self, value: str) -> None:
        self._kda_implementation = value
        self.validate_kda_implementation()

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        super()._remove_keys_not_serialized(d)
        d.pop("_kda_implementation", None)

    # ---- relations between fields, run after construction and before saving ----------------------------------------

    def validate_sizes(self):
        """Widths, ranks and counts are positive."""
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads kv_lora_rank "
            "qk_nope_head_dim qk_rope_head_dim v_head_dim moe_layer_freq max_position_embeddings"
        ).split():
            _require_positive(name, getattr(self, name))
        if self.first_k_dense_replace < 0:
            raise ValueError(
                f"`first_k_dense_replace` must be 0 or more, got {self.first_k_dense_replace}: 0 makes no layer dense."
            )
        for name in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value, "a positive integer or null (null switches the mechanism off)")

    def validate_numbers(self):
        """Epsilon, scale and probability are in range."""
        _require_positive("rms_norm_eps", self.rms_norm_eps, "a positive number", "the release uses 1e-5")
        _require_positive("initializer_range", self.initializer_range, "a positive number", "the release uses 0.02")
        if self.embedding_initializer_range is not None:
            _require_positive(
                "embedding_initializer_range",
                self.embedding_initializer_range,
                "a positive number or null",
                "null takes `initializer_range`",
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(
                f"`attention_dropout` must be in [0, 1), got {self.attention_dropout}: use 0 for no dropout."
            )

    def validate_latent_attention(self):
        """The latent-attention layers are of the kind that is implemented."""
        if not self.mla_use_nope:
            raise ValueError(
                "`mla_use_nope` must be true, got false: latent attention with rotary positions is not implemented; "
                "set `mla_use_nope` to true, or use a model that rotates its keys (e.g. DeepSeek V3)."
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"`num_key_value_heads` must equal `num_attention_heads`={self.num_attention_heads}, got "
                f"{self.num_key_value_heads}: the latent is expanded for every head; leave the field out."
            )

    def validate_linear_attention(self):
        """The KDA block of the file is complete, and its layer lists name every layer exactly once."""
        linear = self._kda
        required = ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size")
        if missing := [key for key in required if key not in linear]:
            raise ValueError(
                f"`linear_attn_config` must have the keys {list(required)}, got none for {missing}: add them."
            )
        for key in ("num_heads", "head_dim", "short_conv_kernel_size"):
            _require_type(f"linear_attn_config.{key}", linear[key], int, "an integer")
            _require_positive(f"linear_attn_config.{key}", linear[key])
        for key in ("kda_layers", "full_attn_layers"):
            _require_type(f"linear_attn_config.{key}", linear[key], (list, tuple), "a list of layer numbers")
            for number in linear[key]:
                _require_type(f"linear_attn_config.{key}", number, int, "a list of integers")
        if linear.get("gate_lower_bound") is not None:
            _require_type("linear_attn_config.gate_lower_bound", linear["gate_lower_bound"], (int, float), "a number")
        if linear.get("use_full_rank_gate") is not None:
            _require_type("linear_attn_config.use_full_rank_gate", linear["use_full_rank_gate"], bool, "true or false")

        kda, full = list(linear["kda_layers"]), list(linear["full_attn_layers"])
        if twice := sorted({i for i in kda + full if (kda + full).count(i) > 1}):
            raise ValueError(
                f"`linear_attn_config.kda_layers` and `full_attn_layers` must name each layer once, got {twice} more "
                "than once: remove each from one of the lists."
            )
        expected = set(range(1, self.num_hidden_layers + 1))
        if gaps := sorted(expected - set(kda + full)):
            raise ValueError(
                "`linear_attn_config.kda_layers` and `full_attn_layers` must together name the layers 1 to "
                f"`num_hidden_layers`={self.num_hidden_layers}, got no entry for {gaps}: add each to one of the lists "
                "(numbers are 1-based)."
            )
        if beyond := sorted(set(kda + full) - expected):
            raise ValueError(
                "`linear_attn_config.kda_layers` and `full_attn_layers` must name the layers 1 to "
                f"`num_hidden_layers`={self.num_hidden_layers}, got {beyond}: remove them (numbers are 1-based)."
            )

        bound = self.gate_lower_bound
        if bound is not None and not MIN_GATE_LOWER_BOUND <= bound < 0:
            raise ValueError(
                f"`linear_attn_config.gate_lower_bound` must be in [{MIN_GATE_LOWER_BOUND:g}, 0) or null, got {bound}:"
                " sixteen steps of decay must fit the exponent range of the kernels; use null for the softplus gate."
            )
        if self.kda_a_log_length is not None and self.kda_a_log_length < self.linear_num_heads:
            raise ValueError(
                f"`kda_a_log_length` must be at least the number of KDA heads ({self.linear_num_heads}), got "
                f"{self.kda_a_log_length}: use null to write one entry per head."
            )

    def validate_activation(self):
        """The activation is known and its caps are positive."""
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(
                f"`hidden_act` must be one of {list(HIDDEN_ACTS)}, got {self.hidden_act!r}: choose one of these."
            )
        if self.hidden_act == "situ":
            for name in ("activation_situ_beta", "activation_situ_linear_beta"):
                _require_positive(name, getattr(self, name), "a positive soft cap", "the release uses 4 and 25")

    def validate_experts(self):
        """The router can choose as many experts as it is asked to."""
        if not self.num_experts:
            return
        _require_positive("num_experts", self.num_experts, "a positive integer, or null for a dense model")
        _require_positive("num_experts_per_token", self.num_experts_per_token)
        _require_positive("moe_intermediate_size", self.moe_intermediate_size)
        _require_positive(
            "routed_scaling_factor", self.routed_scaling_factor, "a positive number", "use 1.0 for no scaling"
        )
        if self.num_shared_experts < 0:
            raise ValueError(f"`num_shared_experts` must be 0 or more, got {self.num_shared_experts}: use 0 for none.")
        if self.moe_router_activation_func not in ROUTER_ACTIVATIONS:
            raise ValueError(
                f"`moe_router_activation_func` must be one of {list(ROUTER_ACTIVATIONS)}, got "
                f"{self.moe_router_activation_func!r}: choose one of these."
            )
        if self.topk_method not in TOPK_METHODS:
            raise ValueError(
                f"`topk_method` must be one of {list(TOPK_METHODS)}, got {self.topk_method!r}: choose one of these."
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"`num_experts_per_token` must be at most `num_experts`={self.num_experts}, got "
                f"{self.num_experts_per_token}: lower it or add experts."
            )
        groups, kept = self.num_expert_group, self.topk_group
        if groups < 1 or self.num_experts % groups:
            raise ValueError(
                f"`num_expert_group` must divide `num_experts`={self.num_experts}, got {groups}: use a divisor (1 for "
                "no groups)."
            )
        if not 1 <= kept <= groups:
            raise ValueError(
                f"`topk_group` must be in [1, `num_expert_group`={groups}], got {kept}: choose one in range."
            )
        if groups > 1 and not self.use_grouped_topk:
            raise ValueError(
                f"`use_grouped_topk` must be true with `num_expert_group`={groups}, got false: set `num_expert_group` "
                "to 1 for routing without groups."
            )
        size = self.num_experts // groups
        if groups > 1 and size < 2:
            raise ValueError(
                "`num_expert_group` must leave at least 2 experts in a group (groups are ranked by their two best), "
                f"got {groups} groups of {size}: use fewer groups."
            )
        if self.num_experts_per_token > kept * size:
            raise ValueError(
                f"`num_experts_per_token` must be at most `topk_group` * experts per group = {kept * size}, got "
                f"{self.num_experts_per_token}: raise `topk_group`."
            )

    def validate_kda_implementation(self):
        """The implementation of KDA has a known name (whether it can run is checked when it runs)."""
        if self._kda_implementation not in KDA_IMPLEMENTATIONS:
            raise ValueError(
                f"`kda_implementation` must be one of {list(KDA_IMPLEMENTATIONS)}, got {self._kda_implementation!r}: "
                "choose one of these."
            )


@strict
class KimiK3VisionConfig(PreTrainedConfig):
    """Configuration of the vision tower (MoonViT-V2) and of the projector into the text model.

    The defaults are the released size. Field names are the released ones; `vt_` stands for "vision tower", `mm_` for
    "multi-modal". The alternatives in `norm_type`, `pos_emb_interpolation_mode`, `mm_projector_type` and the biases
    are those of the predecessor (Kimi K2.5).

    Args:
        patch_size (`int`): Side of a patch in pixels.
        init_pos_emb_height, init_pos_emb_width (`int`): Rows and columns of the learned position table, which is
            resampled for images with another number of patches.
        init_pos_emb_time (`int`): Frames that one clip may have; the time vectors are fixed.
        pos_emb_type (`str`): `"divided_fixed"`, learned positions in the plane and fixed ones in time.
        pos_emb_interpolation_mode (`str`): `"bilinear"` or `"bicubic"`.
        vt_hidden_size (`int`): Width of the tower; even.
        vt_num_attention_heads, vt_num_hidden_layers, vt_intermediate_size (`int`): Heads, blocks and MLP width.
        qkv_hidden_size (`int`): Width of the attention, all heads together; a head has a multiple of 4 channels.
        merge_kernel_size (`list[int]`): Rows and columns of patches that become one visual token.
        merge_type (`str`): `"sd2_tpool"`, the mean over frames, then patches side by side.
        norm_type (`str`): `"rmsnorm"` or `"layernorm"`.
        mlp_type (`str`): `"mlp2"`, two layers.
        activation_func (`str`): Activation of the MLP, a name that Transformers knows.
        attn_bias, linear_bias, patch_embed_proj_bias (`bool`): Biases in attention, MLP and patch embedding.
        mm_projector_type (`str`): `"patchmergerv2"` (no biases, norm at the end) or `"patchmerger"` (biases, norm of
            each patch at the start).
        mm_hidden_size (`int`): Width of what the projector takes, per patch: `vt_hidden_size`.
        projector_hidden_act (`str`), projector_ln_eps (`float`): Activation and epsilon of the projector.
        text_hidden_size (`int`): Width of the text model.
        initializer_range (`float`): Standard deviation of initial weights.

    Raises:
        StrictDataclassFieldValidationError, StrictDataclassClassValidationError: As for `KimiK3TextConfig`.
    """

    model_type = "kimi_k3_vision"
    base_config_key = "vision_config"

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    vt_hidden_size: int = 1024
    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27
    vt_intermediate_size: int = 4096
    qkv_hidden_size: int = 1536
    merge_kernel_size: list[int] | tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)
        # Released files ask for a kernel here that need not be installed; `attn_implementation=` is how to choose one.
        kwargs.pop("_attn_implementation", None)
        super().__post_init__(**kwargs)

    def validate_sizes(self):
        """Widths and counts are positive; heads, frames and merged patches come out even."""
        for name in (
            "patch_size init_pos_emb_height init_pos_emb_width init_pos_emb_time vt_hidden_size "
            "vt_num_attention_heads vt_num_hidden_layers vt_intermediate_size qkv_hidden_size text_hidden_size"
        ).split():
            _require_positive(name, getattr(self, name))
        for name in ("projector_ln_eps", "initializer_range"):
            _require_positive(name, getattr(self, name), "a positive number", "the release uses 1e-5 and 0.02")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ValueError(
                f"`qkv_hidden_size` must be a multiple of 4 * `vt_num_attention_heads`="
                f"{4 * self.vt_num_attention_heads}, got {self.qkv_hidden_size}: pairs of channels turn with the row "
                "and with the column, so a head has a multiple of 4; change one of the two."
            )
        if self.vt_hidden_size % 2:
            raise ValueError(
                f"`vt_hidden_size` must be even, got {self.vt_hidden_size}: half of the time vector are sines, half "
                "cosines."
            )
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ValueError(
                f"`mm_hidden_size` must equal `vt_hidden_size`={self.vt_hidden_size}, got {self.mm_hidden_size}: the "
                "projector takes what the tower gives."
            )
        kernel = self.merge_kernel_size
        if len(kernel) != 2 or min(kernel) < 1:
            raise ValueError(
                f"`merge_kernel_size` must be two positive integers, got {kernel}: the release has [2, 2]."
            )

    def validate_kinds(self):
        """The parts are of the kinds that are implemented."""
        for name, known in VISION_KINDS.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"`{name}` must be one of {list(known)}, got {value!r}: choose one of these.")


@strict
class KimiK3Config(PreTrainedConfig):
    """Configuration of the composite model: a text model and, unless `vision_config` is null, a vision tower.

    Args:
        text_config (`KimiK3TextConfig` or `dict`, *optional*): The text model.
        vision_config (`KimiK3VisionConfig` or `dict`, *optional*): The tower and projector; null for none.
        media_placeholder_token_id (`int`): The token id whose positions are filled with visual tokens.
        ignore_index (`int`): Label that the loss skips.
    """

    model_type = "kimi_k3"
    sub_configs_defaults = {  # noqa: RUF012 - read by the base class
        "text_config": SubConfigSpec(KimiK3TextConfig),
        "vision_config": SubConfigSpec(KimiK3VisionConfig, optional=True),
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 - the Trainer adds a list to it
    attribute_map = {"image_token_id": "media_placeholder_token_id"}  # noqa: RUF012 - the name `generate` looks for

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    media_placeholder_token_id: int = 163605
    ignore_index: int = -100
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def validate_parts(self):
        """The parts are of our kinds."""
        for name, expected in (("text_config", KimiK3TextConfig), ("vision_config", KimiK3VisionConfig)):
            part = getattr(self, name)
            if not isinstance(part, expected) and not (part is None and name == "vision_config"):
                raise TypeError(
                    f"`{name}` must be a {expected.__name__} or a dictionary of its fields, got a "
                    f"{type(part).__name__}: pass one of these."
                )

    def validate_agreement(self):
        """The parts fit each other."""
        text, vision = self.text_config, self.vision_config
        if isinstance(text, KimiK3TextConfig) and isinstance(vision, KimiK3VisionConfig):
            if vision.text_hidden_size != text.hidden_size:
                raise ValueError(
                    f"`vision_config.text_hidden_size` must equal `text_config.hidden_size`={text.hidden_size}, got "
                    f"{vision.text_hidden_size}: visual tokens stand among the embeddings of text; set it."
                )
            if not 0 <= self.media_placeholder_token_id < text.vocab_size:
                raise ValueError(
                    f"`media_placeholder_token_id` must be in [0, `text_config.vocab_size`={text.vocab_size}), got "
                    f"{self.media_placeholder_token_id}: use the id that the tokenizer gives the placeholder."
                )

    def to_dict(self) -> dict[str, Any]:
        """As the release writes it: readers of that layout know the nested text model as `kimi_linear`."""
        output = super().to_dict()
        output["text_config"]["model_type"] = "kimi_linear"
        return output


def _require_positive(
    name: str, value: int | float, what: str = "a positive integer", fix: str = "set it to 1 or more"
) -> None:
    if not 0 < value < math.inf:  # False for NaN too
        raise ValueError(f"`{name}` must be {what}, got {value}: {fix}.")


def _require_type(name: str, value: Any, expected: type | tuple[type, ...], what: str) -> None:
    """As `@strict` does for fields: a bool is no integer."""
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"`{name}` must be {what}, got {value!r}: correct the file or argument.")


__all__ = ["KimiK3Config", "KimiK3TextConfig", "KimiK3VisionConfig"]
