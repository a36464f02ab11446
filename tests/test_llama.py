"""The LLaMA of the experiments equals one device: forward, gradients, train step, on any device count."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from einsummable_jax import distribute, machine
from experiments.models import llama

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
EVEN = llama.LlamaConfig(dim=32, heads=4, kv_heads=2, ffn=48, layers=1, vocabulary=32)
ODD = llama.LlamaConfig(dim=24, heads=4, kv_heads=2, ffn=35, layers=1, vocabulary=29, tied=False)
SIZES = {"even": (EVEN, 8, 16), "odd": (ODD, 3, 7)}
OPTIMIZER = optax.adamw(1e-2)
KEEP_GRADIENTS = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradients, state, params=None: (gradients, gradients),
)
"""Hands gradients on as they are, and leaves them in its state."""


def forward_case(config, batch, tokens):
    params = llama.init_block(np.random.default_rng(0), config)
    x = jax.random.normal(jax.random.key(1), (batch, tokens, config.dim))
    return functools.partial(llama.block, config=config), (params, x)


def decode_case(config, batch, tokens):
    params = llama.init_block(np.random.default_rng(0), config)
    x = jax.random.normal(jax.random.key(1), (batch, 1, config.dim))
    cache = jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(2), a.shape), llama.init_cache(batch, tokens, config)
    )
    return functools.partial(llama.decode_block, config=config), (params, x, cache, jnp.int32(tokens - 2))


def train_step_case(config, batch, tokens):
    """The train step of the experiment; its new state holds the gradients, too, and it returns the loss."""
    params = llama.init(np.random.default_rng(0), config)
    ids = jax.random.randint(jax.random.key(1), (batch, tokens), 0, config.vocabulary)
    optimizer = optax.chain(KEEP_GRADIENTS, OPTIMIZER)
    return llama.make_train_step(config, optimizer), (params, optimizer.init(params), ids)


FUNCTIONS = {"forward": forward_case, "decode": decode_case, "train_step": train_step_case}


def slow_arithmetic(num_devices):
    """A machine on which even these small sizes are worth cutting and moving."""
    return dataclasses.replace(
        machine("dgx_a100", num_devices),
        flops={"default": 1e9},
        memory_bandwidth=1e10,
        latency_s=1e-9,
        kernel_s=0.0,
    )


@functools.cache
def case(kind, sizes):
    function, args = FUNCTIONS[kind](*SIZES[sizes])
    return function, args, jax.jit(function)(*args)


@pytest.mark.parametrize(("sizes", "num_devices"), [*(("odd", n) for n in (2, 3, 4, 6, 8)), ("even", 8)])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_equals_one_device(kind, num_devices, sizes):
    function, args, expected = case(kind, sizes)
    devices = jax.devices()[:num_devices]
    distributed = distribute(function, devices=devices, topology=slow_arithmetic(num_devices))
    plan = distributed.plan(*args)
    assert plan.exchanges
    assert not [operation.primitive for operation in plan.graph.operations if not operation.spec.has_rule]
    compiled = distributed.lower(*args).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    for found, right in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(right), rtol=2e-4, atol=2e-4)
