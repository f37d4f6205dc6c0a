// See products.h. A kernel reads its operands, looks them up, and launches. Torch's own kernel computes the products that
// are left to torch, and throws its own errors. An unknown product goes to Python, whose exceptions come back, too.
extern "C" {
#include "products.h"
}

#include <cstring>

namespace {

enum { ROW_ALIGN_BYTES = 16 };
// First torch whose library_impl takes the version that an extension was built for: 2.10.
constexpr uint64_t BUILT_FOR = (2ull << 56) | (10ull << 48);

enum class Answer { ours, torchs, unknown };
enum class Op : uint64_t { mm = 2, bmm = 3 };  // the dimensions of their operands

Products *active;
thread_local Key sent;
thread_local bool is_sent;

// A tensor that is deleted unless it is given away.
class Owned {
   public:
    Owned(const Torch &torch, Handle handle) : torch_(torch), handle_(handle) {}
    Owned(const Owned &) = delete;
    ~Owned() { drop(); }
    Handle *address() { return &handle_; }
    void drop() {
        if (handle_) torch_.delete_tensor(handle_);
        handle_ = nullptr;
    }
    Handle get() const { return handle_; }
    Handle give() {
        Handle given = handle_;
        handle_ = nullptr;
        return given;
    }

   private:
    const Torch &torch_;
    Handle handle_;
};

class Reading {
   public:
    explicit Reading(Products *products) : lock_(&products->lock) { pthread_rwlock_rdlock(lock_); }
    Reading(const Reading &) = delete;
    ~Reading() { pthread_rwlock_unlock(lock_); }

   private:
    pthread_rwlock_t *lock_;
};

// The operands' device made current, for as long as this lives.
class Current {
   public:
    Current(const Torch &torch, int device) : torch_(torch) {
        if (!torch_.guard_create || torch_.guard_create(device, &guard_)) guard_ = nullptr;
    }
    Current(const Current &) = delete;
    ~Current() {
        if (guard_) torch_.guard_delete(guard_);
    }

   private:
    const Torch &torch_;
    void *guard_ = nullptr;
};

// What Python is asked, for as long as it may take it.
class Sending {
   public:
    explicit Sending(const Key &key) {
        sent = key;
        is_sent = true;
    }
    Sending(const Sending &) = delete;
    ~Sending() { is_sent = false; }
};

// Whether torch has names to check, and to give to the output. An at::Tensor is the address of its TensorImpl.
bool has_names(const Torch &torch, Handle tensor) {
    return torch.has_names && torch.has_names(*static_cast<const void *const *>(tensor));
}

bool read_operand(const Torch &torch, Handle tensor, int64_t wanted, int64_t *&sizes, int64_t *&strides, void *&data) {
    int64_t dim = 0;
    return !torch.dim(tensor, &dim) && dim == wanted && !torch.sizes(tensor, &sizes) && !torch.strides(tensor, &strides) &&
           !torch.data_ptr(tensor, &data) && data && !has_names(torch, tensor);
}

// Fills the key of a product. Returns false for a product that no kernel of OutBLAS serves. The last dtype tells a bmm
// from an mm. Fields that an mm leaves empty hold the batch of a bmm: (extent, 0), and the strides of A's and B's batch.
bool read_call(const Products *p, Handle a, Handle b, Op op, Key *key, uint64_t addresses[3]) {
    const Torch &torch = p->torch;
    int32_t dtype[2], type[2], index[2];
    if (torch.dtype(a, &dtype[0]) || (dtype[0] != p->half && dtype[0] != p->bfloat)) return false;
    if (torch.dtype(b, &dtype[1]) || dtype[1] != dtype[0]) return false;
    if (torch.device_type(a, &type[0]) || torch.device_type(b, &type[1]) || torch.device_index(a, &index[0]) ||
        torch.device_index(b, &index[1]) || type[0] != p->device_type || type[1] != type[0] || index[1] != index[0])
        return false;
    const int skip = op == Op::bmm;
    int64_t *sizes[2], *strides[2];
    memset(key, 0, sizeof *key);
    for (int i = 0; i < 2; i++) {
        void *data = nullptr;
        if (!read_operand(torch, i ? b : a, int64_t(op), sizes[i], strides[i], data)) return false;
        addresses[i] = uint64_t(uintptr_t(data));
        memcpy(key->shape[i], sizes[i] + skip, sizeof key->shape[i]);
        memcpy(key->strides[i], strides[i] + skip, sizeof key->strides[i]);
        key->dtype[i] = uint64_t(dtype[i]);
        key->offset[i] = int32_t(addresses[i] % ROW_ALIGN_BYTES);
    }
    if (key->shape[0][1] != key->shape[1][0]) return false;
    if (skip) {
        // Torch computes a true batch (aten_products.our_bmm).
        if (sizes[0][0] != sizes[1][0] || (sizes[0][0] != 1 && strides[1][0] != 0)) return false;
        key->shape[2][0] = sizes[0][0];
        key->strides[2][0] = strides[0][0];
        key->strides[2][1] = strides[1][0];
    }
    key->dtype[2] = uint64_t(op);
    key->device = int16_t(index[0]);
    key->option = int16_t(p->option);
    return true;
}

int allocate(const Products *p, const Key &key, Handle *out) {
    const int64_t batch = key.shape[2][0], m = key.shape[0][0], n = key.shape[1][1];
    const int64_t sizes[3] = {batch, m, n}, strides[3] = {m * n, n, 1};
    const int skip = Op(key.dtype[2]) == Op::mm;
    return p->torch.empty_strided(3 - skip, sizes + skip, strides + skip, int32_t(key.dtype[0]), p->device_type, key.device,
                                  out);
}

// Enqueues an entry's launch. Returns false if the driver or cuBLASLt refuses, or without a usable workspace. Python then
// tries again, and reports the reason of a second failure.
bool enqueue(Products *p, const Entry *entry, const uint64_t addresses[3], void *stream) {
    uint64_t workspace = 0;
    if (entry->workspace_bytes) {
        // A graph's workspaces are Python's affair: it makes them, and a capture is nothing that is in a hurry.
        if (driver_capture(&p->driver, stream) != NO_CAPTURE) return false;
        const Lent *lent = table_lent(&p->table, entry->key.device, stream, NO_CAPTURE, entry->workspace_bytes);
        if (!lent) return false;
        workspace = lent->address;
    }
    TensorMap maps[MAX_MAPS];
    if (entry->maker == BY_KERNEL && entry->launch.maps) {
        pthread_mutex_lock(&p->maps_lock);
        const int status = table_maps(&p->table, &p->driver, entry, addresses, maps);
        pthread_mutex_unlock(&p->maps_lock);
        if (status) return false;
    }
    workspace_hold(workspace);
    const int status = entry->maker == BY_KERNEL
                           ? driver_launch(&p->driver, &entry->launch, maps, addresses, workspace, stream)
                           : blas_product(&entry->product, addresses, workspace, entry->workspace_bytes, stream);
    workspace_release(workspace);
    return !status;
}

// With the operands' device current: nothing that is called with the lock held may run Python, so the output comes first.
Answer launch(Products *p, const Key &key, uint64_t addresses[3], Owned &result) {
    void *stream = nullptr, *data = nullptr;
    if (p->torch.current_stream && p->torch.current_stream(key.device, &stream)) return Answer::unknown;
    if (allocate(p, key, result.address()) || p->torch.data_ptr(result.get(), &data)) return Answer::unknown;
    addresses[2] = uint64_t(uintptr_t(data));
    const Reading lock(p);
    const Entry *entry = table_find(&p->table, &key);  // it may have been forgotten meanwhile
    return entry && entry->maker != BY_TORCH && enqueue(p, entry, addresses, stream) ? Answer::ours : Answer::unknown;
}

Answer answer(Products *p, Handle a, Handle b, Op op, Key &key, Owned &result) {
    uint64_t addresses[3];
    if (!read_call(p, a, b, op, &key, addresses)) return Answer::torchs;
    void *context;
    {
        const Reading lock(p);
        const Entry *entry = table_find(&p->table, &key);
        if (!entry) return Answer::unknown;
        if (entry->maker == BY_TORCH) return Answer::torchs;
        context = entry->context;
    }
    if (!driver_met(context)) return Answer::unknown;
    if (driver_context(&p->driver) == context) return launch(p, key, addresses, result);
    const Current current(p->torch, key.device);
    return driver_context(&p->driver) == context ? launch(p, key, addresses, result) : Answer::unknown;
}

// A kernel of torch's dispatcher: takes its arguments off the stack, whose handles are then its own, and leaves its result.
template <Op op>
void kernel(uint64_t *stack, uint64_t, uint64_t) {
    Products *p = active;
    const Torch &torch = p->torch;
    const Owned a(torch, Handle(uintptr_t(stack[0]))), b(torch, Handle(uintptr_t(stack[1])));
    Owned result(torch, nullptr);
    Key key;
    const Answer found = answer(p, a.get(), b.get(), op, key, result);
    if (found == Answer::ours) {
        __atomic_fetch_add(&p->ours, 1, __ATOMIC_RELAXED);
        stack[0] = uint64_t(uintptr_t(result.give()));
        return;
    }
    result.drop();  // there may be no room for two
    Handle given;
    if (found == Answer::torchs) {
        __atomic_fetch_add(&p->torchs, 1, __ATOMIC_RELAXED);
        const auto theirs = op == Op::mm ? torch.mm : torch.bmm;
        given = new Returned(theirs(a.get(), b.get()));  // made in place, by a function that may throw
    } else {
        const Sending sending(key);
        const auto ask = op == Op::mm ? torch.mm_redispatch : torch.bmm_redispatch;
        given = new Returned(ask(p->ask_keys, a.get(), b.get()));
    }
    stack[0] = uint64_t(uintptr_t(given));
}

}  // namespace

extern "C" const char *products_install(Products *products, const char *key, void *libraries[2]) {
    const Torch &torch = products->torch;
    if (torch.library_init("aten", key, __FILE__, __LINE__, &libraries[0])) return "a library of kernels";
    active = products;
    if (!torch.library_impl(libraries[0], "mm", kernel<Op::mm>, BUILT_FOR) &&
        !torch.library_impl(libraries[0], "bmm", kernel<Op::bmm>, BUILT_FOR) &&
        !torch.library_init("outblas", key, __FILE__, __LINE__, &libraries[1])) {
        if (!torch.library_impl(libraries[1], "mm", kernel<Op::mm>, BUILT_FOR)) return nullptr;
        torch.library_delete(libraries[1]);
    }
    torch.library_delete(libraries[0]);
    return "a kernel";
}

extern "C" int products_take(Key *key) {
    if (!is_sent) return 0;
    *key = sent;
    is_sent = false;
    return 1;
}
