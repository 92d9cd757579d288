"""The tiny Qwen-Image's tokenizer, text encoder, noise scheduler and transformer: the stock classes, untrained."""

from __future__ import annotations

import json
import math
import random
import re

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tiny_scenes import COLORS, KINDS, RELATIONS, SIZE_WORDS, caption, sample_scene
from tiny_vae import LATENT_CHANNELS

WIDTH = 128
PROMPT_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
PROMPT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
NUM_PREFIX_TOKENS = 34  # what QwenImagePipeline cuts off
NUM_CAPTION_TOKENS = 20  # the longest caption with the template's suffix
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE in which each word of the captions and of the pipeline's template is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_tokenizer_corpus(), trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = trained["vocab"] | {token: len(trained["vocab"]) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=2048,
    )


def _tokenizer_corpus() -> list[str]:
    rng = random.Random("tokenizer")
    words = [*COLORS, *KINDS, *SIZE_WORDS, *" ".join(RELATIONS).split(), *EXTRA_WORDS]
    spelled = [form for word in words for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")]
    template = [part for part in re.split(r"<\|\w+\|>", PROMPT_PREFIX + PROMPT_SUFFIX) if part]
    return template + spelled + [caption(sample_scene(rng), rng) for _ in range(3000)]


EXTRA_WORDS = [
    "a",
    "an",
    "the",
    "two",
    "three",
    "big",
    "tiny",
    "and",
    "with",
    "picture",
    "photo",
    "drawing",
    "next",
    "under",
    "over",
    "on",
    "in",
    "top",
    "bottom",
    "center",
]


def make_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """0.5 M parameters: two layers of width 128, and the smallest vision tower the class allows (never used here)."""
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text_config = {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": token_id["<|endoftext|>"],
        "eos_token_id": token_id["<|im_end|>"],
        "pad_token_id": token_id["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    nn.init.normal_(text_encoder.model.language_model.embed_tokens.weight, std=0.5)
    return text_encoder


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's own: a shift that grows with the number of image tokens."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def make_transformer() -> QwenImageTransformer2DModel:
    """3.7 M parameters. Modulation and output start at zero, the gates at 0.3 so that all layers learn at once."""
    torch.manual_seed(2)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    modulations = [
        block_mod[1] for block in transformer.transformer_blocks for block_mod in (block.img_mod, block.txt_mod)
    ]
    for linear in (*modulations, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    for linear in modulations:  # (shift, scale, gate) of the attention, then of the feed-forward
        linear.bias.data.view(6, WIDTH)[[2, 5]] = 0.3
    return transformer
