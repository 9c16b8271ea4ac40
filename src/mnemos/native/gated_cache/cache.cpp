// The gated cache's kernels for one kind of processor (WIDTH floats a vector, table VARIANT).
#include "gated_cache/read.h"
#include "gated_cache/update.h"

namespace mnemos {
namespace {

template <class Work, class Call>
int compute(const Call& c, bool backward) {
    Work work(c, backward);
    return work.ready() ? work.run() : 1;
}

int update(const Update& c) { return compute<Updating>(c, false); }
int update_backward(const Update& c) { return compute<Updating>(c, true); }
int read(const Reading& c) { return compute<Reader>(c, false); }
int read_backward(const Reading& c) { return compute<Reader>(c, true); }

}  // namespace

namespace gated_cache {

extern const Cache VARIANT;
const Cache VARIANT = {update, update_backward, read, read_backward};

}  // namespace gated_cache
}  // namespace mnemos
