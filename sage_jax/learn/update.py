"""One optimizer update: micro-batches accumulated on device, then one sharded Optax step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sage_jax.core.mesh import Layout, put
from sage_jax.learn.objective import Metrics, micro_objective
from sage_jax.learn.optimizer import UpdateSettings
from sage_jax.learn.pack import MicroBatch, Packed
from sage_jax.learn.score import token_logps
from sage_jax.models import lora
from sage_jax.models.qwen import QwenConfig

Params = Any


class TrainState(NamedTuple):
    """Trained params, optimizer state, updates applied, updates skipped, and what stays as it is.

    All weights are trained: `ref_params` holds the reference if KL is on. An adapter is trained:
    `frozen` holds the base under it, which without the adapter is the reference.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    ref_params: Params | None = None
    frozen: Params | None = None


class Accumulator(NamedTuple):
    """Running gradient (float32, like params), sums and maxima over the micro-batches so far.

    That of an adapter is with respect to the scaled one, which is what the layers are given.
    """

    grads: Params
    sums: Metrics
    maxima: Metrics


def init_state(
    params: Params,
    tx: optax.GradientTransformation,
    *,
    reference: bool = False,
    frozen: Params | None = None,
) -> TrainState:
    """State at step 0, placed like `params`; with `reference` a frozen copy of them for the KL.

    With `frozen` (a base of any dtype, kept as it is) `params` are an adapter on it. The state
    takes `params` over: the first update donates their buffers. ValueError unless all of them are
    float32, in which small updates are not rounded away.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is {leaf.dtype}; master params must be float32 "
                "(optim.dtype sets the dtype of the matrix products)"
            )
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())

    def place(leaf: jax.Array) -> jax.Array:
        # Moments are made like their params; left where they are made, counters would move
        # with the first update and have the second one compiled again.
        return put(leaf, sharding) if leaf.ndim == 0 else leaf

    return TrainState(
        params=params,
        opt_state=jax.tree.map(place, tx.init(params)),
        step=place(jnp.zeros((), jnp.int32)),
        skipped=place(jnp.zeros((), jnp.int32)),
        ref_params=jax.tree.map(jnp.copy, params) if reference and frozen is None else None,
        frozen=frozen,
    )


class Update:
    """The jitted programs of an update, for one model, one set of settings and one placement.

    `accumulate(state, acc, micro, role_tokens) -> acc` donates acc, `finish(state, acc) ->
    (state, metrics)` donates state and takes one without `frozen`. `like` is the state, or an
    abstract one with shardings.
    """

    def __init__(
        self,
        cfg: QwenConfig,
        settings: UpdateSettings,
        roles: Sequence[str],
        tx: optax.GradientTransformation,
        like: TrainState,
        layout: Layout | None = None,
    ):
        unknown = sorted(set(settings.role_weights) - set(roles))
        if unknown:
            raise ValueError(
                f"optim.role_weights names {', '.join(unknown)}; roles are {', '.join(roles)}"
            )
        if (settings.lora_scale > 0) != (like.frozen is not None):
            raise ValueError(
                f"lora_scale={settings.lora_scale}: an adapter needs a scale above 0 and a state "
                "made with frozen=base, full fine-tuning neither"
            )
        if settings.kl_coef and like.ref_params is None and like.frozen is None:
            raise ValueError(
                f"optim.kl_coef={settings.kl_coef} needs reference params; "
                "make the state with reference=True"
            )
        self.cfg, self.settings, self.roles, self.tx = cfg, settings, tuple(roles), tx
        self.layout = layout
        self._replicated = state_at = acc_at = None
        if layout is not None:
            # Left to the compiler, an output may come back placed differently from its input,
            # which costs a second compilation and the donation.
            moving = like._replace(frozen=None)
            state_at: Any = jax.tree.map(lambda x: x.sharding, moving)
            self._replicated = replicated = state_at.step
            acc_at = Accumulator(state_at.params, replicated, replicated)
        finish_at = (state_at, self._replicated)
        self.zeros = jax.jit(self._zeros, out_shardings=acc_at)
        self.accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=acc_at)
        self.finish = jax.jit(self._finish, donate_argnums=0, out_shardings=finish_at)
        self.score = jax.jit(self._score_micro)

    def step(self, state: TrainState, packed: Packed) -> tuple[TrainState, Metrics]:
        """One update over all of `packed`; donates `state`. ValueError if it counts no token.

        Without a row to learn from the gradient is 0, and the optimizer moves by its momentum.

        Metrics stay on the device, see `host_metrics`. A loss or gradient that is not finite
        leaves params and optimizer state untouched and adds one to `skipped`.
        """
        if not packed.role_tokens.any():
            raise ValueError("no row to train on: every row of this update was masked or absent")
        acc, role_tokens_r = self.zeros(state), self.place_counts(packed.role_tokens)
        for micro in packed.micros:
            acc = self.accumulate(state, acc, self.place(micro), role_tokens_r)
        # The base stays out of it: a donated one would be gone for the sampler that shares it.
        moved, metrics = self.finish(state._replace(frozen=None), acc)
        return moved._replace(frozen=state.frozen), metrics

    def old_logps(self, state: TrainState, micro: MicroBatch) -> jax.Array:
        """Log-probs [b, t] of a placed micro-batch under the params as they are now.

        With several epochs or mini-batches: taken once before the first update, for
        `micro._replace(old_logp_bt=...)`.
        """
        return self.score(state, micro)

    def skipped(self, state: TrainState) -> int:
        """Updates skipped so far; waits for the update in flight."""
        return int(jax.device_get(state.skipped))

    def place(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch on the devices, rows split over the batch axes of the mesh."""
        if self.layout is None:
            return put(micro)
        # One sharding for all: every array of a micro-batch has its shape.
        rows = self.layout.sharding(("batch", "seq"), micro.tokens_bt.shape)
        return put(micro, jax.tree.map(lambda x: rows, micro))

    def place_counts(self, role_tokens: np.ndarray) -> jax.Array:
        """The global token counts per role on every device."""
        return put(role_tokens, self._replicated)

    def explain_skip(self, state: TrainState, packed: Packed) -> str:
        """Which rows and params made the last update not finite; replays it, as `state` is intact.

        Costs one pass over the micro-batches; '' when every part is finite.
        """
        role_tokens_r = self.place_counts(packed.role_tokens)
        for micro, ids in zip(packed.micros, packed.ids, strict=True):
            acc = self.accumulate(state, self.zeros(state), self.place(micro), role_tokens_r)
            leaves = jax.tree_util.tree_leaves_with_path(acc.grads)
            named = [("loss", acc.sums["loss"])]
            named += [(f"gradient{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
            bad = [name for name, value in named if not jnp.isfinite(value).all()]
            if bad:
                return f"rows {', '.join(ids)}: not finite in {', '.join(bad)}"
        return ""

    def _zeros(self, state: TrainState) -> Accumulator:
        names = ("loss", "gap", "clipped", "dual_clipped", "weight", "kl", "tokens")
        zero = jnp.zeros(())
        sums: Metrics = dict.fromkeys(names, zero)
        grads = jax.tree.map(jnp.zeros_like, state.params)
        return Accumulator(grads, sums, {"ratio": zero, "gap": zero})

    def _logps(
        self, params: Params, micro: MicroBatch, entropy: bool = False, totals: Params | None = None
    ) -> tuple[jax.Array, Any]:
        return token_logps(
            params,
            self.cfg,
            micro.tokens_bt,
            micro.temperature_bt,
            position_bt=micro.position_bt,
            segment_bt=micro.segment_bt,
            dtype=jnp.dtype(self.settings.dtype),
            layout=self.layout,
            remat=self.settings.remat,
            attend=self.settings.attention,
            chunk=self.settings.chunk,
            entropy=entropy,
            totals=totals,
        )

    def _weights(self, state: TrainState, params: Params) -> Params:
        if state.frozen is None:
            return params
        return lora.attach(state.frozen, lora.scaled(params, self.settings.lora_scale))

    def _score_micro(self, state: TrainState, micro: MicroBatch) -> jax.Array:
        return self._logps(self._weights(state, state.params), micro)[0]

    def _accumulate(
        self, state: TrainState, acc: Accumulator, micro: MicroBatch, role_tokens_r: jax.Array
    ) -> Accumulator:
        ref_logp_bt = None
        if self.settings.kl_coef:
            reference = state.ref_params if state.frozen is None else state.frozen
            ref_logp_bt = self._logps(reference, micro)[0]
        role_weights_r = jnp.array([self.settings.role_weights.get(r, 1.0) for r in self.roles])

        rest = {name: x for name, x in state.params.items() if name != "layers"}

        def loss(rest: Params, totals: Params):
            weights = self._weights(state, {**state.params, **rest})
            bonus = self.settings.entropy_coef > 0
            logp_bt, entropy_bt = self._logps(weights, micro, bonus, totals)
            terms = (logp_bt, entropy_bt, ref_logp_bt)
            return micro_objective(*terms, micro, role_tokens_r, role_weights_r, self.settings)

        # The gradient of the layers never stands beside the running one; that of the rest is small.
        gradient = jax.grad(loss, (0, 1), has_aux=True)
        (rest, layers), (sums, maxima) = gradient(rest, acc.grads["layers"])
        rest = {name: acc.grads[name] + x for name, x in rest.items()}
        return Accumulator(
            {**rest, "layers": layers},
            jax.tree.map(jnp.add, acc.sums, sums),
            jax.tree.map(jnp.maximum, acc.maxima, maxima),
        )

    def _finish(self, state: TrainState, acc: Accumulator) -> tuple[TrainState, Metrics]:
        grads = acc.grads
        if self.settings.lora_scale:
            grads = lora.scaled(grads, self.settings.lora_scale)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(acc.sums["loss"])
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        applied = state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
        )
        skipped = state._replace(skipped=state.skipped + 1)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), applied, skipped)
        return state, self._metrics(acc, grad_norm, state.skipped)

    def _metrics(self, acc: Accumulator, grad_norm: jax.Array, skipped: jax.Array) -> Metrics:
        sums, tokens = acc.sums, acc.sums["tokens"]
        maxima = {n: jnp.where(tokens > 0, x, jnp.nan) for n, x in acc.maxima.items()}
        metrics = {
            "loss": sums["loss"],
            "grad_norm": grad_norm,
            "ratio/max": maxima["ratio"],
            "logp_gap/mean": sums["gap"] / tokens,
            "logp_gap/max": maxima["gap"],
            "clip_share": sums["clipped"] / tokens,
            "dual_clip_share": sums["dual_clipped"] / tokens,
            "skipped_updates": skipped,
        }
        if self.settings.importance_cap:
            metrics["importance/mean"] = sums["weight"] / tokens
        if self.settings.kl_coef:
            metrics["kl"] = sums["kl"] / tokens
        return metrics


def host_metrics(metrics: Metrics) -> dict[str, float]:
    """Metrics as Python floats in one transfer; a figure that is not finite is left out.

    So an update without a row has no log-prob gap, and a skipped one no loss or gradient norm.
    """
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    return {name: value for name, value in values.items() if np.isfinite(value)}
