#include "runtime/cpu.h"

#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#endif
#endif

namespace inl {
namespace {

#if defined(__x86_64__)

struct Leaf {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    Leaf(uint32_t leaf, uint32_t part) {
        __get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx);
    }
};

bool bit(uint32_t word, int index) { return word >> index & 1; }

/* Registers that the operating system saves (XCR0); CPUID alone is not sufficient. */
uint64_t saved_registers() {
    if (!bit(Leaf(1, 0).ecx, 27)) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

constexpr uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;

bool saves(uint64_t registers) { return (saved_registers() & registers) == registers; }

bool can_avx2() {
    const Leaf one(1, 0), seven(7, 0);
    const bool fma = bit(one.ecx, 12), half = bit(one.ecx, 29);
    return saves(YMM) && fma && half && bit(seven.ebx, 5);
}

bool can_avx_vnni() { return can_avx2() && bit(Leaf(7, 1).eax, 4); }

bool can_avx512() {
    const Leaf seven(7, 0), more(7, 1);
    const bool f = bit(seven.ebx, 16), dq = bit(seven.ebx, 17);
    const bool bw = bit(seven.ebx, 30), vl = bit(seven.ebx, 31);
    const bool vnni = bit(seven.ecx, 11), bf16 = bit(more.eax, 5);
    return can_avx2() && saves(ZMM) && f && dq && bw && vl && vnni && bf16;
}

/* Linux grants the tile registers to a process on request. */
bool request_tiles() {
#if defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool can_amx() {
    const Leaf seven(7, 0);
    const bool tiles = bit(seven.edx, 24), bf16 = bit(seven.edx, 22);
    return can_avx512() && tiles && bf16 && saves(TILES) && request_tiles();
}

bool is_zen4() {
    uint32_t most, maker[3];
    __get_cpuid(0, &most, &maker[0], &maker[2], &maker[1]);
    const uint32_t version = Leaf(1, 0).eax;
    const uint32_t family = (version >> 8 & 15) + (version >> 20 & 255);
    return std::memcmp(maker, "AuthenticAMD", 12) == 0 && family == 0x19 && can_avx512();
}

#else

bool is_zen4() { return false; }

#if defined(__aarch64__)

/* Linux reports dot products; every Apple processor with NEON has them. */
bool can_dot() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;
#endif
}

#endif
#endif

} // namespace

bool processor_has(int32_t isa) {
    switch (isa) {
    case INL_SCALAR: return true;
#if defined(__x86_64__)
    case INL_AVX2: return can_avx2();
    case INL_AVX_VNNI: return can_avx_vnni();
    case INL_AVX512: return can_avx512();
    case INL_AMX: return can_amx();
#elif defined(__aarch64__)
    case INL_NEON: return can_dot();
#endif
    default: return false;
    }
}

const bool READS_AHEAD = is_zen4();

} // namespace inl
