# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Images, clips and text in one sequence: the text model, with visual tokens where the prompt has placeholders.

Sources: Kimi K3 report (arXiv 2607.24653), golden README "Vision". A prompt has one placeholder
(`media_placeholder_token_id`) per visual token; the embeddings there are replaced by what the tower and the projector
make of the pixels, in order. From then on visual tokens are tokens like any other: causal, without positions.

Shapes: B rows, T tokens, D width of the text model; of pixels and grids as in `vision_tower.py`.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, LogitsProcessorList
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3VisionConfig
from deltalatent.modeling.language_head import KimiK3LanguageHead
from deltalatent.modeling.modeling_kimi_k3 import KimiK3GenerationMixin, KimiK3PreTrainedModel, KimiK3TextModel
from deltalatent.modeling.vision_tower import KimiK3Projector, KimiK3VisionModel

EncodedMedia = dict[str, BaseModelOutputWithPooling]
"""What `get_image_features` returned, under `"image"`: the form in which `generate` hands it on."""


def items_of(media: BaseModelOutputWithPooling) -> tuple[Tensor, ...]:
    """The visual tokens [tokens, D] of each item; Transformers declares the field as one tensor."""
    return tuple(cast(Any, media.pooler_output))


def check_placeholders(placeholders: list[int], tokens: list[int]) -> None:
    """The placeholders of a batch are those of its items, and no item lies across the end of a row.

    Args:
        placeholders: How many each row has.
        tokens: How many visual tokens each item has.

    Raises:
        ValueError: They do not fit; the message has the numbers.
    """
    remaining = iter(tokens)
    if sum(placeholders) == sum(tokens):
        for count in placeholders:
            while count > 0:
                count -= next(remaining)
            if count < 0:
                break
        else:
            return
    raise ValueError(
        "`input_ids` must have one placeholder per visual token, and each image in one row, got "
        f"{placeholders} placeholders per row ({sum(placeholders)} in all) for images of {tokens} visual tokens "
        f"({sum(tokens)} in all): let the processor write the placeholders, and pass images in the order of the rows."
    )


class KimiK3MultimodalPreTrainedModel(KimiK3PreTrainedModel):
    """What the classes with a vision tower share."""

    config: Any  # a KimiK3Config; the base class is declared for the text model
    config_class = KimiK3Config
    input_modalities = ["image", "video", "text"]  # noqa: RUF012 - read by `generate`
    _no_split_modules = ["KimiK3DecoderLayer", "KimiK3VisionBlock"]  # noqa: RUF012 - read by the base class


class KimiK3Model(KimiK3MultimodalPreTrainedModel):
    """Vision tower, projector and text model: pixels and token ids to hidden states.

    With `vision_config: null` there is no tower, and the model takes text only.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - checkpoints with a head load here too

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        if config.vision_config is not None:
            self.vision_tower = KimiK3VisionModel._from_config(config.vision_config)
            self.mm_projector = KimiK3Projector(cast(KimiK3VisionConfig, config.vision_config))
        self.language_model = KimiK3TextModel._from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    @can_return_tuple
    def get_image_features(self, pixel_values: Tensor, grid_thws: Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """Visual tokens of images and clips.

        Args:
            pixel_values, grid_thws: As in `KimiK3VisionModel.forward`.
            **kwargs: As there.

        Returns:
            `last_hidden_state` [N, W] of the tower, and `pooler_output`, a tuple with [tokens, D] for each item.
        """
        if self.config.vision_config is None:
            raise ValueError(
                "`pixel_values` need a vision tower, got a model with `vision_config` null: pass text only."
            )
        output = self.vision_tower(pixel_values, grid_thws, **kwargs)
        tokens = self.mm_projector(output.pooler_output)
        output.pooler_output = tokens.split(self.vision_tower.tokens_per_item(grid_thws))
        return output

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        mm_encoder_outputs: EncodedMedia | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Hidden states of every token, text or visual.

        Args:
            input_ids: int64 [B, T], with a placeholder for each visual token. Rows may have no image at all.
            attention_mask, position_ids, cache, use_cache: As in `KimiK3TextModel.forward`.
            inputs_embeds: [B, T, D] instead of `input_ids`; visual tokens must be in it already.
            pixel_values, grid_thws: Images and clips in the order of their placeholders, row after row; as in
                `KimiK3VisionModel.forward`.
            mm_encoder_outputs: `{"image": get_image_features(...)}` instead of pixels.
            **kwargs: As in `KimiK3TextModel.forward`.

        Raises:
            ValueError: Placeholders and visual tokens do not fit, or as in the parts.
        """
        media = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            if media is not None:
                raise ValueError(
                    "`pixel_values` and `mm_encoder_outputs` are two forms of one input, got both: pass one."
                )
            media = self.get_image_features(pixel_values, grid_thws, return_dict=True)
        if media is not None:
            if input_ids is None or inputs_embeds is not None:
                raise ValueError(
                    "images need `input_ids` with their placeholders, got `inputs_embeds`: put the visual tokens of "
                    "`get_image_features` into `inputs_embeds`, and pass no image."
                )
            items = items_of(media)
            if pixel_values is not None:
                check_placeholders(self._placeholders(input_ids).sum(dim=1).tolist(), [len(item) for item in items])
            inputs_embeds = self._embed(input_ids, torch.cat(items))
            input_ids = None
        elif input_ids is not None and self._may_look_at(input_ids):
            check_placeholders(self._placeholders(input_ids).sum(dim=1).tolist(), [])
        return self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )

    def _placeholders(self, input_ids: Tensor) -> Tensor:
        return input_ids == self.config.media_placeholder_token_id

    def _may_look_at(self, input_ids: Tensor) -> bool:
        """Whether to look for placeholders without an image: in prompts, not in each step of `generate`."""
        return self.config.vision_config is not None and input_ids.shape[-1] > 1 and not torch.compiler.is_compiling()

    def _embed(self, input_ids: Tensor, visual_tokens: Tensor) -> Tensor:
        """[B, T] and [M, D] -> [B, T, D]."""
        self.language_model._check_token_ids(input_ids)
        embeds = self.language_model.embed_tokens(input_ids)
        places = self._placeholders(input_ids)
        if (count := int(places.sum())) != len(visual_tokens):
            raise ValueError(
                f"`input_ids` must have one placeholder per visual token, got {count} placeholders for "
                f"{len(visual_tokens)} visual tokens: pass the images of exactly these tokens."
            )
        return embeds.masked_scatter(places[..., None], visual_tokens.to(embeds.device, embeds.dtype))


class KimiK3ForConditionalGeneration(KimiK3MultimodalPreTrainedModel, KimiK3GenerationMixin):
    """The multimodal model with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    # Released names of the parts, and where these are here.
    released_prefixes = (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("mm_projector.", "model.mm_projector."),
    )

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.model = KimiK3Model(config)
        text = config.get_text_config()
        self.vocab_size = text.vocab_size
        self.lm_head = KimiK3LanguageHead(text.hidden_size, text.vocab_size)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, grid_thws: Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """As in `KimiK3Model`."""
        return self.model.get_image_features(pixel_values, grid_thws, **kwargs)

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
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        mm_encoder_outputs: EncodedMedia | None = None,
        skip_logits: bool | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Next-token logits, and their loss against labels.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, pixel_values, grid_thws,
                mm_encoder_outputs: As in `KimiK3Model.forward`.
            labels, logits_to_keep, skip_logits: As in `KimiK3ForCausalLM.forward`; labels at placeholders should be
                `config.ignore_index`.
            **kwargs: As in `KimiK3ForCausalLM.forward`.

        Returns:
            As `KimiK3ForCausalLM.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            grid_thws=grid_thws,
            mm_encoder_outputs=mm_encoder_outputs,
            return_dict=True,
            **kwargs,
        )
        return self._with_head(outputs, labels, logits_to_keep, skip_logits, **kwargs)

    def _get_logits_processor(self, generation_config: GenerationConfig, *args, **kwargs) -> LogitsProcessorList:
        """As in Transformers; but no placeholder is written, which would stand for an image that nobody gave."""
        if self.config.vision_config is not None:
            generation_config = copy.copy(generation_config)
            generation_config.suppress_tokens = [
                *(generation_config.suppress_tokens or ()),
                self.config.media_placeholder_token_id,
            ]
        return super()._get_logits_processor(generation_config, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # named, because `generate` looks whether it is
        mm_encoder_outputs: EncodedMedia | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict[str, Any]:
        """As in Transformers; of a prompt that the cache holds in part, only the remaining images are used.

        `generate` encodes all images that it is given. They may be those of the whole prompt or of its new part only.
        """
        # Beside embeddings, `forward` refuses images.
        if is_first_iteration and inputs_embeds is None and mm_encoder_outputs and "image" in mm_encoder_outputs:
            items = items_of(mm_encoder_outputs["image"])
            places = input_ids == self.config.media_placeholder_token_id
            first_new = 0 if next_sequence_length is None else input_ids.shape[1] - next_sequence_length
            new_places = places[:, first_new:]
            tokens = [len(item) for item in items]
            if int(new_places.sum()) == sum(tokens):
                check_placeholders(new_places.sum(dim=1).tolist(), tokens)
            else:
                check_placeholders(places.sum(dim=1).tolist(), tokens)
                column = torch.arange(places.shape[1], device=places.device).expand_as(places)
                remaining = torch.cat(items)[column[places] >= first_new]
                mm_encoder_outputs = {"image": BaseModelOutputWithPooling(pooler_output=cast(Any, (remaining,)))}
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            mm_encoder_outputs=mm_encoder_outputs,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )


__all__ = ["KimiK3ForConditionalGeneration", "KimiK3Model"]
