"""Tiny random models that take images, in Hugging Face's format: like Qwen2-VL, Idefics3, and, for servers, Qwen3-VL.

Guarantees: nothing is downloaded; the same seed gives the same bytes; every parameter is random, those of the image
tower too, so that another image gives other logits. An image of 16 x 16 pixels has 4 features in the first model.
"""

import json
from pathlib import Path
from typing import Any

from tests.tiny import build_tiny_tokenizer

QWEN = (  # as that of Qwen3-VL: tools in a system turn, calls as Hermes writes them
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": ' }}{{ call['function']['name'] | tojson }}{{ ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IDEFICS = (  # as the real one: it renders lists of parts alone
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = {
    "qwen2_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "idefics3": (
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
}  # fmt: skip
PLACEHOLDER = {"qwen2_vl": "<|image_pad|>", "idefics3": "<image>"}
TEMPLATES = {"qwen2_vl": QWEN, "idefics3": IDEFICS}
KINDS = tuple(TOKENS)
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def build_tiny_vision(folder: Path, kind: str = "qwen2_vl", seed: int = 0, hidden: int = 32) -> Path:
    """Write a model, its tokenizer and its processor.

    Args:
        folder: Folder to write to; created when missing.
        kind: One of :data:`KINDS`, or ``qwen3_vl``.
        seed: Seed of the weights.
        hidden: Size of the text's states, of a model like Qwen2-VL; SGLang wants larger heads than 8.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    qwen = kind in ("qwen2_vl", "qwen3_vl")
    tokenizer = tokenizer_of(folder, "qwen2_vl" if qwen else kind)
    config = _qwen(folder, tokenizer, hidden, kind) if qwen else _idefics(folder, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def tokenizer_of(folder: Path, kind: str) -> Any:
    """The byte-level tokenizer of the tiny text model, with the tokens of images and their chat template."""
    from tokenizers import AddedToken

    tokenizer = build_tiny_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in TOKENS[kind]], special_tokens=True)
    tokenizer.chat_template = TEMPLATES[kind]
    tokenizer.save_pretrained(folder)
    return tokenizer


def _common(tokenizer: Any) -> dict[str, Any]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return {**TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": end, "initializer_range": 0.2}


def _qwen(folder: Path, tokenizer: Any, hidden: int, kind: str) -> Any:
    from transformers import Qwen2VLConfig, Qwen3VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    bounds = {"shortest_edge": 64, "longest_edge": 1024}  # pixels
    Qwen2VLImageProcessorPil(**sizes, size=bounds).save_pretrained(folder)
    film = {"video_processor_type": "Qwen2VLVideoProcessor", **sizes, "size": {**bounds, "longest_edge": 8192}}
    film["cap_pixels_per_frame"] = False
    (folder / "video_preprocessor_config.json").write_text(json.dumps(film))
    eighth = hidden // TEXT["num_attention_heads"] // 8
    sections = [eighth, eighth, 2 * eighth]  # of a head's rotated pairs: time, height, width
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    text = {**_common(tokenizer), "hidden_size": hidden, "rope_parameters": rope}
    vision = {
        "depth": 2, "hidden_size": hidden, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": 0.2,
    }  # fmt: skip
    common: dict[str, Any] = {"tie_word_embeddings": True} | {
        name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": hidden, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **common)
    images = folder / "preprocessor_config.json"
    images.write_text(json.dumps(json.loads(images.read_text()) | {"processor_class": "Qwen3VLProcessor"}))
    film["video_processor_type"] = "Qwen3VLVideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(film))
    vision |= {"intermediate_size": 2 * hidden, "out_hidden_size": hidden}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    rope["mrope_interleaved"] = True  # as transformers does anyway; servers look at it
    text |= {"head_dim": hidden // TEXT["num_attention_heads"]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **common)


def _idefics(folder: Path, tokenizer: Any) -> Any:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}).save_pretrained(folder)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return Idefics3Config(
        text_config={"model_type": "llama", **_common(tokenizer)},
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "initializer_range": 0.2,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )  # fmt: skip


def picture(seed: int = 0, width: int = 32, height: int = 24) -> Any:
    """A PIL image of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
