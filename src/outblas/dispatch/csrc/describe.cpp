// See describe.h. It is C++ because no exception may pass through C.
extern "C" {
#include "describe.h"
}

extern "C" int describe_tensor(Describe describe, const void *tensor, DlTensor *out) {
    try {
        describe(tensor, out);
        return 0;
    } catch (...) {
        return -1;
    }
}
