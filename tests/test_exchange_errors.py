"""What goes wrong with exchanges on CPU devices: missing devices, programs and buffers that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_calls import DEVICES, call, distributed, place
from exchange_programs import all_gather, all_reduce, same_shapes

from einsummable_jax import _compat, custom_calls


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    _compat.dispatch.runtime_tokens.clear()  # JAX would wait at exit for calls that a test has made fail
    assert custom_calls.open_exchanges() == 0


@pytest.fixture
def short_timeout():
    before = custom_calls.exchange_timeout()
    custom_calls.set_exchange_timeout(0.5)
    yield
    custom_calls.set_exchange_timeout(before)


def test_a_device_that_never_arrives_is_named(short_timeout):
    program = all_reduce(DEVICES, 16)

    def branch(device):
        if device in (2, 5):
            return lambda x: x
        return lambda x: call(
            program, [x], device, 42, device=device, shared=False, name="dot at model.py:3"
        )[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    x = place(np.ones(DEVICES * 16, np.float32))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            fn(x).block_until_ready()
        message = str(error.value)
        assert "exchange 42 (dot at model.py:3)" in message
        assert "no call came from device rank(s) 2, 5; arrived: 0, 1, 3, 4, 6, 7" in message
    total = distributed(lambda rank, x: call(program, [x], rank, 1)[0][0])(x)
    np.testing.assert_array_equal(total, np.full(DEVICES * 16, DEVICES))


def test_a_large_exchange_that_begins_without_all_devices_fails_too(short_timeout):
    program = all_gather(DEVICES, 200_000)

    def branch(device):
        if device == 7:
            return lambda x: jnp.zeros(DEVICES * 200_000)
        return lambda x: call(program, [x], device, 43, device=device, shared=False)[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"device rank\(s\) 7"):
        fn(place(np.ones(DEVICES * 200_000, np.float32))).block_until_ready()


def test_programs_that_differ_under_one_id_are_refused(short_timeout):
    programs = [all_gather(DEVICES, 4), all_gather(DEVICES, 4, "float32")]
    other = same_shapes(DEVICES, "float32", [(4,)], [(DEVICES * 4,)], [programs[1].rounds[0][::-1]])

    def branch(device):
        program = other if device == 3 else programs[0]
        return lambda x: call(program, [x], device, 44, device=device, shared=False)[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another program under the same exchange id"):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_a_malformed_attribute_is_an_error(monkeypatch):
    program = all_gather(DEVICES, 4)
    numbers = custom_calls.encode(program).copy()
    numbers[-1] = 99
    monkeypatch.setattr("einsummable_jax.custom_calls.call.encode", lambda program: numbers)
    fn = distributed(lambda rank, x: call(program, [x], rank, 45)[0][0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exchange 45 \(test\): malformed exchange program"):
        fn(place(np.ones(DEVICES * 4, np.float32)))


def test_buffers_that_do_not_fit_the_program_are_an_error(monkeypatch):
    program, other = all_gather(DEVICES, 4), all_gather(DEVICES, 5)
    monkeypatch.setattr(
        "einsummable_jax.custom_calls.call.encode", lambda program: custom_calls.encode(other)
    )
    fn = distributed(lambda rank, x: call(program, [x], rank, 46)[0][0])
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="input 0 has 4 elements of dtype code 11, the program wants 5"
    ):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_a_rank_that_does_not_exist_is_an_error():
    program = all_gather(DEVICES, 4)
    fn = distributed(lambda rank, x: call(program, [x], rank + 1, 47)[0][0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank is 8, the program is for 8 devices"):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_inputs_that_do_not_fit_are_refused_when_traced():
    program = all_gather(DEVICES, 4)
    fn = distributed(lambda rank, x: call(program, [x[:3]], rank, 48)[0][0])
    with pytest.raises(
        ValueError, match=r"inputs have shapes \(\(3,\),\).*wants shapes \(\(4,\),\) of dtype float32"
    ):
        fn(place(np.ones(DEVICES * 4, np.float32)))
