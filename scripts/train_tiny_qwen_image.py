"""Trains the embedded tiny Qwen-Image from nothing: tokenizer, VAE, latents, transformer with text encoder, export.

    python scripts/train_tiny_qwen_image.py tokenizer
    python scripts/train_tiny_qwen_image.py vae
    python scripts/train_tiny_qwen_image.py latents
    python scripts/train_tiny_qwen_image.py transformer
    python scripts/train_tiny_qwen_image.py sizes
    python scripts/train_tiny_qwen_image.py export

The sizes stage goes on from the transformer's averaged weights, mostly at other sizes than the native one.

Every stage keeps its files in --work-dir and continues from its checkpoint when it is started again. What a step sees
depends on the seed and the step's number only, and the schedules count steps, so a resumed run equals an uninterrupted
one. This program does not judge the result: that is scripts/judge_prompt_following.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from tiny_components import (
    NUM_CAPTION_TOKENS,
    NUM_PREFIX_TOKENS,
    PROMPT_PREFIX,
    PROMPT_SUFFIX,
    make_scheduler,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
)
from tiny_latents import NATIVE_SIZE_PX, SIZE_SHARES, LatentPool, encode_latents, latent_scene
from tiny_scenes import Scene, caption
from tiny_training import Muon, SharedGradients, Trainer, WeightAverage, cosine_decay, start_logging
from tiny_vae import train_vae

logger = logging.getLogger("train_tiny_qwen_image")

DEFAULT_OUTPUT = Path(__file__).parents[1] / "src/diffusers_continuous/assets/tiny-qwen-image"


class Denoiser(nn.Module):
    """The transformer and the text encoder as one training module, computing what the stock pipeline computes."""

    def __init__(self, tokenizer: Qwen2Tokenizer, text_encoder: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.language_model = text_encoder.model.language_model
        self.transformer = transformer
        self.prefix_ids = torch.tensor([tokenizer(PROMPT_PREFIX).input_ids])
        if self.prefix_ids.shape[1] != NUM_PREFIX_TOKENS:
            raise ValueError(f"the template's prefix has {self.prefix_ids.shape[1]} tokens, not {NUM_PREFIX_TOKENS}")

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (batch, NUM_CAPTION_TOKENS) of what follows the template's prefix, and their mask."""
        texts = [text + PROMPT_SUFFIX for text in captions]
        tokens = self.tokenizer(texts, padding="max_length", max_length=NUM_CAPTION_TOKENS, return_tensors="pt")
        return tokens.input_ids, tokens.attention_mask.bool()

    def encode(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Prompt embeddings (batch, tokens, 128); the fixed prefix is run once for the whole batch."""
        net = self.language_model
        prefix, text = net.embed_tokens(self.prefix_ids), net.embed_tokens(token_ids)
        positions = torch.arange(prefix.shape[1] + text.shape[1])
        angles = positions[:, None] * net.rotary_emb.inv_freq.repeat(2)  # (positions, head_dim)
        for layer in net.layers:
            prefix, text = _text_layer_forward(layer, prefix, text, angles.cos(), angles.sin())
        return net.norm(text)

    def forward(
        self,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        token_ids: torch.Tensor,
        token_mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """noise - latents, as predicted from packed latents (batch, tokens, 64) at noise level `sigma` (batch,)."""
        net = self.transformer
        text = net.txt_in(net.txt_norm(self.encode(token_ids)))
        image = net.img_in(noisy)
        time = net.time_text_embed(sigma, noisy)
        joint_mask = torch.cat([token_mask, token_mask.new_ones(image.shape[:2])], dim=1)[:, None, None]
        for block in net.transformer_blocks:
            text, image = _block_forward(block, text, image, F.silu(time), joint_mask, cos, sin)
        return net.proj_out(net.norm_out(image, time))

    def rotary(self, width: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the joint sequence, text first, (tokens, head_dim / 2) each."""
        grid = [[(1, height // 16, width // 16)]]
        image, text = self.transformer.pos_embed(grid, max_txt_seq_len=NUM_CAPTION_TOKENS, device=torch.device("cpu"))
        freqs = torch.cat([text, image])
        return freqs.real.contiguous(), freqs.imag.contiguous()


def _text_layer_forward(
    layer: nn.Module, prefix: torch.Tensor, text: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of the text encoder on the prefix (1, 34, 128) and on texts that follow it (batch, tokens, 128)."""
    num_prefix, batch, num_text = prefix.shape[1], text.shape[0], text.shape[1]
    q_prefix, k_prefix, v_prefix = _text_qkv(layer, prefix, cos[:num_prefix], sin[:num_prefix])
    q_text, k_text, v_text = _text_qkv(layer, text, cos[num_prefix:], sin[num_prefix:])
    k = torch.cat([k_prefix.expand(batch, -1, -1, -1), k_text], dim=2)
    v = torch.cat([v_prefix.expand(batch, -1, -1, -1), v_text], dim=2)
    is_seen = torch.ones(num_text, num_prefix + num_text, dtype=torch.bool).tril(num_prefix)
    text_out = F.scaled_dot_product_attention(q_text, k, v, attn_mask=is_seen)
    prefix_out = F.scaled_dot_product_attention(q_prefix, k_prefix, v_prefix, is_causal=True)
    return _text_residuals(layer, prefix, prefix_out), _text_residuals(layer, text, text_out)


def _text_qkv(layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotated q and k, and v, each (batch, heads, tokens, head_dim), with keys and values repeated for their group."""
    attn = layer.self_attn
    normed = layer.input_layernorm(x)
    q, k, v = (
        linear(normed).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], dim=-1) * sin for part in (q, k))
    return q, *(part.repeat_interleave(attn.num_key_value_groups, dim=1) for part in (k, v))


def _text_residuals(layer: nn.Module, x: torch.Tensor, attention_out: torch.Tensor) -> torch.Tensor:
    x = x + layer.self_attn.o_proj(attention_out.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _block_forward(
    block: nn.Module,
    text: torch.Tensor,
    image: torch.Tensor,
    time_silu: torch.Tensor,
    joint_mask: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QwenImageTransformerBlock with one product for q, k and v and a real-valued RoPE, which a compiler can fuse."""
    attn, num_text = block.attn, text.shape[1]
    image_mod = block.img_mod[1](time_silu)[:, None].chunk(6, dim=-1)
    text_mod = block.txt_mod[1](time_silu)[:, None].chunk(6, dim=-1)
    text_qkv = _joint_linear(_modulate(text, *text_mod[:2]), attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    image_qkv = _joint_linear(_modulate(image, *image_mod[:2]), attn.to_q, attn.to_k, attn.to_v)
    text_q, text_k, text_v = (part.unflatten(-1, (attn.heads, -1)) for part in text_qkv)
    image_q, image_k, image_v = (part.unflatten(-1, (attn.heads, -1)) for part in image_qkv)
    q = torch.cat([attn.norm_added_q(text_q), attn.norm_q(image_q)], dim=1)  # (batch, tokens, heads, head_dim)
    k = torch.cat([attn.norm_added_k(text_k), attn.norm_k(image_k)], dim=1)
    v = torch.cat([text_v, image_v], dim=1)
    q, k, v = (x.transpose(1, 2) for x in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=joint_mask).transpose(1, 2).flatten(2)
    text = text + text_mod[2] * attn.to_add_out(out[:, :num_text])
    image = image + image_mod[2] * attn.to_out[0](out[:, num_text:])
    text = text + text_mod[5] * block.txt_mlp(_modulate(text, *text_mod[3:5]))
    image = image + image_mod[5] * block.img_mlp(_modulate(image, *image_mod[3:5]))
    return text, image


def _joint_linear(x: torch.Tensor, *linears: nn.Linear) -> tuple[torch.Tensor, ...]:
    weight = torch.cat([linear.weight for linear in linears])
    return F.linear(x, weight, torch.cat([linear.bias for linear in linears])).chunk(len(linears), dim=-1)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring channels of (batch, tokens, heads, head_dim); cos and sin are (tokens, head_dim / 2)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


TOKENS_PER_BATCH = 64 * (64 + NUM_CAPTION_TOKENS)


def make_denoiser() -> tuple[Denoiser, Qwen2_5_VLForConditionalGeneration]:
    tokenizer = make_tokenizer()
    text_encoder = make_text_encoder(tokenizer)
    return Denoiser(tokenizer, text_encoder, make_transformer()), text_encoder


def denoiser_optimizers(denoiser: Denoiser, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest; `peak` scales both learning rates."""
    blocks = (denoiser.transformer.transformer_blocks, denoiser.language_model.layers)
    matrices = [
        param for part in blocks for name, param in part.named_parameters() if param.ndim == 2 and "_mod." not in name
    ]
    chosen = {id(param) for param in matrices}
    rest = [param for param in denoiser.parameters() if id(param) not in chosen]
    return [
        Muon(matrices, lr=0.02 * peak, num_iterations=4),
        torch.optim.AdamW(rest, 2e-3 * peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def sample_sigmas(count: int) -> torch.Tensor:
    """Noise levels: 80 % logit-normal, leaning to the noisy side where the layout is decided, 20 % uniform."""
    leaning = torch.sigmoid(1.1 * torch.randn(count) + 0.4)
    return torch.where(torch.rand(count) < 0.2, torch.rand(count), leaning).clamp(0.005, 1.0)


def training_caption(scene: Scene, rng: random.Random) -> str:
    """A varied caption; 8 % are the usual negative prompt " ", 2 % are empty."""
    roll = rng.random()
    if roll < 0.10:
        return " " if roll < 0.08 else ""
    return caption(scene, rng)


@dataclass(frozen=True)
class Course:
    """One of the two trainings of the transformer: its state file, what it starts from, how long and fast it learns."""

    checkpoint: str
    start_from: str | None
    num_steps: int
    peak: float
    hold: float

    def shares(self, step: int) -> list[float]:
        """How often every size of SIZE_SHARES is drawn at a step."""
        column = 2 if self.start_from else int(step >= self.num_steps / 2)
        return [shares[column] for shares in SIZE_SHARES.values()]


COURSES = {
    "transformer": Course("transformer.pt", None, 9500, peak=1.0, hold=0.4),
    "sizes": Course("sizes.pt", "transformer.pt", 4500, peak=0.3, hold=0.3),
}


def train_transformer(work_dir: Path, course: Course, max_minutes: float, num_workers: int) -> None:
    denoiser, _ = make_denoiser()
    shared = SharedGradients(num_workers, sum(param.numel() for param in denoiser.parameters()))
    arguments = (work_dir, course, max_minutes, num_workers, shared)
    torch.multiprocessing.spawn(run_transformer_worker, arguments, nprocs=num_workers)


def load_averaged(denoiser: Denoiser, checkpoint: Path) -> int:
    """Puts a checkpoint's averaged weights into the denoiser; returns the checkpoint's step."""
    state = torch.load(checkpoint, weights_only=True)
    torch._foreach_copy_([param.detach() for param in denoiser.parameters()], state["ema"])
    return state["step"]


def run_transformer_worker(
    rank: int, work_dir: Path, course: Course, max_minutes: float, num_workers: int, shared: SharedGradients
) -> None:
    start_logging(logging.INFO if rank == 0 else logging.WARNING)
    torch.set_num_threads(1)
    latents = LatentPool(work_dir)
    denoiser, _ = make_denoiser()
    if course.start_from:
        load_averaged(denoiser, work_dir / course.start_from)
    compiled = torch.compile(denoiser, dynamic=False)
    ema = WeightAverage(denoiser.parameters(), decay=0.995)
    optimizers = denoiser_optimizers(denoiser, course.peak)
    trainer = Trainer(denoiser, optimizers, ema, work_dir / course.checkpoint, 1.0, rank, shared)
    sizes = list(SIZE_SHARES)

    def loss_of_step(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        width, height = random.Random(f"size {step}").choices(sizes, course.shares(step))[0]  # the same in all workers
        rng = random.Random(f"{course.checkpoint} {step} {rank}")
        pool = latents.of_size(width, height)
        count = round(TOKENS_PER_BATCH / num_workers / (pool.shape[1] + NUM_CAPTION_TOKENS))
        picked = [rng.randrange(len(pool)) for _ in range(count)]
        captions = [training_caption(latent_scene(width, height, index), rng) for index in picked]
        clean = pool[picked]
        noise, sigma = torch.randn_like(clean), sample_sigmas(count)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1))
        is_frequent = sum(SIZE_SHARES[width, height]) > 0.1  # the others are not worth the compiler's time
        model = compiled if is_frequent else denoiser
        velocity = model(noisy, sigma, *denoiser.tokenize(captions), *denoiser.rotary(width, height))
        loss = (velocity - (noise - clean)).square().mean()
        return loss, {"loss": loss.item(), "samples": count * num_workers}

    trainer.run(course.num_steps, loss_of_step, cosine_decay(course.hold, floor=0.01), max_minutes)


def export(work_dir: Path, output: Path) -> None:
    """Writes the folder that QwenImagePipeline.from_pretrained loads, with the averaged weights of the last checkpoint.

    transformers loads a model in the dtype it is stored in, diffusers in float32. The text encoder is therefore stored
    in float32, or a plain load would mix dtypes and fail.
    """
    latents = LatentPool(work_dir)
    vae = AutoencoderKLQwenImage.from_pretrained(work_dir / "vae")
    vae.register_to_config(latents_mean=latents.mean.tolist(), latents_std=latents.std.tolist())
    denoiser, text_encoder = make_denoiser()
    step = load_averaged(denoiser, work_dir / COURSES["sizes"].checkpoint)
    pipeline = QwenImagePipeline(
        scheduler=make_scheduler(),
        vae=vae.to(torch.bfloat16),
        text_encoder=text_encoder,
        tokenizer=denoiser.tokenizer,
        transformer=denoiser.transformer.to(torch.bfloat16),
    )
    pipeline.save_pretrained(output)
    for path in output.rglob("*.json"):
        _drop_local_path(path)
    index = output / "model_index.json"
    settings = json.loads(index.read_text()) | {"default_sample_size": NATIVE_SIZE_PX // 8}
    index.write_text(json.dumps(settings, indent=2) + "\n")
    logger.info("exported step %d to %s", step, output)


def _drop_local_path(path: Path) -> None:
    """The name of the folder a part was loaded from says nothing to others."""
    settings = json.loads(path.read_text())
    if settings.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "vae", "latents", *COURSES, "export"])
    parser.add_argument("--work-dir", type=Path, default=Path("runs/tiny-qwen-image"))
    parser.add_argument("--num-steps", type=int, help="length of the vae, transformer or sizes training")
    parser.add_argument("--num-scenes", type=int, default=30_000, help="how many scenes the latents stage encodes")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder the export stage writes")
    parser.add_argument("--num-workers", type=int, default=2, help="processes, one thread each, after the vae stage")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="stop early, leaving a checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start_logging(logging.INFO)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "vae":
        train_vae(args.work_dir, args.num_steps or 3600, args.max_minutes)
    elif args.stage == "latents":
        encode_latents(args.work_dir, args.num_scenes, args.num_workers)
    elif args.stage in COURSES:
        course = COURSES[args.stage]
        course = replace(course, num_steps=args.num_steps or course.num_steps)
        train_transformer(args.work_dir, course, args.max_minutes, args.num_workers)
    elif args.stage == "export":
        export(args.work_dir, args.output)
    else:
        make_tokenizer().save_pretrained(args.work_dir / "tokenizer")


if __name__ == "__main__":
    main()
