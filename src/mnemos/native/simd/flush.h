// Denormal numbers (below 1.2·10⁻³⁸) count as zero within the kernels: arithmetic with them takes up to a hundred times as
// long. Of x86 alone: other processors compute with them as fast as with others, or have no such switch.
#pragma once
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace mnemos {

// For its lifetime this thread takes denormal numbers for zeros and rounds results to zero that would be denormal. The
// thread's settings before, which belong to PyTorch or to the user, are those after.
class Flush {
#if defined(__SSE2__)
   public:
    Flush() : before(_mm_getcsr()) { _mm_setcsr(before | ZERO_RESULTS | ZERO_INPUTS); }
    ~Flush() { _mm_setcsr(before); }
    Flush(const Flush&) = delete;

   private:
    static constexpr unsigned ZERO_RESULTS = 0x8000, ZERO_INPUTS = 0x0040;
    unsigned before;
#else
   public:
    Flush() {}  // not trivial: a variable of it is no unused one
#endif
};

}  // namespace mnemos
