"""A configuration made concrete: method, backbone, noise source and dtypes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from branchgrpo.conformance.audit.config import CONFIG_LIMIT, AuditConfig, config_of, read_document
from branchgrpo.conformance.audit.training_run import audit_of_run, is_training, run_backbone
from branchgrpo.conformance.case import Backbone, Case
from branchgrpo.conformance.codec import decode_plan
from branchgrpo.conformance.record_io import read_json
from branchgrpo.conformance.subjects import Distance, Network, condition_for
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.reference.errors import BranchGRPOError, InputError
from branchgrpo.reference.method import Method
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import NoiseSource, Prompt
from branchgrpo.reference.types import Reduction
from branchgrpo.training.audit_gate import Identity, identity_of
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.config.schema import TrainConfig

MEAN, TAU = 0.7, 0.5
"""The Gaussian data of the oracle's studies."""


class BackboneError(InputError):
    """A backbone that cannot be loaded: the configuration is wrong, not the implementation."""


@dataclass(frozen=True)
class Setting:
    """What a configuration stands for; models are made when they are asked for.

    Attributes:
        config: the configuration.
        method: preset, or its options with a plan of one's own.
        run: the training run that is audited; None for an audit's own table.
    """

    config: AuditConfig
    method: Method
    run: TrainConfig | None = None

    @property
    def identity(self) -> Identity:
        """What is audited, as the gate of a run compares it."""
        if self.run is not None:
            return identity_of(self.run)
        config = self.config
        dtypes = (config.dtype, config.dtype, config.storage_dtype)
        return Identity(self.method, config.backbone, {}, None, *dtypes, config.noise)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the arithmetic."""
        return named_dtype(self.config.dtype)

    @property
    def storage(self) -> torch.dtype:
        """Dtype of stored states."""
        return named_dtype(self.config.storage_dtype)

    def plan(self) -> Plan:
        """The plan of the iteration; of a plan family its first member."""
        found = self.method.plan_at(self.config.iteration, self.config.seed)
        return found if isinstance(found, Plan) else found.member(found.ks[0], found.granularities[0])

    def noise(self, seed: int | None = None) -> NoiseSource:
        """The run's noise source."""
        own = self.config.seed if seed is None else seed
        return KeyedNoise(own) if self.config.noise == "keyed" else PhiloxNoise(own)

    def case(self, device: torch.device, training: bool) -> Case:
        """The run's rollout and first update as a case of conformance."""
        try:
            made = (
                backbone(self.config, self.dtype, device)
                if self.run is None
                else run_backbone(self.run, self.config.prompts, device)
            )
        except (BranchGRPOError, OSError, ImportError) as error:
            raise BackboneError("audit.backbone", self.config.backbone, f"loadable ({error})") from error
        return Case(
            replace(self.method, objective=replace(self.method.objective, kl=0.0)),
            (Distance(0.3),),
            prompts=len(made.prompts),
            latent=(1, 8, 8) if self.config.backbone == "digits" else self.config.latent,
            dtype=self.dtype,
            storage=self.storage,
            iteration=self.config.iteration,
            seed=self.config.seed,
            training=training,
            device=device,
            backbone=made,
        )


def named_dtype(name: str) -> torch.dtype:
    """A torch dtype by name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def make_setting(config: AuditConfig) -> Setting:
    """An audit's own table made concrete: look the method up, and read the plan if there is one.

    Raises:
        InputError, PlanError: a plan file that is none.
    """
    method = preset(config.preset)
    if config.plan:
        method = replace(method, name=Path(config.plan).stem, source=config.plan, sampler=read_plan(Path(config.plan)))
    if config.log_prob:
        method = replace(method, log_prob=Reduction(config.log_prob))
    return Setting(config, method)


def read_setting(path: Path) -> Setting:
    """The setting of a TOML file: its table ``[audit]``, or without one the training run that it configures.

    Raises:
        InputError, OptionError: a file that is neither, or an option that is not legal.
    """
    document = read_document(path)
    if not is_training(document):
        return make_setting(config_of(path, document))
    run = read_config(path)
    return Setting(audit_of_run(run), build_method(run.method), run)


def read_plan(path: Path) -> Plan:
    """A plan from JSON: the object that a trace's record holds under ``plan``, by itself or under that key."""
    if path.is_file() and path.stat().st_size > CONFIG_LIMIT:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {CONFIG_LIMIT} bytes")
    data = read_json(path)
    return decode_plan(data["plan"] if isinstance(data, dict) and set(data) == {"plan"} else data)


def numbered_prompts(count: int) -> tuple[Prompt, ...]:
    """Prompts with the ids 1, 2 and so on."""
    return tuple(Prompt(i + 1, f"prompt {i + 1}") for i in range(count))


def backbone(config: AuditConfig, dtype: torch.dtype, device: torch.device) -> Backbone:
    """The velocity of the run, with prompts, and conditions on a device."""
    prompts = numbered_prompts(config.prompts)
    if config.backbone == "gaussian":
        return Backbone(ExactGaussian(MEAN, TAU), prompts, condition_for(prompts, dtype, device))
    if config.backbone == "network":
        return Backbone(Network(config.elements, dtype=dtype), prompts, condition_for(prompts, dtype, device))
    if config.backbone == "digits":
        from branchgrpo.training.digits import digit_condition, digit_prompts, pretrained_generator

        own = digit_prompts()[: config.prompts]
        return Backbone(pretrained_generator().to(dtype), own, digit_condition(own, device))
    from branchgrpo.models.auto import load_backbone

    model = load_backbone(config.backbone, dtype=dtype, device=device)
    return Backbone(model, prompts, model.encode([prompt.text for prompt in prompts]))


def described(setting: Setting) -> dict[str, object]:
    """The configuration as JSON, for keys and reports."""
    config = setting.config
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return json.loads(json.dumps(values)) | {"method": setting.method.name}  # type: ignore[no-any-return]
