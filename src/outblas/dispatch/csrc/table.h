// Decisions on earlier products: a hash table from everything that a decision depends on to the launch. It also holds the
// last encoded TMA maps, and the workspaces of streams. The caller holds the interpreter's lock.
#ifndef OUTBLAS_TABLE_H
#define OUTBLAS_TABLE_H

#include "blas.h"
#include "driver.h"

enum { TABLE_LIMIT = 4096, MAP_SLOTS = 4096, LENT_LIMIT = 256 };

// What a caller allows of a launch, in the order of outblas.core.config.LAUNCHES: Python's False and True are the first two.
// Each guarantee has its own three numbers (guarantees/guarantee.py), so that no entry serves calls under two of them.
enum { PLAIN, DEPENDENT, CONSTANT_WEIGHTS, LAUNCH_OPTIONS, GUARANTEES = 3, LAST_OPTION = LAUNCH_OPTIONS * GUARANTEES - 1 };

// Operands are A, B and C; C is all zero if the caller passes no output. Compared byte by byte: no padding.
typedef struct {
    int64_t shape[3][2], strides[3][2];  // elements
    uint64_t dtype[3];                   // addresses of torch's dtype objects, or what DLPack calls them, all of one kind
    int32_t offset[3];                   // address modulo 16 bytes
    int16_t device, option;              // index into the devices seen; what a launch may do, and the guarantee
} Key;

// Who computes a product.
typedef enum { BY_TORCH, BY_KERNEL, BY_CUBLASLT } Maker;

typedef struct Entry {
    Key key;
    uint64_t serial;  // never used twice, from 1
    Maker maker;
    int64_t element_bytes;
    void *context;             // of a kernel, or of cuBLASLt's handle
    uint64_t workspace_bytes;  // 0: needs none
    Launch launch;
    Product product;
    void *allocation, *keep;  // owned by the caller: see table_clear
    struct Entry *next;       // of those that are taken out
} Entry;

// The workspace of a stream, for its calls one after the other: of all that are captured by no graph, or of a capture.
typedef struct {
    int16_t device;
    void *stream;
    uint64_t capture;  // NO_CAPTURE, or whose it is
    uint64_t address, bytes;
    void *owner;  // the object that keeps it alive
} Lent;

typedef struct {
    uint64_t address, owner;
    TensorMap map;
} MapSlot;

typedef struct {
    Entry **slots;
    MapSlot *maps;
    uint32_t count;
    uint64_t serial;
    Lent lent[LENT_LIMIT];
    uint32_t lent_count, lent_next;  // next: to be replaced where all are taken
} Table;

// 0, or -1 without memory.
int table_open(Table *table);

// The entry of a key, or NULL.
Entry *table_find(const Table *table, const Key *key);

// A copy of the entry for the key, NULL without memory. Its key must not be there, and the table must not be full.
Entry *table_add(Table *table, const Key *key, const Entry *made);

// Takes every entry and every workspace out; `release` is given what they held once the table is empty.
void table_clear(Table *table, void (*release)(void *));
void table_close(Table *table, void (*release)(void *));

// The TMA maps of an entry's operands, each encoded unless it is there still; the driver's status.
int table_maps(Table *table, const Driver *driver, const Entry *entry, const uint64_t addresses[3], TensorMap *maps);

// Returns the workspace of a stream in a capture, or outside of captures; NULL if it is absent or too small.
const Lent *table_lent(const Table *table, int16_t device, void *stream, uint64_t capture, uint64_t bytes);

// Replaces a stream's workspace. A stream has one for its last capture, and one for all other calls. Returns the owner
// that the caller must release, or NULL.
void *table_lend(Table *table, const Lent *lent);

// Whether A or B may share memory with C: their spans meet.
int entry_overlap(const Entry *entry, const uint64_t addresses[3]);

#endif
