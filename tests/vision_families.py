"""More families with images in miniature, with the processors of their own: what differs from Qwen2-VL and Idefics3.

Tiles that the processor cuts although its file says otherwise (InternVL, Aya Vision), a placeholder that is not what
the template writes (Aya Vision), a processor that wants one of videos (SmolVLM), features that enter at later layers
(Qwen3-VL), sizes beside the pixels (LLaVA-NeXT), a single token for images and videos (GLM-4V).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.tiny import build_tiny_tokenizer
from tests.tiny_vision import TEXT

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_TILES = {
    "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "crop_to_patches": False,
    "min_patches": 1, "max_patches": 4,
}  # fmt: skip


class Family(NamedTuple):
    """How a family is made.

    Attributes:
        shown: What its template writes for an image.
        tokens: Tokens that its tokenizer has beside those of the text model.
        config: Makes the parts of its config from the ids of tokens.
        image: Values of ``preprocessor_config.json``.
        processor: Values of ``processor_config.json``.
        names: Names of tokens in the tokenizer's config.
    """

    shown: str
    tokens: tuple[str, ...]
    config: Callable[[Callable[[str], int]], dict[str, Any]]
    image: dict[str, Any]
    processor: dict[str, Any]
    names: dict[str, str] = {}  # noqa: RUF012  (of a named tuple)


def _qwen(**tower: Any) -> Callable[..., dict[str, Any]]:
    def config(token: Callable[[str], int]) -> dict[str, Any]:
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        return {
            "text_config": {"rope_parameters": _ROPE, "head_dim": 8},
            "vision_config": _QWEN_TOWER | tower,
            "tie_word_embeddings": True,
            **{name: token(one) for name, one in zip(names, _VISION, strict=True)},
        }

    return config


def _glm(token: Callable[[str], int]) -> dict[str, Any]:
    names = ("image_start_token_id", "image_end_token_id", "image_token_id", "video_token_id")
    return {
        "text_config": {"rope_parameters": _ROPE},
        "vision_config": _QWEN_TOWER | {"image_size": 16},
        **{name: token(one) for name, one in zip(names, _GLM, strict=True)},
    }


_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
_SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_BOUNDS = {"shortest_edge": 64, "longest_edge": 1024}  # pixels
_AS_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", **_SIZES, "size": _BOUNDS}
_AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL")
_GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
_FRAMES = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip
_GRID = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}

FAMILIES = {
    "qwen2_5_vl": Family(_SHOWN, _VISION, _qwen(window_size=16, fullatt_block_indexes=[1]), _AS_QWEN, {}),
    "qwen3_vl": Family(
        _SHOWN, _VISION, _qwen(depth=3, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]), _AS_QWEN, {}
    ),
    "glm4v": Family(
        "<|begin_of_image|><|image|><|end_of_image|>",
        _GLM,
        _glm,
        {"image_processor_type": "Glm4vImageProcessor", **_SIZES, "size": {"shortest_edge": 128, "longest_edge": 2048}},
        {"processor_class": "Glm4vProcessor"},
    ),
    "internvl": Family(
        "<IMG_CONTEXT>",
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        lambda token: {
            "text_config": {"model_type": "qwen2"},
            "vision_config": _TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": token("<IMG_CONTEXT>"),
            "downsample_ratio": 0.5,
        },
        _TILES,
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "aya_vision": Family(
        "<image>",
        _AYA,
        lambda token: {
            "text_config": {"model_type": "cohere2"},
            "vision_config": _TOWER | {"model_type": "siglip_vision_model"},
            "image_token_index": token("<|IMG_PATCH|>"),
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _TILES,
        {"processor_class": "AyaVisionProcessor", "patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ),
    "smolvlm": Family(
        "<image>",
        _FRAMES,
        lambda token: {
            "text_config": {"model_type": "llama"},
            "vision_config": _TOWER,
            "scale_factor": 2,
            "image_token_id": token("<image>"),
            "tie_word_embeddings": True,
        },
        {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"},
    ),
    "llava_next": Family(
        "<image>",
        ("<image>",),
        lambda token: {
            "text_config": {"model_type": "llama"},
            "vision_config": _TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": token("<image>"),
            "vision_feature_layer": -1,
            **_GRID,
        },
        {
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16}, **_GRID,
        },
        {
            "processor_class": "LlavaNextProcessor", "patch_size": 4, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ 'SHOWN' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_family(folder: Path, name: str, seed: int = 0) -> Path:
    """Writes a random model of a family, its tokenizer and its processor."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = FAMILIES[name]
    tokenizer: Any = build_tiny_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in family.tokens], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE.replace("SHOWN", family.shown)
    tokenizer.save_pretrained(folder)
    _add(folder / "tokenizer_config.json", {"extra_special_tokens": family.names} if family.names else {})
    _add(folder / "preprocessor_config.json", family.image)
    _add(folder / "processor_config.json", family.processor)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    values = family.config(tokenizer.convert_tokens_to_ids)
    text = {**TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": end, "initializer_range": 0.2}
    values["text_config"] = text | values["text_config"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **values), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    _add(folder / "generation_config.json", {"eos_token_id": end})
    return folder


def _add(file: Path, values: dict[str, Any]) -> None:
    if values:
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(known | values))
