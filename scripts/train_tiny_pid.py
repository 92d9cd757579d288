"""Trains the embedded tiny PiD, the 4x pixel decoder of the embedded tiny Qwen-Image, and exports it.

    python scripts/train_tiny_pid.py train
    python scripts/train_tiny_pid.py export

Needs what scripts/train_tiny_qwen_image.py left in --source-dir: the VAE, and the latents, whose mean and deviation
normalize those that the decoder reads. `train` continues from its checkpoint when it is started again. This program
does not judge the result: that is scripts/judge_pid.py.

How a network of four steps is made without a teacher. The latent of a flat scene says nearly everything about its 4x
rendering, so the expected picture is itself sharp, and regression to the true rendering suffices: nothing has to be
distilled. Every scene is decoded twice: from pure noise at the first time of the schedule, and, at one of the later
times, from a picture noised to it. Half of these pictures are the true ones, half are what the first pass made, so
that the network learns to mend its own mistakes and not only to trust what it is shown. The network is only ever asked
for the times of the schedule (and for pure noise at time 1, where one-step decoding starts), so it learns no others.
Both passes share the latent's features.

Latents are the VAE's means of the true picture, noised with sigma uniform in [0, 0.8], a quarter clean. What is lost
to that noise cannot be learned, so a row counts (1 - sigma) squared.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from diffusers_continuous.pid import LatentFeatures, PiDDecoder, PiDScheduler, PiDTransformer2DModel
from diffusers_continuous.pid.scheduling import DISTILLED_TIMES, NETWORK_TIMES
from diffusers_continuous.pid.text_encoding import encode_captions
from tiny_components import make_tokenizer
from tiny_latents import LatentPool
from tiny_scenes import Scene, render, sample_scene
from tiny_training import Muon, SharedGradients, Trainer, WeightAverage, cosine_decay, start_logging
from tiny_vae import LATENT_CHANNELS, VAE_SIZES, PlanarAutoencoder, to_model_range
from train_tiny_qwen_image import training_caption

logger = logging.getLogger("train_tiny_pid")

SCALE = 4
TEXT_WIDTH = 64
NUM_TEXT_POSITIONS = 24  # the longest caption and the two tokens before it
MAX_SIGMA = 0.8
SHARE_OF_CLEAN = 0.25
INSTRUCTION = ""
DEFAULT_OUTPUT = Path(__file__).parents[1] / "src/diffusers_continuous/assets/tiny-pid"

# The first pass is at the schedule's first time, now and then at 1; the second at one of the others. The last is the
# picture that is handed out.
FIRST_TIMES, FIRST_SHARES = (DISTILLED_TIMES[0], 1.0), (0.9, 0.1)
LATER_TIMES, LATER_SHARES = DISTILLED_TIMES[1:-1], (0.2, 0.3, 0.5)
SHARE_OF_OWN = 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Network, text encoder, tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def make_transformer() -> PiDTransformer2DModel:
    """3.0 M parameters: the v1.5 network, shrunk. It sees through noise from the start; modulations are smooth."""
    torch.manual_seed(3)
    transformer = PiDTransformer2DModel(
        hidden_size=64,
        num_groups=4,
        patch_depth=4,
        pixel_hidden_size=8,
        pixel_attn_hidden_size=32,
        pixel_num_groups=2,
        pixel_depth=1,
        txt_embed_dim=TEXT_WIDTH,
        txt_max_length=NUM_TEXT_POSITIONS,
        rope_ref_h=512,
        rope_ref_w=512,
        lq_latent_channels=LATENT_CHANNELS,
        lq_hidden_dim=128,
        sr_scale=SCALE,
        trained_sides=(256, 768),
    )
    for block in transformer.patch_blocks:
        for modulation in (block.adaLN_modulation_img[0], block.adaLN_modulation_txt[0]):
            nn.init.normal_(modulation.weight, std=0.02)
            _start_bias(modulation.bias, (6, -1), gate=0.3)
    for block in transformer.pixel_blocks:
        modulation = block.adaLN_modulation[0]
        modulation.weight.data.copy_(_smooth_modulation(transformer.config.patch_size, modulation.weight.shape))
        _start_bias(modulation.bias, (block.pixels_per_patch, 6, -1), gate=1.0)
    for linear, std in ((transformer.t_embedder.mlp[0], 0.09), (transformer.t_embedder.mlp[2], 0.2)):
        nn.init.normal_(linear.weight, std=std)  # so that times differ by about 1, or all seem the same for long
    transformer.s_embedder.proj.weight.data.mul_(0.3)  # mostly noise, which the patches must not drown in
    _start_velocity(transformer, transformer.pixel_blocks[0])
    return transformer


@torch.no_grad()
def _start_velocity(transformer: PiDTransformer2DModel, block: nn.Module) -> None:
    """The velocity starts as noisy / time, the picture as gray: what is left to learn is the picture.

    Of a pixel's 8 values three carry (noisy - picture), in places where the position varies slowly, so that patches can
    correct for it. The others hold a constant times the time, by the attention's gate, and are so large that the norm
    in the final layer does nothing but divide by them.
    """
    colors, rest, gain, constant = [1, 3, 5], [0, 2, 4, 6, 7], 3.0, 26.0
    embedder, last = transformer.pixel_embedder.proj, transformer.final_layer.linear
    for param in (*embedder.parameters(), *last.parameters()):
        nn.init.zeros_(param)
    embedder.weight[colors] = gain * torch.eye(3)
    embedder.bias[rest] = constant
    last.weight[:, colors] = torch.eye(3) * constant * (len(rest) / 8) ** 0.5 / gain
    times = torch.tensor([*LATER_TIMES, *FIRST_TIMES])
    conditions = F.silu(transformer.t_embedder(NETWORK_TIMES * times, torch.float32))  # (times, hidden_size)
    modulation, expand = block.adaLN_modulation[0], block.expand_from_attn
    gates = (block.pixels_per_patch, 6, 8)  # the attention's is the third
    modulation.weight.view(*gates, -1)[:, 2, rest] = torch.linalg.pinv(conditions) @ (1 - times)
    modulation.bias.view(gates)[:, 2, rest] = 0.0
    expand.weight.view(block.pixels_per_patch, 8, -1)[:, rest] = 0.0
    expand.bias.view(block.pixels_per_patch, 8)[:, rest] = -constant


def _start_bias(bias: torch.Tensor, shape: tuple[int, ...], gate: float) -> None:
    """Open gates (of the attention and of the MLP), so that all parts learn at once."""
    nn.init.zeros_(bias)
    bias.data.view(shape)[..., [2, 5], :] = gate


def _smooth_modulation(patch_size: int, shape: torch.Size) -> torch.Tensor:
    """A weight (pixels * values, width) with which any condition modulates a patch by a parabola over its pixels.

    Each pixel has its own rows, and would otherwise have to learn by itself what its neighbors do.
    """
    y, x = torch.meshgrid(*2 * [torch.linspace(-1, 1, patch_size)], indexing="ij")
    basis = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], -1).flatten(0, 1)  # (pixels, 6)
    mixture = torch.randn(basis.shape[1], shape[0] // basis.shape[0], shape[1]) * 0.5 / shape[1] ** 0.5
    return torch.einsum("pb,bvw->pvw", basis, mixture).reshape(shape)


def make_pid_tokenizer() -> PreTrainedTokenizerFast:
    """The embedded model's words, with a token before every text, as Gemma's tokenizer sets one."""
    backend = make_tokenizer().backend_tokenizer
    start = "<|im_start|>"
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, backend.token_to_id(start))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        padding_side="right",
        model_max_length=2048,
    )


def make_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Gemma2Model:
    """One layer of width 64, never trained: random features tell words and their places apart, which is enough."""
    torch.manual_seed(4)
    config = Gemma2Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        initializer_range=0.1,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Gemma2Model._from_config(config, attn_implementation="eager").eval()


class CaptionEncoder:
    """What the network reads of a caption; each distinct one is encoded once."""

    def __init__(self) -> None:
        self.tokenizer = make_pid_tokenizer()
        self.text_encoder = make_text_encoder(self.tokenizer)
        self.by_caption: dict[str, torch.Tensor] = {}

    def __call__(self, captions: list[str]) -> torch.Tensor:
        """(captions, NUM_TEXT_POSITIONS, TEXT_WIDTH)"""
        components = self.text_encoder, self.tokenizer
        for caption in captions:
            if caption not in self.by_caption:
                (self.by_caption[caption],) = encode_captions(*components, [caption], NUM_TEXT_POSITIONS, INSTRUCTION)
        return torch.stack([self.by_caption[caption] for caption in captions])


# ---------------------------------------------------------------------------------------------------------------------
# Data: pictures of true scenes, made when they are needed
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """What the pictures of a step show: whole scenes of `width` x `height`, or windows of that size in larger ones."""

    width: int
    height: int
    count: int
    is_window: bool = False


# View (count: of each worker): share of the steps in the first and in the second part of the training. Windows are
# cheap and full of edges; only whole scenes have the positions and the attention of the sizes that are asked for.
SECOND_PART = 0.4  # of all steps come before it
VIEW_SHARES: dict[View, tuple[float, float]] = {
    View(64, 64, count=2, is_window=True): (0.85, 0.30),
    View(96, 96, count=1): (0.10, 0.20),
    View(128, 128, count=1): (0.05, 0.42),
    View(128, 192, count=1): (0.0, 0.03),
    View(192, 128, count=1): (0.0, 0.03),
    View(192, 192, count=1): (0.0, 0.02),
}


def sample_pictures(rng: random.Random, view: View) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Training pictures, the same four times larger, (count, height, width, 3) uint8 each, and their captions."""
    small, large, captions = [], [], []
    for _ in range(view.count):
        size = rng.choice(VAE_WINDOW_SIZES) if view.is_window else (view.width, view.height)
        scene = sample_scene(rng, *size)
        left, top = _sample_corner(rng, scene, size, view) if view.is_window else (0, 0)
        small.append(_render_part(scene, size, 1, left, top, view))
        large.append(_render_part(scene, size, SCALE, left, top, view))
        captions.append(training_caption(scene, rng))
    return np.stack(small), np.stack(large), captions


VAE_WINDOW_SIZES = [size for size in VAE_SIZES if max(size) < 256]  # larger ones take long to draw at 4x


def _sample_corner(rng: random.Random, scene: Scene, size: tuple[int, int], view: View) -> tuple[int, int]:
    """Left and top of a window near an object, on the 8 px grid of the latents."""
    obj = rng.choice(scene.objects)
    reach = obj.size * min(size) / 2
    centers = (obj.x * size[0] + rng.uniform(-reach, reach), obj.y * size[1] + rng.uniform(-reach, reach))
    sides = zip(centers, (view.width, view.height), size, strict=True)
    left, top = (min(max(round((center - part / 2) / 8) * 8, 0), whole - part) for center, part, whole in sides)
    return left, top


def _render_part(scene: Scene, size: tuple[int, int], scale: int, left: int, top: int, view: View) -> np.ndarray:
    picture = render(scene, scale * size[0], scale * size[1])
    bottom, right = top + view.height, left + view.width
    return picture[scale * top : scale * bottom, scale * left : scale * right]


def sample_sigmas(count: int) -> torch.Tensor:
    """Noise levels of the latents: a quarter clean, the others uniform."""
    return torch.where(torch.rand(count) < SHARE_OF_CLEAN, 0.0, MAX_SIGMA * torch.rand(count))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def _sample_times(times: tuple[float, ...], shares: tuple[float, ...], count: int) -> torch.Tensor:
    return torch.tensor(times)[torch.multinomial(torch.tensor(shares), count, replacement=True)]


def predict(
    transformer: PiDTransformer2DModel,
    noisy: torch.Tensor,
    times: torch.Tensor,
    captions: torch.Tensor,
    features: LatentFeatures,
    sigma: torch.Tensor,
) -> torch.Tensor:
    """The expected picture behind noisy ones (batch, 3, height, width) at `times` (batch,), 0 to 1."""
    (velocity,) = transformer(noisy, NETWORK_TIMES * times, captions, features, sigma, return_dict=False)
    return noisy - times.view(-1, 1, 1, 1) * velocity


def picture_loss(error: torch.Tensor, is_late: bool) -> torch.Tensor:
    """(batch,) Huber on the pixels and on their differences; later L1 as well, which clears flat areas."""
    differences = (error, error.diff(dim=-1), error.diff(dim=-2))
    loss = sum(_mean_per_row(F.smooth_l1_loss(d, torch.zeros_like(d), beta=0.5, reduction="none")) for d in differences)
    return loss + (0.2 if is_late else 0.02) * sum(_mean_per_row(d.abs()) for d in differences)


def _mean_per_row(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).mean(1)


def _psnr(error: torch.Tensor) -> float:
    return -10 * math.log10(error.detach().square().mean().item() / 4)


def loss_of_pictures(
    transformer: PiDTransformer2DModel,
    pictures: torch.Tensor,
    latents: torch.Tensor,
    captions: torch.Tensor,
    is_late: bool,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of both passes (see above) on true pictures (batch, 3, height, width) and their clean latents.

    The network's velocity is the picture's error over the time, so an error weighs 1 / time: the last step, at the
    smallest time, would learn least otherwise.
    """
    count = len(pictures)
    sigma = sample_sigmas(count)
    features = transformer.encode_latents(torch.lerp(latents, torch.randn_like(latents), sigma.view(-1, 1, 1, 1)))
    condition = captions, features, sigma
    first_times = _sample_times(FIRST_TIMES, FIRST_SHARES, count)
    first = predict(transformer, torch.randn_like(pictures), first_times, *condition)
    later_times = _sample_times(LATER_TIMES, LATER_SHARES, count)
    is_own = (torch.rand(count) < SHARE_OF_OWN).view(-1, 1, 1, 1)
    start = torch.where(is_own, first.detach(), pictures)
    noisy = torch.lerp(start, torch.randn_like(start), later_times.view(-1, 1, 1, 1))
    later = predict(transformer, noisy, later_times, *condition)
    first_error, later_error = first - pictures, later - pictures
    losses = picture_loss(first_error, is_late) / first_times + picture_loss(later_error, is_late) / later_times
    loss = ((1 - sigma).square() * losses).mean()
    return loss, {"loss": loss.item(), "first": _psnr(first_error), "later": _psnr(later_error)}


def make_optimizers(transformer: PiDTransformer2DModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and kernels inside the blocks, AdamW for the rest."""
    matrices = [param for name, param in transformer.named_parameters() if _is_inner(name, param)]
    rest = [param for name, param in transformer.named_parameters() if not _is_inner(name, param)]
    return [
        Muon(matrices, lr=0.01, num_iterations=4),
        torch.optim.AdamW(rest, 2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _is_inner(name: str, param: nn.Parameter) -> bool:
    return param.ndim > 1 and name.startswith(("patch_blocks", "lq_proj.latent_proj")) and "adaLN" not in name


def train(source_dir: Path, work_dir: Path, num_steps: int, max_minutes: float, num_workers: int) -> None:
    latents = LatentPool(source_dir)
    shared = SharedGradients(num_workers, sum(param.numel() for param in make_transformer().parameters()))
    arguments = (source_dir, work_dir, num_steps, max_minutes, latents.mean, latents.std, shared)
    torch.multiprocessing.spawn(run_worker, arguments, nprocs=num_workers)


def run_worker(
    rank: int,
    source_dir: Path,
    work_dir: Path,
    num_steps: int,
    max_minutes: float,
    mean: torch.Tensor,
    std: torch.Tensor,
    shared: SharedGradients,
) -> None:
    start_logging(logging.INFO if rank == 0 else logging.WARNING)
    torch.set_num_threads(1)
    vae = PlanarAutoencoder(AutoencoderKLQwenImage.from_pretrained(source_dir / "vae"))
    encode_caption = CaptionEncoder()
    transformer = make_transformer()
    ema = WeightAverage(transformer.parameters(), decay=0.995)
    trainer = Trainer(transformer, make_optimizers(transformer), ema, work_dir / "pid.pt", 1.0, rank, shared)
    views = list(VIEW_SHARES)

    def loss_of_step(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        part = 0 if step < SECOND_PART * num_steps else 1
        shares = [VIEW_SHARES[view][part] for view in views]
        view = random.Random(f"view {step}").choices(views, shares)[0]  # the same in all workers
        small, large, captions = sample_pictures(random.Random(f"pid {step} {rank}"), view)
        with torch.no_grad():
            means, _ = vae.encode(to_model_range(small))
        latents = (means - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
        pictures = to_model_range(large).contiguous()
        return loss_of_pictures(transformer, pictures, latents, encode_caption(captions), is_late=part == 1)

    trainer.run(num_steps, loss_of_step, cosine_decay(hold=0.3, floor=0.01), max_minutes)


# ---------------------------------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------------------------------


def export(work_dir: Path, output: Path) -> None:
    """Writes the folder that PiDDecoder.from_pretrained loads, with the averaged weights of the last checkpoint.

    The text encoder is stored in float32, because transformers loads a model in the dtype it is stored in.
    """
    state = torch.load(work_dir / "pid.pt", weights_only=True)
    transformer = make_transformer()
    torch._foreach_copy_([param.detach() for param in transformer.parameters()], state["ema"])
    encoder = CaptionEncoder()
    decoder = PiDDecoder(
        transformer.to(torch.bfloat16), PiDScheduler(), encoder.text_encoder, encoder.tokenizer, INSTRUCTION
    )
    decoder.save_pretrained(output)
    logger.info("exported step %d to %s", state["step"], output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "export"])
    parser.add_argument("--source-dir", type=Path, default=Path("runs/tiny-qwen-image"), help="the other training's")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/tiny-pid"), help="where the checkpoint is kept")
    parser.add_argument("--num-steps", type=int, default=7000, help="length of the training")
    parser.add_argument("--num-workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="stop early, leaving a checkpoint")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder the export stage writes")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start_logging(logging.INFO)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "train":
        train(args.source_dir, args.work_dir, args.num_steps, args.max_minutes, args.num_workers)
    else:
        export(args.work_dir, args.output)


if __name__ == "__main__":
    main()
