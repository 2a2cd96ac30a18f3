"""The `learner` section: which algorithm trains the policy, and with what settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from guerdon.config.build import Checked
from guerdon.config.limits import (
    Fraction,
    LayerWidth,
    NameOrPlugin,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_encoder_name,
)
from guerdon.core.plugins import load_plugins

AGENT_PLUGINS = "guerdon.agents"
"""The entry-point group of agents."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Checked):
    """`learner.network`: policy and value networks."""

    hidden: tuple[LayerWidth, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Between the layers."""
    layer_norm: bool = False
    """Layer norm in the hidden layers; RLPD wants it in its critics."""
    image_features: LayerWidth = 128
    """Features that the encoder makes of the cameras."""
    encoder: str | None = None
    """`hf:PATH` looks at images with a frozen encoder in the Hugging Face layout, such as the reward model's
    (`reward.model.encoder`), in place of a small CNN that is trained (extra `hf`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder is not None:
            check_encoder_name("learner.network.encoder", self.encoder)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(Checked):
    """`learner.ppo`: proximal policy optimisation (Schulman et al., 2017)."""

    num_steps: PositiveInt = 64
    """Steps of each environment in a rollout."""
    gamma: Fraction = 0.99
    """Discount."""
    gae_lambda: Fraction = 0.95
    """Of generalised advantage estimation."""
    lr: PositiveFloat = 3e-4
    """Learning rate of Adam."""
    anneal_lr: bool = False
    """Let it fall to zero in a straight line over the run."""
    update_epochs: PositiveInt = 4
    """Passes over a rollout."""
    minibatch_size: PositiveInt = 256
    """Transitions in a gradient step."""
    clip_range: PositiveFloat = 0.2
    """How far the probability ratio may move."""
    value_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: PositiveFloat = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: PositiveFloat | None = None
    """Stop the passes over a rollout at this divergence; null never stops early."""
    normalize_advantage: bool = True
    """Per minibatch."""
    normalize_obs: bool = False
    """Scale states by running statistics, which are saved with the policy."""
    initial_log_std: float = 0.0
    """Of a Gaussian policy."""
    reference_coef: NonNegativeFloat = 0.0
    """Weight of a pull back to the cloned policy: far from it a reward model is easier to fool."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(Checked):
    """What all agents that learn from a replay buffer have; the defaults are those of SAC and TD3."""

    gamma: Fraction = 0.99
    """Discount."""
    batch_size: PositiveInt = 256
    """Transitions in a gradient step."""
    buffer_size: PositiveInt = 500_000
    """Transitions that the replay buffer holds."""
    learning_starts: NonNegativeInt = 1_000
    """Environment steps before the first update; until then actions are random."""
    updates_per_step: PositiveFloat = 1.0
    """Updates for each environment step (update-to-data ratio)."""


@dataclass(frozen=True, kw_only=True)
class PriorConfig(Checked):
    """Demonstrations that are sampled beside the replay buffer, as RLPD does (Ball et al., 2023)."""

    prior_data: str | None = None
    """A data set of demonstrations that is sampled beside the buffer; its states and actions must fit."""
    prior_ratio: Fraction = 0.5
    """Share of each batch that comes from it."""
    interventions_size: PositiveInt = 20_000
    """Steps in which a person took over that are kept; they are drawn with the demonstrations."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(OffPolicyConfig, PriorConfig):
    """What SAC and TD3 have in common."""

    tau: Fraction = 0.005
    """How fast target networks follow."""
    actor_lr: PositiveFloat = 3e-4
    """Learning rate of the policy."""
    critic_lr: PositiveFloat = 3e-4
    """Learning rate of the critics."""
    image_shift: NonNegativeInt = 4
    """Images are shifted at random by up to so many pixels."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(ActorCriticConfig):
    """`learner.sac`: soft actor-critic (Haarnoja et al. 2018) with the options of RLPD (Ball et al. 2023)."""

    alpha_lr: PositiveFloat = 3e-4
    """Learning rate of the temperature."""
    initial_alpha: PositiveFloat = 1.0
    """The temperature to start with."""
    learn_alpha: bool = True
    """Adjust the temperature to the target entropy."""
    target_entropy: float | None = None
    """Null: minus the number of action dimensions."""
    entropy_in_backup: bool = True
    """Count the entropy in the critics' targets."""
    num_critics: PositiveInt = 2
    """Critics in the ensemble."""
    num_min_critics: PositiveInt = 2
    """A random subset of so many gives the target's minimum."""
    actor_every: PositiveInt = 1
    """The policy is updated at every so many updates of the critics."""
    bc_coef: NonNegativeFloat = 0.0
    """Weight of a pull of the policy towards what was demonstrated, ..."""
    bc_coef_end: NonNegativeFloat | None = None
    """... the weight to which it changes in a straight line; null: it stays, ..."""
    bc_decay_updates: PositiveInt = 10_000
    """... and over how many updates, from the policy's first one on."""
    bc_towards: Literal["demonstrations", "cloned_policy"] = "demonstrations"
    """Their actions, in their rows of a batch, or what the policy of `warm_start` would do, in all rows."""
    bc_scaled: bool = False
    """Multiply the pull by the mean size of the values, so that it does not fade as they grow."""
    num_critic_only_updates: NonNegativeInt = 0
    """When learning starts, so many updates are done at once, of the critics alone."""
    initial_log_std: float = 0.0
    """Log deviation of the actions, before squashing, at first; low for a cloned policy."""
    actor_ema: Fraction = 0.0
    """What a running mean of the policy's weights keeps in an update; it acts in evaluations. 0: none."""


@dataclass(frozen=True, kw_only=True)
class TD3Config(ActorCriticConfig):
    """`learner.td3`: twin delayed deep deterministic policy gradient (Fujimoto et al., 2018)."""

    exploration_noise: NonNegativeFloat = 0.1
    """Deviation of the noise on actions while collecting, as a share of half their range."""
    policy_noise: NonNegativeFloat = 0.2
    """Deviation of the noise on the next actions in targets (target policy smoothing), in the same unit."""
    noise_clip: NonNegativeFloat = 0.5
    """Limit of that noise."""
    policy_delay: PositiveInt = 2
    """The policy and all targets are updated at every so many updates of the critics."""


@dataclass(frozen=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """`learner.dqn`: deep Q-learning with double targets and n-step returns."""

    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    batch_size: PositiveInt = 128
    buffer_size: PositiveInt = 100_000
    updates_per_step: PositiveFloat = 0.25
    target_interval: PositiveInt = 500
    """Updates between copies to the target network."""
    num_n_steps: PositiveInt = 1
    """Rewards that are summed before bootstrapping."""
    double: bool = True
    """Choose the next action by the online network, value it by the target network."""
    epsilon_start: Fraction = 1.0
    """Share of random actions at first ..."""
    epsilon_end: Fraction = 0.05
    """... and at last."""
    epsilon_fraction: Fraction = 0.2
    """Share of the run over which it falls."""


@dataclass(frozen=True, kw_only=True)
class BCConfig(Checked):
    """`learner.warm_start`: behaviour cloning of demonstrations before training."""

    data: str | None = None
    """A data set whose successful episodes are imitated; null starts from scratch."""
    epochs: PositiveInt = 50
    """Passes over the demonstrations."""
    batch_size: PositiveInt = 256
    """Transitions in a gradient step."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    anneal_lr: bool = False
    """Let it fall to zero in a straight line."""
    num_episodes: PositiveInt | None = None
    """Imitate so many of its successful episodes, the first ones; null: all."""
    intended: bool = False
    """Imitate what a scripted demonstrator meant to do, not what noise made of it."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """`learner`: how the policy is trained."""

    algorithm: Annotated[str, NameOrPlugin(("ppo", "sac", "td3", "dqn"), AGENT_PLUGINS)] = "ppo"
    """SAC and TD3 take continuous actions, DQN discrete ones, PPO both; or an agent of a plugin."""
    total_steps: PositiveInt = 200_000
    """Environment steps of the whole run, all environments together."""
    eval_interval: PositiveInt = 20_000
    """Environment steps between evaluations."""
    eval_episodes: PositiveInt = 50
    """Episodes of an evaluation."""
    save_interval: PositiveInt = 50_000
    """Environment steps between checkpoints."""
    save_best: bool = False
    """Also keep the policy with the highest mean return of an evaluation, in `checkpoints/best`."""
    stop_return: float | None = None
    """The run ends when the mean return of an evaluation reaches it."""
    iteration_steps: PositiveInt = 512
    """Off-policy: environment steps, all environments together, after which metrics are logged and a reward
    model that learns beside the policy learns from them."""
    device: str = "auto"
    """Where the networks are trained, such as `cpu` or `cuda:1`; `auto`: on a GPU where there is one."""
    num_threads: PositiveInt | None = None
    """Threads of torch; null leaves it as it is."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sac: SACConfig = field(default_factory=SACConfig)
    td3: TD3Config = field(default_factory=TD3Config)
    dqn: DQNConfig = field(default_factory=DQNConfig)
    warm_start: BCConfig = field(default_factory=BCConfig)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of an agent of a plugin that has settings of its own."""

    @property
    def section(self) -> Any:
        """The settings of the agent that `algorithm` names."""
        builtin = {"ppo": self.ppo, "sac": self.sac, "td3": self.td3, "dqn": self.dqn}
        if self.algorithm in builtin:
            return builtin[self.algorithm]
        return load_plugins(AGENT_PLUGINS)[self.algorithm].load().settings(self)
