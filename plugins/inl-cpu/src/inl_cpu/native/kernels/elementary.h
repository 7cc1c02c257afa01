/* Elementary functions of sixteen lanes; coefficients as in Cephes (Moshier, 1989). */
#pragma once

#include <cstdint>

#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* e^x, accurate to 2 ulp; 0 below -87.3, infinite from 88.4. */
inline F exponential(F x) {
    const F lowest = set(-87.3f);
    const F bounded = smaller(set(89.0f), larger(lowest, x));
    const I power = nearest(mul(bounded, set(1.44269504f)));
    const F whole = to_float(power);
    F r = fma(whole, set(-0.693359375f), bounded);
    r = fma(whole, set(2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set(1.0f)));
    const F scale = as_float(shift_left(add(power, set_int(127)), 23));
    return where_below(x, lowest, set(0.0f), mul(p, scale));
}

/* e^x for x <= 0 with a relative error of 5e-6, for results that are rounded to
 * bfloat16 or bytes; uses the minimax polynomial of 2^f for |f| <= 1/2. */
inline F rough_exponential(F x) {
    const F lowest = set(-87.3f);
    const F scaled = mul(larger(lowest, x), set(1.44269504f));
    const I power = nearest(scaled);
    const F f = sub(scaled, to_float(power));
    F p = set(0.00957010191f);
    p = fma(p, f, set(0.0559178603f));
    p = fma(p, f, set(0.240247448f));
    p = fma(p, f, set(0.693121815f));
    p = fma(p, f, set(0.999999261f));
    const F scale = as_float(shift_left(add(power, set_int(127)), 23));
    return where_below(x, lowest, set(0.0f), mul(p, scale));
}

/* log(1 + x) for 0 <= x <= 1, accurate to 3 ulp also where x is tiny: the series of the
 * inverse hyperbolic tangent of x / (2 + x). */
inline F log_one_plus(F x) {
    const F s = quotient(x, add(set(2.0f), x));
    const F z = mul(s, s);
    F p = set(2.0f / 15.0f);
    p = fma(p, z, set(2.0f / 13.0f));
    p = fma(p, z, set(2.0f / 11.0f));
    p = fma(p, z, set(2.0f / 9.0f));
    p = fma(p, z, set(2.0f / 7.0f));
    p = fma(p, z, set(2.0f / 5.0f));
    p = fma(p, z, set(2.0f / 3.0f));
    p = fma(p, z, set(2.0f));
    return mul(s, p);
}

/* log(1 + e^x) without an overflow. */
inline F softplus(F x) {
    const F zero = set(0.0f);
    return add(larger(x, zero), log_one_plus(exponential(sub(zero, magnitude(x)))));
}

inline F sigmoid(F x) {
    const F one = set(1.0f);
    return quotient(one, add(one, exponential(sub(set(0.0f), x))));
}

inline F hyperbolic_tangent(F x) {
    const F two = set(2.0f), one = set(1.0f);
    const F far = sub(one, quotient(two, add(exponential(mul(two, x)), one)));
    const F z = mul(x, x);
    F p = set(-5.70498872745e-3f);
    p = fma(p, z, set(2.06390887954e-2f));
    p = fma(p, z, set(-5.37397155531e-2f));
    p = fma(p, z, set(1.33314422036e-1f));
    p = fma(p, z, set(-3.33332819422e-1f));
    const F near = fma(mul(p, z), x, x);
    return where_below(magnitude(x), set(0.625f), near, far);
}

inline F silu(F x) {
    return quotient(x, add(set(1.0f), exponential(sub(set(0.0f), x))));
}

inline F gelu_tanh(F x) {
    const F cube = mul(mul(x, x), x);
    const F inner = mul(set(0.7978845608f), fma(set(0.044715f), cube, x));
    return quotient(x, add(set(1.0f), exponential(mul(set(-2.0f), inner))));
}

inline F activation(F gate, int32_t flags) {
    return flags & INL_GATE_SILU ? silu(gate) : gelu_tanh(gate);
}

} // namespace
} // namespace inl
