from __future__ import annotations

import struct

from inl.spec.uniforms import GOLDEN, MASK, mix, uniform


def test_mix_is_the_published_splitmix64():
    # The first outputs of the reference implementation at seed 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix(1234567 + n * GOLDEN) for n in range(1, 6)] == published


def test_a_uniform_is_output_number_position_of_the_scrambled_seed():
    for seed, position in ((0, 0), (42, 7), (2**64 - 1, 2**31)):
        output = mix((mix(seed) + (position + 1) * GOLDEN) & MASK)
        assert uniform(seed, position) == (output >> 40) / 2**24


def test_uniforms_lie_in_range_and_are_exact_in_float32():
    for position in range(2_000):
        number = uniform(3, position)
        assert 0 <= number < 1
        assert struct.unpack("<f", struct.pack("<f", number))[0] == number


def test_uniforms_are_spread_evenly_over_positions_and_over_seeds():
    for numbers in (
        [uniform(1, position) for position in range(20_000)],
        [uniform(seed, 1) for seed in range(20_000)],
    ):
        tenths = [0] * 10
        for number in numbers:
            tenths[int(number * 10)] += 1
        # Chi-squared with 9 degrees of freedom: 27.9 is passed once in a thousand.
        assert sum((count - 2_000) ** 2 / 2_000 for count in tenths) < 27.9


def test_seeds_count_modulo_two_to_the_64():
    assert uniform(-1, 5) == uniform(MASK, 5) == uniform((1 << 64) + MASK, 5)
    assert uniform(1, 5) != uniform(2, 5)


def test_seeds_give_unrelated_streams():
    assert uniform(7 + GOLDEN, 0) != uniform(7, 1)
