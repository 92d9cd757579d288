"""One transformer over several processes: rank 0 decides and takes everybody's steps, the others do their share of it.

Only the packed forward is shared. Rank 0 has the engine; before a forward it tells the other ranks what goes into it,
and they run the same forward on their shards of the weights. Text encoding, noise-scheduler steps and decoding happen
on rank 0 alone. Diffusers shards the weights by the transformer's own tensor-parallel plan; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import logging
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel, TensorParallelConfig

from ..attention import AttentionBackend
from ..errors import ConfigError, EngineStoppedError, UnsupportedModelError
from .interface import BatchLayout
from .qwen_image_transformer import Packed, install_packed_forward, uninstall_packed_forward

logger = logging.getLogger(__name__)

# How long a rank waits for the next forward: for as long as nobody asks for a picture. A rank that dies closes its
# connections, which the others see at once.
IDLE_TIMEOUT = datetime.timedelta(days=365)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """What rank 0 tells of a forward: the shapes of what is broadcast, and of a new batch its layout and texts."""

    latents_shape: torch.Size
    timestep_shape: torch.Size
    dtype: torch.dtype
    layout: BatchLayout | None = None
    prompt_embeds: torch.Tensor | None = None


def check_parallelism(transformer: QwenImageTransformer2DModel, parallel: Mapping[str, int] | None) -> None:
    """Refuse a transformer that is spread over processes in a way that the engine does not know of.

    Raises:
        UnsupportedModelError: says what to do instead.
    """
    found = transformer._parallel_config
    if found is None:
        return
    if found.context_parallel_config is not None:
        raise UnsupportedModelError(_NO_CONTEXT_PARALLEL)
    num_ranks = found.tensor_parallel_config._tp_degree
    if parallel is None or parallel.get("tp") != num_ranks:
        raise UnsupportedModelError(
            f"the transformer's weights are shared out among {num_ranks} processes: say "
            f'ContinuousBatchingConfig(parallel={{"tp": {num_ranks}}}), so that they take the same steps'
        )


_NO_CONTEXT_PARALLEL = (
    "context parallelism cannot run packed rows: diffusers' plan splits (batch, tokens, channels) at the first block "
    "and gathers them after the last, and a packed batch is one sequence of rows of any length; use "
    'ContinuousBatchingConfig(parallel={"tp": n}), or one engine on each device'
)


class RankGroup:
    """This process among those that share the transformer; sharding its weights waits for all of them.

    Args:
        transformer: Its weights are sharded in place, unless `from_pretrained(parallel_config=...)` did that.
        parallel: The config's option.

    Raises:
        ConfigError: without a process group of that many ranks.
        UnsupportedModelError: for context parallelism, without accelerators, and for what diffusers cannot shard.
    """

    def __init__(self, transformer: QwenImageTransformer2DModel, parallel: Mapping[str, int]) -> None:
        if "cp" in parallel:
            raise UnsupportedModelError(_NO_CONTEXT_PARALLEL)
        num_ranks = parallel["tp"]
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != num_ranks:
            found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else "none"
            raise ConfigError(
                f"parallel={dict(parallel)!r} needs a process group of {num_ranks} ranks and there is {found}: start "
                f"the program with `torchrun --nproc-per-node {num_ranks}` and call "
                "torch.distributed.init_process_group() in it"
            )
        check_parallelism(transformer, parallel)
        if transformer._parallel_config is None:
            if torch.accelerator.device_count() == 0:
                raise UnsupportedModelError(
                    f"parallel={dict(parallel)!r}: diffusers shares weights out among accelerators; there is none here"
                )
            try:
                transformer.enable_parallelism(config=TensorParallelConfig(tp_degree=num_ranks))
            except ValueError as error:
                raise UnsupportedModelError(f"parallel={dict(parallel)!r}: {error}") from error
        config = transformer._parallel_config.tensor_parallel_config
        self._group = config._mesh.get_group()
        self._device = transformer.device
        # A group of its own, on the host: a device's collectives give up after minutes without traffic.
        self._control = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._layout: BatchLayout | None = None
        self._is_broken = self._is_closed = False

    @staticmethod
    def is_leader() -> bool:
        """True in the process that has the engine."""
        return dist.get_rank() == 0

    # ------------------------------------------------------------------ rank 0

    @contextlib.contextmanager
    def leading(
        self, latents: torch.Tensor, prompt_embeds: torch.Tensor, timestep: torch.Tensor, layout: BatchLayout
    ) -> Iterator[None]:
        """Let the other ranks run, with these inputs, the forward that is the body.

        Raises:
            EngineStoppedError: when it failed here: the ranks may no longer stand at the same place, so nothing that
                they would compute together could be trusted.
        """
        if self._is_broken or self._is_closed:
            raise EngineStoppedError("the ranks that share the transformer do not work together any more")
        is_new = layout is not self._layout
        told = _Forward(
            latents.shape,
            timestep.shape,
            latents.dtype,
            # What was worked out from the layout is each rank's own.
            dataclasses.replace(layout, kept={}, joint=dataclasses.replace(layout.joint, kept={})) if is_new else None,
            prompt_embeds if is_new else None,
        )
        try:
            self._tell(told)
            self._layout = layout
            for tensor in (latents, timestep):
                dist.broadcast(tensor.contiguous(), src=0, group=self._group)
            yield
        except Exception as error:
            self._is_broken = True
            raise EngineStoppedError(f"a forward that {dist.get_world_size()} ranks share failed: {error}") from error

    def forget(self) -> None:
        """Let go of the last batch."""
        self._layout = None

    def close(self) -> None:
        """Rank 0 is done: the others stop waiting. They are not told after a failure, since they may not listen."""
        if not self._is_closed and not self._is_broken:
            self._tell(None)
        self._is_closed = True
        self._layout = None

    def _tell(self, told: _Forward | None) -> None:
        buffer = io.BytesIO()
        torch.save(told, buffer)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._control)
        dist.broadcast(data, src=0, group=self._control)

    # ------------------------------------------------------------------ the others

    def follow(self, transformer: QwenImageTransformer2DModel, attention: AttentionBackend) -> None:
        """Run this rank's part of every forward of rank 0, until its engine has stopped.

        Raises:
            EngineStoppedError: when rank 0 went away without saying so, or a forward failed.
        """
        layout = prompt_embeds = None
        try:
            while (told := self._hear()) is not None:
                if told.layout is not None:
                    layout, prompt_embeds = told.layout, told.prompt_embeds
                latents, timestep = (
                    torch.empty(shape, dtype=told.dtype, device=self._device)
                    for shape in (told.latents_shape, told.timestep_shape)
                )
                for tensor in (latents, timestep):
                    dist.broadcast(tensor, src=0, group=self._group)
                assert layout is not None
                transformer(
                    hidden_states=latents,
                    encoder_hidden_states=prompt_embeds,
                    timestep=timestep,
                    packed=Packed(layout, attention),
                )
        except Exception as error:
            reason = f"rank {dist.get_rank()} cannot follow rank 0 any more: {error}"
            raise EngineStoppedError(reason) from error

    def _hear(self) -> _Forward | None:
        length = torch.empty(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        # From rank 0 of our own process group, which runs the same program.
        told: _Forward | None = torch.load(
            io.BytesIO(data.numpy().tobytes()), map_location=self._device, weights_only=False
        )
        return told


def join(transformer: QwenImageTransformer2DModel, parallel: Mapping[str, int] | None) -> RankGroup | None:
    """Rank 0's end of the processes that `parallel` asks for; None when the transformer runs in this one alone.

    Raises:
        ConfigError: on another rank, which has no engine.
    """
    if parallel is None:
        check_parallelism(transformer, None)
        return None
    if dist.is_available() and dist.is_initialized() and not RankGroup.is_leader():
        raise ConfigError(
            f"rank {dist.get_rank()} has no engine of its own with parallel={dict(parallel)!r}: call "
            "pipe.follow_continuous_batching(...) there, with the same config"
        )
    return RankGroup(transformer, parallel)


def follow(
    transformer: QwenImageTransformer2DModel, attention: AttentionBackend, parallel: Mapping[str, int] | None
) -> None:
    """On every rank but 0: shard the transformer with the others and run this rank's part until the engine stops.

    Raises:
        ConfigError: on rank 0, and without `parallel`.
        UnsupportedModelError: for what cannot be sharded.
        EngineStoppedError: when rank 0 went away without saying so, or a forward failed.
    """
    if parallel is None:
        raise ConfigError('only a config with parallel={"tp": n} has ranks that follow')
    if dist.is_available() and dist.is_initialized() and RankGroup.is_leader():
        raise ConfigError("rank 0 has the engine, which the other ranks follow")
    group = RankGroup(transformer, parallel)
    install_packed_forward(transformer, group)
    try:
        with torch.no_grad():
            group.follow(transformer, attention)
    finally:
        uninstall_packed_forward(transformer, group)
