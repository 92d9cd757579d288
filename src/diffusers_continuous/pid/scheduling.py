"""Two ways from noise to a picture: the few steps of the distilled networks, the solver of the undistilled ones.

Time runs from 1 (noise) to 0 (picture), x_t = (1 - t) x_0 + t * noise, and the network predicts noise - x_0. The
network is given 1000 t. Everything is float32. Knows nothing of networks and captions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor

from ..errors import ConfigError, RequestError

DISTILLED_TIMES = (0.999, 0.866, 0.634, 0.342, 0.0)
ALGORITHMS = ("sde", "ode", "dpmsolver++")
NETWORK_TIMES = 1000


@dataclass
class PiDSchedulerOutput(BaseOutput):
    """The next picture, and what the whole picture is expected to be; both float32."""

    prev_sample: torch.Tensor
    pred_original_sample: torch.Tensor


class PiDScheduler(SchedulerMixin, ConfigMixin):
    """Noise schedule and update rule of the Pixel Diffusion Decoder.

    `algorithm_type="sde"` (distilled networks) predicts the picture and noises it again to the next time; `"ode"` goes
    straight on. Both take their times from `t_list`, at most one step per entry; without a list, times are evenly
    spaced. `"dpmsolver++"` (undistilled networks) is diffusers' second-order multistep solver on a shifted flow
    schedule: `shift` is used as it is, or, with `shift_reference`, grows with the picture as
    shift * sqrt(sqrt(height * width) / shift_reference).

    Attributes after `set_timesteps`: `timesteps`, what the network is given, and `sigmas`, the times with the last 0.
    """

    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(
        self,
        algorithm_type: str = "sde",
        t_list: Sequence[float] | None = DISTILLED_TIMES,
        shift: float = 6.0,
        shift_reference: int | None = None,
    ) -> None:
        if algorithm_type not in ALGORITHMS:
            raise ConfigError(f"algorithm_type={algorithm_type!r} is not known; choose from {list(ALGORITHMS)}")
        if t_list is not None and (len(t_list) < 2 or t_list[-1] != 0 or sorted(t_list, reverse=True) != list(t_list)):
            raise ConfigError(f"t_list must fall to 0 in at least two entries, not {list(t_list)}")
        self.sigmas = torch.zeros(0)
        self.timesteps = torch.zeros(0)
        self.num_inference_steps: int | None = None
        self._solver: DPMSolverMultistepScheduler | None = None

    def __copy__(self) -> PiDScheduler:
        """One that goes its own way from here on; the tensors that steps were made of are shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        if self._solver is not None:
            twin._solver = copy.copy(self._solver)
            twin._solver.model_outputs = list(self._solver.model_outputs)
        return twin

    @property
    def max_steps(self) -> int | None:
        """The most steps that `set_timesteps` takes; None if there is no limit."""
        is_distilled = self.config.algorithm_type != "dpmsolver++" and self.config.t_list is not None
        return len(self.config.t_list) - 1 if is_distilled else None

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: str | torch.device | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> None:
        """Start over with so many steps. `height` and `width` are needed where the shift depends on them.

        Raises:
            RequestError: for less than one step, more than the distilled network knows, or a size that is missing.
        """
        self.check_steps(num_inference_steps)
        self._solver = None
        if self.config.algorithm_type == "dpmsolver++":
            self._solver = _flow_solver(num_inference_steps, self._shift(height, width))
            self.sigmas = self._solver.sigmas
        else:
            self.sigmas = torch.tensor(self._few_times(num_inference_steps), dtype=torch.float32)
        self.timesteps = (self.sigmas[:-1] * NETWORK_TIMES).to(device)
        self.num_inference_steps = num_inference_steps

    def check_steps(self, num_inference_steps: int) -> None:
        """Refuse a number of steps that this schedule does not have.

        Raises:
            RequestError: with the reason.
        """
        if num_inference_steps < 1:
            raise RequestError(f"num_inference_steps must be at least 1, not {num_inference_steps}")
        if self.max_steps is not None and num_inference_steps > self.max_steps:
            raise RequestError(
                f"a distilled network knows the {self.max_steps} times {list(self.config.t_list[:-1])}: "
                f"num_inference_steps={num_inference_steps} would visit some of them twice; take 1 to {self.max_steps}"
            )

    def _few_times(self, steps: int) -> list[float]:
        times = self.config.t_list
        if times is None or steps == 1:  # one step starts at pure noise, not at the list's first time
            return [1 - i / steps for i in range(steps + 1)]
        return [times[round(i * (len(times) - 1) / steps)] for i in range(steps + 1)]  # halves go to the even entry

    def _shift(self, height: int | None, width: int | None) -> float:
        reference = self.config.shift_reference
        if reference is None:
            return float(self.config.shift)
        if height is None or width is None:
            raise RequestError("this schedule depends on the picture's size: pass height and width to set_timesteps")
        return float(self.config.shift * ((height * width) ** 0.5 / reference) ** 0.5)

    def scale_model_input(self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None) -> torch.Tensor:
        """The sample: the network takes it as it is."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        noise: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> PiDSchedulerOutput | tuple[torch.Tensor, torch.Tensor]:
        """One step from `timestep` to the next time.

        Args:
            model_output: predicted noise - picture, any dtype, of the sample's shape.
            timestep: an entry of `timesteps`.
            sample: the noisy picture.
            generator: where "sde" draws the new noise from, in float32; one per row or one for all.
            noise: the new noise itself, for repeating a recorded run.

        Raises:
            RequestError: for a timestep that is not in the schedule, or out of order with "dpmsolver++".
        """
        index = self._index_of(float(timestep))
        now, then = self.sigmas[index].item(), self.sigmas[index + 1].item()
        velocity, sample = model_output.float(), sample.float()
        original = sample - now * velocity
        if self._solver is not None:
            previous = self._multistep(velocity, index, sample)
        elif then == 0:
            previous = original
        elif self.config.algorithm_type == "ode":
            previous = sample + (then - now) * velocity
        else:
            if noise is None:
                noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)
            previous = (1 - then) * original + then * noise.float()
        if not return_dict:
            return previous, original
        return PiDSchedulerOutput(prev_sample=previous, pred_original_sample=original)

    def _index_of(self, timestep: float) -> int:
        if self.num_inference_steps is None:
            raise RequestError("call set_timesteps first")
        distances = (self.sigmas[:-1] * NETWORK_TIMES - timestep).abs()
        index = int(distances.argmin())
        if distances[index] > 1e-2:
            raise RequestError(f"timestep {timestep} is not one of {(self.sigmas[:-1] * NETWORK_TIMES).tolist()}")
        return index

    def _multistep(self, velocity: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        assert self._solver is not None
        expected = self._solver.step_index or 0
        if index != expected:
            raise RequestError(f"the multistep solver is at step {expected}, not {index}: run the steps in order")
        return self._solver.step(velocity, self._solver.timesteps[index], sample, return_dict=False)[0]


def _flow_solver(steps: int, shift: float) -> DPMSolverMultistepScheduler:
    """Diffusers' solver does exactly what is needed, but for its integer timesteps, which we do not use."""
    solver = DPMSolverMultistepScheduler(
        num_train_timesteps=NETWORK_TIMES,
        solver_order=2,
        algorithm_type="dpmsolver++",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        final_sigmas_type="zero",
    )
    solver.set_timesteps(steps)
    solver.set_begin_index(0)  # two float times can share an integer one: never look steps up
    return solver
