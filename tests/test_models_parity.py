"""Our ODE plan against the pipelines that people know: same noise, schedule, guidance and prompt."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from helpers_models import NEGATIVE, PROMPTS, ROWS, first_frames, guided, image, no_network, saved

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.options import LoadOptions
from branchgrpo.models.packing import pack, unpack
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Guidance, Prompt
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import ODE

STEPS = 4
RELATIVE = 1e-5  # of the largest latent: float32 rounding (6e-8) through a few layers and STEPS calls, with room


@dataclass(frozen=True)
class Case:
    """One pipeline call; a row a backbone and setting."""

    kind: str
    size: tuple[int, int, int]  # frames, height, width in pixels
    guidance: Guidance
    call: dict[str, object]  # the pipeline's words for the guidance
    options: dict[str, float] = field(default_factory=dict)
    own_schedule: bool = False
    prompt: int = 0

    def __str__(self) -> str:
        frames, height, width = self.size
        own = "-own" if self.own_schedule else ""
        return f"{self.kind}-{frames}x{height}x{width}-{self.guidance.kind}{self.guidance.scale:g}{own}"


def embedded(scale: float) -> Guidance:
    return Guidance("embedded", scale)


FLUX_TRUE = {"guidance_scale": 2.0, "true_cfg_scale": 3.0, "negative_prompt": NEGATIVE}
SD3 = {"guidance_scale": 7.0, "negative_prompt": NEGATIVE}
QWEN = {"true_cfg_scale": 4.0, "negative_prompt": NEGATIVE}
WAN = {"guidance_scale": 5.0, "negative_prompt": NEGATIVE}
QUICK = [
    *(Case(kind, row.size, row.guidance, row.call) for kind, row in ROWS.items()),
    Case("flux", (1, 32, 16), guided(3.0), FLUX_TRUE, {"embedded_scale": 2.0}, prompt=1),
    Case("sd3.5", (1, 40, 16), guided(4.5), {**SD3, "guidance_scale": 4.5}, own_schedule=True, prompt=1),
    Case("qwen", (1, 32, 16), Guidance(), {"true_cfg_scale": 1.0}, own_schedule=True, prompt=1),
    Case("wan2.2", (1, 32, 16), guided(5.0), {**WAN, "guidance_scale_2": 2.0}, {"low_noise_scale": 2.0}),
    Case("wan2.2-5b", (5, 32, 16), guided(3.0), {**WAN, "guidance_scale": 3.0}, prompt=1),
]
THOROUGH = [
    *(Case("flux", (1, *hw), embedded(w), {"guidance_scale": w}, own_schedule=own)
      for hw in ((64, 16), (24, 40)) for w in (1.0, 7.0) for own in (False, True)),
    *(Case("flux-schnell", (1, 48, 32), guided(w), {"true_cfg_scale": w, "negative_prompt": NEGATIVE})
      for w in (2.0, 6.0)),
    *(Case(kind, (1, *hw), guided(w), {**SD3, "guidance_scale": w}, own_schedule=own)
      for kind in ("sd3", "sd3.5", "sd3-no-t5") for hw in ((48, 16), (24, 40))
      for w in (2.0, 9.0) for own in (False, True)),
    Case("sd3", (1, 16, 16), Guidance(), {"guidance_scale": 1.0}),
    *(Case("qwen", (1, *hw), guided(w), {**QWEN, "true_cfg_scale": w}, own_schedule=own, prompt=p)
      for hw in ((64, 16), (24, 40)) for w in (1.5, 6.0) for own in (False, True) for p in (0, 1)),
    *(Case(kind, size, guided(w), {**WAN, "guidance_scale": w})
      for kind in ("wan2.1", "wan2.2", "wan2.2-5b", "wan2.1-i2v", "wan2.2-i2v", "wan2.2-5b-i2v")
      for size in ((1, 16, 16), (9, 32, 48), (13, 48, 16)) for w in (1.5, 6.0)),
    *(Case(kind, (5, 16, 32), Guidance(), {"guidance_scale": 1.0})
      for kind in ("wan2.1", "wan2.2", "wan2.2-5b", "wan2.1-i2v", "wan2.2-i2v", "wan2.2-5b-i2v")),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def ours(model: Backbone, case: Case, sigmas: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and final latent of the ODE plan with K = 1, by the reference rollout."""
    shape = model.latent_shape(case.size[1], case.size[2], case.size[0])
    text = PROMPTS[case.prompt]
    condition = model.encode([text], negative=NEGATIVE, **first_frames(case.kind, case.size, 1))
    steps = len(sigmas) - 1
    plan = Plan(sigmas, (ODE,) * steps, (1,) * steps, (1.0,) * steps)
    sampling = Sampling(KeyedNoise(7), shape, torch.float32, torch.float32)
    tree = rollout(plan, model, Prompt(3, text), condition, sampling)[0]
    return tree.root.state.unsqueeze(0), tree.root.leaves()[0].state.unsqueeze(0)


def theirs(pipe: DiffusionPipeline, case: Case, noise: torch.Tensor, sigmas: tuple[float, ...]) -> torch.Tensor:
    """Final latent of the pipeline from that noise; its scheduler must have used our schedule."""
    frames, height, width = case.size
    takes = inspect.signature(pipe.__call__).parameters
    packed = hasattr(pipe, "_pack_latents")
    arguments: dict[str, object] = {"height": height, "width": width, "output_type": "latent", **case.call}
    if "num_frames" in takes:
        arguments["num_frames"] = frames
    if "sigmas" in takes and not case.own_schedule:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        arguments["sigmas"] = list(sigmas[:-1])
    if ROWS[case.kind].image:
        arguments["image"] = image(0)
    latents = pipe(
        prompt=PROMPTS[case.prompt],
        num_inference_steps=STEPS,
        latents=pack(noise) if packed else noise,
        **arguments,
    )[0]
    assert torch.equal(pipe.scheduler.sigmas.cpu(), torch.tensor(sigmas)), "the pipeline used another schedule"
    return unpack(latents, *noise.shape[-2:]) if packed else latents


def check_parity(case: Case, root: Path) -> None:
    folder = saved(case.kind, root)
    with no_network():
        model = load_backbone(folder, guidance=case.guidance, options=LoadOptions(**case.options))
        shape = model.latent_shape(case.size[1], case.size[2], case.size[0])
        own = case.own_schedule or "sigmas" not in inspect.signature(model.pipeline_class.__call__).parameters
        sigmas = model.schedule(STEPS, shape) if own else shifted_schedule(STEPS)
        noise, found = ours(model, case, sigmas)
        pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent(case.kind))
        pipe.set_progress_bar_config(disable=True)
        wanted = theirs(pipe, case, noise, sigmas)
    assert found.shape == wanted.shape
    assert (noise - wanted).abs().max() > 0.1  # the network did something
    assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


def absent(kind: str) -> dict[str, None]:
    """Components that a pipeline is told to do without."""
    return {"text_encoder_3": None, "tokenizer_3": None} if kind == "sd3-no-t5" else {}


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ode_plan_gives_the_latents_of_the_pipeline(case: Case, root: Path) -> None:
    check_parity(case, root)


@pytest.mark.slow
@pytest.mark.parametrize("case", THOROUGH, ids=str)
def test_ode_plan_gives_the_latents_of_the_pipeline_at_many_settings(case: Case, root: Path) -> None:
    check_parity(case, root)


@pytest.mark.parametrize("kind", ["flux", "sd3", "qwen", "wan2.1"])
def test_decoding_gives_the_samples_of_the_pipeline(kind: str, root: Path) -> None:
    """Also chunk by chunk; the pipeline's samples are in [0, 1], videos with frames before channels."""
    folder, frames = saved(kind, root), 5 if kind.startswith("wan") else 1
    model = load_backbone(folder, guidance=Guidance("embedded", 3.5) if kind == "flux" else Guidance())
    shape = model.latent_shape(32, 16, frames)
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    size: dict[str, object] = {"height": 32, "width": 16, "num_inference_steps": 2}
    size |= {"num_frames": frames} if frames > 1 else {}
    start = {"latents": pack(noise) if kind in ("flux", "qwen") else noise}
    name = "true_cfg_scale" if kind == "qwen" else "guidance_scale"
    size[name] = 3.5 if kind == "flux" else 1.0
    final = pipe(PROMPTS[0], output_type="latent", **start, **size)[0]
    wanted = pipe(PROMPTS[0], output_type="pt", **start, **size)[0]
    latents = unpack(final, *shape[-2:]) if kind in ("flux", "qwen") else final
    found = model.decode(torch.cat([latents, noise, latents]))
    assert found.shape == (3, *wanted.shape[1:])
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert found.std() > 1e-3  # an image, not a constant
    # rounding of a float32 convolution stack, batch of three against one
    torch.testing.assert_close(found[[0, 2]], wanted.expand(2, *wanted.shape[1:]), rtol=0, atol=1e-5)
