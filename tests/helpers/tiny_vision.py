"""Tiny vision-language models with random weights, and their processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma4Config,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLConfig,
    Llama4Config,
    LlavaConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.models.images import GridProcessor, ImageEncoder
from fastppo.models.policy import ActorCritic

SPECIAL = (
    "<image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
)
"""Tokens of images in the two families, after the words of the tiny tokenizer."""
IDS = {token: len(tiny.VOCABULARY) + i for i, token in enumerate(SPECIAL)}

ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
QWEN_IDS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tiny.VOCABULARY) + len(SPECIAL),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        **more,
    }


def _tower(**more: Any) -> dict[str, Any]:
    """Return the options of Qwen's vision towers."""
    return {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, **more}


def _siglip(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 32,
        "patch_size": 8,
        **more,
    }


def _idefics(config: Any) -> PretrainedConfig:
    return config(
        text_config=_text(model_type="llama"),
        vision_config=_siglip(),
        scale_factor=2,
        image_token_id=IDS["<image>"],
        pad_token_id=0,
    )


LINEAR_ATTENTION = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
}
POSITIONS = {"intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 64}
"""Of the towers since Qwen3-VL, which have a table of positions."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_IDS = {"boi_token_index": IDS["<|vision_start|>"], "eoi_token_index": IDS["<|vision_end|>"]}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "idefics3": lambda: _idefics(Idefics3Config),
    "smolvlm": lambda: _idefics(SmolVLMConfig),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config=_text(rope_parameters=ROPE),
        vision_config=_tower(embed_dim=16, hidden_size=32, mlp_ratio=2),
        **QWEN_IDS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=ROPE),
        vision_config=_tower(
            intermediate_size=24, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
        ),
        **QWEN_IDS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=_text(head_dim=8, rope_parameters=ROPE),
        vision_config=_tower(depth=3, deepstack_visual_indexes=[0, 1], **POSITIONS),
        **QWEN_IDS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config=_text(**LINEAR_ATTENTION),
        vision_config=_tower(**POSITIONS),
        **QWEN_IDS,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config=_text(shared_expert_intermediate_size=16, **EXPERTS, **LINEAR_ATTENTION),
        vision_config=_tower(**POSITIONS),
        **QWEN_IDS,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config=_text(head_dim=8, rope_parameters=ROPE, **EXPERTS),
        vision_config=_tower(depth=3, deepstack_visual_indexes=[0, 1], **POSITIONS),
        **QWEN_IDS,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=_text(model_type="gemma3_text", **LOCAL),
        vision_config=_siglip(model_type="siglip_vision_model"),
        mm_tokens_per_image=4,
        image_token_index=IDS["<image>"],
        **GEMMA_IDS,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=_text(
            global_head_dim=8,
            vocab_size_per_layer_input=len(tiny.VOCABULARY) + len(SPECIAL),
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=0,
            **LOCAL,
        ),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "patch_size": 8,
            "position_embedding_size": 16,
        },
        audio_config=None,
        image_token_id=IDS["<image>"],
        boi_token_id=IDS["<|vision_start|>"],
        eoi_token_id=IDS["<|vision_end|>"],
    ),
    "internvl": lambda: InternVLConfig(
        text_config=_text(model_type="qwen2"),
        vision_config=_siglip(image_size=[32, 32], patch_size=[8, 8]),
        image_token_id=IDS["<image>"],
    ),
    "llama4": lambda: Llama4Config(
        text_config=_text(
            head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=8
        ),
        vision_config=_siglip(
            intermediate_size=64,
            vision_output_dim=16,
            projector_input_dim=16,
            projector_output_dim=16,
        ),
        image_token_index=IDS["<image>"],
        **GEMMA_IDS,
    ),
    "llava": lambda: LlavaConfig(
        text_config=_text(model_type="llama"),
        vision_config=_siglip(model_type="clip_vision_model", projection_dim=16),
        image_token_index=IDS["<image>"],
        vision_feature_layer=-1,
    ),
    "llava_onevision": lambda: LlavaOnevisionConfig(
        text_config=_text(model_type="qwen2"),
        vision_config=_siglip(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=IDS["<image>"],
        video_token_index=IDS["<|video_pad|>"],
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=_text(model_type="mistral", sliding_window=None),
        vision_config=_siglip(model_type="pixtral", head_dim=8),
        image_token_index=IDS["<image>"],
        vision_feature_layer=-1,
    ),
    "paligemma": lambda: PaliGemmaConfig(
        text_config=_text(model_type="gemma", head_dim=8),
        vision_config=_siglip(
            model_type="siglip_vision_model", projection_dim=32, vision_use_head=False
        ),
        image_token_index=IDS["<image>"],
        projection_dim=32,
        hidden_size=32,
    ),
}


def model(architecture: str, seed: int = 0) -> Any:
    """Return a vision-language model whose logits differ between tokens and between images."""
    return model_of(CONFIGS[architecture](), seed)


def model_of(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a vision-language model of the given config."""
    torch.manual_seed(seed)
    whole = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return whole.eval()


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the tokens of images."""
    words = tiny.tokenizer(**options)
    words.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True) for token in SPECIAL]}
    )
    return words


def image_processor(architecture: str) -> Any:
    """Return an image processor that needs Pillow alone."""
    if architecture == "idefics3":
        return Idefics3ImageProcessorPil(**_idefics_options())
    if architecture == "smolvlm":
        return SmolVLMImageProcessorPil(**_idefics_options())
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )


def _idefics_options() -> dict[str, Any]:
    return {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": False,
    }


def saved_model(directory: Path, architecture: str) -> str:
    """Save a model with its tokenizer and its image processor; return the directory."""
    model(architecture).save_pretrained(directory)
    processor(architecture).save_pretrained(directory)
    image_processor(architecture).save_pretrained(directory)
    return str(directory)


def processor(architecture: str) -> Any:
    """Return a processor that needs Pillow alone."""
    words = tokenizer(chat=True)
    if architecture == "gemma3":
        words.image_token, words.image_token_id = "<image>", IDS["<image>"]
        words.boi_token, words.boi_token_id = "<|vision_start|>", IDS["<|vision_start|>"]
        words.eoi_token = "<|vision_end|>"
        return Gemma3Processor(_square_images(), words, image_seq_length=4)
    if architecture == "internvl":
        return FourTokens(_square_images(), words, "<image>")
    images = image_processor(architecture)
    if architecture in ("idefics3", "smolvlm"):  # SmolVLM's own needs torchvision for videos
        return Idefics3Processor(image_processor=images, tokenizer=words, image_seq_len=4)
    return GridProcessor(images, words, "<|image_pad|>")


def _square_images() -> Gemma3ImageProcessorPil:
    return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})


class FourTokens(GridProcessor):
    """A processor for towers that turn each image of 32 × 32 pixels into four tokens.

    InternVL's own needs torchvision for videos.
    """

    def __call__(
        self, text: Sequence[str], images: Sequence[Sequence[Any]], **options: Any
    ) -> dict[str, Any]:
        """Return the ids of one text and the pixels of its images."""
        pixels = self.image_processor(images=list(images[0]), return_tensors="pt")["pixel_values"]
        expanded = text[0].replace(self.image_token, 4 * self.image_token)
        return {**self.tokenizer([expanded], **options), "pixel_values": pixels}


def placeholder(architecture: str) -> str:
    """Return the placeholder of an image in a text."""
    if architecture in ("idefics3", "smolvlm", "internvl"):
        return "<image>"
    if architecture == "gemma3":
        return "<|vision_start|>"
    return "<|vision_start|><|image_pad|><|vision_end|>"


def image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def rows(architecture: str) -> list[dict[str, Any]]:
    """Return prompts with one image, with two, and with none."""
    at = placeholder(architecture)
    return [
        {"prompt": f"w1 {at} w2", "image": image(40, 24)},
        {"prompt": f"{at} w3 {at} w5 w6", "images": [image(16, 48, 1), image(33, 33, 2)]},
        {"prompt": "w4 w5"},
    ]


def encoder(architecture: str) -> tuple[ImageEncoder, Prompts]:
    """Return the vision tower of a new policy, and the prompts of `rows`."""
    reader = processor(architecture)
    policy = ActorCritic(model(architecture))
    prompts = encode_prompts(
        rows(architecture), reader.tokenizer, max_prompt_tokens=100, processor=reader
    )
    return ImageEncoder(policy, reader), prompts
