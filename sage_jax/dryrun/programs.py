"""The programs of a training step over abstract arrays: shapes, types and places, no data.

They are those that a run compiles, with the arguments it would give them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from sage_jax.config import ROLES
from sage_jax.core.mesh import Layout
from sage_jax.learn.optimizer import make_optimizer
from sage_jax.learn.pack import MicroBatch
from sage_jax.learn.update import Accumulator, TrainState, Update
from sage_jax.models import attention, costs, lora, qwen, qwen_params
from sage_jax.models import cache as kv
from sage_jax.models.qwen_params import Param
from sage_jax.models.stack import apart
from sage_jax.rollout import decode
from sage_jax.rollout.engine import KEPT_CALLS, bucket_of
from sage_jax.run import update_settings
from sage_jax.runtime import Placement, cast_weights, lora_settings

Tree = Any


def bytes_per_chip(tree: Tree) -> int:
    """Bytes of abstract arrays on the device that holds most, whole where no place is given."""

    def size(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return int(jnp.dtype(x.dtype).itemsize * _product(shape))

    return sum(size(x) for x in jax.tree.leaves(tree))


def _product(shape) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


@dataclass(frozen=True)
class Abstract:
    """One program: the traced call, and what lies beside its arguments in HBM while it runs."""

    name: str
    trace: Callable[[], Any]
    arguments: Tree
    beside: Tree
    # Of the steps of a Pallas kernel's grid those that compute something.
    kernel_share: float = 1.0


class StepPrograms:
    """The abstract state of a run and the programs of one of its steps.

    `config` is validated, `cfg` the model, `place` the layouts over any devices.
    """

    def __init__(self, config, cfg: qwen.QwenConfig, place: Placement):
        self.config, self.cfg, self.place = config, cfg, place
        self.dtype = jnp.dtype(config.model.dtype)
        self.lora = lora_settings(config)
        self.rank = config.lora.rank
        self.settings = update_settings(config)
        self.tx = make_optimizer(
            self.settings,
            max(config.train.steps, 1),
            config.optim.epochs * config.optim.minibatches,
        )

    # ---- arrays

    def _arrays(self, table: dict[str, Param], dtype, layout: Layout | None) -> Tree:
        def place(p: Param):
            return None if layout is None else layout.sharding(p.axes, p.shape)

        flat = {
            name: jax.ShapeDtypeStruct(p.shape, dtype, sharding=place(p))
            for name, p in table.items()
        }
        return unflatten_dict(flat, sep=".")

    def _replicated(self, tree: Tree) -> Tree:
        layout = self.place.update
        at = None if layout is None else NamedSharding(layout.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree)

    @cached_property
    def state(self) -> TrainState:
        """What is trained, its optimizer state, and the frozen base or KL reference."""
        table, adapter = qwen_params.param_table(self.cfg), lora.adapter_table(self.cfg, self.rank)
        update = self.place.update
        trained = self._arrays(adapter if self.rank else table, jnp.float32, update)
        like = jax.eval_shape(self.tx.init, trained)
        moments = optax.tree_utils.tree_map_params(
            self.tx,
            lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
            like,
            trained,
            transform_non_params=lambda x: self._replicated(x),
        )
        counter = self._replicated(jax.ShapeDtypeStruct((), jnp.int32))
        reference = trained if self.config.optim.kl_coef > 0 and not self.rank else None
        frozen = self._arrays(table, self.dtype, update) if self.rank else None
        return TrainState(trained, moments, counter, counter, reference, frozen)

    @cached_property
    def weights(self) -> Tree:
        """The sampler's copy of the weights, adapter beside base."""
        table = qwen_params.param_table(self.cfg) | lora.adapter_table(self.cfg, self.rank)
        weights = self._arrays(table, self.dtype, self.place.decode)
        return jax.eval_shape(apart, weights) if self.place.apart else weights

    def slots(self) -> decode.Slots:
        """The running batch, cache included."""
        c, layout = self.config, self.place.decode
        like = jax.eval_shape(
            partial(
                decode.empty_slots,
                self.cfg,
                c.rollout.slots,
                c.rollout.buckets[-1],
                max(c.rollout.max_new[role] for role in ROLES),
                dtype=self.dtype,
                layout=layout,
                form=self._form,
            )
        )
        if layout is None:
            return like

        axes = kv.AXES[self._form]

        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(axes, x.shape))

        return like._replace(cache={name: placed(x) for name, x in like.cache.items()})

    @cached_property
    def update(self) -> Update:
        return Update(self.cfg, self.settings, ROLES, self.tx, self.state, self.place.update)

    def micro(self, length: int) -> MicroBatch:
        """One micro-batch of rows of `length` tokens."""
        shape, layout = (self.config.optim.micro_rows, length), self.place.update
        at = None if layout is None else layout.sharding(("batch", "seq"), shape)
        ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
        floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
        return MicroBatch(
            tokens_bt=ints,
            segment_bt=ints,
            position_bt=ints,
            prompt_length_bt=ints,
            length_bt=ints,
            adv_bt=floats,
            role_bt=ints,
            temperature_bt=floats,
            sampler_logp_bt=floats,
        )

    def accumulator(self) -> Accumulator:
        """Gradient and sums between two micro-batches."""
        like = self.update.zeros.eval_shape(self.state)
        params = self.state.params
        return Accumulator(params, self._replicated(like.sums), self._replicated(like.maxima))

    def _row_tokens(self) -> float:
        """Tokens of a pass on one device."""
        tokens = self.config.optim.micro_rows * self.config.optim.buckets[-1]
        return tokens / self._parts("batch")

    def _parts(self, axis: str) -> int:
        return 1 if self.place.update is None else self.place.update.parts(axis)

    def kept_bytes(self) -> float:
        """Bytes that a device at least keeps of a pass for its backward pass: of each layer the
        input, and by model.remat what attention gave and the other matrix products."""
        c, policy = self.cfg, self.config.model.remat
        bytes_of_token = c.hidden_size * self.dtype.itemsize
        if policy != "full":
            # The log of the softmax's sum of each head is float32.
            gave = c.num_heads * (c.head_dim * self.dtype.itemsize + 4)
            bytes_of_token += gave / self._parts("q_heads")
        if policy in ("dots", "none"):
            heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim / self._parts("q_heads")
            wide = 2 * c.intermediate_size / self._parts("mlp")
            bytes_of_token += (heads + c.hidden_size + wide) * self.dtype.itemsize
        return self._row_tokens() * c.num_layers * bytes_of_token

    def temporaries_model(self) -> float:
        """Bytes that a pass has to hold on one device: what it keeps of all layers, values and
        gradients inside one layer, its gathered weights, and one chunk of logits twice in float32.
        """
        c = self.cfg
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim / self._parts("q_heads")
        inside = 4 * c.hidden_size + heads + 3 * c.intermediate_size / self._parts("mlp")
        layer = 2 * self._row_tokens() * inside * self.dtype.itemsize
        weights = costs.Weights.of(c, self.rank)
        whole = (weights.layers + weights.adapter) / c.num_layers / self._parts("mlp")
        chunk = max(self.config.optim.logit_chunk, self.config.optim.micro_rows)
        logits = 2 * 4 * chunk * c.vocab_size / self._parts("batch") / self._parts("vocab")
        head = weights.head * self.dtype.itemsize / self._parts("vocab")
        return self.kept_bytes() + layer + whole * self.dtype.itemsize + logits + head

    # ---- programs

    def programs(self) -> dict[str, Callable[[], Abstract]]:
        """By name, in the order in which a step runs them."""
        return {
            "cast": self.cast,
            "prefill": self.prefill,
            "insert": self.insert,
            "decode": self.decode,
            "score": self.score,
            "update": self.accumulate,
            "apply": self.finish,
        }

    @property
    def _static(self) -> dict[str, Any]:
        return {"cfg": self.cfg, "dtype": self.dtype, "layout": self.place.decode}

    @property
    def _form(self) -> str:
        """Of the cache, as the engine chooses it."""
        c = self.config
        length, place = c.rollout.buckets[-1], self.place
        return kv.choose(
            c.model.attention, self.cfg, length, self.dtype, place.decode, apart=place.apart
        )

    @property
    def _attend(self) -> str:
        return self.config.model.attention

    def _prompts(self) -> tuple[Any, Any]:
        c = self.config
        rows, length = c.rollout.prefill_rows, bucket_of(c.tokens.max_prompt, c.rollout.buckets)
        return (
            jax.ShapeDtypeStruct((rows, length), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )

    def cast(self) -> Abstract:
        """Trained weights to the sampler's type and layout, once a step."""
        source = dict(flatten_dict(self.state.params, sep="."))
        names = tuple(source)
        table = qwen_params.param_table(self.cfg) | lora.adapter_table(self.cfg, self.rank)
        axes = tuple((name, table[name].axes) for name in names)
        static = {"axes": axes, "dtype": self.config.model.dtype, "layout": self.place.decode}
        return Abstract(
            "cast",
            lambda: cast_weights.trace(source, **static),
            source,
            (self.state._replace(params=None), self._kept_base),
        )

    def prefill(self) -> Abstract:
        arguments = (self.weights, *self._prompts())
        return Abstract(
            "prefill",
            lambda: decode.prefill.trace(*arguments, **self._static, attend=self._attend),
            arguments,
            (self.state, self.slots(), self._kept_prefixes()),
            self._causal_share(arguments[1].shape[1]),
        )

    def _prefilled(self) -> tuple[Any, Any]:
        """Hidden states and cache prefix that a prefill call leaves."""
        static = {**self._static, "layout": None, "attend": self._attend}
        prefill = partial(decode.prefill, **static)
        hidden, prefix = jax.eval_shape(prefill, self.weights, *self._prompts())
        layout = self.place.decode
        if layout is None:
            return hidden, prefix

        def placed(x, axes):
            at = layout.sharding(axes, x.shape)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

        cache = {name: placed(x, kv.PREFIX_AXES) for name, x in prefix.items()}
        return placed(hidden, ("batch", None)), cache

    def _kept_prefixes(self) -> list[Tree]:
        """What the engine keeps of earlier prefill calls while it decodes."""
        return [self._prefilled()] * KEPT_CALLS

    def insert(self) -> Abstract:
        slots, lengths = self.slots(), self._prompts()[1]
        hidden, prefix = self._prefilled()
        words = decode.START.itemsize // 4
        starts = jax.ShapeDtypeStruct((self.config.rollout.prefill_rows, words), jnp.int32)
        arguments = (self.weights, slots, hidden, prefix, lengths, starts)
        return Abstract(
            "insert",
            lambda: decode.insert.trace(*arguments, **self._static, form=self._form),
            arguments,
            (self.state, self._kept_prefixes()),
        )

    def decode(self) -> Abstract:
        r = self.config.rollout
        arguments = (self.weights, self.slots())
        static = {**self._static, "form": self._form, "steps": r.chunk}
        static["read_length"] = r.buckets[-1]
        return Abstract(
            "decode",
            lambda: decode.decode.trace(*arguments, **static),
            arguments,
            (self.state, self._kept_prefixes()),
        )

    def _causal_share(self, length: int) -> float:
        """Of all pairs of blocks of a row those that splash attention computes."""
        blocks = -(-length // attention.SPLASH_BLOCK)
        return (blocks + 1) / (2 * blocks)

    @property
    def _kept_base(self) -> Tree:
        """What the sampler keeps outside of rollouts: the base under an adapter, made once."""
        if not self.rank:
            return ()
        table = qwen_params.param_table(self.cfg)
        base = self._arrays(table, self.dtype, self.place.decode)
        return jax.eval_shape(apart, base) if self.place.apart else base

    def score(self) -> Abstract:
        longest = self.config.optim.buckets[-1]
        arguments = (self.state, self.micro(longest))
        return Abstract(
            "score",
            lambda: self.update.score.trace(*arguments),
            arguments,
            self._kept_base,
            self._causal_share(longest),
        )

    def accumulate(self) -> Abstract:
        counts = self._replicated(jax.ShapeDtypeStruct((len(ROLES),), jnp.float32))
        longest = self.config.optim.buckets[-1]
        arguments = (self.state, self.accumulator(), self.micro(longest), counts)
        return Abstract(
            "update",
            lambda: self.update.accumulate.trace(*arguments),
            arguments,
            self._kept_base,
            self._causal_share(longest),
        )

    def finish(self) -> Abstract:
        arguments = (self.state._replace(frozen=None), self.accumulator())
        return Abstract(
            "apply",
            lambda: self.update.finish.trace(*arguments),
            arguments,
            (self.state.frozen, self._kept_base),
        )
