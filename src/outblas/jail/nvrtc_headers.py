"""Headers that texts for NVRTC include by habit, and that it has not: names of fixed width, a TMA descriptor."""

from __future__ import annotations

#: Read before every text of form ``device``.
FORCED_INCLUDE = "outblas_free.h"
_TENSOR_MAP = """#pragma once
// A TMA descriptor as the kernel sees it; the driver's header, which says the same, needs a host compiler.
struct alignas(64) CUtensorMap_st {
  unsigned long long opaque[16];
};
typedef struct CUtensorMap_st CUtensorMap;
"""
_WIDTHS = """#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
"""
_IN_STD = """#pragma once
#include <stdint.h>
namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t;
}  // namespace std
"""
_TRAITS = """#pragma once
#include <cuda/std/type_traits>
namespace std {
using namespace cuda::std;
}  // namespace std
"""
_NOTHING = "#pragma once\n"
#: (name as included, text).
HEADERS = (
    (FORCED_INCLUDE, _TENSOR_MAP),
    ("cuda.h", _NOTHING),
    ("stdint.h", _WIDTHS),
    ("cstdint", _IN_STD),
    ("stddef.h", _NOTHING),
    ("cstddef", _NOTHING),
    ("stdlib.h", _NOTHING),
    ("stdio.h", _NOTHING),
    ("cstdio", _NOTHING),
    ("math.h", _NOTHING),
    ("cmath", _NOTHING),
    ("assert.h", _NOTHING),
    ("cassert", _NOTHING),
    ("type_traits", _TRAITS),
)
