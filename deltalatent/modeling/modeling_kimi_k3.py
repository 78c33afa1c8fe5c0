# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The text model, from `input_ids` to `logits`.

Sources: Kimi K3 report (arXiv 2607.24653), Kimi Linear (arXiv 2510.26692), golden README. The path of a token:
`KimiK3ForCausalLM.forward` -> `KimiK3TextModel.forward` (embedding, layers, depth mixing, norm) ->
`KimiK3DecoderLayer.forward` (`delta_attention.py` or `latent_attention.py`, then `latent_moe.py`).

Shapes: B rows, T tokens, D width of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.kernels.dispatch import triton_obstacle
from deltalatent.kernels.latent_attention import document_groups
from deltalatent.kernels.sequence_layout import SequenceLayout, sequence_layout
from deltalatent.modeling.attention_residuals import KimiK3MixedRMSNorm, KimiK3PseudoQuery, unmixed
from deltalatent.modeling.checkpoint_errors import (
    check_conversion,
    check_files,
    shortened,
    unfinished_save,
    unreadable_files,
)
from deltalatent.modeling.decoding_graph import GraphedDecoding, recording_obstacle
from deltalatent.modeling.delta_attention import KimiK3DeltaAttention, KimiK3ShortConvolution
from deltalatent.modeling.experts_backends import GROUPED_MM_MULTIPLE
from deltalatent.modeling.language_head import KimiK3LanguageHead, has_loss_without_logits
from deltalatent.modeling.latent_attention import CausalView, KimiK3LatentAttention
from deltalatent.modeling.latent_moe import KimiK3Experts, KimiK3MLP, KimiK3SparseMoE, KimiK3TopKRouter
from deltalatent.modeling.norms import KimiK3GatedRMSNorm, KimiK3RMSNorm
from deltalatent.modeling.packed_checkpoints import without_mxfp4_claim
from deltalatent.modeling.released_layout import VISION_PREFIXES, accept_released_layout
from deltalatent.modeling.sharding import ShardedLoading

logger = logging.get_logger(__name__)

INITIAL_DECAY_RANGE = (1e-3, 1e-1)
"""Initial decay per token and channel, log-uniform (Mamba-2, arXiv 2405.21060; Gated DeltaNet, arXiv 2412.06464)."""


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Token mixer (KDA or latent attention), then channel mixer (dense or mixture of experts).

    With attention residuals, what a mixer reads is not the running sum but a mix of the closed blocks and the running
    sum (`KimiK3MixedRMSNorm`), with a learned query per mixer. The first layer of a block closes the sum that it
    receives: its token mixer still reads it as the running sum, afterwards it is one of the closed blocks.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.has_attention_residuals = config.attn_res_block_size is not None
        self.closes_block = config.attn_res_block_size is not None and layer_idx % config.attn_res_block_size == 0

        attention = KimiK3DeltaAttention if self.layer_type == "linear_attention" else KimiK3LatentAttention
        self.self_attn = attention(config, layer_idx)
        is_sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = KimiK3SparseMoE(config) if is_sparse else KimiK3MLP(config, config.intermediate_size)
        self.input_layernorm = KimiK3MixedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3MixedRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.has_attention_residuals:
            self.self_attention_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attention_res_proj = KimiK3PseudoQuery(config.hidden_size)
            self.mlp_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp_res_proj = KimiK3PseudoQuery(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        *closed_blocks: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        layout: SequenceLayout | None = None,
        collect_routing: bool = False,
        **kwargs,
    ) -> tuple[Any, ...]:
        """One layer. Streams are positional, so that both kinds of activation checkpointing carry their gradients.

        Args:
            hidden_states: [B, T, D], running sum of the current block.
            *closed_blocks: [B, T, D] each, sums of earlier blocks in order; the embedding is the first.
            attention_mask: For latent attention, as its attention function wants it.
            cache: Read and extended by the token mixer.
            layout: Padding and packing, for KDA.
            collect_routing: Also return what quantile balancing counts (sparse layers only).

        Returns:
            The new running sum [B, T, D], routing statistics or `None`, and the closed blocks [B, T, D] for the next
            layer: those given, as they were passed on (`attention_residual_mix`), and the one closed here, if any.
        """
        # In layer 0 the running sum is alone: the mix is the same vector, but its query gets a (zero) gradient, which
        # `DistributedDataParallel` waits for.
        mix = self._mix_for_attention if self.has_attention_residuals else partial(unmixed, self.input_layernorm)
        mixed, streams = mix(*closed_blocks, hidden_states)
        if self.layer_type == "linear_attention":
            update = self.self_attn(mixed, cache=cache, layout=layout)
        else:
            update, _ = self.self_attn(mixed, attention_mask=attention_mask, cache=cache, **kwargs)
        if self.closes_block:
            # The stream keeps its dtype, which under autocast is not that of the mixers.
            streams.append(update.to(hidden_states.dtype))
        else:
            streams[-1] = streams[-1] + update

        mix = self._mix_for_mlp if self.has_attention_residuals else partial(unmixed, self.post_attention_layernorm)
        mixed, streams = mix(*streams)
        routing = None
        if isinstance(self.mlp, KimiK3SparseMoE):
            update, routing = self.mlp(mixed)
        else:
            update = self.mlp(mixed)
        *closed, running = streams
        return running + update, routing if collect_routing else None, *closed

    # Depth mixing uses weights of child modules without calling them: offloading hooks must bring these first.
    @force_accelerate_hooks(["self_attention_res_norm", "self_attention_res_proj"])
    def _mix_for_attention(self, *streams: Tensor) -> tuple[Tensor, list[Tensor]]:
        key_norm, query = self.self_attention_res_norm, self.self_attention_res_proj
        return self.input_layernorm(*streams, key_norm=key_norm, query=query, impl=_mix_impl(self.config))

    @force_accelerate_hooks(["mlp_res_norm", "mlp_res_proj"])
    def _mix_for_mlp(self, *streams: Tensor) -> tuple[Tensor, list[Tensor]]:
        key_norm, query = self.mlp_res_norm, self.mlp_res_proj
        return self.post_attention_layernorm(*streams, key_norm=key_norm, query=query, impl=_mix_impl(self.config))


def _mix_impl(config: KimiK3TextConfig) -> str:
    """A model that is to run without Triton mixes without it, too; nobody else implements the mix."""
    return "torch" if config.kda_implementation == "torch" else "auto"


MAX_SHARD_SIZE = "5GB"
"""Of weight files by default: what the Hub and its readers handle without a second thought."""


class KimiK3PreTrainedModel(ShardedLoading, PreTrainedModel):
    """Loading, saving and initialisation that all model classes share."""

    config: KimiK3TextConfig
    config_class: type[PreTrainedConfig] = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]  # noqa: RUF012 - read by the base class
    _supports_sdpa = True
    _supports_flash_attn = False  # value heads are narrower than key heads
    _can_compile_fullgraph = True
    # The recurrent state cannot be rolled back: `generate` refuses assisted decoding.
    _is_stateful = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(KimiK3TopKRouter, index=0),
        "hidden_states": OutputRecorder(KimiK3DecoderLayer, index=0),
        "attentions": OutputRecorder(KimiK3LatentAttention, index=1),
    }
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "A_log",
        "dt_bias",
        "q_conv1d",
        "k_conv1d",
        "v_conv1d",
        "o_norm",
        "e_score_correction_bias",
    ]

    trained_later: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a pretrained checkpoint need not hold: they start at random."""

    def __init__(self, config: PreTrainedConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        # Fields may have been set since the config was made, and what contradicts would be ignored or fail later.
        cast(Any, config).validate()
        self.register_load_state_dict_pre_hook(accept_released_layout)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The base class searches the source of this file for the experts class, which is in latent_moe.py.
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As in Transformers; without a request `"auto"` on a machine whose GPU can run our kernels."""
        if requested_experts is None and torch.cuda.is_available() and triton_obstacle(torch.device("cuda")) is None:
            return "auto"
        return super().get_correct_experts_implementation(requested_experts)

    def _grouped_mm_can_dispatch(self) -> bool:
        """Whether `experts_implementation="grouped_mm"` can run; where it cannot, the default becomes `"eager"`."""
        config = self.config.get_text_config()
        widths = {
            "moe_intermediate_size": config.moe_intermediate_size,
            "routed_expert_hidden_size": config.routed_expert_hidden_size or config.hidden_size,
        }
        if config.num_experts and any(width % GROUPED_MM_MULTIPLE for width in widths.values()):
            shown = ", ".join(f"{name}={width}" for name, width in widths.items())
            raise ValueError(
                f'`experts_implementation="grouped_mm"` needs expert widths that are multiples of '
                f'{GROUPED_MM_MULTIPLE}, got {shown}: use `experts_implementation="eager"` or `"batched_mm"`.'
            )
        return super()._grouped_mm_can_dispatch()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *model_args,
        allow_missing_keys: bool = False,
        allow_unexpected_keys: bool = False,
        output_loading_info: bool = False,
        **kwargs,
    ):
        """As in Transformers, except that a checkpoint must hold every tensor of the model and no other.

        A config that switches a mechanism off (plain residuals, full-rank queries, fewer layers) fits the remaining
        tensors of the checkpoint; so a tensor without a place is as suspicious as a place without a tensor.

        Experts packed as MXFP4 are unpacked to `dtype` while loading, whatever the `ignore` list of the config says:
        the tensors that are present decide. The model is then an ordinary one, without `quantization_config`.

        Of a composite checkpoint a text class takes the text part.

        Args:
            pretrained_model_name_or_path: Folder or Hub repository.
            allow_missing_keys: Initialise tensors that the checkpoint lacks instead of raising, e.g. a new head.
            allow_unexpected_keys: Ignore tensors that the model has no place for instead of raising.
            output_loading_info: Also return the dictionary of missing, unexpected and mismatched keys.
            **kwargs: Anything that `PreTrainedModel.from_pretrained` accepts, and fields of the config
                (`kda_implementation="torch"`).

        Raises:
            ValueError: Tensors are missing, have no place or another shape, or a file is cut short; they are named.
        """
        kwargs = without_mxfp4_claim(cls.config_class, pretrained_model_name_or_path, kwargs)
        try:
            if not {"variant", "gguf_file", "state_dict"} & kwargs.keys():
                check_files(Path(pretrained_model_name_or_path, kwargs.get("subfolder", "")))
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            files = unreadable_files(Path(pretrained_model_name_or_path, kwargs.get("subfolder", "")))
            raise ValueError(
                f"the files of the checkpoint {pretrained_model_name_or_path} must be whole, got {files or error}: "
                "copy or download them again (`force_download=True`)."
            ) from error
        model, info = loaded
        advice = "the file is truncated or belongs to another config"
        missing = {name for name in info["missing_keys"] if not name.startswith(cls.trained_later)}
        if missing and not allow_missing_keys:
            raise ValueError(
                f"the checkpoint {pretrained_model_name_or_path} must hold every tensor of {cls.__name__}, got none "
                f"for {shortened(missing)}: {advice}; pass `allow_missing_keys=True` to initialise them at random."
            )
        if (unexpected := info["unexpected_keys"]) and not allow_unexpected_keys:
            raise ValueError(
                f"the checkpoint {pretrained_model_name_or_path} must hold nothing but tensors of {cls.__name__}, got "
                f"{shortened(unexpected)}: {advice}; pass `allow_unexpected_keys=True` to ignore them."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory,
        is_main_process=True,
        state_dict=None,
        push_to_hub: bool = False,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        *args,
        **kwargs,
    ):
        """As in Transformers, in files of 5 GB; a folder in which this was interrupted is refused by
        `from_pretrained`."""
        # What is in the folder would be pushed too.
        is_marked = self.should_save_on_this_rank(is_main_process) and not push_to_hub
        with unfinished_save(save_directory) if is_marked else nullcontext():
            super().save_pretrained(
                save_directory, is_main_process, state_dict, push_to_hub, max_shard_size, *args, **kwargs
            )

    # Transformers types its own as a decorated function without `self`.
    def push_to_hub(self, *args, max_shard_size: int | str | None = MAX_SHARD_SIZE, **kwargs) -> str:  # type: ignore[override]
        """As in Transformers, in files of 5 GB."""
        return super().push_to_hub(*args, max_shard_size=max_shard_size, **kwargs)

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable[..., Any]:
        """What `generate` calls for the steps of a static cache on a GPU: by default their replay from a CUDA graph.

        `torch.compile`, which a `compile_config` asks for, gains no more and takes long to begin. With
        `disable_compile=True` every step runs eagerly.
        """
        if compile_config is not None or self.device.type != "cuda":
            return super().get_compiled_call(compile_config)
        obstacle = recording_obstacle(self)
        if obstacle is None:
            return GraphedDecoding(self.__call__)
        logger.warning_once(f"decoding runs eagerly: the model cannot be recorded as a CUDA graph, since {obstacle}.")
        return self.__call__

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if self.config.model_type == KimiK3TextConfig.model_type:  # a composite checkpoint holds a vision part too
            loading_info.unexpected_keys = {
                name for name in loading_info.unexpected_keys if not name.startswith(VISION_PREFIXES)
            }

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        check_conversion(
            loading_info, str(load_config.pretrained_model_name_or_path), load_config.ignore_mismatched_sizes
        )
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args, **kwargs) -> nn.Linear:
        """As in Transformers, which makes an `nn.Linear`; a head that gives the loss without logits stays one."""
        resized = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        if type(old_lm_head) is not KimiK3LanguageHead or resized is old_lm_head:
            return resized
        with torch.device("meta"):
            head = KimiK3LanguageHead(resized.in_features, resized.out_features)
        head.weight = resized.weight
        return head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal projections, unit norms, and: A = 0 with the bounded gate, decay as in the delta-rule literature,
        pseudo-queries zero (uniform depth mixing), selection bias zero."""
        super()._init_weights(module)
        config = self.config.get_text_config()
        std, embedding_std = config.initializer_range, config.embedding_initializer_range
        if isinstance(module, KimiK3DeltaAttention):
            self._init_decay(module)
        elif isinstance(module, KimiK3ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, KimiK3GatedRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, KimiK3TopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KimiK3PseudoQuery):
            init.zeros_(module.weight)
        elif isinstance(module, nn.Embedding) and embedding_std is not None and not config.tie_word_embeddings:
            # Embeddings as small as the projections drown in the first layers' output: a narrow model then stays at
            # the frequencies of the tokens, and its routers send all of them to the same experts.
            init.copy_(module.weight, module.weight * (embedding_std / std))

    @staticmethod
    def _init_decay(module: KimiK3DeltaAttention) -> None:
        low, high = (math.log(value) for value in INITIAL_DECAY_RANGE)
        decay = torch.empty_like(module.dt_bias).uniform_(low, high).exp()  # -g of an input whose gate logit is 0
        if module.gate_lower_bound is None:
            # g = -exp(A) softplus(b): A log-uniform over [1, 16], b the inverse softplus of the decay.
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
            init.copy_(module.dt_bias, decay + torch.log(-torch.expm1(-decay)))
        else:
            # g = g_min sigmoid(exp(A) b): b the inverse sigmoid of the decay's share of the bound.
            init.zeros_(module.A_log)
            init.copy_(module.dt_bias, torch.logit(decay / -module.gate_lower_bound))


class KimiK3TextModel(KimiK3PreTrainedModel):
    """Embedding, decoder layers, final depth mixing and norm: token ids to hidden states."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]  # noqa: RUF012 - checkpoints with a head load here too

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.has_attention_residuals = config.attn_res_block_size is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        if self.has_attention_residuals:
            self.output_attn_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = KimiK3PseudoQuery(config.hidden_size)
        self.norm = KimiK3MixedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, tokens in the cache + T], 1 for real tokens and 0 for padding, anywhere in a row; or
                the dictionary that `KimiK3ForCausalLM.create_masks_for_generate` makes. Padding never influences real
                tokens; the hidden states at padding are of no use.
            position_ids: [B, T]. No position enters the model; positions that restart mark packed documents, which are
                then computed as if each were alone.
            cache: Continued and extended. `None` starts one if `use_cache` and not training; packed documents have
                none.
            inputs_embeds: [B, T, D], instead of `input_ids`. NaN in a row spoils that row only.
            use_cache: Whether to return a cache; default from the config.
            cu_seq_lens_q: int [N+1], offsets of packed documents in a single row, instead of `position_ids`.
            **kwargs: `output_hidden_states`, `output_router_logits`, `output_attentions`, and what the attention
                function takes.

        Raises:
            ValueError: The arguments contradict each other; the message says what was expected.
        """
        if input_ids is not None and inputs_embeds is None:
            self._check_token_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        elif input_ids is not None or inputs_embeds is None:
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given: pass one of the two.")
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"`inputs_embeds` must have shape [B, T, hidden_size={self.config.hidden_size}], got "
                f"{tuple(inputs_embeds.shape)}: pass what `get_input_embeddings()` gives for a batch of rows."
            )
        self._check_cache(cache)
        batch_size, length, _ = inputs_embeds.shape
        if batch_size == 0 or length == 0:
            raise ValueError(
                f"the batch must hold at least one token, got shape {(batch_size, length)}: skip empty batches."
            )

        full_mask, layout = self._masks(inputs_embeds, attention_mask, position_ids, cache, cu_seq_lens_q)
        is_packed = layout is not None and layout.is_packed
        is_training_step = self.training and torch.is_grad_enabled()
        if use_cache and cache is None and not is_packed and not is_training_step:
            cache = DynamicCache(config=self.config)  # empty, so the masks made above hold for it too

        hidden_states = inputs_embeds if layout is None else layout.blank_padding(inputs_embeds)
        counted = layout.real_tokens() if layout is not None and is_training_step else None
        closed_blocks: tuple[Tensor, ...] = ()
        for layer in self.layers:
            hidden_states, routing, *closed_blocks = layer(
                hidden_states,
                *closed_blocks,
                attention_mask=full_mask,
                cache=cache,
                layout=layout,
                collect_routing=is_training_step,
                **kwargs,
            )
            if routing is not None:
                # Here, outside activation checkpointing, a token is counted once however often it is recomputed.
                router = cast(KimiK3SparseMoE, layer.mlp).gate
                router.balance.add(
                    routing.scores, routing.cutoff, router.e_score_correction_bias, counted, routing.top_k_index
                )

        mix = self._mix_for_output if self.has_attention_residuals else partial(unmixed, self.norm)
        return MoeModelOutputWithPast(last_hidden_state=mix(*closed_blocks, hidden_states)[0], cache=cache)

    @force_accelerate_hooks(["output_attn_res_norm", "output_attn_res_proj"])
    def _mix_for_output(self, *streams: Tensor) -> tuple[Tensor, list[Tensor]]:
        key_norm, query = self.output_attn_res_norm, self.output_attn_res_proj
        return self.norm(*streams, key_norm=key_norm, query=query, impl=_mix_impl(self.config))

    def _check_token_ids(self, input_ids: Tensor) -> None:
        if input_ids.ndim != 2:
            raise ValueError(
                f"`input_ids` must have shape [B, T], got {tuple(input_ids.shape)}: pass a batch, also of one row."
            )
        # On a GPU the embedding kernel asserts by itself, and looking at the ids would wait for the device.
        if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or input_ids.numel() == 0:
            return
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"`input_ids` must be in [0, vocab_size={self.config.vocab_size}), got values from {low} to {high}: "
                "use the tokenizer that belongs to the model."
            )

    def _check_cache(self, cache: Cache | None) -> None:
        if cache is None or torch.compiler.is_compiling():
            return
        if not isinstance(cache, Cache):
            raise TypeError(
                f"`cache` must be a `transformers.Cache`, got {type(cache).__name__}: use "
                "`DynamicCache(config=model.config)`."
            )
        if cache.is_linear != [kind == "linear_attention" for kind in self.config.layer_types]:
            raise ValueError(
                "`cache` must have one layer for each layer of the model, of the same kind, got "
                f"{[type(layer).__name__ for layer in cache.layers]}: use `DynamicCache(config=model.config)` or "
                "`StaticCache(config=model.config, max_cache_len=...)`."
            )
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            raise ValueError(
                "`cache` must not record the past: a recurrent state cannot be rolled back to before a rejected "
                "token, so this model neither checks drafts nor writes them for another; decode without an assistant."
            )

    def _masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Any, SequenceLayout | None]:
        """What the latent-attention layers see, and where the sequences are for the KDA layers."""
        batch_size, length, _ = inputs_embeds.shape
        full_mask: Any = None
        if isinstance(attention_mask, dict):
            full_mask, padding = attention_mask.get("full_attention"), attention_mask["linear_attention"]
        else:
            self._check_mask(attention_mask, batch_size, length, cache)
            padding = _padding_of_new_tokens(attention_mask, length)

        layout = None
        if padding is not None or cu_seqlens is not None or (position_ids is not None and length > 1):
            if torch.compiler.is_exporting():
                raise ValueError(
                    "an exported graph cannot find padding or packed documents, whose number it does not know, got "
                    "`attention_mask`, `position_ids` or `cu_seq_lens_q`: export the model without them, for rows "
                    "of one length."
                )
            layout = sequence_layout(
                batch_size, length, attention_mask=padding, position_ids=position_ids, cu_seqlens=cu_seqlens
            )
        is_packed = layout is not None and layout.is_packed
        if is_packed and cache is not None:
            raise ValueError(
                "packed documents (restarting `position_ids` or `cu_seq_lens_q`) cannot be cached, got a `cache`: "
                "pass one document per row to continue it, or no cache."
            )
        if "full_attention" not in self.config.layer_types:
            return None, layout
        if self.config._attn_implementation == "sdpa":
            real = full_mask if isinstance(attention_mask, dict) else attention_mask
            return self._causal_view(length, real, cache, layout), layout
        if not isinstance(attention_mask, dict):
            # Unless documents are packed, the mask functions must not look for any.
            position_ids = same_document = None
            if layout is not None and is_packed:
                # Positions that restart say it all, unless padding interrupts them.
                is_padded = layout.indices is not None
                attention_mask, position_ids = None, None if is_padded else layout.restarting_positions()
                same_document = layout.same_document if is_padded else None
            full_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
                and_mask_function=same_document,
            )
        return full_mask, layout

    def _causal_view(
        self, length: int, real: Tensor | None, cache: Cache | None, layout: SequenceLayout | None
    ) -> CausalView | Tensor:
        """What tokens see of each other, without a mask of T*S entries; `real` is 1 at tokens that are no padding."""
        if real is not None and real.ndim == 4:
            if length > 1:
                return real  # somebody else's
            real = real[:, 0, 0]
        if cache is not None and (length == 1 or _holds_tokens(cache)):
            if real is not None:
                real = real.bool()
                if length > 1 and not torch.compiler.is_compiling() and bool(real.all()):
                    real = None
            return CausalView(continues=True, keys=real)
        return CausalView(groups=None if layout is None else document_groups(layout))

    def _check_mask(self, attention_mask: Tensor | None, batch_size: int, length: int, cache: Cache | None) -> None:
        if attention_mask is None:
            return
        if attention_mask.ndim != 2:
            raise ValueError(
                f"`attention_mask` must have shape [B, tokens], got {tuple(attention_mask.shape)}: the KDA layers "
                "cannot follow an arbitrary mask; pass a padding mask, or restarting `position_ids` for packed "
                "documents."
            )
        if torch.compiler.is_compiling():
            return
        if cache is not None and all(cache.is_linear):
            length = max(length, attention_mask.shape[1])  # without an attention layer nobody counts tokens
        elif cache is not None:
            length += int(cache.get_seq_length())
        expected = (batch_size, length)
        if tuple(attention_mask.shape) != expected:
            raise ValueError(
                f"`attention_mask` must have shape {expected} (rows, tokens in the cache plus new tokens), got "
                f"{tuple(attention_mask.shape)}: pass one entry per token."
            )


def _padding_of_new_tokens(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """The mask of the last `length` tokens, or `None` if none of them is padding.

    Transformers' `create_recurrent_attention_mask` takes it that a single token never is; when a padded prompt is fed
    token by token, it may be.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, -length:]
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding


def _holds_tokens(cache: Cache) -> bool:
    length = cache.get_seq_length()
    if isinstance(length, Tensor) and torch.compiler.is_compiling():
        return True  # a static cache that has been written to once; if it is empty again, that costs only time
    return int(length) > 0


class RefuseNaN(LogitsProcessor):
    """Stops `generate` at logits that are NaN; greedy search would take the arg-max of NaN and write on for ever."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, vocab_size] -> the same. Raises ValueError, naming the rows."""
        rows = torch.isnan(scores).any(dim=-1)
        if bool(rows.any()):
            raise ValueError(
                f"logits must be numbers, got NaN in rows {rows.nonzero().flatten().tolist()} after "
                f"{input_ids.shape[1]} tokens: look for NaN in the weights or in `inputs_embeds`; "
                "`remove_invalid_values=True` generates all the same."
            )
        return scores


class KimiK3GenerationMixin(GenerationMixin):
    """Head, loss and what `generate` needs: the same for the text model and for the one with images.

    The class that uses it has the language-modelling head as `lm_head`.
    """

    lm_head: nn.Module
    training: bool
    config: Any  # the two users have different classes
    loss_function: Callable[..., Tensor]

    skip_logits: bool | None = None
    """Default of `forward`'s argument. Set it to `False` on a model whose trainer reads logits beside the loss."""

    def _with_head(
        self,
        outputs: MoeModelOutputWithPast,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        skip_logits: bool | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """What `forward` returns, from the base model's outputs; arguments as in `KimiK3ForCausalLM.forward`."""
        hidden_states = cast(Tensor, outputs.last_hidden_state)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = hidden_states[:, kept]
        if skip_logits is None:
            skip_logits = self.skip_logits
        if skip_logits is None:
            skip_logits = self.training and torch.is_grad_enabled()
        if labels is None:
            loss, logits = None, self.lm_head(hidden_states)
        else:
            if labels.shape != hidden_states.shape[:2]:
                raise ValueError(
                    f"`labels` must have shape {tuple(hidden_states.shape[:2])}, one per token with logits, got "
                    f"{tuple(labels.shape)}: pass one label per token, -100 for none."
                )
            kwargs.setdefault("ignore_index", getattr(self.config, "ignore_index", -100))
            loss, logits = self._loss(hidden_states, labels, skip_logits, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        skip_logits: bool,
        ignore_index: int,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Loss of tokens [B, T, D] with labels [B, T], and their logits unless these can be and shall be skipped."""
        if skip_logits and self.loss_function is ForCausalLMLoss and has_loss_without_logits(self.lm_head):
            if shift_labels is None:
                shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            if isinstance(num_items_in_batch, Tensor):
                num_items_in_batch = num_items_in_batch.to(hidden_states.device)
            targets = shift_labels.to(hidden_states.device).view(hidden_states.shape[:2])
            loss = self.lm_head(
                hidden_states, targets=targets, num_items=num_items_in_batch, ignore_index=ignore_index
            )
            return loss, None
        logits = self.lm_head(hidden_states)
        loss = self.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=self.config.get_text_config().vocab_size,
            ignore_index=ignore_index,
            num_items_in_batch=num_items_in_batch,
            shift_labels=shift_labels,
            **kwargs,
        )
        return loss, None if skip_logits else logits

    def _get_logits_processor(self, generation_config: GenerationConfig, *args, **kwargs) -> LogitsProcessorList:
        # Transformers types `self` there as a protocol of its own.
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        if not generation_config.remove_invalid_values:
            processors.insert(0, RefuseNaN())
        return processors

    def init_continuous_batching(self, *args, **kwargs) -> NoReturn:
        """Refuses `generate_batch` and its like, whose cache is made of pages of keys and values."""
        raise ValueError(
            f"continuous batching needs a cache of keys and values in pages, got {type(self).__name__}, whose cache "
            "holds recurrent states and latents: call `generate` with prompts padded on the left."
        )

    @staticmethod
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        position_ids: Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs,
    ) -> dict[str, Tensor | None]:
        """Masks of both kinds of layers, made by `generate` before the forward of a static cache.

        Transformers' function leaves padding out if the model has no KDA layer, or if a prompt comes token by token;
        packing could then no longer be told from padding, or padding from tokens. Nor does it know that
        `attn_implementation="sdpa"` takes the padding itself, where its mask would have an entry per pair of tokens.
        """
        masks: dict[str, Tensor | None] = {"full_attention": attention_mask}
        if config.get_text_config()._attn_implementation != "sdpa":
            masks = create_masks_for_generate(config, inputs_embeds, attention_mask, cache, position_ids=position_ids)
        elif inputs_embeds.shape[1] == 1 and attention_mask is not None and cache is not None and cache.is_compileable:
            # One shape for all steps, which are recorded or compiled once.
            room = cache.get_max_length() - attention_mask.shape[1]
            masks["full_attention"] = nn.functional.pad(attention_mask.bool(), (0, room))
        if is_first_iteration:  # generated tokens are never padding
            masks["linear_attention"] = _padding_of_new_tokens(attention_mask, inputs_embeds.shape[1])
        return {"linear_attention": None} | masks


class KimiK3ForCausalLM(KimiK3PreTrainedModel, KimiK3GenerationMixin):
    """The text model with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.model = KimiK3TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = KimiK3LanguageHead(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Next-token logits, or their loss against labels.

        A training step has labels and no use for logits, which are larger than everything else in it: then the loss is
        computed a few tokens at a time (`linear_cross_entropy`), and `logits` is `None`. Adapters in the head,
        quantised or tensor-parallel heads, and a `loss_function` of your own take the way over all logits.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: As in `KimiK3TextModel.forward`.
            labels: int64 [B, T], -100 where there is no target; shifted here, so pass the `input_ids`. In packed rows
                the first token of each document should be -100.
            logits_to_keep: Compute logits for the last so many tokens only (0 for all), or for these positions.
            skip_logits: Whether a call with labels leaves out `logits`. `None`: what the model's attribute
                `skip_logits` says; and if that is `None`, in training with gradients.
            **kwargs: Also `num_items_in_batch`, the number of targets in the whole optimizer step.

        Returns:
            `loss` (mean over targets, or sum over `num_items_in_batch`), `logits` [B, kept, vocab_size] unless they
            are skipped, `cache`, and what was asked for by `output_*`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return self._with_head(outputs, labels, logits_to_keep, skip_logits, **kwargs)


__all__ = ["KimiK3ForCausalLM", "KimiK3PreTrainedModel", "KimiK3TextModel"]
