"""From rewards to training rows: advantages by role, then fixed-shape batches."""

import numpy as np

from sage_jax.config import ROLES
from sage_jax.learn.advantages import RewardRow, flat_groups, normalise
from sage_jax.learn.pack import Packed, TrainRow, pack
from sage_jax.methods.graph import Sample
from sage_jax.methods.rewards import REWARD_SETS


def assign_advantages(samples: list[Sample], config) -> dict[str, float]:
    """Fill in every sample's advantage; returns its statistics by role."""
    kind = config.method.advantage
    apart = REWARD_SETS[config.method.rewards].grounded
    rows = [
        RewardRow(
            id=s.id,
            reward=s.reward,
            length=len(s.completion.tokens),
            role=s.role,
            # Where the Critic's kinds are rewarded on different scales: never one baseline for all.
            part=s.kind if apart and s.role == "critic" else "",
            group=s.group if s.role == "solver" else (s.kind if s.role == "critic" else s.domain),
            valid=not s.masked,
        )
        for s in samples
    ]
    for sample, advantage in zip(samples, normalise(kind, rows), strict=True):
        sample.advantage = float(advantage)
    figures = {}
    for role, (flat, total) in flat_groups(kind, rows).items():
        figures[f"zero_spread/{role}"] = flat / total
    for role in ROLES:
        tokens = [
            np.full(len(s.completion.tokens), s.advantage)
            for s in samples
            if s.role == role and not s.masked
        ]
        if tokens:
            figures[f"adv/{role}_mean"] = float(np.concatenate(tokens).mean())
            figures[f"adv/{role}_std"] = float(np.concatenate(tokens).std())
    return figures


def training_batches(samples: list[Sample], config) -> list[Packed]:
    """Rows of the trained roles, packed for optim.minibatches updates; masked rows stay out.

    Every minibatch holds its share of each role, so that none of them is skewed.
    """
    rows = [
        TrainRow(
            id=s.id,
            role=s.role,
            prompt=s.prompt,
            completion=s.completion.tokens,
            logps=s.completion.logps,
            advantage=s.advantage,
            temperature=s.temperature,
        )
        for s in sorted(samples, key=lambda s: (ROLES.index(s.role), s.id))
        if s.role in config.method.train_roles and not s.masked
    ]
    o = config.optim
    parts = [rows[first :: o.minibatches] for first in range(o.minibatches)]
    # cuDNN has no segments: there each row keeps a sequence to itself.
    share = config.model.attention != "cudnn"
    # Entropy and KL pull at every row; the policy loss at those with an advantage.
    flat = bool(o.entropy_coef or o.kl_coef)
    return [
        pack(part, ROLES, o.buckets, o.micro_rows, share=share, flat=flat) for part in parts if part
    ]
